"""What was promised, held against what is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import asyncpg

from perdure.callback.verify import InvalidSignature, verify
from perdure.llm.simulated import words as simulated_words
from tests.chaos.faults import Strike
from tests.chaos.load import FINAL, Accepted, Load
from tests.chaos.model import expected
from tests.support.receiver import Receiver

# Notes every move into a final state, every change of a row that was final before, and every step back.
TRIGGER = """
CREATE TABLE chaos_finals (task_id text, kind text);
CREATE FUNCTION chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.completed_at IS NULL AND NEW.completed_at IS NOT NULL THEN
        INSERT INTO chaos_finals VALUES (NEW.task_id, 'final');
    ELSIF OLD.completed_at IS NOT NULL AND (NEW.status, NEW.version, NEW.completed_at)
            IS DISTINCT FROM (OLD.status, OLD.version, OLD.completed_at) THEN
        INSERT INTO chaos_finals VALUES (NEW.task_id, 'moved');
    END IF;
    IF NEW.version < OLD.version OR (NEW.status = 'PENDING' AND OLD.status <> 'PENDING')
            OR NEW.started_at IS DISTINCT FROM COALESCE(OLD.started_at, NEW.started_at) THEN
        INSERT INTO chaos_finals VALUES (NEW.task_id, 'back');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_note AFTER UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION chaos_note();
"""


@dataclass
class Verdict:
    """Figures of a run, and the promises that were broken."""

    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    words_kept: int = 0  # of the scripted model, in results

    def check(self, name: str, bad: list[str] | int) -> None:
        """A figure that must be zero; names some of the guilty."""
        count = bad if isinstance(bad, int) else len(bad)
        self.figures[name] = count
        if count:
            examples = "" if isinstance(bad, int) else ": " + ", ".join(sorted(bad)[:5])
            self.broken.append(f"{name}: {count}{examples}")


async def settled(database_url: str, load: Load, seconds: float) -> float:
    """Waits until every accepted task is final and no callback waits; how long that took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            connection = await asyncpg.connect(database_url, timeout=5)
            try:
                open_rows = await connection.fetchval("SELECT count(*) FROM tasks WHERE completed_at IS NULL")
                waiting = await connection.fetchval(
                    "SELECT count(*) FROM callback_deliveries WHERE state IN ('PENDING', 'RETRYING')"
                )
            finally:
                await connection.close()
            if not open_rows and not waiting:
                break
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pass
        await asyncio.sleep(0.5)
    return time.monotonic() - began


async def judge(
    database_url: str, load: Load, receiver: Receiver, secret: str, strikes: list[Strike]
) -> Verdict:
    """Everything that can be checked once the dust has settled."""
    connection = await asyncpg.connect(database_url)
    try:
        rows = {
            row["task_id"]: row
            for row in await connection.fetch(
                "SELECT t.*, r.result FROM tasks t LEFT JOIN task_results r ON r.task_id = t.task_id"
            )
        }
        finals = await connection.fetch("SELECT task_id, kind FROM chaos_finals")
        deliveries = await connection.fetch("SELECT * FROM callback_deliveries")
    finally:
        await connection.close()
    verdict = Verdict()
    figures = verdict.figures
    figures["accepted"] = len(load.accepted)
    figures["refused for the moment (503) and tried again"] = load.refused_for_now
    figures.update({f"final {s}": sum(r["status"] == s for r in rows.values()) for s in FINAL})
    _judge_tasks(verdict, load, rows)
    verdict.check("answers that no caller should see", load.odd)
    _judge_writes(verdict, finals)
    _judge_attempts(verdict, rows)
    _judge_callbacks(verdict, load, rows, deliveries, receiver, secret)
    figures["tokens made"] = sum(r["completion_tokens"] or 0 for r in rows.values())
    figures["tokens discarded"] = sum(r["discarded_tokens"] for r in rows.values())
    figures["attempts"] = dict(_attempts(rows))
    figures["faults"] = dict(Counter(strike.kind for strike in strikes))
    figures["worst recovery (s)"] = _recoveries(strikes)
    verdict.check("faults from which nothing recovered", [s.kind for s in strikes if s.took is None])
    return verdict


def _judge_tasks(verdict: Verdict, load: Load, rows: dict[str, Any]) -> None:
    verdict.check("lost", [task_id for task_id in load.accepted if task_id not in rows])
    verdict.check("rows that nobody submitted", [task_id for task_id in rows if task_id not in load.accepted])
    verdict.check("stuck rows", [i for i, row in rows.items() if row["status"] not in FINAL])
    wrong, text = [], []
    for task_id, task in load.accepted.items():
        row = rows.get(task_id)
        if row is None or row["status"] not in FINAL:
            continue
        if row["status"] == "CANCELLED" and not task.cancel and not row["cancel_requested"]:
            wrong.append(f"{task_id} cancelled by nobody")
        if task.must_fail and row["status"] == "COMPLETED":
            wrong.append(f"{task_id} had to fail")
        if not task.must_fail and row["status"] == "FAILED":
            wrong.append(f"{task_id} {task.model} failed: {row['error_code']} {row['error_message']}")
        said = (json.loads(row["result"]) or {}).get("text", "") if row["result"] else ""
        if not _text_right(task, row["status"], said):
            text.append(f"{task_id} {task.model} {row['status']}")
        if task.model == "scripted":
            verdict.words_kept += len(said.split())
    verdict.check("ends that nothing explains", wrong)
    verdict.check("texts with a word lost, doubled or changed", text)


def _text_right(task: Accepted, status: str, said: str) -> bool:
    """COMPLETED: the whole text; otherwise a beginning of it."""
    whole = simulated_words(0, task.words) if task.model == "simulated" else expected(task.words)
    return said == whole if status == "COMPLETED" else whole.startswith(said)


def _judge_writes(verdict: Verdict, finals: list[Any]) -> None:
    ends = Counter(row["task_id"] for row in finals if row["kind"] == "final")
    verdict.check("results written twice", [task_id for task_id, times in ends.items() if times > 1])
    verdict.check("final rows that moved", [row["task_id"] for row in finals if row["kind"] == "moved"])
    verdict.check("rows that went back", [row["task_id"] for row in finals if row["kind"] == "back"])


def _judge_attempts(verdict: Verdict, rows: dict[str, Any]) -> None:
    """Attempts are numbered without a gap, cost what they should, and hand on what they have made."""
    odd, charged, again = [], [], 0
    for task_id, row in rows.items():
        attempts = json.loads(row["attempts"] or "[]")
        outcomes = [a["outcome"] for a in attempts]
        if [a["number"] for a in attempts] != list(range(1, len(attempts) + 1)) or None in outcomes:
            odd.append(task_id)
        if row["status"] == "COMPLETED" and outcomes[-1:] != ["completed"]:
            odd.append(task_id)
        if row["retry_count"] > outcomes.count("failed"):
            charged.append(task_id)
        for one, following in pairwise(attempts):
            if one["outcome"] == "drained" and following["outcome"] in ("completed", "drained"):
                again += one["output_tokens"] - following["resumed_from_tokens"]
    verdict.check("attempts out of order", odd)
    verdict.check("retries charged for lost workers or drains", charged)
    verdict.check("tokens made again after a drain", again)


def _judge_callbacks(
    verdict: Verdict,
    load: Load,
    rows: dict[str, Any],
    deliveries: list[Any],
    receiver: Receiver,
    secret: str,
) -> None:
    came: dict[str, set[str]] = defaultdict(set)  # task -> ids of its events that came with an answer of 200
    bodies: dict[str, set[bytes]] = defaultdict(set)
    forged, repeats = [], 0
    seen: Counter[str] = Counter()
    for request in receiver.requests:
        try:
            verify(request.body, request.header_map, [secret], tolerance=3600)
        except InvalidSignature:
            forged.append(request["webhook-id"])
        event = request["webhook-id"]
        seen[event] += 1
        bodies[event].add(request.body)
        came[json.loads(request.body)["task_id"]].add(event)
    wanted = [i for i, task in load.accepted.items() if task.callback and i in rows]
    verdict.check("callbacks missing", [i for i in wanted if i not in came])
    verdict.check("callbacks undelivered", [d["task_id"] for d in deliveries if d["state"] != "DELIVERED"])
    verdict.check(
        "callbacks doubled (two events for one task)", [i for i, ids in came.items() if len(ids) > 1]
    )
    verdict.check("callbacks for tasks without one", [i for i in came if i not in set(wanted)])
    verdict.check("callbacks whose bytes changed", [e for e, kinds in bodies.items() if len(kinds) > 1])
    verdict.check("callbacks that do not verify", forged)
    repeats = sum(times - 1 for times in seen.values())
    verdict.figures["callback tries beyond one for each event (same id, allowed)"] = repeats


def _attempts(rows: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows.values():
        found.update(str(a["outcome"]) for a in json.loads(row["attempts"] or "[]"))
    return found


def _recoveries(strikes: list[Strike]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for strike in strikes:
        if strike.took is not None:
            worst[strike.kind] = max(worst.get(strike.kind, 0.0), round(strike.took, 2))
    return worst
