"""Taking tasks in: row, params and idempotency key in one statement and one round trip."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.store.base import Repository, sql
from perdure.store.columns import FULL, FULL_JOINS, PLAIN, task_row
from perdure.store.errors import StoreRefused, StoreUnavailable
from perdure.store.jsontext import to_json
from perdure.store.rows import CreateManyResult, CreateResult, Idempotency, NewTask, TaskRow
from perdure.task.policy import priority_key

# The values travel as one JSON array (one parameter, whatever the number of tasks), params as they are.
_FIELDS: Final = (
    "task_id text, task_type text, user_id text, model_id text, pool text, priority text, lane smallint, "
    "max_retries integer, metadata text, callback_url text, callback_events text[], not_before timestamptz, "
    "queue_timeout_seconds double precision, timeout_seconds double precision, "
    "deadline_seconds double precision, rerun_of text, traceparent text"
)
_NAMES: Final = ", ".join(field.split()[0] for field in _FIELDS.split(", "))
_INSERT: Final = f"""
input AS (
    SELECT * FROM ROWS FROM (
        json_to_recordset(CAST(:rows AS json)) AS ({_FIELDS}), unnest(CAST(:params AS text[]))
    ) AS x ({_NAMES}, params)
), t AS (
    INSERT INTO tasks (
        {_NAMES}, status, ready, due_at, lane_since, queue_deadline, total_deadline, expires_at)
    SELECT {_NAMES}, 'PENDING', due <= now(), due, due, queue_end, total_end, LEAST(queue_end, total_end)
    FROM input
    CROSS JOIN LATERAL (SELECT GREATEST(now(), not_before) AS due) d
    CROSS JOIN LATERAL (
        SELECT due + make_interval(secs => queue_timeout_seconds) AS queue_end,
               due + make_interval(secs => deadline_seconds) AS total_end
    ) e
    WHERE/*keyed*/
    RETURNING *
), payloads AS (
    INSERT INTO task_payloads (task_id, params)
    SELECT input.task_id, input.params FROM input WHERE/*keyed*/
)
SELECT {PLAIN} FROM t
"""
_CREATE: Final = sql("WITH " + _INSERT.replace("WHERE/*keyed*/", ""))
# A key that expired is taken over. One that stands makes the insert wait for its owner, then do nothing.
_CREATE_KEYED: Final = sql(
    """
WITH k AS (
    INSERT INTO idempotency_keys AS old (user_id, route, key, fingerprint, task_ids, reply, expires_at)
    VALUES (:key_user, :key_route, :key, :fingerprint, :task_ids, :reply, now() + make_interval(secs => :ttl))
    ON CONFLICT (user_id, route, key) DO UPDATE
    SET fingerprint = EXCLUDED.fingerprint, task_ids = EXCLUDED.task_ids, reply = EXCLUDED.reply,
        created_at = now(), expires_at = EXCLUDED.expires_at
    WHERE old.expires_at <= now()
    RETURNING 1
), """
    + _INSERT.replace("WHERE/*keyed*/", "WHERE EXISTS (SELECT 1 FROM k)")
)
_FIND_KEY: Final = sql(
    f"""
SELECT {FULL}, k.fingerprint, k.task_ids, k.reply
FROM idempotency_keys k LEFT JOIN tasks t ON t.task_id = ANY (k.task_ids) {FULL_JOINS}
WHERE k.user_id = :user AND k.route = :route AND k.key = :key AND k.expires_at > now()
"""
)
_DROP_KEY: Final = sql(
    "DELETE FROM idempotency_keys "
    "WHERE user_id = :user AND route = :route AND key = :key AND task_ids = :task_ids"
)
_ROUNDS: Final = 3


class Submits(Repository):
    """Part of TaskRepository."""

    async def create(self, new: NewTask, idempotency: Idempotency | None = None) -> CreateResult:
        """Accepts one task. The row is PENDING when this returns.

        A created row has no `params_json` (the caller holds it); a replayed one has everything. A key whose
        task was deleted is free again. Raises StoreRefused when the task id exists.
        """
        done = await self.create_many([new], idempotency)
        return CreateResult(done.kind, done.tasks[0] if done.tasks else None)

    async def create_many(
        self, new: Sequence[NewTask], idempotency: Idempotency | None = None
    ) -> CreateManyResult:
        """Accepts several tasks, of any users, in one transaction: all or none. None at all keep no key."""
        if not new:
            return CreateManyResult("created", [])
        params = {
            "rows": to_json([_fields(task) for task in new]),
            "params": [task.params_json for task in new],
        }
        ids = [task.task_id for task in new]
        if idempotency is None:
            return CreateManyResult("created", _in_order(await self._one(_CREATE, **params), ids))
        key = {"user": idempotency.user_id, "route": idempotency.route, "key": idempotency.key}
        for _ in range(_ROUNDS):
            rows = await self._one(
                _CREATE_KEYED,
                key_user=idempotency.user_id,
                key_route=idempotency.route,
                key=idempotency.key,
                fingerprint=idempotency.fingerprint,
                task_ids=ids,
                reply=idempotency.reply,
                ttl=float(idempotency.ttl_seconds),
                **params,
            )
            if rows:
                return CreateManyResult("created", _in_order(rows, ids), idempotency.reply)
            found = await self._one(_FIND_KEY, **key)
            if not found:
                continue  # it expired or was dropped in between
            known = _recalled(found, idempotency)
            if known is not None:
                return known
            await self._one(_DROP_KEY, **key, task_ids=found[0][-2])
        raise StoreUnavailable("the idempotency key changes hands too fast; try again")

    async def recall(self, idempotency: Idempotency) -> CreateManyResult | None:
        """What the request that holds this key gave: `replayed` or `conflict`. None while the key is free."""
        found = await self._one(
            _FIND_KEY, user=idempotency.user_id, route=idempotency.route, key=idempotency.key
        )
        return _recalled(found, idempotency) if found else None


def _fields(new: NewTask) -> dict[str, Any]:
    if any("\x00" in part for pair in new.metadata.items() for part in pair):
        raise StoreRefused("metadata holds U+0000, which cannot be searched for")
    return {
        "task_id": new.task_id,
        "task_type": new.task_type,
        "user_id": new.user_id,
        "model_id": new.model_id,
        "pool": new.pool,
        "priority": new.priority,
        "lane": priority_key(new.priority),
        "max_retries": new.max_retries,
        "metadata": to_json(dict(new.metadata)),
        "callback_url": new.callback_url,
        "callback_events": new.callback_events,
        "not_before": new.not_before,
        "queue_timeout_seconds": new.queue_timeout_seconds,
        "timeout_seconds": new.timeout_seconds,
        "deadline_seconds": new.deadline_seconds,
        "rerun_of": new.rerun_of,
        "traceparent": new.traceparent,
    }


def _recalled(found: Sequence[Any], idempotency: Idempotency) -> CreateManyResult | None:
    """The answer to a repeat, from the key's rows. None when all its tasks were deleted: the key is free."""
    fingerprint, task_ids, reply = found[0][-3:]
    tasks = _in_order([row for row in found if row[0] is not None], task_ids)
    if all(task is None for task in tasks):
        return None
    if bytes(fingerprint) != idempotency.fingerprint:
        return CreateManyResult("conflict", [])
    return CreateManyResult("replayed", tasks, reply)


def _in_order(rows: Sequence[Any], ids: Sequence[str]) -> list[TaskRow | None]:
    found = {row[0]: task_row(row) for row in rows}
    return [found.get(task_id) for task_id in ids]
