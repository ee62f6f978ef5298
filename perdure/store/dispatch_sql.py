"""The statements of dispatch: they stay cheap with tens of thousands of PENDING rows of one user.

Index `ix_tasks_ready` holds exactly the rows that could start now, by pool, lane, user, model and age.
`pairs` hops through it from one (user, model) to the next, one probe each, however many rows a pair has;
models that are paused are hopped over. What cannot start now (a `not_before`, a lease, a back-off) is not in
it, but in `ix_tasks_due` until its time comes.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from typing import Final

from perdure.store.base import TOUCH, sql
from perdure.store.columns import HOT, PLAIN
from perdure.task.policy import aged_lane

READY: Final = "t.status = 'PENDING' AND t.ready"
# The window: attempts that wait in Temporal, and rows that a dispatcher is about to start. As in the index.
WINDOW: Final = "(t.status = 'QUEUED' OR (t.status = 'PENDING' AND t.leased_until IS NOT NULL))"
COUNT_CAP: Final = 1000
_MOVES: Final = " ".join(f"WHEN {lane} THEN {aged_lane(lane)}" for lane in range(1, 6))
_AGED: Final = f"CASE t.lane {_MOVES} ELSE t.lane END"

WAKE: Final = sql(
    """
UPDATE tasks t SET ready = true, leased_until = NULL
FROM (
    SELECT task_id FROM tasks WHERE status = 'PENDING' AND NOT ready AND due_at <= now()
    ORDER BY due_at LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED
) due
WHERE t.task_id = due.task_id
"""
)

LANES: Final = sql(
    f"""
WITH RECURSIVE pairs AS (
    (SELECT t.pool, t.lane, t.user_id, t.model_id, t.created_at FROM tasks t WHERE {READY}
     ORDER BY t.pool, t.lane, t.user_id, t.model_id, t.task_id LIMIT 1)
    UNION ALL
    SELECT n.* FROM pairs CROSS JOIN LATERAL (
        SELECT t.pool, t.lane, t.user_id, t.model_id, t.created_at FROM tasks t
        WHERE {READY} AND (t.pool, t.lane, t.user_id, t.model_id)
            > (pairs.pool, pairs.lane, pairs.user_id, pairs.model_id)
        ORDER BY t.pool, t.lane, t.user_id, t.model_id, t.task_id LIMIT 1
    ) n
), lanes AS (
    SELECT pool, lane, min(created_at) AS oldest, array_agg(DISTINCT model_id) AS models
    FROM pairs
    WHERE NOT EXISTS (SELECT 1 FROM pauses WHERE kind = 'pool' AND name = pairs.pool)
        AND NOT EXISTS (SELECT 1 FROM pauses WHERE kind = 'model' AND name = pairs.model_id)
        AND NOT pairs.model_id = ANY (CAST(:held AS text[]))
    GROUP BY pool, lane
)
SELECT l.pool, l.lane, (
        SELECT count(*) FROM (
            SELECT 1 FROM tasks t
            WHERE {READY} AND t.pool = l.pool AND t.lane = l.lane AND t.model_id = ANY (l.models)
            LIMIT {COUNT_CAP}
        ) capped
    ), (SELECT count(*) FROM tasks t WHERE {WINDOW} AND t.pool = l.pool AND t.lane = l.lane), l.oldest
FROM lanes l ORDER BY l.pool, l.lane
"""
)

# Hops from user to user through the index; those with rows in the window come from its own index.
USERS: Final = sql(
    f"""
WITH RECURSIVE ready AS (
    (SELECT t.user_id FROM tasks t WHERE {READY} AND t.pool = :pool AND t.lane = :lane
     ORDER BY t.user_id LIMIT 1)
    UNION ALL
    SELECT n.user_id FROM ready CROSS JOIN LATERAL (
        SELECT t.user_id FROM tasks t
        WHERE {READY} AND t.pool = :pool AND t.lane = :lane AND t.user_id > ready.user_id
        ORDER BY t.user_id LIMIT 1
    ) n
)
SELECT user_id FROM ready
UNION
SELECT t.user_id FROM tasks t WHERE {WINDOW} AND t.pool = :pool AND t.lane = :lane
"""
)

# One dispatcher at a time counts and claims where users have a limit: two could each see the last free place.
SERIALIZE: Final = sql("SELECT pg_advisory_xact_lock(7246002)")

# `turn` is the place that a row would take among its user's own rows in the window: sorting by it gives every
# user the next place in turn. A pair offers enough rows to fill the claim eight times over, never all it has.
CLAIM: Final = sql(
    f"""
WITH RECURSIVE pairs AS (
    (SELECT t.user_id, t.model_id FROM tasks t
     WHERE {READY} AND t.pool = :pool AND t.lane = :lane
        AND NOT EXISTS (SELECT 1 FROM pauses WHERE kind = 'pool' AND name = :pool)
     ORDER BY t.user_id, t.model_id LIMIT 1)
    UNION ALL
    SELECT n.* FROM pairs CROSS JOIN LATERAL (
        SELECT t.user_id, t.model_id FROM tasks t
        WHERE {READY} AND t.pool = :pool AND t.lane = :lane
            AND (t.user_id, t.model_id) > (pairs.user_id, pairs.model_id)
        ORDER BY t.user_id, t.model_id LIMIT 1
    ) n
), held AS (
    SELECT t.user_id, count(*) AS n FROM tasks t
    WHERE {WINDOW} AND t.pool = :pool AND t.lane = :lane GROUP BY t.user_id
), busy AS (
    SELECT user_id, sum(n) AS n FROM (
        SELECT t.user_id, count(*) AS n FROM tasks t WHERE {WINDOW} AND :limited GROUP BY t.user_id
        UNION ALL
        SELECT t.user_id, count(*) FROM tasks t WHERE t.status = 'PROCESSING' AND :limited GROUP BY t.user_id
    ) b GROUP BY user_id
), users AS (
    SELECT p.user_id, p.model_id, COALESCE(h.n, 0) AS held,
        COALESCE(m.most, :default_most) - COALESCE(b.n, 0) AS room, count(*) OVER () AS pairs
    FROM pairs p
    LEFT JOIN held h ON h.user_id = p.user_id
    LEFT JOIN busy b ON b.user_id = p.user_id
    LEFT JOIN unnest(CAST(:limit_users AS text[]), CAST(:limit_counts AS integer[])) AS m (user_id, most)
        ON m.user_id = p.user_id
    WHERE NOT EXISTS (SELECT 1 FROM pauses WHERE kind = 'model' AND name = p.model_id)
        AND NOT p.model_id = ANY (CAST(:held AS text[]))
), offers AS (
    SELECT u.user_id, u.held, u.room, c.task_id,
        row_number() OVER (PARTITION BY u.user_id ORDER BY c.task_id) AS nth
    FROM users u CROSS JOIN LATERAL (
        SELECT t.task_id FROM tasks t
        WHERE {READY} AND t.pool = :pool AND t.lane = :lane
            AND t.user_id = u.user_id AND t.model_id = u.model_id
        ORDER BY t.task_id
        LIMIT LEAST(2 * CAST(:limit AS bigint), GREATEST(2, 1 + 8 * CAST(:limit AS bigint) / u.pairs))
    ) c
), ranked AS (
    SELECT task_id, held + nth AS turn FROM offers
    WHERE (room IS NULL OR nth <= room)
        AND (CAST(:last_turn AS bigint) IS NULL OR held + nth <= CAST(:last_turn AS bigint))
    ORDER BY turn, task_id LIMIT 2 * CAST(:limit AS bigint)
), picked AS (
    SELECT l.task_id, r.turn FROM ranked r CROSS JOIN LATERAL (
        SELECT t.task_id FROM tasks t WHERE t.task_id = r.task_id AND {READY} FOR NO KEY UPDATE SKIP LOCKED
    ) l LIMIT :limit
)
UPDATE tasks t SET
    ready = false, due_at = now() + make_interval(secs => :lease),
    leased_until = now() + make_interval(secs => :lease), lease_owner = :owner,
    claimed_at = COALESCE(t.claimed_at, now()),
    expires_at = LEAST(t.queue_deadline, t.total_deadline) + interval '10 seconds'
FROM picked k JOIN task_payloads p ON p.task_id = k.task_id
WHERE t.task_id = k.task_id
RETURNING {HOT}, p.params, NULL AS result, t.attempts, t.leased_until, k.turn
"""
)

# Rows are locked in id order, so that two batches can never wait for each other.
QUEUED: Final = sql(
    f"""
WITH x AS (
    SELECT s.task_id, s.at, s.priority FROM unnest(
        CAST(:ids AS text[]), CAST(:ats AS timestamptz[]), CAST(:priorities AS text[])
    ) AS s (task_id, at, priority)
), locked AS (
    SELECT t.task_id, t.cancel_requested, t.cancel_reason,
        CASE WHEN t.priority <> x.priority THEN t.priority END AS priority
    FROM tasks t JOIN x ON x.task_id = t.task_id
    ORDER BY t.task_id FOR NO KEY UPDATE OF t
), u AS (
    UPDATE tasks t SET status = 'QUEUED', version = t.version + 1, queued_at = GREATEST(x.at, t.created_at),
        ready = false, leased_until = NULL, {TOUCH}
    FROM x JOIN locked l ON l.task_id = x.task_id WHERE t.task_id = x.task_id AND t.status = 'PENDING'
)
SELECT task_id, cancel_requested, cancel_reason, priority FROM locked
WHERE cancel_requested OR priority IS NOT NULL
"""
)

RELEASE: Final = sql(
    """
UPDATE tasks t SET
    due_at = now() + make_interval(secs => :seconds), leased_until = NULL, ready = :seconds <= 0
FROM (
    SELECT task_id FROM tasks WHERE task_id = ANY (:ids) AND status = 'PENDING'
    ORDER BY task_id FOR NO KEY UPDATE
) held
WHERE t.task_id = held.task_id
"""
)

REFUSE: Final = sql(
    f"""
UPDATE tasks t SET start_failures = t.start_failures + 1, leased_until = NULL, ready = false,
    due_at = now() + make_interval(secs => 5 * power(2, LEAST(t.start_failures, 10)))
WHERE t.task_id = :id AND t.status = 'PENDING' RETURNING {PLAIN}, now()
"""
)

EXPIRED: Final = sql(
    f"""
SELECT {PLAIN}, now(), t.total_deadline <= now() FROM tasks t
WHERE t.status = 'PENDING' AND t.expires_at IS NOT NULL AND t.expires_at <= now()
ORDER BY t.expires_at LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
"""
)

# Of each user's rows for a model only the oldest are looked at: nobody behind them has waited longer.
AGE: Final = sql(
    f"""
WITH RECURSIVE pairs AS (
    (SELECT t.lane, t.user_id, t.model_id FROM tasks t WHERE {READY} AND t.pool = :pool AND t.lane > 2
     ORDER BY t.lane, t.user_id, t.model_id LIMIT 1)
    UNION ALL
    SELECT n.* FROM pairs CROSS JOIN LATERAL (
        SELECT t.lane, t.user_id, t.model_id FROM tasks t
        WHERE {READY} AND t.pool = :pool AND (t.lane, t.user_id, t.model_id)
            > (pairs.lane, pairs.user_id, pairs.model_id)
        ORDER BY t.lane, t.user_id, t.model_id LIMIT 1
    ) n
), old AS (
    SELECT c.task_id FROM pairs p CROSS JOIN LATERAL (
        SELECT t.task_id, t.lane_since FROM tasks t
        WHERE {READY} AND t.pool = :pool AND t.lane = p.lane
            AND t.user_id = p.user_id AND t.model_id = p.model_id
        ORDER BY t.task_id LIMIT :limit
    ) c WHERE c.lane_since <= now() - make_interval(secs => :wait) LIMIT :limit
), locked AS (
    SELECT l.task_id FROM old CROSS JOIN LATERAL (
        SELECT t.task_id FROM tasks t WHERE t.task_id = old.task_id AND {READY} FOR NO KEY UPDATE SKIP LOCKED
    ) l
)
UPDATE tasks t SET lane = {_AGED}, lane_since = t.lane_since + make_interval(secs => :wait)
FROM locked WHERE t.task_id = locked.task_id RETURNING 1
"""
)

NEXT_DUE: Final = sql(
    """
SELECT LEAST(
    (SELECT due_at FROM tasks WHERE status = 'PENDING' AND NOT ready ORDER BY due_at LIMIT 1),
    (SELECT expires_at FROM tasks WHERE status = 'PENDING' AND expires_at IS NOT NULL
     ORDER BY expires_at LIMIT 1)
)
"""
)
