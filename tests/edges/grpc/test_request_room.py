"""Requests on their way: read when there is room, bounded over all connections, and nobody is kept out by others."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from tests.edges.grpc.wire import Wire, d, s
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually

from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.http2 import exchange as module
from timeball.edges.shared.shared_limits import MemoryQuota

MIB = 1024 * 1024


def shares_of(node: RunningNode) -> MemoryQuota:
    assert node.node.edges is not None
    return node.node.edges.grpc.service.room.received


def large(topic: str = "orders") -> s.SendMessageRequest:
    message = d.Message(topic=d.Resource(name=topic), body=bytes(4 * MIB))
    message.system_properties.message_id = "01" + "0" * 32
    return s.SendMessageRequest(messages=[message])


def test_large_sends_of_one_address_share_its_room_and_all_get_on(node: RunningNode, wire: Wire) -> None:
    shares, most = shares_of(node), 0
    shares.bytes_max = 4 * REQUEST_BYTES_MAX
    sends = [wire.later("SendMessage", large()) for _ in range(12)]
    while not all(send.done() for send in sends):
        most = max(most, shares.held_bytes)
    assert {send.result().status.code for send in sends} == {d.Code.OK}
    assert 0 < most <= shares.bytes_max
    eventually(lambda: not shares.held_bytes, "all is given back")


def test_who_sends_nothing_of_what_it_has_begun_has_no_room_for_long(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are announced and not sent take all the room of their address; it comes back, others get on."""
    monkeypatch.setattr(module.Exchange, "READ_S", 0.3)
    shares = shares_of(node)
    shares.bytes_max = 4 * REQUEST_BYTES_MAX
    announced = message(bytes(REQUEST_BYTES_MAX))[:100]
    with RawClient(node) as client:
        begun = [client.headers() for _ in range(6)]
        for number in begun:
            client.data(number, announced, ends=False)
        eventually(lambda: shares.waiting, "some wait")
        assert shares.held_bytes <= 2 * REQUEST_BYTES_MAX, "half of all"
        assert shares.fits("10.0.0.1", REQUEST_BYTES_MAX)
        wire.ask_ok("SendMessage", large())
        assert {client.status(number)[0] for number in begun} == {grpc.StatusCode.DEADLINE_EXCEEDED.value[0]}
        eventually(lambda: not shares.held_bytes and not shares.waiting, "all is given back")


def test_requests_without_room_have_a_bound(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    shares = shares_of(node)
    shares.bytes_max = 1
    with RawClient(node) as client:
        begun = [client.headers() for _ in range(4)]
        for number in begun:
            client.data(number, message(bytes(1_000))[:100], ends=False)
        assert client.status(begun[3])[0] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    eventually(lambda: not shares.held_bytes and not shares.waiting, "all is given back")


def test_a_client_that_goes_while_it_waits_leaves_nothing(node: RunningNode) -> None:
    shares = shares_of(node)
    shares.bytes_max = REQUEST_BYTES_MAX

    async def fill() -> None:
        shares.add("10.0.0.1", REQUEST_BYTES_MAX)

    async def empty() -> None:
        shares.remove("10.0.0.1", REQUEST_BYTES_MAX)

    node.run(fill())
    with Wire.to(node, "hasty") as hasty:
        calls = [hasty.later("SendMessage", large()) for _ in range(3)]
        eventually(lambda: shares.waiting == 3, "no room")
        for call in calls:
            call.cancel()
        eventually(lambda: not shares.waiting, "they have gone")
    node.run(empty())
    assert not shares.held_bytes


def test_many_that_wait_for_room_and_are_refused_let_each_other_in(node: RunningNode) -> None:
    """Each gives its room to the next one as it ends; a thousand of them may not nest."""
    shares, nothing = shares_of(node), b"\x9a\x06\x02ab"  # a field that there is not, and no message
    shares.bytes_max = len(nothing)
    node.run(_call(lambda: shares.add("10.0.0.1", len(nothing))))
    with RawClient(node) as client:
        begun = [client.headers(headers=fields(f"/{SERVICE_NAME}/SendMessage")) for _ in range(1_000)]
        for number in begun:
            client.data(number, message(nothing))
        eventually(lambda: shares.waiting == len(begun), "no room")
        node.run(_call(lambda: shares.remove("10.0.0.1", len(nothing))))
        assert [client.status(number)[0] for number in begun] == [0] * len(begun)
    assert not shares.held_bytes and not shares.waiting


async def _call(change: Callable[[], None]) -> None:
    change()
