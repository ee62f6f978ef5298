"""Models, queues and usage; pausing for operators."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from api.accept import record
from api.deps import PrincipalDep, Resources, ResourcesDep
from api.problems import FieldError, Problem, invalid
from api.render import PRIVATE, json_response, time_text
from api.replies import (
    INVALID,
    REFUSED_BODY,
    ModelsReply,
    PausedReply,
    QueuesReply,
    UsagePage,
    problem,
)
from api.schemas import Day, ModelId, PauseBody, UserId
from api.strict_json import StrictRoute, requires
from perdure.contracts import ModelNews
from perdure.models import Model
from perdure.store.rows import Pause, Principal, QueueStat, WorkerRow
from perdure.task.states import CLASSES

router = APIRouter(prefix="/v1", route_class=StrictRoute)
_MAX_USAGE_DAYS: Final = 400
_BREAKERS: Final = ("closed", "half_open", "open")  # best first
_FIRST_YEAR, _LAST_YEAR = 2000, 9000
Kind = Literal["pool", "model"]
Name = Annotated[str, Path(max_length=128)]
_PAUSED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": PausedReply, "description": "How it stands now."},
    404: problem("No such pool or model."),
    **REFUSED_BODY,
}


@router.get(
    "/models",
    tags=["queues"],
    summary="Models, their pools and limits",
    responses={200: {"model": ModelsReply, "description": "All models of models.toml."}},
)
@requires("tasks:read")
async def models(resources: ResourcesDep) -> Response:
    """`no_worker`: no live worker serves the model; its tasks wait. `paused`: the model, or its pool, is.

    A worker's `breaker` is open while its model server refuses: then one task at a time tries it, the others
    wait. `broken` names workers that cannot serve the model as they are set up."""
    workers = await resources.store.workers.live()
    pauses = await _pauses(resources)
    data = [_model(name, model, workers, pauses) for name, model in resources.catalogue.models.items()]
    return json_response({"data": data}, 200, PRIVATE)


@router.get(
    "/queues",
    tags=["queues"],
    summary="What waits and runs, per pool and class",
    responses={200: {"model": QueuesReply, "description": "All pools of models.toml."}},
)
@requires("tasks:read")
async def queues(resources: ResourcesDep) -> Response:
    """Counts come from the rows. `demand` (waiting + running) per pool is what a scaler needs."""
    stats = await resources.store.stats.queues()
    workers = await resources.store.workers.live()
    pauses = await _pauses(resources)
    data = [_pool(name, resources, stats, workers, pauses) for name in resources.catalogue.pools]
    return json_response({"data": data}, 200, PRIVATE)


@router.post("/queues/{pool}/pause", tags=["queues"], summary="Pause a pool", responses=_PAUSED)
@requires("admin")
async def pause_pool(
    pool: Name, principal: PrincipalDep, resources: ResourcesDep, body: PauseBody | None = None
) -> Response:
    """What waits stays PENDING; nothing new starts. What Temporal holds already still starts."""
    return await _pause("pool", pool, pool in resources.catalogue.pools, body, principal, resources)


@router.post("/queues/{pool}/resume", tags=["queues"], summary="Resume a pool", responses=_PAUSED)
@requires("admin")
async def resume_pool(pool: Name, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Ends a pause; repeatable."""
    return await _resume("pool", pool, pool in resources.catalogue.pools, principal, resources)


@router.post("/models/{model_id}/pause", tags=["queues"], summary="Pause a model", responses=_PAUSED)
@requires("admin")
async def pause_model(
    model_id: Name, principal: PrincipalDep, resources: ResourcesDep, body: PauseBody | None = None
) -> Response:
    """What waits for the model stays PENDING; nothing new starts."""
    known = model_id in resources.catalogue.models
    return await _pause("model", model_id, known, body, principal, resources)


@router.post("/models/{model_id}/resume", tags=["queues"], summary="Resume a model", responses=_PAUSED)
@requires("admin")
async def resume_model(model_id: Name, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Ends a pause; repeatable."""
    return await _resume("model", model_id, model_id in resources.catalogue.models, principal, resources)


@router.get(
    "/usage",
    tags=["usage"],
    summary="Tokens and seconds by user, model and day",
    responses={200: {"model": UsagePage, "description": "One line per user, model and day."}, 422: INVALID},
)
@requires("tasks:read")
async def usage(
    principal: PrincipalDep,
    resources: ResourcesDep,
    since: Annotated[Day | None, Query(description="The first UTC day; 30 days before the last.")] = None,
    until: Annotated[Day | None, Query(description="The last UTC day, whole; today.")] = None,
    user_id: Annotated[UserId | None, Query(description="For an admin.")] = None,
    model_id: Annotated[ModelId | None, Query()] = None,
) -> Response:
    """From the ledger of ended tasks: it stays when a task is deleted. Another user's usage needs an admin
    key."""
    last = until or datetime.now(UTC).date()
    if last.year < _FIRST_YEAR or last.year > _LAST_YEAR:
        raise invalid([FieldError(None, "span", "there is no usage of that time", parameter="until")])
    first = since or last - timedelta(days=30)
    if not timedelta(0) <= last - first <= timedelta(days=_MAX_USAGE_DAYS):
        why = f"`since` is no later than `until`, at most {_MAX_USAGE_DAYS} days"
        raise invalid([FieldError(None, "span", why, parameter="since")])
    start, end = _midnight(first), _midnight(last) + timedelta(days=1)
    if user_id is not None and not principal.admin and user_id != principal.user_id:
        raise Problem(403, "scope-missing", "Only an admin key reads another user's usage.", scope="admin")
    rows = await resources.store.stats.usage(principal, start, end, user_id, model_id)
    data = [
        {
            "user_id": row.user_id,
            "model_id": row.model_id,
            "day": row.day.date().isoformat(),
            "tasks": row.tasks,
            "attempts": row.attempts,
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
            "discarded_tokens": row.discarded_tokens,
            "queue_seconds": row.queue_seconds,
            "run_seconds": row.run_seconds,
        }
        for row in rows
    ]
    return json_response({"data": data}, 200, PRIVATE)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


async def _pause(
    kind: Kind,
    name: str,
    known: bool,
    body: PauseBody | None,
    principal: Principal,
    resources: Resources,
) -> Response:
    _must_exist(known)
    await resources.store.dispatch.pause(kind, name, principal.user_id, body.reason if body else None)
    record(f"{kind} paused", principal, None, **{kind: name})
    return await _paused(kind, name, resources)


async def _resume(kind: Kind, name: str, known: bool, principal: Principal, resources: Resources) -> Response:
    _must_exist(known)
    if await resources.store.dispatch.resume(kind, name):
        record(f"{kind} resumed", principal, None, **{kind: name})
    resources.dispatcher.wake()
    return await _paused(kind, name, resources)


def _must_exist(known: bool) -> None:
    if not known:
        raise Problem(404, "not-found", "There is no such pool or model.")


async def _paused(kind: str, name: str, resources: Resources) -> Response:
    pauses = await _pauses(resources)
    body = {"kind": kind, "name": name, "paused": _pause_fields(pauses.get((kind, name)))}
    return json_response(body, 200, PRIVATE)


async def _pauses(resources: Resources) -> dict[tuple[str, str], Pause]:
    return {(one.kind, one.name): one for one in await resources.store.dispatch.pauses()}


def _pause_fields(pause: Pause | None) -> dict[str, Any] | None:
    if pause is None:
        return None
    return {"reason": pause.reason, "paused_by": pause.paused_by, "paused_at": time_text(pause.paused_at)}


def _model(
    name: str, model: Model, workers: list[WorkerRow], pauses: dict[tuple[str, str], Pause]
) -> dict[str, Any]:
    here = [worker for worker in workers if worker.pool == model.pool]
    serving = [_serving(worker, name) for worker in here if worker.serves(name)]
    states = [one["breaker"]["state"] for one in serving if one["breaker"]]
    pause = pauses.get(("model", name)) or pauses.get(("pool", model.pool))
    return {
        "model_id": name,
        "pool": model.pool,
        "executor": model.executor,
        "state": "paused" if pause else "ok" if serving else "no_worker",
        "workers": len(serving),
        "breaker": min(states, key=_BREAKERS.index) if states else None,
        "serving": serving,
        "broken": [
            {"worker": worker.worker, "error_code": told.error_code}
            for worker in here
            if (told := _told(worker, name)) and told.error_code
        ],
        "paused": _pause_fields(pause),
        "limits": {
            "max_input_bytes": model.max_input_bytes,
            "max_output_bytes": model.max_output_bytes,
            "default_max_tokens": model.default_max_tokens,
            "max_tokens": model.max_tokens,
            "context_tokens": model.context_tokens,
            "timeout_seconds": model.timeout_seconds,
            "queue_timeout_seconds": model.queue_timeout_seconds,
            "deadline_seconds": model.deadline_seconds,
            "allow_image_urls": model.allow_image_urls,
        },
    }


def _serving(worker: WorkerRow, model_id: str) -> dict[str, Any]:
    told = _told(worker, model_id)
    breaker = None
    if told is not None and told.breaker is not None:
        breaker = {
            "state": told.breaker,
            "since": time_text(told.since),
            "refusals": told.refusals,
        }
    return {"worker": worker.worker, "seen_at": time_text(worker.seen_at), "breaker": breaker}


def _told(worker: WorkerRow, model_id: str) -> ModelNews | None:
    """What the worker says of the model; None where it has said nothing."""
    return next((one for one in worker.told or () if one.model_id == model_id), None)


def _pool(
    name: str,
    resources: Resources,
    stats: list[QueueStat],
    workers: list[WorkerRow],
    pauses: dict[tuple[str, str], Pause],
) -> dict[str, Any]:
    pool = resources.catalogue.pools[name]
    mine = {stat.priority: stat for stat in stats if stat.pool == name}
    here = [worker for worker in workers if worker.pool == name]
    classes: dict[str, dict[str, Any]] = {}
    for priority in CLASSES:
        stat = mine.get(priority)
        classes[priority.value] = {
            "waiting": stat.waiting if stat else 0,
            "running": stat.running if stat else 0,
            "scheduled": stat.scheduled if stat else 0,
            "oldest_wait_seconds": stat.oldest_wait if stat else 0.0,
            "max_waiting": pool.max_waiting.get(priority),
        }
    return {
        "pool": name,
        "scheduling": pool.scheduling,
        "waiting": sum(each["waiting"] for each in classes.values()),
        "running": sum(each["running"] for each in classes.values()),
        "demand": sum(each["waiting"] + each["running"] for each in classes.values()),
        "oldest_wait_seconds": max(each["oldest_wait_seconds"] for each in classes.values()),
        "slots": sum(worker.slots for worker in here if not worker.draining),
        "slots_in_use": sum(worker.in_use for worker in here),
        "workers": [_worker(worker) for worker in here],
        "models": resources.catalogue.models_of(name),
        "paused": _pause_fields(pauses.get(("pool", name))),
        "classes": classes,
    }


def _worker(worker: WorkerRow) -> dict[str, Any]:
    return {
        "worker": worker.worker,
        "models": list(worker.models),
        "slots": worker.slots,
        "in_use": worker.in_use,
        "draining": worker.draining,
        "seen_at": time_text(worker.seen_at),
    }
