"""Calls: typed answers, repeated only where that is safe, and clear when nobody is there."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.node_fixture import BOUND_S, RunningNode, running_node

from timeball.client.calls import RETRY_PAUSES_S, Calls
from timeball.errors import NotFound, OutOfRange, RequestError, Unavailable

NOBODY = "grpc://127.0.0.1:1"


@pytest.mark.parametrize("endpoint", ["", "localhost:7400", "http://localhost:7400", "grpc://"])
def test_an_endpoint_must_look_like_one(endpoint: str) -> None:
    with pytest.raises((RequestError, Unavailable), match="grpc://"):
        Calls(endpoint, 1_000).action("status", {}, dict[str, Any])


def test_answers_are_typed(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    assert there.action("status", {}, dict[str, Any])["log"]["next_seq"] >= 0
    assert there.action("topics", b"{}", dict[str, Any]).keys() == {"topics"}
    there.close()


def test_the_brokers_error_arrives_as_its_class(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    with pytest.raises(NotFound, match="nowhere"):
        there.action("queues", {"topic": "nowhere"}, dict[str, Any])
    with pytest.raises(RequestError, match="rows"):
        there.action("reserve", {"rows": 0}, dict[str, int])
    there.close()


def test_errors_in_the_middle_of_a_stream_are_ours_too(node: RunningNode) -> None:
    there = Calls(node.endpoint, 30_000)
    reader = there.stream({"read": "log", "from_seq": 0, "to_seq": 2**40})
    with pytest.raises(OutOfRange):
        reader.read_all()
    there.close()


@pytest.mark.parametrize(("verb", "attempts"), [("status", 1 + len(RETRY_PAUSES_S)), ("reserve", 1)])
def test_nobody_there_is_unavailable_after_some_attempts(verb: str, attempts: int) -> None:
    made = []

    class Counted(Calls):
        def attempts(self) -> Iterator[bool]:
            for more in super().attempts():
                made.append(more)
                yield more

    there = Counted(NOBODY, 30_000)
    with pytest.raises(Unavailable, match=NOBODY):
        there.action(verb, {"rows": 1} if verb == "reserve" else {}, dict[str, Any])
    assert max(1, len(made)) == attempts
    there.close()


def test_a_call_that_is_tried_again_does_not_outlive_its_time() -> None:
    tried = []

    class Counted(Calls):
        def attempts(self) -> Iterator[bool]:
            for more in super().attempts():
                tried.append(more)
                yield more

    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        there = Counted(f"grpc://127.0.0.1:{silent.getsockname()[1]}", 100)
        with pytest.raises(Unavailable):
            there.action("status", {}, dict[str, Any])
    assert len(tried) <= 2, "the second attempt has no time left"
    there.close()


def test_a_closed_client_says_so_and_waits_for_nothing() -> None:
    nobody = Calls(NOBODY, 30_000)
    attempts = nobody.attempts()
    assert next(attempts) is True
    nobody.close()
    with pytest.raises(Unavailable, match="closed"):
        next(attempts)
    with pytest.raises(RequestError, match="closed"):
        nobody.action("status", {}, dict[str, Any])


def test_a_safe_call_outlives_a_restart(data: Path) -> None:
    with running_node(data) as node:
        there = Calls(node.endpoint, 30_000)
        before = there.action("status", {}, dict[str, Any])
        node.stop()
        restart = threading.Thread(target=node.start)
        restart.start()
        after = there.action("status", {}, dict[str, Any])
        restart.join(BOUND_S)
        assert after["log"]["first_seq"] == before["log"]["first_seq"]
        there.close()
