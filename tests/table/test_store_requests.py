"""Tests of StoreRequests: the time limit of requests, and abandoned requests."""

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
    """An event whose `wait` blocks until the end of the test, as a request without an answer."""
    answered = threading.Event()
    yield answered
    answered.set()


def test_result_or_error_of_a_request_reaches_the_caller() -> None:
    requests = StoreRequests()
    assert requests.ask(lambda: 3, BOUND_S) == requests.ask(lambda: 3, None) == 3

    def fail() -> None:
        raise NotFound("gone")

    with pytest.raises(NotFound, match="gone"):
        requests.ask(fail, BOUND_S)


def test_a_request_without_an_answer_is_abandoned_and_later_requests_run(silence: threading.Event) -> None:
    requests = StoreRequests()
    with pytest.raises(Unavailable, match=r"no answer within 0\.01 s"):
        requests.ask(silence.wait, 0.01)
    assert requests.ask(lambda: 3, BOUND_S) == 3


def test_close_abandons_requests_without_an_answer_and_refuses_new_ones(
    silence: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LAST_ANSWERS_S", 0.01)
    requests, has_begun = StoreRequests(), threading.Event()

    def hang() -> bool:
        has_begun.set()
        return silence.wait()

    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(requests.ask, hang, None)
        assert has_begun.wait(BOUND_S)
        requests.close()
        with pytest.raises(Unavailable, match="the broker stops"):
            request.result(BOUND_S)
    assert not silence.is_set()
    with pytest.raises(Unavailable, match="the broker stops"):
        requests.ask(lambda: 3, None)


def test_close_waits_briefly_for_an_answer() -> None:
    requests, has_begun, may_end = StoreRequests(), threading.Event(), threading.Event()

    def answer() -> int:
        has_begun.set()
        may_end.wait(BOUND_S)
        return 3

    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(requests.ask, answer, None)
        assert has_begun.wait(BOUND_S)
        closing = pool.submit(requests.close)
        may_end.set()
        assert request.result(BOUND_S) == 3
        closing.result(BOUND_S)
