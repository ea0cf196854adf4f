"""Checks of open half messages: the producer that is asked, the time, and when a check counts as asked."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.broker.accepting import transacting
from timeball.broker.accepting.transacting import Half
from timeball.model import limits
from timeball.model.errors import OverLimit
from timeball.model.message import READ_SCHEMA, encode_properties


class Edge:
    """An edge with or without a connected producer, which accepts checks or does not."""

    def __init__(self, *, connected: bool = True, accepts: bool = True) -> None:
        self.connected, self.accepts = connected, accepts
        self.asked: list[tuple[int, int, bytes]] = []  # (number, checks before, body) of each half message

    def has_producer(self, half: Half) -> bool:
        return self.connected

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        assert row.schema == READ_SCHEMA and row.column("seq").to_pylist() == [half.seq]
        if not self.accepts:
            return 0
        body: bytes = row.column("body")[0].as_py()
        self.asked.append((half.seq, half.checks, body))
        return len(body)


async def prepare(world: World) -> int:
    """Send a half message. Returns its number."""
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": "payers"})
    accepted, durable = world.broker.prepare_nowait(batch(1, properties=[properties], sys_flag=[4]))
    await durable
    return int(accepted.first_seq)


async def ask_after(world: World, ms: int = limits.TRANSACTION_CHECK_INTERVAL_MS) -> None:
    """Let time pass, and do one round of checks."""
    world.clock.advance(ms)
    await world.broker.transaction_checks.ask_due()


@on_node()
async def test_the_first_edge_that_has_a_producer_asks(world: World) -> None:
    disconnected, first, second = Edge(connected=False), Edge(), Edge()
    world.broker.transaction_checks.askers += [disconnected, first, second]
    seq = await prepare(world)
    await ask_after(world, limits.TRANSACTION_FIRST_CHECK_MS - 1)
    assert first.asked == []
    await ask_after(world, 1)
    await ask_after(world)
    assert first.asked == [(seq, 0, b"body"), (seq, 1, b"body")]
    assert disconnected.asked == second.asked == []
    assert world.broker.transactions.open() == [(seq, 2)]


@on_node()
async def test_a_check_that_no_producer_accepts_does_not_count(world: World) -> None:
    world.broker.transaction_checks.askers.append(Edge(accepts=False))
    seq = await prepare(world)
    await ask_after(world)
    assert world.broker.transactions.open() == [(seq, 0)]
    accepting = Edge()
    world.broker.transaction_checks.askers.append(accepting)
    await ask_after(world)
    assert len(accepting.asked) == 1
    assert world.broker.transactions.open() == [(seq, 1)]


@on_node()
async def test_no_producer_is_asked_about_a_half_message_that_has_ended(world: World) -> None:
    edge = Edge()
    world.broker.transaction_checks.askers.append(edge)
    seq = await prepare(world)
    await world.broker.transactions.end(seq, "payers", commit=True)
    await ask_after(world)
    assert edge.asked == []


@on_node()
async def test_after_too_many_checks_a_half_message_is_rolled_back(world: World) -> None:
    edge = Edge()
    world.broker.transaction_checks.askers.append(edge)
    await prepare(world)
    for _ in range(limits.TRANSACTION_CHECKS_MAX + 1):
        await ask_after(world)
    assert len(edge.asked) == limits.TRANSACTION_CHECKS_MAX
    assert world.broker.transactions.open() == []


@on_node()
async def test_the_checks_of_a_round_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transacting, "CHECKS_PER_LOOK", 2)
    edge = Edge()
    world.broker.transaction_checks.askers.append(edge)
    seqs = {await prepare(world) for _ in range(5)}
    world.clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
    for asked_in_total in (2, 4, 5):
        await ask_after(world, 0)
        assert len(edge.asked) == asked_in_total
    assert {seq for seq, _, _ in edge.asked} == seqs


class FailsOnce(Edge):
    """An edge whose first check fails with `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.errors = [error]

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        if self.errors:
            raise self.errors.pop()
        return super().ask(half, row)


async def run_until(world: World, monkeypatch: pytest.MonkeyPatch, edge: Edge) -> None:
    """Run the task of the checks until the edge was asked or the task has ended."""
    monkeypatch.setattr(transacting, "LOOK_S", 0)
    world.broker.transaction_checks.askers.append(edge)
    await prepare(world)
    world.clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
    running = asyncio.create_task(world.broker.transaction_checks.run())
    for _ in range(10_000):
        if edge.asked or running.done():
            break
        world.clock.advance(limits.TRANSACTION_CHECK_INTERVAL_MS)
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@on_node()
async def test_a_refused_round_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = FailsOnce(OverLimit("later"))
    await run_until(world, monkeypatch, edge)
    assert len(edge.asked) == 1


@on_node(failing=True)
async def test_an_unexpected_error_of_a_check_stops_the_broker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = FailsOnce(AssertionError("a bug"))
    await run_until(world, monkeypatch, edge)
    assert edge.asked == [] and isinstance(world.failure, AssertionError)
