"""Attempts of a call: the outcomes that allow another attempt, the remaining time, and the nodes that are asked."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from timeball import NotLeader, OverLimit, RequestError, Unavailable
from timeball.client import attempts
from timeball.client.attempts import (
    Attempts,
    Lost,
    NotNow,
    NotSent,
    OpenRead,
    refusal,
    split_endpoints,
    wait_within,
)
from timeball.client.network import run
from timeball.io.clock import ManualClock
from timeball.model.errors import Corrupt, DiskFailed, MissingFile, StorageError, TimeballError


@pytest.fixture(autouse=True)
def _no_pauses(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "CLUSTER_PAUSES_S", (0.0,) * 3)


class Hanging:
    """Nodes of which some hang: an attempt at these takes its whole time limit, and its answer is lost."""

    def __init__(self, calls: Attempts, *hanging: str) -> None:
        self._calls, self._hanging = calls, hanging
        self.asked: list[str] = []

    async def __call__(self, limit_s: float) -> list[str]:
        self.asked.append(self._calls.endpoint)
        if self._calls.endpoint in self._hanging:
            self._calls._clock.advance(int(1_000 * limit_s))  # type: ignore[attr-defined]
            raise Lost("no answer in time")
        return self.asked


class Broker:
    """Fails with these errors, one in each attempt, and then answers with the nodes that were asked."""

    def __init__(self, calls: Attempts, *errors: Exception, seconds: int = 0) -> None:
        self._calls, self._errors, self._seconds = calls, list(errors), seconds
        self.asked: list[str] = []
        self.left_s: list[float] = []

    async def __call__(self, remaining_s: float) -> list[str]:
        self.asked.append(self._calls.endpoint)
        self.left_s.append(remaining_s)
        self._calls._clock.advance(1_000 * self._seconds)  # type: ignore[attr-defined]
        if self._errors:
            raise self._errors.pop(0)
        return self.asked


def calls(*nodes: str) -> Attempts:
    return Attempts(nodes or ("a",), 30_000, clock=ManualClock())


def test_a_call_that_was_not_executed_is_retried_at_the_next_node() -> None:
    there = calls("a", "b")
    broker = Broker(there, NotSent("1"), NotNow("2"))
    assert run(there.with_retries(broker, 30_000, is_repeatable=False)) == ["a", "b", "a"]


@pytest.mark.parametrize("error", [Lost("x"), Unavailable("x"), OverLimit("x"), RequestError("x")])
def test_a_call_that_may_have_been_executed_is_reported(error: Exception) -> None:
    there = calls()
    with pytest.raises(type(error)):
        run(there.with_retries(Broker(there, error), 30_000, is_repeatable=False))


def test_repeatable_calls_are_retried_after_a_lost_answer() -> None:
    there = calls()
    assert run(there.with_retries(Broker(there, Lost("x"), Unavailable("x")), 30_000)) == ["a"] * 3


@pytest.mark.parametrize("error", [StorageError("x"), DiskFailed("x"), NotLeader("x"), Lost("x")])
def test_a_repeatable_call_is_made_at_another_node_after_a_failure_of_one(error: TimeballError) -> None:
    there = calls("a", "b")
    assert run(there.with_retries(Broker(there, error), 30_000)) == ["a", "b"]
    there = calls("a", "b")
    with pytest.raises(type(error)):
        run(there.with_retries(Broker(there, error), 30_000, is_repeatable=False))


@pytest.mark.parametrize("error", [Corrupt("x"), MissingFile("x"), OverLimit("x")])
def test_an_error_that_other_nodes_would_have_too_is_reported(error: TimeballError) -> None:
    there = calls("a", "b")
    with pytest.raises(type(error)):
        run(there.with_retries(Broker(there, error), 30_000))


def test_a_failed_disk_of_the_only_node_is_reported() -> None:
    there = calls()
    with pytest.raises(StorageError):
        run(there.with_retries(Broker(there, StorageError("x")), 30_000))


def test_after_a_failed_disk_the_next_call_asks_another_node() -> None:
    there = calls("a", "b")
    with pytest.raises(DiskFailed):
        run(there.with_retries(Broker(there, DiskFailed("x")), 30_000, is_repeatable=False))
    assert there.endpoint == "b"


def test_after_a_node_that_does_not_lead_the_next_call_asks_another() -> None:
    there = calls("a", "b")
    with pytest.raises(NotLeader):
        run(there.with_retries(Broker(there, NotLeader("x")), 30_000, is_repeatable=False))
    assert there.endpoint == "b"


def test_a_repeatable_call_succeeds_within_its_time_if_nodes_hang() -> None:
    there = calls("a", "b", "c")
    before_ns = there._clock.monotonic_ns()
    assert run(there.with_retries(Hanging(there, "a"), 30_000)) == ["a", "b"]
    assert there.endpoint == "b" and there._clock.monotonic_ns() - before_ns == 15 * 10**9
    there = calls("a", "b", "c")
    assert run(there.with_retries(Hanging(there, "a", "b"), 30_000)) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [Lost("x"), Unavailable("x")])
def test_after_a_call_without_an_answer_the_next_call_asks_another_node(error: TimeballError) -> None:
    there = calls("a", "b")
    with pytest.raises(type(error)):
        run(there.with_retries(Broker(there, error), 30_000, is_repeatable=False))
    assert there.endpoint == "b"


def test_a_node_is_left_by_one_of_the_calls_that_it_does_not_answer() -> None:
    """With two nodes, a second change would lead back to the one that hangs."""
    there = calls("a", "b")

    async def first(limit_s: float) -> None:
        with pytest.raises(Lost):
            await there.with_retries(Broker(there, Lost("second")), 30_000, is_repeatable=False)
        raise Lost("first")

    with pytest.raises(Lost, match="first"):
        run(there.with_retries(first, 30_000, is_repeatable=False))
    assert there.endpoint == "b"


def test_a_call_that_may_not_be_repeated_and_one_to_a_single_node_have_the_whole_time() -> None:
    for nodes, is_repeatable in ((("a", "b"), False), (("a",), True)):
        there = calls(*nodes)
        broker = Broker(there)
        run(there.with_retries(broker, 30_000, is_repeatable=is_repeatable))
        assert broker.left_s == [30.0]


def test_a_long_poll_has_time_to_wait_and_half_of_the_rest() -> None:
    there = calls("a", "b")
    broker = Broker(there, Lost("x"), seconds=75)
    run(there.with_retries(broker, 30_000, wait_ms=60_000))
    assert broker.left_s == [75.0, 7.5]
    assert [wait_within(limit_s, 30_000, 60_000) for limit_s in broker.left_s] == [60_000, 0]


def test_attempts_share_the_time_of_the_call() -> None:
    there = calls()
    broker = Broker(there, NotSent("1"), NotSent("2"), NotSent("3"), seconds=20)
    with pytest.raises(NotSent, match="2"):
        run(there.with_retries(broker, 30_000))
    assert broker.left_s == [30.0, 10.0]


def test_pauses_leave_the_generator_of_the_program_alone() -> None:
    there, before = calls(), random.getstate()
    pauses_s = [pause_s for pause_s, _ in islice(there._patient_pauses(3600), 8)]
    assert len(set(pauses_s)) == 8
    assert random.getstate() == before


def test_a_closed_client_says_so() -> None:
    there = calls()
    there._closed.set()
    with pytest.raises(RequestError, match="closed"):
        run(there.with_retries(Broker(there), 30_000))


def test_refusals_say_whether_anything_was_done() -> None:
    assert type(refusal("unavailable", "x")) is NotNow
    assert type(refusal("not_leader", "x")) is NotLeader
    assert type(refusal("over_limit", "x")) is OverLimit


def test_endpoints_are_split() -> None:
    assert split_endpoints("http://a:1, b:2", ("http",), "http://host:port") == ["http://a:1", "http://b:2"]
    for wrong in ("a:1", "ftp://a:1", "http://a:1,"):
        with pytest.raises(RequestError, match="write it as http://host:port"):
            split_endpoints(wrong, ("http",), "http://host:port")


def test_a_read_is_cancelled_before_during_and_not_after() -> None:
    cancelled: list[int] = []
    read = OpenRead()
    read.begin(lambda: cancelled.append(1))
    read.end()
    read.cancel()
    assert cancelled == [] and read.is_cancelled
    read.begin(lambda: cancelled.append(2))
    assert cancelled == [2]


def test_a_client_may_be_closed_and_used_behind_a_fork() -> None:
    """A child uses the parent's object, whose lock another thread may have held at the fork."""
    there = calls()
    there._closed._cond.acquire()  # type: ignore[attr-defined]
    there.after_fork()
    assert run(there.with_retries(Broker(there), 30_000)) == ["a"]
