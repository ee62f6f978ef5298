"""Every name that is stored outside this process: queues, ids, types, search attributes.

Histories, schedules and other programs hold these strings. They are never renamed; new ones are added.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import uuid_utils
from temporalio.common import SearchAttributeKey

# Task queues ---------------------------------------------------------------------------------------
CONTROL_QUEUE: Final = "control"
CALLBACKS_QUEUE: Final = "callbacks"
_POOL_PREFIX: Final = "pool."


def pool_queue(pool: str) -> str:
    """The activity queue of a GPU pool."""
    return _POOL_PREFIX + pool


def pool_of_queue(queue: str) -> str | None:
    """The pool that a queue serves, or None when it is no pool queue."""
    return queue[len(_POOL_PREFIX) :] if queue.startswith(_POOL_PREFIX) else None


# Ids -----------------------------------------------------------------------------------------------
_TASK_ID = re.compile(r"task_[0-9a-f]{32}\Z")
_DELIVERY_ID = re.compile(r"msg_[0-9a-f]{32}\Z")


def new_task_id() -> str:
    """A fresh task id (`task_` and the 32 hex digits of a UUIDv7). It is the workflow id too."""
    return "task_" + uuid_utils.uuid7().hex


def is_task_id(text: str) -> bool:
    """True for the exact form of a task id; anything else belongs to nobody."""
    return _TASK_ID.match(text) is not None


def new_delivery_id() -> str:
    """Id of one callback event (`webhook-id`): the same on every try and redelivery. It holds no dot."""
    return "msg_" + uuid_utils.uuid7().hex


def is_delivery_id(text: str) -> bool:
    """True for the exact form of a delivery id."""
    return _DELIVERY_ID.match(text) is not None


def worker_news_id(worker: str) -> str:
    """The workflow id of a worker's news: one for all, so that later news replace what still waits."""
    return f"worker-news-{worker}"


# Workflows, activities, messages -------------------------------------------------------------------
WF_INFERENCE_TASK: Final = "InferenceTask"
WF_RECONCILE: Final = "Reconcile"
WF_CALLBACK_SWEEP: Final = "CallbackSweep"
WF_RETENTION: Final = "Retention"
WF_WORKER_NEWS: Final = "WorkerNews"  # a GPU worker tells the store what it serves
WF_ENGINE_PROBE: Final = "EngineProbe"  # `perdure doctor` measures the server with it, on a queue of its own

ACT_GENERATE: Final = "generate"
ACT_COMMIT_OUTCOME: Final = "commit_outcome"
ACT_DELIVER_CALLBACK: Final = "deliver_callback"
ACT_RECORD: Final = "record"  # ordinary activity: brings the latest projection until it succeeds
ACT_RECORD_NOW: Final = "record_now"  # local activity: one short try
ACT_RECONCILE: Final = "reconcile"
ACT_SWEEP_CALLBACKS: Final = "sweep_callbacks"
ACT_PURGE: Final = "purge_expired"
ACT_NOTE_WORKER: Final = "note_worker"
ACT_PROBE_STEP: Final = "probe_step"
ACT_PROBE_WAIT: Final = "probe_wait"

SIG_ATTEMPT_STARTED: Final = "attempt_started"
SIG_CANCEL: Final = "cancel"
SIG_SET_PRIORITY: Final = "set_priority"
QUERY_SNAPSHOT: Final = "snapshot"

SCHEDULE_RECONCILE: Final = "perdure-reconcile"
SCHEDULE_CALLBACK_SWEEP: Final = "perdure-callback-sweep"
SCHEDULE_RETENTION: Final = "perdure-retention"

# Search attributes (Keyword, at most 128 bytes) ----------------------------------------------------
SA_STATUS: Final = SearchAttributeKey.for_keyword("TaskStatus")
SA_USER: Final = SearchAttributeKey.for_keyword("TaskUser")
SA_MODEL: Final = SearchAttributeKey.for_keyword("TaskModel")
SA_TYPE: Final = SearchAttributeKey.for_keyword("TaskType")
SA_PRIORITY: Final = SearchAttributeKey.for_keyword("TaskPriority")
SEARCH_ATTRIBUTES: Final = (SA_STATUS, SA_USER, SA_MODEL, SA_TYPE, SA_PRIORITY)


def search_value(text: str) -> str:
    """A value cut to the 128 bytes that a Keyword attribute may hold, at a character boundary."""
    return text.encode()[:128].decode(errors="ignore")


def fairness_key(user_id: str) -> str:
    """The user as Temporal's fairness key: at most 64 bytes, a hash above that."""
    raw = user_id.encode()
    return user_id if len(raw) <= 64 else "h_" + hashlib.sha256(raw).hexdigest()[:48]
