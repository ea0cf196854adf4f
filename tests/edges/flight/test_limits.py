"""Limits for requests of Flight: a slow request only loses its own call, and no address exceeds its share of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually

from timeball.edges.flight import codec
from timeball.edges.flight.exchange import READ_AHEAD_BYTES, FlightCall, framed
from timeball.edges.flight.server import MESSAGE_BYTES_MAX, SERVICE
from timeball.edges.http2.frames import Fault, GrpcStatus
from timeball.edges.http2.streams import WINDOW_BYTES
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.shared_limits import MemoryQuota


def test_a_message_that_is_not_complete_in_time_ends_its_call(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it has reserved memory and a slot, which become free."""
    edge = node.node.edges.flight
    assert edge is not None
    monkeypatch.setattr(FlightCall, "READ_S", 0.3)
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoAction"))
        client.data(number, message(bytes(100_000))[:1_000], ends=False)
        eventually(lambda: edge.call_limits.received.held_bytes == 100_000, "the memory is reserved")
        assert edge._calls.taken == 1
        assert client.status(number)[0] == GrpcStatus.DEADLINE_EXCEEDED
    eventually(
        lambda: not (edge.call_limits.received.held_bytes or edge._calls.taken), "memory and slot are free"
    )


def test_requests_of_one_address_leave_memory_to_other_addresses(node: RunningNode) -> None:
    edge = node.node.edges.flight
    assert edge is not None
    received, bound = edge.call_limits.received, edge.call_limits.received.bytes_max
    received.bytes_max = 4 * MESSAGE_BYTES_MAX
    try:
        with RawClient(node, port=node.node.port) as client:
            for _ in range(4):
                number = client.headers(headers=fields(f"{SERVICE}DoAction"))
                client.data(number, message(bytes(MESSAGE_BYTES_MAX))[:100], ends=False)
            eventually(lambda: received.waiting == 2, "two requests have memory, and two wait")
            assert received.held_bytes == 2 * MESSAGE_BYTES_MAX, "half of the quota"
            assert received.fits("10.0.0.1", MESSAGE_BYTES_MAX)
        eventually(lambda: not (received.held_bytes or received.waiting), "the memory is free")
    finally:
        received.bytes_max = bound


@pytest.mark.parametrize("method", ["DoAction", "DoGet"])
def test_without_memory_a_request_may_only_send_its_first_window(node: RunningNode, method: str) -> None:
    edge = node.node.edges.flight
    assert edge is not None
    received = edge.call_limits.received
    with fill_quota(node, received), RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}{method}"))
        announced = message(bytes(100_000))
        for at in range(0, 2 * WINDOW_BYTES, 8_192):
            client.data(number, announced[at : at + 8_192], ends=False)
        assert client.end()[0] == Fault.FLOW_CONTROL_ERROR
    eventually(lambda: not (received.waiting or edge._calls.taken), "the slot is free")


def test_a_stream_whose_batch_waits_for_memory_receives_only_a_part_of_the_next(node: RunningNode) -> None:
    edge = node.node.edges.flight
    assert edge is not None
    batch = pa.record_batch({"topic": ["held-up"], "body": [bytes(100_000)]})
    descriptor = flight.FlightDescriptor.for_path(b"send").serialize()
    begun = codec.encode_data(ipc.schema_header(batch.schema))
    ((header, body),) = ipc.split_batch(batch, MESSAGE_BYTES_MAX)
    with fill_quota(node, edge._budget), RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoExchange"))
        described = bytes([0x0A, len(descriptor)]) + descriptor
        client.data(number, framed(described, *begun), ends=False)
        item = framed(*codec.encode_data(header, body))
        for _ in range(3 * READ_AHEAD_BYTES // len(item)):
            for at in range(0, len(item), 16_384):
                client.data(number, item[at : at + 16_384], ends=False)
        assert client.end()[0] == Fault.FLOW_CONTROL_ERROR
    eventually(lambda: not edge._send_streams.taken, "the slot is free")
    assert not edge._budget.held_bytes and not edge._budget.waiting


@contextmanager
def fill_quota(node: RunningNode, quota: MemoryQuota) -> Iterator[None]:
    """Let another address hold the whole quota."""

    async def fill() -> None:
        quota.add("10.0.0.1", quota.bytes_max)

    async def empty() -> None:
        quota.remove("10.0.0.1", quota.bytes_max)

    node.run(fill())
    try:
        yield
    finally:
        node.run(empty())
