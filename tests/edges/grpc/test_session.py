"""Sessions of clients: their settings, and their Telemetry streams."""

from __future__ import annotations

import pytest
from tests.edges.grpc.wire import consumer_settings, producer_settings

from timeball.edges.grpc._generated.service_pb2 import TelemetryCommand
from timeball.edges.grpc.calls import (
    QUEUED_COMMANDS_MAX,
    STREAMS_PER_CLIENT_MAX,
    Client,
    Stream,
    store_settings,
)
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import Sessions
from timeball.model.errors import OverLimit


def test_the_client_type_decides_whether_a_client_is_a_consumer() -> None:
    assert Client("a", "a", consumer_settings("g")).is_consumer
    assert not Client("a", "a", producer_settings("t")).is_consumer


def test_the_end_of_a_stream_restarts_the_expiry_once() -> None:
    client, stream = Client("a", "a", consumer_settings("g")), Stream()
    client.add_stream(stream)
    client.remove_stream(stream, 700)
    client.remove_stream(stream, 800)
    assert client.streams == [] and client.heard_ms == 700


def test_too_many_streams_of_a_client_are_refused() -> None:
    client = Client("a", "a", consumer_settings("g"))
    for _ in range(STREAMS_PER_CLIENT_MAX):
        client.add_stream(Stream())
    with pytest.raises(OverLimit, match="streams"):
        client.add_stream(Stream())


def test_a_full_queue_refuses_commands_but_can_be_ended() -> None:
    stream = Stream()
    assert all(stream.push(TelemetryCommand()) for _ in range(QUEUED_COMMANDS_MAX))
    assert not stream.push(TelemetryCommand())
    stream.end()  # the end is queued although the queue is full
    commands = [stream.commands.get_nowait() for _ in range(stream.commands.qsize())]
    assert commands[-1] is None


def test_producers_are_found_by_the_topics_of_their_last_settings() -> None:
    sessions: Sessions[str, Client] = Sessions(0)
    client = store_settings(sessions, "a", producer_settings("t1", "t2"), 0)
    assert sessions.producers("t1") == sessions.producers("t2") == [client]
    assert store_settings(sessions, "a", producer_settings("t2", "t3"), 5) is client and client.heard_ms == 5
    assert sessions.producers("t1") == [] and sessions.producers("t3") == [client]


def test_invalid_settings_change_no_session() -> None:
    sessions: Sessions[str, Client] = Sessions(0)
    client = store_settings(sessions, "a", producer_settings("t"), 0)
    for name in "ab":
        with pytest.raises(Refused):
            store_settings(sessions, name, producer_settings("no/name"), 0)
    assert sessions.producers("t") == [client] == sessions.all()
