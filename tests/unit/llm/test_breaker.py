"""The breaker: a dead server is tried by a few, a server that is back is not overrun."""

from __future__ import annotations

import random

import pytest

from perdure.llm.breaker import Breaker, Ticket
from perdure.task.errors import ErrorCode, TaskFault
from perdure.task.policy import back_off


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock, uniform=random.Random(7).uniform)


def refused(breaker: Breaker) -> TaskFault:
    with pytest.raises(TaskFault) as caught:
        breaker.enter()
    return caught.value


def open_up(breaker: Breaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.enter().refused()


def test_a_few_refusals_open_it(breaker: Breaker) -> None:
    open_up(breaker, 2)
    assert breaker.state().state == "closed"
    open_up(breaker, 1)
    assert (breaker.state().state, breaker.state().refusals) == ("open", 3)
    fault = refused(breaker)
    assert (fault.code, fault.refused, fault.retryable) == (ErrorCode.UPSTREAM_UNAVAILABLE, True, True)
    assert fault.retry_after is not None
    assert 0.5 <= fault.retry_after <= 3


def test_an_answer_between_starts_the_count_again(breaker: Breaker) -> None:
    open_up(breaker, 2)
    breaker.enter().answered()
    open_up(breaker, 2)
    assert breaker.state().state == "closed"


def test_one_probe_at_a_time(breaker: Breaker, clock: Clock) -> None:
    open_up(breaker)
    clock.now += 1.01
    probe = breaker.enter()
    assert breaker.state().state == "probing"
    refused(breaker)
    probe.refused()
    assert breaker.state().state == "open"
    clock.now += 1.5
    refused(breaker)  # the pause has grown to two seconds
    clock.now += 0.6
    breaker.enter()


def test_a_probe_that_was_cancelled_makes_room_for_another(breaker: Breaker, clock: Clock) -> None:
    open_up(breaker)
    clock.now += 1.01
    breaker.enter().leave()
    breaker.enter()


def test_the_first_verdict_of_a_request_counts(breaker: Breaker) -> None:
    for _ in range(3):
        ticket = breaker.enter()
        ticket.answered()
        ticket.refused()
        ticket.leave()
    assert breaker.state().state == "closed"


def test_a_server_that_is_back_gets_more_and_more(breaker: Breaker, clock: Clock) -> None:
    open_up(breaker)
    clock.now += 1.01
    breaker.enter().answered()
    admitted = []
    for _ in range(6):
        count = 0
        for _ in range(200):
            try:
                breaker.enter()
                count += 1
            except TaskFault:
                pass
        admitted.append(count)
        clock.now += 1
    assert admitted[:5] == [2, 2, 4, 8, 16]
    assert admitted[5] == 200
    assert breaker.state().state == "closed"


def test_a_refusal_while_it_recovers_opens_it_again(breaker: Breaker, clock: Clock) -> None:
    open_up(breaker)
    clock.now += 1.01
    breaker.enter().answered()
    breaker.enter().refused()
    assert breaker.state().state == "open"


def test_an_old_request_that_is_answered_tells_that_the_server_lives(breaker: Breaker) -> None:
    old: Ticket = breaker.enter()
    open_up(breaker)
    old.answered()
    assert breaker.state().state == "recovering"


def test_a_task_that_is_alone_is_always_the_probe(breaker: Breaker, clock: Clock) -> None:
    """Its back-off, at its shortest, is never shorter than the pause."""
    for n in range(30):
        breaker.enter().refused()
        clock.now += back_off(n, 0.5)


def test_two_hundred_tasks_come_back_one_by_one(breaker: Breaker, clock: Clock) -> None:
    """A dead server sees single probes; after it is back, arrivals spread over seconds."""
    rng = random.Random(3)
    due = [(clock.now, 0) for _ in range(200)]  # when, and which try in a row
    dead_until, arrivals_dead, arrivals = clock.now + 30, [], []
    while due:
        due.sort()
        (when, n), *due = due
        clock.now = max(clock.now, when)
        try:
            ticket = breaker.enter()
        except TaskFault as fault:
            due.append((clock.now + back_off(n, rng.uniform(0.5, 1), fault.retry_after), n + 1))
            continue
        if clock.now < dead_until:
            arrivals_dead.append(clock.now)
            ticket.refused()
            due.append((clock.now + back_off(n, rng.uniform(0.5, 1)), n + 1))
        else:
            arrivals.append(clock.now)
            ticket.answered()
    assert len(arrivals) == 200
    assert len(arrivals_dead) < 20
    assert arrivals[-1] - arrivals[0] > 3
    first_second = sum(at < arrivals[0] + 1 for at in arrivals)
    assert first_second <= 3
