"""The usage ledger: summed from tasks while they stand, from `usage_daily` once they are gone.

So a commit writes nothing for it. `queue_seconds` run from creation (or `not_before`) to the first start, or
to the end of a task that never started; `run_seconds` from the first start to the end.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from typing import Final

SUMS: Final = """
    count(*) AS tasks, sum(attempt_count) AS attempts, sum(COALESCE(prompt_tokens, 0)) AS prompt_tokens,
    sum(COALESCE(completion_tokens, 0)) AS completion_tokens, sum(discarded_tokens) AS discarded_tokens,
    sum(GREATEST(0, EXTRACT(EPOCH FROM
        COALESCE(started_at, completed_at) - GREATEST(created_at, not_before)))) AS queue_seconds,
    sum(COALESCE(EXTRACT(EPOCH FROM completed_at - started_at), 0)) AS run_seconds
"""
DAY: Final = "CAST(completed_at AT TIME ZONE 'UTC' AS date)"

# Adds deleted tasks (`gone`) to their days.
FOLD: Final = f"""
fold AS (
    INSERT INTO usage_daily AS old (user_id, model_id, day, tasks, attempts, prompt_tokens, completion_tokens,
        discarded_tokens, queue_seconds, run_seconds)
    SELECT user_id, model_id, {DAY}, {SUMS} FROM gone GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (user_id, model_id, day) DO UPDATE SET
        tasks = old.tasks + EXCLUDED.tasks, attempts = old.attempts + EXCLUDED.attempts,
        prompt_tokens = old.prompt_tokens + EXCLUDED.prompt_tokens,
        completion_tokens = old.completion_tokens + EXCLUDED.completion_tokens,
        discarded_tokens = old.discarded_tokens + EXCLUDED.discarded_tokens,
        queue_seconds = old.queue_seconds + EXCLUDED.queue_seconds,
        run_seconds = old.run_seconds + EXCLUDED.run_seconds
)
"""
