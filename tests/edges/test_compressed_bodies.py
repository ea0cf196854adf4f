"""A body that a remoting producer has compressed is readable for every receiver that does not see `sys_flag`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.edges.http.client import client_of
from tests.edges.http.handlers.test_events import tail
from tests.edges.http.handlers.test_streams import stream
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, running_node

from timeball.edges.http import answers_codec, codec

TEXT = json.dumps({"order": 17, "text": "x" * 6_000})  # Java's producer compresses bodies from 4 KiB on
COMPRESSED = zlib.compress(TEXT.encode())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node") / "data", queues_per_topic=1) as running:
        yield running


def send(node: RunningNode, topic: str, count: int = 1, body: bytes = COMPRESSED) -> None:
    """Send `count` compressed messages over remoting."""
    with Wire.to(node) as wire:
        for number in range(count):
            properties = {"UNIQ_KEY": f"{topic}-{number}"}
            assert sent(wire, body, topic=topic, e=0, f=1, properties=properties).code == 0  # f: sys_flag


def receive(node: RunningNode, topic: str) -> list[dict[str, Any]]:
    """Receive the messages of a topic over HTTP."""
    with client_of(node) as client:
        messages: list[dict[str, Any]] = client.receive(topic).value["messages"]
        return messages


def test_http_answers_have_the_readable_body(node: RunningNode) -> None:
    send(node, "answers")
    [message] = receive(node, "answers")
    assert message["body"] == TEXT
    with client_of(node) as client:
        [place] = client.ask("GET", "/v1/messages/answers-0").value["messages"]
        assert (place["body"], place["size_bytes"]) == (TEXT, len(TEXT))
        receipts = {"receipts": [message["receipt"]]}
        query = {"group": "workers"}
        assert client.ask("POST", "/v1/topics/answers/dead-letter", receipts, query=query).status == 200
        [letter] = client.ask("GET", "/v1/groups/workers/dead-letters").value["dead_letters"]
        assert (letter["body"], letter["size_bytes"]) == (TEXT, len(TEXT))


def test_streams_and_live_tails_have_the_readable_body(node: RunningNode) -> None:
    send(node, "streams")
    with stream(node, "streams") as lines:
        assert lines.messages(1)[0]["body"] == TEXT
    with tail(node, "streams", last="0") as events:
        assert next(events.events()).message["body"] == TEXT


def test_python_clients_hand_out_the_readable_body_over_both_transports(node: RunningNode) -> None:
    send(node, "clients")
    with node.client() as ball:
        [browsed] = ball.browse("clients")
        [received] = ball.pull("clients", "workers")
        assert browsed.body == received.body == TEXT.encode()
        # Columns have the compressed body, because they also have the flag.
        columns = ball.browse_batch("clients", "columns").select(["body", "sys_flag"])
        assert columns.to_pylist() == [{"body": COMPRESSED, "sys_flag": 1}]


def test_a_body_that_does_not_decompress_is_received_as_it_is(node: RunningNode) -> None:
    send(node, "plain", body=b"no zlib")
    assert [message["body"] for message in receive(node, "plain")] == ["no zlib"]


def test_an_answer_ends_when_its_decompressed_bodies_fill_it(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "LEASED_BYTES_MAX", 2 * len(TEXT))
    send(node, "full", 5)
    seen = []
    for expected_count in (2, 2, 1):
        messages = receive(node, "full")
        assert len(messages) == expected_count
        seen += messages
    assert [message["id"] for message in seen] == [f"full-{number}" for number in range(5)]
    # The messages that did not fit returned to the queue without counting an attempt.
    assert {message["attempt"] for message in seen} == {1}


def test_a_live_tail_continues_after_the_last_event_of_a_full_answer(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_codec, "EVENTS_BYTES_MAX", 2 * len(TEXT))
    send(node, "tail", 5)
    with tail(node, "tail", last="0") as events:
        first_events = [event for _, event in zip(range(5), events.events(), strict=False)]
    assert [event.id for event in first_events] == ["1", "2", "3", "4", "5"]
