"""The activity `generate`: one attempt of a task on a GPU worker.

    GenerateActivities(executors, catalogue, client, metrics, drain).generate(GenerateInput) -> GenerateResult

An attempt that ends in order returns `generated`, `cancelled` or `drained`. A fault is an ApplicationError of
type `code` with `FaultDetails`; Temporal never retries it, the workflow decides. An attempt that the server
has given up, or that it does not hear, closes its model connection; what it reports then counts for nothing.

Beside the stream run: a beat about once a second, which is also how a silent attempt hears a cancel; the
signal `attempt_started`; and a watch on the clock and on the worker's drain.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, Literal

from temporalio import activity
from temporalio.client import Client

from activities.attempt import Attempt
from activities.own_run import OwnRun
from activities.pulse import Pulse
from perdure import names
from perdure.contracts import GenerateInput, GenerateResult, Params, TaskResult
from perdure.llm.base import Executor, Job
from perdure.llm.drain import DrainState
from perdure.llm.track import beat_interval
from perdure.models import Catalogue
from perdure.observability import logs, traces
from perdure.observability.genai import answered, model_call
from perdure.observability.metrics import Metrics
from perdure.task import policy
from perdure.task.errors import ErrorCode, TaskFault

log = logging.getLogger(__name__)

_CLOSING: Final = 2.0  # seconds that an executor may take to close; after that its task is left behind
_FOR_OPERATORS: Final = (ErrorCode.UPSTREAM_AUTH, ErrorCode.MODEL_UNKNOWN)  # no user can mend these
_CUT_OFF: Final = 3.0  # seconds beyond the heartbeat time-out after which an unheard attempt ends itself
_AHEAD: Final = 1.0  # seconds before Temporal's own limit at which an attempt ends itself


class GenerateActivities:
    """Runs attempts on the executors of one worker. `drain` tells when they must hand over."""

    def __init__(
        self,
        executors: Mapping[str, Executor],
        catalogue: Catalogue,
        client: Client,
        metrics: Metrics | None,
        drain: DrainState,
    ) -> None:
        self._executors = executors
        self._catalogue = catalogue
        self._client = client
        self._metrics = metrics
        self._drain = drain
        self._pulse = Pulse(client)

    @activity.defn(name=names.ACT_GENERATE)
    async def generate(self, given: GenerateInput) -> GenerateResult:
        """One attempt. Raises ApplicationError (a fault), or CancelledError when it was fenced."""
        info = activity.info()
        attempt = Attempt(given, self._client.identity)
        own = OwnRun(self._client, info.workflow_id or "", info.workflow_run_id or "")
        limit = given.limits.attempt_seconds
        if info.start_to_close_timeout is not None:
            limit = min(limit, max(0.0, info.start_to_close_timeout.total_seconds() - _AHEAD))
        with (
            logs.bind(task_id=given.task_id, attempt=given.attempt),
            traces.span(
                f"attempt {given.attempt}", parent=traces.task_traceparent(given.traceparent, given.task_id)
            ) as span,
        ):
            span.set("perdure.model", given.model_id)
            span.set("perdure.resumed", given.checkpoint is not None)
            if given.due_at is not None and self._metrics:
                waited = (attempt.started_at - given.due_at).total_seconds()
                self._metrics.task_queue_wait.observe(max(0.0, waited))
            try:
                async with self._pulse.felt():
                    ended = await self._run(attempt, own, limit)
            except Exception as error:
                fault = error if isinstance(error, TaskFault) else _unexpected(error)
                span.fail(fault.code)
                self._count("refused" if fault.refused else _outcome(fault))
                if self._metrics:
                    self._metrics.attempt_faults.labels(model=given.model_id, code=fault.code).inc()
                told = {"model_id": given.model_id, "error_code": str(fault.code), **attempt.figures()}
                if fault.code in _FOR_OPERATORS:
                    log.error("model is misconfigured: %s", fault.message, extra=told)
                else:  # the message may quote the server, so it goes to the task's owner only
                    log.info("attempt faulted", extra=told)
                raise attempt.error(fault) from None
            span.set("perdure.attempt.outcome", ended.kind)
            self._count("completed" if ended.kind == "generated" else ended.kind)
            log.info("attempt %s", ended.kind, extra={"model_id": given.model_id, **attempt.figures()})
            return ended

    async def _run(self, attempt: Attempt, own: OwnRun, limit: float) -> GenerateResult:
        """Generates beside beats, announcement and watches; ends with whatever comes first."""
        given = attempt.given
        if self._drain.begun:  # it was on its way when the worker stopped asking for work
            return attempt.ended("drained")
        work = asyncio.create_task(self._generate(attempt, own))
        handed = asyncio.create_task(self._drain.handed_over.wait())
        beats = asyncio.create_task(_beats(attempt))
        cut = asyncio.create_task(self._pulse.lost(given.limits.heartbeat_seconds + _CUT_OFF))
        beside: list[asyncio.Task[Any]] = [handed, beats, cut]
        watched = list(beside)
        if given.announce:
            telling = own.announce(
                given.attempt, attempt.worker, attempt.started_at, after=policy.QUICK_ATTEMPT
            )
            beside.append(asyncio.create_task(_quietly(telling)))
        try:
            await asyncio.wait([work, *watched], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            by_itself = work.done()
            await _close(work)
        except asyncio.CancelledError:
            await _close(work)
            kind = _why_cancelled()
            if not _ended_well(work):
                if kind is None:
                    log.warning("attempt fenced: Temporal has given it up, so it reports nothing")
                    raise
                return attempt.ended(kind)
            by_itself = True
        finally:
            for task in beside:
                task.cancel()
        if by_itself or _ended_well(work):
            return attempt.generated(_outcome_of(work))
        if handed.done():
            return attempt.ended("drained")
        if cut.done():  # Temporal has given it up by now; should it not have, the checkpoint is handed over
            log.warning("attempt fenced: Temporal does not hear this worker")
            return attempt.ended("drained")
        if beats.done():
            beats.result()  # beats only end by an exception
        raise TaskFault(
            ErrorCode.ATTEMPT_TIMEOUT,
            f"the attempt ran for {limit:g} s, its time limit (timeout_seconds); raise it or ask for less",
        )

    async def _generate(self, attempt: Attempt, own: OwnRun) -> TaskResult:
        """Drives the executor. Closing the generator closes the model connection."""
        given, track = attempt.given, attempt.track
        executor = self._executors.get(given.model_id)
        if executor is None:  # another worker of the pool may have it: nothing was begun, so it costs nothing
            raise TaskFault(
                ErrorCode.MODEL_UNKNOWN,
                f"the GPU worker {attempt.worker} does not have model '{given.model_id}'; "
                "give all workers of the pool the same models.toml and start them again",
                refused=True,
                retryable=True,
            )
        params = given.params if given.params is not None else await own.params()
        track.expect(self._token_limit(given.model_id, params))
        with model_call(given.model_id, self._catalogue.models.get(given.model_id), params) as call:
            traceparent = traces.current_traceparent()
            job = Job(
                task_id=given.task_id,
                attempt=given.attempt,
                params=params,
                checkpoint=given.checkpoint,
                limits=given.limits,
                headers={"traceparent": traceparent} if traceparent else {},
            )
            result = await self._stream(executor, job, attempt)
            answered(call, result, track.usage(ended_well=True), attempt.first_token)
            return result

    async def _stream(self, executor: Executor, job: Job, attempt: Attempt) -> TaskResult:
        """Applies every delta. Raises TaskFault."""
        result, track = None, attempt.track
        async with aclosing(executor.run(job)) as deltas:
            async for delta in deltas:
                track.apply(delta)
                if delta.tokens and attempt.first_token is None:
                    attempt.first_token = attempt.seconds()
                    if self._metrics:
                        self._metrics.time_to_first_token.observe(attempt.first_token)
                result = delta.result or result
        if result is None:
            raise TaskFault(ErrorCode.INTERNAL, "the executor ended without a result")
        return result

    def _token_limit(self, model_id: str, params: Params) -> int:
        """What counts as the whole, for progress. Only chat models have such a limit."""
        model = self._catalogue.models.get(model_id)
        if model is None or model.executor != "openai":
            return 0
        asked = params.get("max_completion_tokens") or params.get("max_tokens")
        return (
            min(asked, model.max_tokens) if isinstance(asked, int) and asked > 0 else model.default_max_tokens
        )

    def _count(self, outcome: str) -> None:
        """Attempts as they end; those whose worker died are counted with the task's end, as are tokens."""
        if self._metrics:
            self._metrics.attempts.labels(outcome=outcome).inc()


async def _beats(attempt: Attempt) -> None:
    """Heartbeats: the first at once, then about one a second, with news or without."""
    track, seen = attempt.track, -1
    while True:
        if track.changes != seen:
            seen = track.changes
            beat = track.beat()
            wait = beat_interval(beat, attempt.given.limits.heartbeat_seconds)
        activity.heartbeat(beat)
        await asyncio.sleep(wait)


async def _close(work: asyncio.Task[TaskResult]) -> None:
    """Cancels the generation, unless it is over, and waits for its connection to be closed."""
    if work.done():
        return
    work.cancel()
    _, still = await asyncio.wait([work], timeout=_CLOSING)
    if still:
        log.error("an executor did not stop when it was told to; its task is left behind")


def _ended_well(work: asyncio.Task[TaskResult]) -> bool:
    return work.done() and not work.cancelled() and work.exception() is None


def _outcome_of(work: asyncio.Task[TaskResult]) -> TaskResult:
    """The result. Raises what the generation raised."""
    if work.cancelled():
        raise TaskFault(ErrorCode.INTERNAL, "the executor cancelled itself")
    return work.result()


def _unexpected(error: Exception) -> TaskFault:
    """A fault of ours. Its text may hold the prompt: only its type and where it was raised are told."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("attempt failed unexpectedly", extra={"error": type(error).__name__, "where": where})
    message = f"an unexpected {type(error).__name__}; the GPU worker's log has more"
    return TaskFault(ErrorCode.INTERNAL, message)


def _why_cancelled() -> Literal["cancelled", "drained"] | None:
    """What a cancel means; None when the attempt is no longer ours to report."""
    details = activity.cancellation_details()
    if details is None or details.timed_out or details.not_found or details.paused or details.reset:
        return None
    if details.cancel_requested:
        return "cancelled"
    return "drained" if details.worker_shutdown else None


def _outcome(fault: TaskFault) -> str:
    return "timed_out" if fault.code is ErrorCode.ATTEMPT_TIMEOUT else "failed"


async def _quietly(telling: Coroutine[Any, Any, None]) -> None:
    """A failed announcement never ends an attempt."""
    try:
        await telling
    except Exception as error:  # whatever the SDK raises: the attempt's end tells who ran it, too
        log.warning("attempt_started could not be sent", extra={"error": type(error).__name__})
