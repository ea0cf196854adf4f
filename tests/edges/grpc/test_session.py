"""A client's Telemetry streams: how many, and what is sent on one."""

from __future__ import annotations

import pytest
from tests.edges.grpc.wire import consumer_settings, producer_settings

from timeball.edges.grpc._generated.service_pb2 import TelemetryCommand
from timeball.edges.grpc.session import (
    COMMANDS_WAITING_MAX,
    STREAMS_PER_CLIENT_MAX,
    Client,
    Stream,
    settle,
)
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import Sessions
from timeball.model.errors import OverLimit


def test_a_client_is_what_its_settings_say() -> None:
    assert Client("a", "a", consumer_settings("g")).is_consumer
    assert not Client("a", "a", producer_settings("t")).is_consumer


def test_a_client_has_time_to_open_another_stream() -> None:
    client, stream = Client("a", "a", consumer_settings("g")), Stream()
    client.add_stream(stream)
    client.remove_stream(stream, 700)
    client.remove_stream(stream, 800)
    assert client.streams == [] and client.heard_ms == 700


def test_the_streams_of_a_client_are_bounded() -> None:
    client = Client("a", "a", consumer_settings("g"))
    for _ in range(STREAMS_PER_CLIENT_MAX):
        client.add_stream(Stream())
    with pytest.raises(OverLimit, match="streams"):
        client.add_stream(Stream())


def test_a_slow_client_is_not_sent_more_than_it_takes() -> None:
    stream = Stream()
    assert all(stream.push(TelemetryCommand()) for _ in range(COMMANDS_WAITING_MAX))
    assert not stream.push(TelemetryCommand())
    stream.end()  # it is told that nothing comes any more, all the same
    commands = [stream.commands.get_nowait() for _ in range(stream.commands.qsize())]
    assert commands[-1] is None


def test_a_producer_is_found_by_its_topics() -> None:
    sessions: Sessions[str, Client] = Sessions(0)
    client = settle(sessions, "a", producer_settings("t1", "t2"), 0)
    assert sessions.producers("t1") == sessions.producers("t2") == [client]
    assert settle(sessions, "a", producer_settings("t2", "t3"), 5) is client and client.heard_ms == 5
    assert sessions.producers("t1") == [] and sessions.producers("t3") == [client]


def test_bad_settings_change_nothing() -> None:
    sessions: Sessions[str, Client] = Sessions(0)
    client = settle(sessions, "a", producer_settings("t"), 0)
    for name in "ab":
        with pytest.raises(Refused):
            settle(sessions, name, producer_settings("no/name"), 0)
    assert sessions.producers("t") == [client] == sessions.all()
