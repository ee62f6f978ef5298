"""Live progress: shared, budgeted, never backwards, never an error to a reader."""

from __future__ import annotations

import asyncio

from perdure.contracts import Beat
from perdure.live.progress import BUDGET, LiveProgress
from tests.unit.live.virtual_time import clock, run


class Engine:
    """Beats that are made once a second, described in 2 ms."""

    def __init__(self, phase: float = 0.0) -> None:
        self.calls: list[tuple[float, str]] = []
        self.phase = phase
        self.hang = False
        self.broken = False
        self.answers: dict[str, list[Beat | None]] = {}

    async def describe_beat(self, task_id: str) -> Beat | None:
        self.calls.append((clock(), task_id))
        if self.broken:
            raise OSError("no engine")
        await asyncio.sleep(3600 if self.hang else 0.002)
        if task_id in self.answers:
            return self.answers[task_id].pop(0)
        seq = int(clock() - self.phase) + 1
        return Beat(attempt=1, seq=seq, text="x" * seq, output_tokens=seq, state={"large": 1})


def live(engine: Engine, **options: object) -> LiveProgress:
    return LiveProgress(engine, clock=clock, **options)  # type: ignore[arg-type]


def test_many_readers_are_one_call() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        beats = await asyncio.gather(*(progress.beat("t", attempt=1) for _ in range(50)))
        assert len(engine.calls) == 1
        assert {beat.seq for beat in beats if beat} == {1}
        await asyncio.sleep(0.5)
        assert (await progress.beat("t")) is beats[0]
        assert len(engine.calls) == 1, "within the interval nobody is asked again"
        await asyncio.sleep(0.6)
        assert (await progress.beat("t", want_fresh=False)) is beats[0]
        fresh = await progress.beat("t")
        assert fresh is not None
        assert fresh.seq == 2
        await progress.aclose()

    run(main)


def test_a_beat_of_another_attempt_is_none() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        assert await progress.beat("t", attempt=2) is None
        assert progress.last_seen("t", 1) is not None
        assert progress.last_seen("t") is not None
        assert progress.last_seen("other") is None
        assert progress.last_seen("t", 1).state is None  # type: ignore[union-attr]  # not kept
        await progress.aclose()

    run(main)


def test_a_beat_never_goes_back() -> None:
    async def main() -> None:
        engine = Engine()
        newer, older = Beat(attempt=2, seq=1), Beat(attempt=1, seq=9)
        engine.answers["t"] = [newer, older, None, Beat(attempt=2, seq=2)]
        progress = live(engine)
        seen = []
        for _ in range(4):
            beat = await progress.beat("t")
            assert beat is not None
            seen.append((beat.attempt, beat.seq))
            await asyncio.sleep(1.1)
        assert seen == [(2, 1), (2, 1), (2, 1), (2, 2)]
        await progress.aclose()

    run(main)


def test_a_followed_task_is_fresh_and_asked_about_twice_a_second() -> None:
    """What a watcher sees is never older than a beat and a little: the looks keep step with the beats."""

    async def main() -> None:
        for phase in (0.0, 0.3, 0.77):
            engine = Engine(phase)
            progress = live(engine)
            seen: list[tuple[float, int]] = []
            progress.follow("t", lambda _, beat, seen=seen: seen.append((clock(), beat.seq)))  # type: ignore[misc]
            start = clock()
            await asyncio.sleep(30)
            assert [seq for _, seq in seen] == list(range(seen[0][1], seen[0][1] + len(seen)))
            late = [at - (seq - 1 + phase) for at, seq in seen[2:]]
            assert max(late) < 0.2, "seconds between a beat and its being seen"
            assert len(seen) >= 29
            assert len(engine.calls) <= 2.5 * (clock() - start)
            progress.unfollow("t")
            calls = len(engine.calls)
            await asyncio.sleep(5)
            assert len(engine.calls) == calls
            await progress.aclose()

    run(main)


def test_a_silent_task_is_asked_about_once_a_second() -> None:
    async def main() -> None:
        engine = Engine()
        engine.answers["t"] = [Beat(attempt=1, seq=1)] * 200
        progress = live(engine)
        progress.follow("t", lambda *_: None)
        await asyncio.sleep(60)
        assert 55 <= len(engine.calls) <= 70
        await progress.aclose()

    run(main)


def test_who_does_not_wait_finds_it_at_the_next_look() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        for _ in range(5):
            progress.want("t")
        assert progress.last_seen("t") is None
        await asyncio.sleep(0.1)
        progress.want("t")
        assert progress.last_seen("t") is not None
        assert len(engine.calls) == 1
        await progress.aclose()

    run(main)


def test_the_budget_holds_and_everybody_has_a_turn() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        many = [f"t{number}" for number in range(500)]
        for task_id in many:
            progress.follow(task_id, lambda *_: None)
        assert progress.interval == 5.0
        await asyncio.sleep(20)
        assert len(engine.calls) <= BUDGET * 20 + BUDGET
        per_task = [sum(1 for _, asked in engine.calls if asked == task_id) for task_id in many]
        assert max(per_task) - min(per_task) <= 1
        assert min(per_task) >= 3
        await progress.aclose()

    run(main)


def test_the_interval_stretches_evenly() -> None:
    async def main() -> None:
        progress = live(Engine())
        found = {}
        for number in range(1, 3001):
            progress.follow(f"t{number}", lambda *_: None)
            found[number] = progress.interval
        assert (found[1], found[100], found[250], found[1000], found[3000]) == (1, 1, 2.5, 10, 10)
        await progress.aclose()

    run(main)


def test_reads_are_within_the_budget_too() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        await asyncio.gather(*(progress.beat(f"t{number}") for number in range(400)))
        assert len(engine.calls) <= BUDGET
        await progress.aclose()

    run(main)


def test_an_engine_that_hangs_costs_half_a_second_once() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        assert await progress.beat("t") is not None
        await asyncio.sleep(2)
        engine.hang = True
        before = clock()
        beat = await progress.beat("t")
        assert beat is not None
        assert beat.seq == 1, "what was seen before"
        assert clock() - before <= 0.51
        before = clock()
        assert await progress.beat("u") is None
        assert clock() - before < 0.01, "nobody else waits for it"
        await progress.aclose()

    run(main)


def test_an_engine_that_fails_is_no_error() -> None:
    async def main() -> None:
        engine = Engine()
        engine.broken = True
        progress = live(engine)
        progress.follow("t", lambda *_: None)
        assert await progress.beat("u") is None
        await asyncio.sleep(3)
        engine.broken = False
        await asyncio.sleep(3)
        assert progress.last_seen("t") is not None
        await progress.aclose()

    run(main)


def test_memory_is_bounded_in_tasks_and_in_text() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine, budget=1e6, max_entries=10, max_bytes=1000)
        for number in range(30):
            engine.answers[f"t{number}"] = [Beat(attempt=1, seq=1, text="x" * 300)]
            await progress.beat(f"t{number}")
        kept = [number for number in range(30) if progress.last_seen(f"t{number}")]
        assert kept == [27, 28, 29]
        await progress.aclose()

    run(main)


def test_a_reader_that_leaves_does_not_end_the_call_of_others() -> None:
    async def main() -> None:
        engine = Engine()
        progress = live(engine)
        first = asyncio.create_task(progress.beat("t"))
        second = asyncio.create_task(progress.beat("t"))
        await asyncio.sleep(0.001)
        first.cancel()
        beat = await second
        assert beat is not None
        assert len(engine.calls) == 1
        await progress.aclose()

    run(main)
