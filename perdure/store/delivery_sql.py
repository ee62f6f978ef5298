"""The statements of callback deliveries."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from typing import Final

from perdure.store.base import sql

QUICK_GRACE_SECONDS: Final = (
    120.0  # the sweep leaves a delivery alone this long after commit and a quick claim
)
SUSPEND_AFTER_DEAD: Final = 5  # dead deliveries of a receiver …
SUSPEND_AFTER_SECONDS: Final = 5 * 86_400.0  # … that has failed for as long without one success

CLAIMED: Final = (
    "d.delivery_id, d.task_id, d.user_id, d.event, d.url, d.body, d.tries_made, d.slow_tries, d.created_at, "
    "d.lease_no, (SELECT t.traceparent FROM tasks t WHERE t.task_id = d.task_id)"
)
OPEN: Final = "d.state IN ('PENDING', 'RETRYING')"
FREE: Final = "(d.leased_until IS NULL OR d.leased_until <= now())"
CLAIM: Final = sql(
    f"""
UPDATE callback_deliveries d SET
    leased_until = now() + make_interval(secs => :lease), lease_no = d.lease_no + 1,
    next_due = GREATEST(d.next_due, now() + make_interval(secs => :grace))
WHERE d.delivery_id = :id AND {OPEN} AND {FREE}
RETURNING {CLAIMED}
"""
)
# Receivers are visited one by one, each with a few: thousands due at one dead receiver hold up no other.
CLAIM_DUE: Final = sql(
    f"""
WITH RECURSIVE receivers AS (
    (SELECT d.user_id, d.origin FROM callback_deliveries d WHERE {OPEN} ORDER BY d.user_id, d.origin LIMIT 1)
    UNION ALL
    SELECT n.* FROM receivers r CROSS JOIN LATERAL (
        SELECT d.user_id, d.origin FROM callback_deliveries d
        WHERE {OPEN} AND (d.user_id, d.origin) > (r.user_id, r.origin)
        ORDER BY d.user_id, d.origin LIMIT 1
    ) n
), due AS (
    SELECT x.* FROM receivers r CROSS JOIN LATERAL (
        SELECT d.delivery_id, d.next_due FROM callback_deliveries d
        WHERE {OPEN} AND {FREE} AND d.user_id = r.user_id AND d.origin = r.origin AND d.next_due <= now()
        ORDER BY d.next_due LIMIT :each
    ) x WHERE NOT EXISTS (
        SELECT FROM unnest(CAST(:skip_users AS text[]), CAST(:skip_origins AS text[])) AS s (user_id, origin)
        WHERE s.user_id = r.user_id AND s.origin = r.origin
    ) ORDER BY x.next_due LIMIT :limit
), picked AS (
    SELECT l.delivery_id, due.next_due AS was_due FROM due CROSS JOIN LATERAL (
        SELECT d.delivery_id FROM callback_deliveries d
        WHERE d.delivery_id = due.delivery_id AND {OPEN} AND {FREE} FOR NO KEY UPDATE SKIP LOCKED
    ) l
)
UPDATE callback_deliveries d SET
    leased_until = now() + make_interval(secs => :lease), lease_no = d.lease_no + 1,
    next_due = now() + make_interval(secs => :lease)
FROM picked WHERE d.delivery_id = picked.delivery_id
RETURNING {CLAIMED}, picked.was_due
"""
)
DEFER: Final = sql(
    f"""
UPDATE callback_deliveries d SET leased_until = NULL, next_due = now() + make_interval(secs => :next_in)
WHERE d.delivery_id = :id AND d.lease_no = :token AND {OPEN}
"""
)
# A try is logged whoever holds the lease by now; it changes the state only under its own lease, unless it
# delivered: that is true whoever says it.
RECORD: Final = sql(
    """
WITH old AS (
    SELECT delivery_id, state, next_due, lease_no = :token AS mine FROM callback_deliveries
    WHERE delivery_id = :id FOR NO KEY UPDATE
), new AS (
    SELECT delivery_id, mine, CASE
        WHEN :verdict = 'delivered' THEN 'DELIVERED'
        WHEN NOT mine OR state NOT IN ('PENDING', 'RETRYING') THEN state
        WHEN :verdict = 'dead' OR CAST(:next_in AS double precision) IS NULL THEN 'DEAD'
        ELSE 'RETRYING' END AS state,
        CASE WHEN mine THEN now() + make_interval(secs => CAST(:next_in AS double precision))
             ELSE next_due END AS due
    FROM old
), d AS (
    UPDATE callback_deliveries d SET
        tries_made = d.tries_made + 1, slow_tries = d.slow_tries + CAST(:kind = 'sweep' AS integer),
        state = new.state,
        next_due = CASE WHEN new.state IN ('PENDING', 'RETRYING') THEN COALESCE(new.due, d.next_due) END,
        leased_until = CASE WHEN new.mine THEN NULL ELSE d.leased_until END, updated_at = now()
    FROM new WHERE d.delivery_id = new.delivery_id
    RETURNING d.delivery_id, d.user_id, d.origin, d.state, d.tries_made
), logged AS (
    INSERT INTO callback_tries (delivery_id, number, kind, at, duration_ms, status, error, address, sample)
    SELECT delivery_id, tries_made, :kind, :at, :duration_ms, :status, :error, :address, :sample FROM d
), bad AS (
    INSERT INTO callback_origins AS o (user_id, origin, failing_since, dead)
    SELECT user_id, origin, now(), CAST(:verdict = 'dead' AS integer) FROM d WHERE :verdict <> 'delivered'
    ON CONFLICT (user_id, origin) DO UPDATE SET
        failing_since = COALESCE(o.failing_since, now()), dead = o.dead + EXCLUDED.dead
), good AS (
    UPDATE callback_origins o SET failing_since = NULL, dead = 0 FROM d
    WHERE :verdict = 'delivered' AND o.user_id = d.user_id AND o.origin = d.origin
        AND o.failing_since IS NOT NULL
)
SELECT state, user_id, origin FROM d
"""
)
SUSPEND_FAILING: Final = sql(
    """
UPDATE callback_origins SET suspended_at = now(), reason = 'failing'
WHERE user_id = :user AND origin = :origin AND suspended_at IS NULL AND dead >= :dead
    AND failing_since <= now() - make_interval(secs => :seconds)
RETURNING 1
"""
)
SUSPEND: Final = sql(
    """
INSERT INTO callback_origins AS o (user_id, origin, failing_since, suspended_at, reason)
VALUES (:user, :origin, now(), now(), :reason)
ON CONFLICT (user_id, origin) DO UPDATE SET
    suspended_at = COALESCE(o.suspended_at, now()), reason = COALESCE(o.reason, EXCLUDED.reason)
"""
)
KEEP_BACK: Final = sql(
    f"UPDATE callback_deliveries d SET state = 'SUSPENDED', next_due = NULL, updated_at = now() "
    f"WHERE d.user_id = :user AND d.origin = :origin AND {OPEN} RETURNING 1"
)
UNSUSPEND: Final = sql(
    "UPDATE callback_origins SET suspended_at = NULL, reason = NULL, failing_since = NULL, dead = 0 "
    "WHERE user_id = :user AND origin = :origin AND suspended_at IS NOT NULL RETURNING 1"
)
AGAIN: Final = (
    "state = CASE WHEN d.tries_made > 0 THEN 'RETRYING' ELSE 'PENDING' END, next_due = now(), "
    "slow_tries = 0, updated_at = now()"
)
LET_GO: Final = sql(
    f"UPDATE callback_deliveries d SET {AGAIN} "
    "WHERE d.user_id = :user AND d.origin = :origin AND d.state = 'SUSPENDED' RETURNING 1"
)
REDELIVER: Final = sql(
    f"UPDATE callback_deliveries d SET {AGAIN} WHERE d.delivery_id = :id AND d.task_id = :task "
    f"AND (CAST(:admin AS boolean) OR d.user_id = :user) AND {FREE} RETURNING 1"
)
REDELIVER_SINCE: Final = sql(
    f"""
UPDATE callback_deliveries d SET {AGAIN} FROM (
    SELECT delivery_id FROM callback_deliveries d
    WHERE (CAST(:admin AS boolean) OR d.user_id = :user) AND d.state = :state AND d.created_at >= :since
        AND (CAST(:until AS timestamptz) IS NULL OR d.created_at < :until)
        AND (CAST(:origin AS text) IS NULL OR d.origin = :origin) AND {FREE}
    ORDER BY d.delivery_id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
) x WHERE d.delivery_id = x.delivery_id RETURNING 1
"""
)
LIST: Final = sql(
    """
SELECT d.delivery_id, d.task_id, d.user_id, d.event, d.url, d.state, d.tries_made, d.next_due, d.created_at,
    d.updated_at, y.number, y.kind, y.at, y.duration_ms, y.status, y.error, y.address, y.sample
FROM tasks t
LEFT JOIN callback_deliveries d
    ON d.task_id = t.task_id AND (CAST(:id AS text) IS NULL OR d.delivery_id = :id)
LEFT JOIN callback_tries y ON y.delivery_id = d.delivery_id
WHERE t.task_id = :task AND (CAST(:admin AS boolean) OR t.user_id = :user)
ORDER BY d.created_at, d.delivery_id, y.number
"""
)
STATE: Final = sql("SELECT state FROM callback_deliveries WHERE delivery_id = :id")
ORIGINS: Final = sql(
    """
SELECT o.user_id, o.origin, o.failing_since, o.dead, o.suspended_at, o.reason, (
    SELECT count(*) FROM callback_deliveries d WHERE d.user_id = o.user_id AND d.origin = o.origin
        AND d.state IN ('PENDING', 'RETRYING', 'SUSPENDED'))
FROM callback_origins o
WHERE (CAST(:admin AS boolean) OR o.user_id = :user)
    AND (o.failing_since IS NOT NULL OR o.suspended_at IS NOT NULL)
ORDER BY o.user_id, o.origin
"""
)
COUNTS: Final = sql(
    "SELECT state, count(*) FROM callback_deliveries WHERE state <> 'DELIVERED' GROUP BY state"
)
