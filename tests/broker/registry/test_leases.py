"""The row of a queue's leases: what is written is read again, and its columns have their places."""

from __future__ import annotations

import base64

import msgspec
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World
from timeball.broker.registry.lease_counts import SIZE_BYTES, ReceiptSecret, SavedLease, SavedLeases

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.model.message import Kind

LEASE = SavedLease(offset=3, seq=41, size_bytes=90, pop_ms=7, deadline_ms=60_007, in_order=True, times=2)
SAVED = SavedLeases(
    group="g", topic="orders", queue_id=1, next_offset=4, stored_offset=2, last_pop_ms=7, attempt_id="x",
    in_flight=[LEASE], returned=[], acked_ahead=[5], in_log=False,
)  # fmt: skip


def table(meta: MetaLog) -> MetaTable[SavedLeases]:
    return MetaTable(meta, "in_flight", SavedLeases)


def test_saved_leases_are_read_as_written() -> None:
    log = StateRows()
    log.opened(table).put([("g@orders@1", SAVED)])
    assert log.opened(table).values == {"g@orders@1": SAVED}


def test_a_saved_lease_is_an_array_and_older_rows_are_read() -> None:
    """A folder of an older broker has such rows: a new field goes to the end, with a default."""
    assert msgspec.json.encode(LEASE) == b'[3,41,90,7,60007,true,2,null,""]'
    assert msgspec.json.decode(b"[3,41,90,7,60007,true,2]", type=SavedLease) == LEASE


def test_the_receipt_secret_is_created_once_per_folder() -> None:
    log = StateRows()
    made = log.opened(ReceiptSecret).get()
    assert len(made) == SIZE_BYTES and log.count == 1
    again = log.opened(ReceiptSecret)
    assert again.is_made and again.get() == made and log.count == 1
    assert StateRows().opened(ReceiptSecret).get() != made, "another folder has another"


@on_node()
async def test_the_receipt_secret_survives_a_restart(world: World) -> None:
    before = world.broker.tables.receipt_secret.get()
    await world.restart()
    assert world.broker.tables.receipt_secret.get() == before


@on_node()
async def test_the_first_receive_creates_a_durable_receipt_secret(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(1))
    await world.broker.consuming.receive(ReceiveRequest("g", "orders", counts_times=True), 0)
    kept = world.broker.tables.receipt_secret
    assert kept.is_made
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert world.broker.tables.receipt_secret.get() == kept.get()


@on_node()
async def test_readers_of_the_log_do_not_get_the_receipt_secret(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    secret = world.broker.tables.receipt_secret.get()
    await world.broker.log.writer.flushed()
    for kinds in (None, [Kind.META]):
        for columns in (None, ["body"], ["seq", "body", "unique_key"]):
            rows = [
                row for part in world.broker.read_log(1, 99, kinds, 1, columns) for row in part.to_pylist()
            ]
            bodies = [row["body"] for row in rows]
            assert bodies.count(None) == 1 and any(b'"queues"' in (body or b"") for body in bodies)
            shown = b"".join(body or b"" for body in bodies)
            assert secret not in shown and base64.b64encode(secret) not in shown
