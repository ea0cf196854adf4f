"""The result of a receive: a receipt for each row."""

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
