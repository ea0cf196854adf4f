"""What a consumer gets: a receipt for each row."""

from __future__ import annotations

from tests.broker.consuming.subscriber import receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import Receipt


@on_node()
async def test_each_received_row_has_a_receipt(world: World) -> None:
    await send(world, [b"a", b"b", b"c"])
    received = await receive(world)
    assert received.rows.num_rows == len(set(received.receipts)) == 3
    assert all(isinstance(receipt, Receipt) for receipt in received.receipts)


def test_a_receipt_of_a_scheduled_message_is_none_of_a_position() -> None:
    receipt = Receipt("g", "t", 7, 1_000)
    assert (receipt.group, receipt.topic, receipt.seq, receipt.due_ms) == ("g", "t", 7, 1_000)
    assert not isinstance(receipt, Receipt)
    assert not isinstance(Receipt("g", "t", 0, 7, 1_000), Receipt)
