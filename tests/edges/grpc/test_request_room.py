"""The memory of incomplete requests is bounded over all connections, and shared fairly between addresses."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from tests.edges.grpc.wire import Wire, definition, service
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually

from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.http2 import exchange as module
from timeball.edges.shared.shared_limits import MemoryQuota

MIB = 1024 * 1024


def quota_of(node: RunningNode) -> MemoryQuota:
    """Return the quota of the bytes of received requests."""
    assert node.node.edges is not None
    return node.node.edges.grpc.service.call_limits.received


def large_send(topic: str = "orders") -> service.SendMessageRequest:
    """Return a send with a body of 4 MiB."""
    message = definition.Message(topic=definition.Resource(name=topic), body=bytes(4 * MIB))
    message.system_properties.message_id = "01" + "0" * 32
    return service.SendMessageRequest(messages=[message])


def test_large_sends_of_one_address_succeed_within_the_quota(node: RunningNode, wire: Wire) -> None:
    quota, held_bytes_max = quota_of(node), 0
    quota.bytes_max = 4 * REQUEST_BYTES_MAX
    sends = [wire.later("SendMessage", large_send()) for _ in range(12)]
    while not all(send.done() for send in sends):
        held_bytes_max = max(held_bytes_max, quota.held_bytes)
    assert {send.result().status.code for send in sends} == {definition.Code.OK}
    assert 0 < held_bytes_max <= quota.bytes_max
    eventually(lambda: not quota.held_bytes, "all memory is given back")


def test_incomplete_requests_time_out_and_give_their_memory_back(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incomplete requests use up the memory of their address, until they time out. Other addresses are not affected."""
    monkeypatch.setattr(module.Exchange, "READ_S", 0.3)
    quota = quota_of(node)
    quota.bytes_max = 4 * REQUEST_BYTES_MAX
    announced = message(bytes(REQUEST_BYTES_MAX))[:100]
    with RawClient(node) as client:
        calls = [client.headers() for _ in range(6)]
        for number in calls:
            client.data(number, announced, ends=False)
        eventually(lambda: quota.waiting, "some requests wait for memory")
        assert quota.held_bytes <= 2 * REQUEST_BYTES_MAX, "half of the memory"
        assert quota.fits("10.0.0.1", REQUEST_BYTES_MAX)
        wire.ask_ok("SendMessage", large_send())
        assert {client.status(number)[0] for number in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED.value[0]}
        eventually(lambda: not quota.held_bytes and not quota.waiting, "all memory is given back")


def test_requests_that_wait_for_memory_are_limited(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    quota = quota_of(node)
    quota.bytes_max = 1
    with RawClient(node) as client:
        calls = [client.headers() for _ in range(4)]
        for number in calls:
            client.data(number, message(bytes(1_000))[:100], ends=False)
        assert client.status(calls[3])[0] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    eventually(lambda: not quota.held_bytes and not quota.waiting, "all memory is given back")


def test_a_cancelled_request_waits_for_memory_no_more(node: RunningNode) -> None:
    quota = quota_of(node)
    quota.bytes_max = REQUEST_BYTES_MAX

    async def fill() -> None:
        quota.add("10.0.0.1", REQUEST_BYTES_MAX)

    async def empty() -> None:
        quota.remove("10.0.0.1", REQUEST_BYTES_MAX)

    node.run(fill())
    with Wire.to(node, "hasty") as hasty:
        calls = [hasty.later("SendMessage", large_send()) for _ in range(3)]
        eventually(lambda: quota.waiting == 3, "all requests wait for memory")
        for call in calls:
            call.cancel()
        eventually(lambda: not quota.waiting, "cancelled requests wait no more")
    node.run(empty())
    assert not quota.held_bytes


def test_a_thousand_waiting_requests_get_memory_one_after_the_other(node: RunningNode) -> None:
    """Each request gives its memory to the next one when it ends. A thousand of them must not nest in the stack."""
    quota, empty_request = quota_of(node), b"\x9a\x06\x02ab"  # an unknown field, and no message
    quota.bytes_max = len(empty_request)
    node.run(_call(lambda: quota.add("10.0.0.1", len(empty_request))))
    with RawClient(node) as client:
        calls = [client.headers(headers=fields(f"/{SERVICE_NAME}/SendMessage")) for _ in range(1_000)]
        for number in calls:
            client.data(number, message(empty_request))
        eventually(lambda: quota.waiting == len(calls), "all requests wait for memory")
        node.run(_call(lambda: quota.remove("10.0.0.1", len(empty_request))))
        assert [client.status(number)[0] for number in calls] == [0] * len(calls)
    assert not quota.held_bytes and not quota.waiting


async def _call(change: Callable[[], None]) -> None:
    change()
