"""How a client makes itself known, over the wire."""

from __future__ import annotations

import pytest
from tests.node_fixture import RunningNode, eventually
from tests.protocols.grpc.wire import Wire, consumer_settings, d, producer_settings, s

from timeball.protocols.grpc.clients import Client


def known(node: RunningNode, name: str) -> Client | None:
    assert node.node.grpc is not None
    return node.node.grpc.site.clients.find(name)


def test_settings_are_answered_first(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(settings=producer_settings("orders")))
    answer = next(stream)
    assert answer.status.code == d.Code.OK
    assert answer.settings.publishing.max_body_size > 0
    client = known(node, "client-1")
    assert client is not None and len(client.streams) == 1 and not client.is_consumer


def test_settings_may_be_sent_again(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.send(s.TelemetryCommand(settings=consumer_settings("h")))
    assert next(stream).settings.subscription.group.name == "h"
    client = known(node, "client-1")
    assert client is not None and len(client.streams) == 1


def test_what_is_no_settings_is_let_pass(wire: Wire) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(thread_stack_trace=s.ThreadStackTrace(nonce="1")))
    stream.send(s.TelemetryCommand())
    stream.send(s.TelemetryCommand(settings=consumer_settings("g")))
    assert next(stream).settings.subscription.group.name == "g"


def test_a_stream_ends_when_its_client_ends_it(node: RunningNode, wire: Wire) -> None:
    stream = wire.telemetry(consumer_settings("g"))
    stream.end()
    assert list(stream) == []
    client = known(node, "client-1")
    assert client is not None and client.streams == []  # it may come again


def test_a_client_that_is_cut_off_has_no_stream(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g")).cut()
    client = known(node, "client-1")
    assert client is not None
    eventually(lambda: not client.streams, "its stream is closed")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (d.Settings(), d.Code.UNRECOGNIZED_CLIENT_TYPE),
        (d.Settings(client_type=d.ClientType.LITE_PUSH_CONSUMER), d.Code.UNRECOGNIZED_CLIENT_TYPE),
        (consumer_settings("no name"), d.Code.ILLEGAL_CONSUMER_GROUP),
        (producer_settings("no/topic"), d.Code.ILLEGAL_TOPIC),
    ],
)
def test_bad_settings_are_refused_in_words(wire: Wire, settings: d.Settings, code: int) -> None:
    stream = wire.telemetry()
    stream.send(s.TelemetryCommand(settings=settings))
    answer = next(stream)
    assert answer.status.code == code and answer.status.message
    assert list(stream) == []


def test_a_client_without_a_name_is_refused(node: RunningNode) -> None:
    with Wire.to(node, client_id="") as wire:
        stream = wire.telemetry()
        stream.send(s.TelemetryCommand(settings=consumer_settings("g")))
        assert next(stream).status.code == d.Code.CLIENT_ID_REQUIRED
        assert wire.ask("Heartbeat", s.HeartbeatRequest()).status.code == d.Code.CLIENT_ID_REQUIRED


def test_heartbeats_count_once_there_are_settings(node: RunningNode, wire: Wire) -> None:
    beat = s.HeartbeatRequest(group=d.Resource(name="g"), client_type=d.ClientType.SIMPLE_CONSUMER)
    assert wire.ask("Heartbeat", beat).status.code == d.Code.UNRECOGNIZED_CLIENT_TYPE
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok("Heartbeat", beat)


def test_a_good_bye_is_the_end(node: RunningNode, wire: Wire) -> None:
    wire.telemetry(consumer_settings("g"))
    wire.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest(group=d.Resource(name="g")))
    assert known(node, "client-1") is None
    wire.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest())  # again: nothing to do
    assert wire.ask("Heartbeat", s.HeartbeatRequest()).status.code == d.Code.UNRECOGNIZED_CLIENT_TYPE


def test_two_clients_are_two(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node, "client-2") as other:
        wire.telemetry(consumer_settings("g"))
        other.telemetry(consumer_settings("g"))
        other.ask_ok("NotifyClientTermination", s.NotifyClientTerminationRequest())
        assert known(node, "client-1") is not None and known(node, "client-2") is None
