"""The rows of a selection: rows from memory equal those of the log, and the log decides where memory cannot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.broker.consuming.subscriber import GROUP, TOPIC, acknowledge, bodies, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.consuming.selection import FEW_ROWS, selected_rows
from timeball.broker.filters import compile_filter
from timeball.log.row_encoder import NumberedRows, read_batch
from timeball.log.writer import NewestRows

ASK = ReceiveRequest(GROUP, TOPIC)


async def send_tagged(world: World, count: int) -> list[int]:
    """Send messages with the tags `even` and `odd` in turn. Returns the sequence numbers of their rows."""
    first_seq = world.broker.log.writer.next_seq
    await send(
        world, [b"%d" % i for i in range(count)], tag=["odd" if i % 2 else "even" for i in range(count)]
    )
    rows = [row for part in world.broker.read_log(first_seq, 1 << 60) for row in part.to_pylist()]
    return [row["seq"] for row in rows if row["topic"] == TOPIC and row["queue_offset"] is not None]


async def select(world: World, request: ReceiveRequest, seqs: list[int]) -> Any:
    """Call `selected_rows` with the parts of this broker."""
    log = world.broker.log
    return await selected_rows(
        request, seqs, writer=log.writer, reader=log.reader, reader_thread=world.broker.threads.reader
    )


@on_node()
async def test_a_few_new_rows_from_memory_equal_those_of_the_log(world: World) -> None:
    seqs = await send_tagged(world, 5)
    rows_in_memory, mask = await select(world, ASK, seqs)
    assert isinstance(rows_in_memory, NumberedRows) and mask is None
    world.broker.log.writer.newest = NewestRows()  # no row is in memory
    rows_of_log, mask = await select(world, ASK, seqs)
    assert not isinstance(rows_of_log, NumberedRows) and mask is None
    assert read_batch(rows_in_memory).equals(rows_of_log)


@on_node()
async def test_many_rows_filtered_rows_and_rows_of_retry_topics_are_read_from_the_log(world: World) -> None:
    seqs = await send_tagged(world, FEW_ROWS + 1)
    many_rows, _ = await select(world, ASK, seqs)
    assert not isinstance(many_rows, NumberedRows) and many_rows.num_rows == FEW_ROWS + 1
    filtered = ReceiveRequest(GROUP, TOPIC, wanted=compile_filter("odd"))
    odd_rows, mask = await select(world, filtered, seqs[:4])
    assert mask is not None and mask.tolist() == [False, True, False, True]
    assert not isinstance(odd_rows, NumberedRows) and odd_rows.column("seq").to_pylist() == [seqs[1], seqs[3]]
    # A row of another topic than the requested one is taken as a row of the retry topic. Its properties show whether
    # it is for this group.
    other = ReceiveRequest(GROUP, "another")
    rows, _ = await select(world, other, seqs[:1])
    assert not isinstance(rows, NumberedRows)


@pytest.mark.parametrize("in_order", [True, False])
@on_node()
async def test_a_consumer_gets_the_same_message_from_memory_and_from_the_log(
    world: World, in_order: bool
) -> None:
    for is_in_memory in (True, False):
        await send_tagged(world, 3)
        if not is_in_memory:
            world.broker.log.writer.newest = NewestRows()
        received = await receive(world, in_order=in_order, counts_times=False)
        assert isinstance(received.handed_out, NumberedRows) == is_in_memory
        await acknowledge(world, received)
        assert sorted(bodies(received)) == [b"0", b"1", b"2"]
