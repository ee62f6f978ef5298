"""Places per receiver, with a clock of the test's own."""

from __future__ import annotations

import asyncio

from perdure.callback.gate import FAST_PLACES, SLOW_MEMORY, SLOW_PLACES, SLOW_SECONDS, OriginGate

HERE, THERE = ("alice", "https://here.example"), ("alice", "https://there.example")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def fill(gate: OriginGate, count: int) -> list[float]:
    begun = [await gate.enter(HERE) for _ in range(count)]
    assert None not in begun
    return [one for one in begun if one is not None]


async def test_a_fast_receiver_has_many_places_and_others_have_theirs() -> None:
    gate = OriginGate(Clock(), patience=0.01)
    await fill(gate, FAST_PLACES)
    assert await gate.enter(HERE) is None
    assert gate.full() == [HERE]
    assert await gate.enter(THERE) is not None
    assert await gate.enter(("bob", HERE[1])) is not None


async def test_a_try_waits_for_a_place_and_takes_it_in_order() -> None:
    gate = OriginGate(Clock(), patience=20)
    begun = await fill(gate, FAST_PLACES)
    waiting = [asyncio.create_task(gate.enter(HERE)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.leave(HERE, begun[0])
    assert await waiting[0] is not None
    assert not waiting[1].done()
    gate.leave(HERE, begun[1])
    assert await waiting[1] is not None


async def test_no_more_wait_than_there_are_places() -> None:
    gate = OriginGate(Clock(), patience=20)
    await fill(gate, FAST_PLACES)
    waiting = [asyncio.create_task(gate.enter(HERE)) for _ in range(FAST_PLACES)]
    await asyncio.sleep(0)
    assert await gate.enter(HERE) is None
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    again = asyncio.create_task(gate.enter(HERE))  # those that gave up hold no place in the queue
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_a_receiver_that_was_slow_has_few_places_for_a_while() -> None:
    clock = Clock()
    gate = OriginGate(clock, patience=20)
    (begun,) = await fill(gate, 1)
    clock.now += SLOW_SECONDS + 1
    gate.leave(HERE, begun)
    places = await fill(gate, SLOW_PLACES)
    assert await gate.enter(HERE) is None  # at once: nobody waits for a slow one
    for place in places:
        gate.leave(HERE, place)
    clock.now += SLOW_MEMORY + 1
    await fill(gate, FAST_PLACES)


async def test_hanging_tries_make_a_receiver_slow_before_one_ends() -> None:
    clock = Clock()
    gate = OriginGate(clock, patience=20)
    await fill(gate, SLOW_PLACES)
    clock.now += SLOW_SECONDS + 1
    assert await gate.enter(HERE) is None
    assert gate.full() == [HERE]
    assert await gate.enter(THERE) is not None


async def test_a_place_that_comes_while_giving_up_is_not_lost() -> None:
    gate = OriginGate(Clock(), patience=20)
    begun = await fill(gate, FAST_PLACES)
    waiting = asyncio.create_task(gate.enter(HERE))
    await asyncio.sleep(0)
    gate.leave(HERE, begun[0])  # the place is given to the waiter …
    waiting.cancel()  # … that goes away before it wakes
    await asyncio.gather(waiting, return_exceptions=True)
    assert await gate.enter(HERE) is not None


async def test_idle_receivers_are_forgotten() -> None:
    clock = Clock()
    gate = OriginGate(clock, patience=0.01)
    for number in range(3_000):
        begun = await gate.enter(("alice", str(number)))
        assert begun is not None
        gate.leave(("alice", str(number)), begun)
        clock.now += 0.001
    assert len(gate._states) <= 1_000
