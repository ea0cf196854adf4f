"""Requests that may have no answer: how long is waited for one, and what becomes of the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.bounds import BOUND_S

from timeball.model.errors import NotFound, Unavailable
from timeball.table import object_store
from timeball.table.object_store import StoreRequests


@pytest.fixture
def silence() -> Iterator[threading.Event]:
    """What hangs until the end of the test."""
    answered = threading.Event()
    yield answered
    answered.set()


def test_an_answer_or_an_error_comes_through() -> None:
    requests = StoreRequests()
    assert requests.ask(lambda: 3, BOUND_S) == requests.ask(lambda: 3, None) == 3

    def fail() -> None:
        raise NotFound("gone")

    with pytest.raises(NotFound, match="gone"):
        requests.ask(fail, BOUND_S)


def test_one_without_an_answer_is_left_behind_and_others_go_on(silence: threading.Event) -> None:
    requests = StoreRequests()
    with pytest.raises(Unavailable, match=r"no answer within 0\.01 s"):
        requests.ask(silence.wait, 0.01)
    assert requests.ask(lambda: 3, BOUND_S) == 3


def test_what_is_under_way_at_the_end_is_not_waited_for(
    silence: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LAST_ANSWERS_S", 0.01)
    requests, begun = StoreRequests(), threading.Event()

    def hang() -> bool:
        begun.set()
        return silence.wait()

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(requests.ask, hang, None)
        assert begun.wait(BOUND_S)
        requests.close()
        with pytest.raises(Unavailable, match="the broker stops"):
            asked.result(BOUND_S)
    assert not silence.is_set()
    with pytest.raises(Unavailable, match="the broker stops"):
        requests.ask(lambda: 3, None)


def test_an_answer_on_its_way_at_the_end_still_comes() -> None:
    requests, begun, may_end = StoreRequests(), threading.Event(), threading.Event()

    def answer() -> int:
        begun.set()
        may_end.wait(BOUND_S)
        return 3

    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(requests.ask, answer, None)
        assert begun.wait(BOUND_S)
        closing = pool.submit(requests.close)
        may_end.set()
        assert asked.result(BOUND_S) == 3
        closing.result(BOUND_S)
