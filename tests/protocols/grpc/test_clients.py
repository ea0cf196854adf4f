"""Who is connected: from the first settings on, until silence or a good-bye."""

from __future__ import annotations

import pytest
from tests.protocols.grpc.wire import consumer_settings, producer_settings

from timeball.errors import OverLimit
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc import clients as clients_module
from timeball.protocols.grpc._generated.service_pb2 import TelemetryCommand
from timeball.protocols.grpc.clients import (
    COMMANDS_WAITING_MAX,
    EXPIRY_MS,
    STREAMS_PER_CLIENT_MAX,
    Client,
    Clients,
    Stream,
)


@pytest.fixture
def clients() -> Clients:
    return Clients()


@pytest.fixture
def gone(clients: Clients) -> list[str]:
    names: list[str] = []
    clients.on_gone.append(lambda client: names.append(client.name))
    return names


def test_a_client_is_known_from_its_settings_on(clients: Clients) -> None:
    assert clients.heard("a", 0) is None and clients.find("a") is None
    client = clients.settle("a", consumer_settings("g"), 0)
    assert clients.find("a") is client and client.is_consumer and len(clients) == 1
    assert clients.heard("a", 5) is client and client.heard_ms == 5
    assert clients.all() == [client]


def test_silence_is_forgotten_and_told_once(clients: Clients, gone: list[str]) -> None:
    clients.settle("a", consumer_settings("g"), 0)
    clients.settle("b", consumer_settings("g"), 0)
    clients.heard("b", 10)
    clients.expire(EXPIRY_MS)
    assert gone == []
    clients.expire(EXPIRY_MS + 1)
    assert gone == ["a"]
    clients.expire(EXPIRY_MS + 1)
    clients.gone("a")
    assert gone == ["a"] and clients.find("b") is not None


def test_an_open_stream_keeps_a_client(clients: Clients, gone: list[str]) -> None:
    client, stream = clients.settle("a", consumer_settings("g"), 0), Stream()
    clients.opened(client, stream)
    clients.expire(10 * EXPIRY_MS)
    assert gone == []
    clients.closed(client, stream, 10 * EXPIRY_MS)
    clients.expire(11 * EXPIRY_MS)  # it has had no time to come again
    assert gone == []
    clients.expire(11 * EXPIRY_MS + 1)
    assert gone == ["a"]


def test_a_producer_is_found_by_its_topics(clients: Clients) -> None:
    client = clients.settle("a", producer_settings("t1", "t2"), 0)
    assert clients.producer("t1") is None  # no stream to ask it by
    stream = Stream()
    clients.opened(client, stream)
    assert clients.producer("t1") is clients.producer("t2") is stream
    clients.settle("a", producer_settings("t2", "t3"), 0)
    assert clients.producer("t1") is None and clients.producer("t3") is stream
    clients.gone("a")
    assert clients.producer("t2") is None


def test_bad_settings_change_nothing(clients: Clients) -> None:
    stream = Stream()
    clients.opened(clients.settle("a", producer_settings("t"), 0), stream)
    with pytest.raises(Refused):
        clients.settle("a", producer_settings("no/name"), 0)
    assert clients.producer("t") is stream
    with pytest.raises(Refused):
        clients.settle("b", producer_settings("no/name"), 0)
    assert clients.find("b") is None


def test_clients_and_their_streams_are_bounded(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    client = clients.settle("a", consumer_settings("g"), 0)
    for _ in range(STREAMS_PER_CLIENT_MAX):
        clients.opened(client, Stream())
    with pytest.raises(OverLimit, match="streams"):
        clients.opened(client, Stream())
    monkeypatch.setattr(clients_module, "CLIENTS_MAX", 1)
    with pytest.raises(OverLimit, match="clients"):
        clients.settle("b", consumer_settings("g"), 0)
    assert clients.settle("a", consumer_settings("g"), 1) is client  # who is there may say so again


def test_a_slow_client_is_not_sent_more_than_it_takes() -> None:
    stream = Stream()
    assert all(stream.push(TelemetryCommand()) for _ in range(COMMANDS_WAITING_MAX))
    assert not stream.push(TelemetryCommand())
    stream.end()  # it is told that nothing comes any more, all the same
    commands = [stream.commands.get_nowait() for _ in range(stream.commands.qsize())]
    assert commands[-1] is None


def test_a_stop_ends_every_stream(clients: Clients) -> None:
    streams = [Stream(), Stream()]
    client: Client = clients.settle("a", consumer_settings("g"), 0)
    for stream in streams:
        clients.opened(client, stream)
    clients.close()
    assert [stream.commands.get_nowait() for stream in streams] == [None, None]
