"""What becomes of an accepted body: the checks that need the catalogue, and the row to write.

new = Acceptance(resources, principal).task(body)     raises Problem 422, 413
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from api.deps import Resources
from api.params import check_params
from api.problems import FieldError, Problem, invalid
from api.schemas import RerunBody, SubmitBody
from perdure import names
from perdure.callback.guard import CallbackRejected, check_url
from perdure.models import Model
from perdure.observability.traces import current_traceparent
from perdure.store.rows import ALL_EVENTS, CreateResult, Idempotency, NewTask, Principal, TaskRow
from perdure.task.states import Status

audit: Final = logging.getLogger("perdure.audit")
DEFAULT_RETRIES: Final = 3


class Acceptance:
    """Turns bodies of one caller into rows."""

    def __init__(self, resources: Resources, principal: Principal) -> None:
        self._resources = resources
        self._principal = principal

    def owner(self, body: SubmitBody) -> str:
        """Whose task it will be. Raises Problem 403."""
        if body.user_id is None or body.user_id == self._principal.user_id:
            return self._principal.user_id
        if not self._principal.act_as:
            raise Problem(403, "act-as-refused", "This key may not submit for another user.")
        return body.user_id

    def task(self, body: SubmitBody) -> NewTask:
        """The row of a submit. Raises Problem."""
        model = self._model(body.model_id)
        self._check_callback(body.callback_url)
        events = ALL_EVENTS if body.callback_events is None else tuple(map(Status, body.callback_events))
        return NewTask(
            task_id=names.new_task_id(),
            user_id=self.owner(body),
            model_id=body.model_id,
            pool=model.pool,
            params_json=check_params(body.model_id, model, body.params),
            task_type=body.task_type,
            priority=body.priority,
            max_retries=_first(body.max_retries, model.max_retries, DEFAULT_RETRIES),
            callback_url=body.callback_url,
            callback_events=events,
            metadata=body.metadata or {},
            not_before=body.not_before,
            queue_timeout_seconds=_first(body.queue_timeout_seconds, model.queue_timeout_seconds),
            timeout_seconds=_first(body.timeout_seconds, model.timeout_seconds),
            deadline_seconds=_first(body.deadline_seconds, model.deadline_seconds),
            traceparent=current_traceparent(),
        )

    def rerun(self, old: TaskRow, body: RerunBody) -> NewTask:
        """The row of a rerun: the old task's, but for what the body says. Raises Problem."""
        model_id = body.model_id or old.model_id
        model = self._model(model_id)
        self._check_callback(old.callback_url)
        params: dict[str, Any] = (old.params or {}) if body.params is None else body.params
        return NewTask(
            task_id=names.new_task_id(),
            user_id=old.user_id,
            model_id=model_id,
            pool=model.pool,
            params_json=check_params(model_id, model, params),
            task_type=old.task_type,
            priority=body.priority or old.priority,
            max_retries=old.max_retries,
            callback_url=old.callback_url,
            callback_events=old.callback_events,
            metadata=old.metadata,
            queue_timeout_seconds=old.queue_timeout_seconds,
            timeout_seconds=old.timeout_seconds if model_id == old.model_id else model.timeout_seconds,
            deadline_seconds=old.deadline_seconds,
            rerun_of=old.task_id,
            traceparent=current_traceparent(),
        )

    def _model(self, model_id: str) -> Model:
        model = self._resources.catalogue.models.get(model_id)
        if model is None:
            error = FieldError("/model_id", "model-unknown", "there is no such model; see GET /v1/models")
            raise invalid([error], "model-unknown")
        return model

    def _check_callback(self, url: str | None) -> None:
        if url is None:
            return
        try:
            check_url(url, self._resources.guard)
        except CallbackRejected as error:
            field = FieldError("/callback_url", error.code, error.message)
            raise invalid([field], "callback-url-rejected") from None

    async def refusal(self, new: NewTask) -> Problem | None:
        """Lets the task in, or gives the 429 of a bound on what waits. What was let in must be settled."""
        return await self._resources.pressure.admit(new.user_id, new.pool, new.priority)

    def settle(self, news: Iterable[NewTask], *, kept: bool) -> None:
        """Tasks that were let in are written, or will not be."""
        for new in news:
            self._resources.pressure.settle(new.user_id, new.pool, new.priority, kept=kept)

    async def keep(self, new: NewTask, held: Idempotency | None) -> CreateResult:
        """Writes the task, or finds the one that the same request wrote before: a repeat is answered also
        while nothing new is let in. Raises Problem 429."""
        refusal = await self.refusal(new)
        if refusal is None:
            kept = False
            try:
                result = await self._resources.intake.add(new, held)
                kept = result.kind == "created"
            finally:
                self.settle([new], kept=kept)
            return result
        known = await self._resources.store.tasks.recall(held) if held else None
        if known is None:
            raise refusal
        return CreateResult(known.kind, known.tasks[0] if known.tasks else None)

    def count(self, new: NewTask, action: str) -> None:
        """Counts and audits a task that was written."""
        self._resources.metrics.tasks_submitted.labels(
            priority=new.priority.value, task_type=new.task_type
        ).inc()
        record(action, self._principal, new.task_id, user=new.user_id)


def record(action: str, principal: Principal, task_id: str | None = None, **more: Any) -> None:
    """One audit line: who did what to which task."""
    audit.info(
        action,
        extra={
            "who": principal.user_id,
            "key_id": principal.key_id,
            "what": action,
            "task_id": task_id,
            **more,
        },
    )


def accepted(body: SubmitBody, owner: str) -> dict[str, Any]:
    """The accepted request as its fingerprint sees it: defaults filled in, the owner named."""
    fields = body.model_dump(mode="python")
    fields["user_id"] = owner
    if isinstance(fields["not_before"], datetime):
        fields["not_before"] = fields["not_before"].isoformat()
    return fields


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
