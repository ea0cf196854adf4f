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


class HangingNodes:
    """Nodes that answer with the nodes asked so far, except those in `hanging`, which never answer.

    An attempt at a hanging node takes its whole time limit, and raises Lost.
    """

    def __init__(self, calls: Attempts, *hanging: str) -> None:
        self._calls, self._hanging = calls, hanging
        self.asked: list[str] = []

    async def __call__(self, limit_s: float) -> list[str]:
        """Ask the current node of the calls."""
        self.asked.append(self._calls.endpoint)
        if self._calls.endpoint in self._hanging:
            self._calls._clock.advance(int(1_000 * limit_s))  # type: ignore[attr-defined]
            raise Lost("no answer in time")
        return self.asked


class Broker:
    """Raises these errors, one in each attempt, and then answers with the nodes that were asked.

    Each attempt takes `seconds` by the clock of the calls.
    """

    def __init__(self, calls: Attempts, *errors: Exception, seconds: int = 0) -> None:
        self._calls, self._errors, self._seconds = calls, list(errors), seconds
        self.asked: list[str] = []
        self.limits_s: list[float] = []  # the time limit of each attempt

    async def __call__(self, limit_s: float) -> list[str]:
        """Ask the current node of the calls."""
        self.asked.append(self._calls.endpoint)
        self.limits_s.append(limit_s)
        self._calls._clock.advance(1_000 * self._seconds)  # type: ignore[attr-defined]
        if self._errors:
            raise self._errors.pop(0)
        return self.asked


def attempts_at(*endpoints: str) -> Attempts:
    """Attempts of calls to these nodes, by default to the only node "a", with a clock that only the test moves."""
    return Attempts(endpoints or ("a",), 30_000, clock=ManualClock())


def test_a_call_that_was_not_carried_out_is_repeated_at_the_next_node() -> None:
    nodes = attempts_at("a", "b")
    broker = Broker(nodes, NotSent("1"), NotNow("2"))
    assert run(nodes.with_retries(broker, 30_000, is_repeatable=False)) == ["a", "b", "a"]


@pytest.mark.parametrize("error", [Lost("x"), Unavailable("x"), OverLimit("x"), RequestError("x")])
def test_the_error_of_a_call_that_may_have_been_carried_out_is_raised_at_once(error: Exception) -> None:
    nodes = attempts_at()
    with pytest.raises(type(error)):
        run(nodes.with_retries(Broker(nodes, error), 30_000, is_repeatable=False))


def test_a_repeatable_call_is_repeated_after_a_lost_answer() -> None:
    nodes = attempts_at()
    assert run(nodes.with_retries(Broker(nodes, Lost("x"), Unavailable("x")), 30_000)) == ["a"] * 3


@pytest.mark.parametrize("error", [StorageError("x"), DiskFailed("x"), NotLeader("x"), Lost("x")])
def test_after_a_failure_of_a_node_only_a_repeatable_call_is_repeated_at_the_next(
    error: TimeballError,
) -> None:
    nodes = attempts_at("a", "b")
    assert run(nodes.with_retries(Broker(nodes, error), 30_000)) == ["a", "b"]
    nodes = attempts_at("a", "b")
    with pytest.raises(type(error)):
        run(nodes.with_retries(Broker(nodes, error), 30_000, is_repeatable=False))


@pytest.mark.parametrize("error", [Corrupt("x"), MissingFile("x"), OverLimit("x")])
def test_an_error_that_other_nodes_would_have_too_is_raised_at_once(error: TimeballError) -> None:
    nodes = attempts_at("a", "b")
    with pytest.raises(type(error)):
        run(nodes.with_retries(Broker(nodes, error), 30_000))


def test_a_failed_disk_of_the_only_node_is_raised_at_once() -> None:
    nodes = attempts_at()
    with pytest.raises(StorageError):
        run(nodes.with_retries(Broker(nodes, StorageError("x")), 30_000))


def test_after_a_failed_disk_the_next_call_asks_another_node() -> None:
    nodes = attempts_at("a", "b")
    with pytest.raises(DiskFailed):
        run(nodes.with_retries(Broker(nodes, DiskFailed("x")), 30_000, is_repeatable=False))
    assert nodes.endpoint == "b"


def test_after_a_node_that_does_not_lead_the_next_call_asks_another_node() -> None:
    nodes = attempts_at("a", "b")
    with pytest.raises(NotLeader):
        run(nodes.with_retries(Broker(nodes, NotLeader("x")), 30_000, is_repeatable=False))
    assert nodes.endpoint == "b"


def test_a_repeatable_call_succeeds_within_its_time_limit_if_nodes_hang() -> None:
    nodes = attempts_at("a", "b", "c")
    before_ns = nodes._clock.monotonic_ns()
    assert run(nodes.with_retries(HangingNodes(nodes, "a"), 30_000)) == ["a", "b"]
    assert nodes.endpoint == "b" and nodes._clock.monotonic_ns() - before_ns == 15 * 10**9
    nodes = attempts_at("a", "b", "c")
    assert run(nodes.with_retries(HangingNodes(nodes, "a", "b"), 30_000)) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [Lost("x"), Unavailable("x")])
def test_after_a_call_without_an_answer_the_next_call_asks_another_node(error: TimeballError) -> None:
    nodes = attempts_at("a", "b")
    with pytest.raises(type(error)):
        run(nodes.with_retries(Broker(nodes, error), 30_000, is_repeatable=False))
    assert nodes.endpoint == "b"


def test_two_calls_that_fail_at_one_node_leave_it_only_once() -> None:
    """Both calls began at node "a". A second change of the node would lead back to it."""
    nodes = attempts_at("a", "b")

    async def first(limit_s: float) -> None:
        """A call that fails after a second call has failed at the same node."""
        with pytest.raises(Lost):
            await nodes.with_retries(Broker(nodes, Lost("second")), 30_000, is_repeatable=False)
        raise Lost("first")

    with pytest.raises(Lost, match="first"):
        run(nodes.with_retries(first, 30_000, is_repeatable=False))
    assert nodes.endpoint == "b"


def test_an_attempt_has_the_whole_time_limit_if_no_other_node_may_be_tried() -> None:
    for endpoints, is_repeatable in ((("a", "b"), False), (("a",), True)):
        nodes = attempts_at(*endpoints)
        broker = Broker(nodes)
        run(nodes.with_retries(broker, 30_000, is_repeatable=is_repeatable))
        assert broker.limits_s == [30.0]


def test_an_attempt_of_a_long_poll_has_the_wait_and_half_of_the_other_time() -> None:
    nodes = attempts_at("a", "b")
    broker = Broker(nodes, Lost("x"), seconds=75)
    run(nodes.with_retries(broker, 30_000, wait_ms=60_000))
    # Of the 30 s besides the wait, the first attempt has half, and the second one half of the remaining time.
    assert broker.limits_s == [75.0, 7.5]
    assert [wait_within(limit_s, 30_000, 60_000) for limit_s in broker.limits_s] == [60_000, 0]


def test_attempts_share_the_time_limit_of_the_call() -> None:
    nodes = attempts_at()
    broker = Broker(nodes, NotSent("1"), NotSent("2"), NotSent("3"), seconds=20)
    with pytest.raises(NotSent, match="2"):
        run(nodes.with_retries(broker, 30_000))
    assert broker.limits_s == [30.0, 10.0]


def test_the_pauses_do_not_use_the_random_generator_of_the_program() -> None:
    nodes, before = attempts_at(), random.getstate()
    pauses_s = [pause_s for pause_s, _ in islice(nodes._patient_pauses(3600), 8)]
    assert len(set(pauses_s)) == 8
    assert random.getstate() == before


def test_a_call_of_a_closed_client_is_refused() -> None:
    nodes = attempts_at()
    nodes._closed.set()
    with pytest.raises(RequestError, match="closed"):
        run(nodes.with_retries(Broker(nodes), 30_000))


def test_only_the_code_unavailable_becomes_notnow() -> None:
    assert type(refusal("unavailable", "x")) is NotNow
    assert type(refusal("not_leader", "x")) is NotLeader
    assert type(refusal("over_limit", "x")) is OverLimit


def test_a_list_of_nodes_is_split_and_a_malformed_one_is_refused() -> None:
    assert split_endpoints("http://a:1, b:2", ("http",), "http://host:port") == ["http://a:1", "http://b:2"]
    for wrong in ("a:1", "ftp://a:1", "http://a:1,"):
        with pytest.raises(RequestError, match="write it as http://host:port"):
            split_endpoints(wrong, ("http",), "http://host:port")


def test_a_cancel_ends_a_read_that_runs_or_begins_later_and_not_one_that_has_ended() -> None:
    cancelled: list[int] = []
    read = OpenRead()
    read.begin(lambda: cancelled.append(1))
    read.end()
    read.cancel()
    assert cancelled == [] and read.is_cancelled
    read.begin(lambda: cancelled.append(2))
    assert cancelled == [2]


def test_a_child_process_can_make_calls_although_a_lock_was_held_at_the_fork() -> None:
    """A child uses the parent's object, whose lock another thread may have held at the fork."""
    nodes = attempts_at()
    nodes._closed._cond.acquire()  # type: ignore[attr-defined]
    nodes.after_fork()
    assert run(nodes.with_retries(Broker(nodes), 30_000)) == ["a"]
