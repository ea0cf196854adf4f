"""The state of drains, the saved leases and the receipt secret survive a restart as META rows."""

from __future__ import annotations

import base64

import msgspec
import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.meta import Holder, MetaLog, MetaTable, Restorable
from timeball.broker.registry.tables import (
    SECRET_BYTES,
    AdoptedFacts,
    DrainFacts,
    Drains,
    LeaseRun,
    ReceiptSecret,
    SavedPart,
    Tables,
)
from timeball.model.answers import HANDED
from timeball.model.errors import Corrupt
from timeball.model.message import Kind, pairs_of


def test_each_key_prefix_is_restored_by_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[str] = []
    register = MetaLog.register

    def recorded(log: MetaLog, prefix: str, table: Restorable, holds: Holder | None = None) -> None:
        prefixes.append(prefix)
        register(log, prefix, table, holds)

    monkeypatch.setattr(MetaLog, "register", recorded)
    Tables(CrashFiles(), queues_per_topic=4)
    assert len(prefixes) == len(set(prefixes)) > 10


def reopened(rows: list[object]) -> Drains:
    """The drains of a log with these META rows."""
    meta = MetaLog()
    drains = Drains(meta)
    for row in rows:
        meta.restore(pairs_of(row))  # type: ignore[arg-type]
    return drains


def opened() -> tuple[Drains, list[object]]:
    """The drains of an empty log, and the list to which it appends rows."""
    meta, rows = MetaLog(), list[object]()
    drains = Drains(meta)
    meta.open(rows.append, lambda: 7)
    return drains, rows


def test_the_last_drain_and_adoption_rows_are_restored_after_a_restart() -> None:
    drains, rows = opened()
    assert drains.out is None and drains.adopted("g2") is None
    drains.put(DrainFacts(heir="g1", since_ms=5))
    change = drains.build_change(DrainFacts(heir="g1", since_ms=5, transfer=1, first_seq=9, rows=2, at_ms=6))
    assert drains.out is not None and not drains.out.transfer, "not before the append"
    rows.append(change.rows)
    change.apply()
    adoption = drains.adoption_row("g3", AdoptedFacts(since_ms=1, transfer=4, rows=10))
    rows.append(adoption.rows)
    adoption.apply()
    for restored in (drains, reopened(rows)):
        assert restored.out == DrainFacts(heir="g1", since_ms=5, transfer=1, first_seq=9, rows=2, at_ms=6)
        assert restored.adopted("g3") == AdoptedFacts(since_ms=1, transfer=4, rows=10)
        assert restored.needed_seq == 9


def test_a_message_that_was_handed_over_is_not_reported_as_cancelled() -> None:
    drains, _ = opened()
    assert not drains.was_handed_over("already_cancelled", None) and not drains.is_moving(None)
    drains.put(DrainFacts(heir="g1", since_ms=5, transfer=2, first_seq=9, rows=2, at_ms=6))
    assert drains.was_handed_over(HANDED, 3) and drains.was_handed_over("already_cancelled", None)
    assert not drains.was_handed_over("already_cancelled", 3) and not drains.was_handed_over("released", None)
    assert (drains.is_moving(5), drains.is_moving(6), drains.is_moving(None)) == (False, True, True)
    drains.put(DrainFacts(heir="g1", since_ms=5, transfer=2, moved_rows=2))
    assert not drains.is_moving(6) and drains.needed_seq is None


RUN = LeaseRun(
    offset=1027, count=3, pop_ms=7, deadline_ms=60_007, since_ms=8, in_order=True, counts=False, times=2,
    nacked_ms=9, nack_reason="no",
)  # fmt: skip
PART = SavedPart(
    group="g", topic="orders", queue_id=1, part=1, next_offset=1030, runs=[RUN], acked_ahead=[1032],
    last_pop_ms=7, attempt_id="x",
)  # fmt: skip
NAME = "g@orders@1@1"


def table(meta: MetaLog) -> MetaTable[SavedPart]:
    return MetaTable(meta, "leases", SavedPart)


def test_a_saved_part_is_read_as_written_until_it_is_deleted() -> None:
    log = StateRows()
    parts = log.opened(table)
    parts.put([(NAME, PART)])
    assert log.opened(table).values == {NAME: PART}
    parts.put([(NAME, None)])
    assert log.opened(table).values == {}


def test_a_run_of_leases_is_an_array_and_rows_without_the_last_columns_are_read() -> None:
    """An upgraded broker reads rows of earlier versions, so a new field is added at the end, with a default."""
    assert msgspec.json.encode(RUN) == b'[1027,3,7,60007,8,true,false,2,9,"no",""]'
    assert msgspec.json.decode(b"[1027,3,7,60007,8]", type=LeaseRun) == LeaseRun(1027, 3, 7, 60_007, 8)


def test_a_saved_part_without_runs_is_refused() -> None:
    """From such a row, the group would skip messages that no consumer has processed."""
    meta = MetaLog()
    table(meta)
    with pytest.raises(Corrupt, match=f"META row of 'leases/{NAME}'"):
        meta.restore([(f"leases/{NAME}", b'{"group":"g","topic":"orders","queue_id":1,"part":1}')])


def test_the_receipt_secret_is_created_once_per_folder() -> None:
    log = StateRows()
    secret = log.opened(ReceiptSecret).get()
    assert len(secret) == SECRET_BYTES and log.count == 1
    restored = log.opened(ReceiptSecret)
    assert restored.is_made and restored.get() == secret and log.count == 1
    assert StateRows().opened(ReceiptSecret).get() != secret, "another folder has another secret"


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
    secret = world.broker.tables.receipt_secret
    assert secret.is_made
    files = world.files.crash(survival="nothing")
    await world.abandon()
    world.files = files
    await world.start()
    assert world.broker.tables.receipt_secret.get() == secret.get()


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
            # Only the row of the secret has no body. The row of the topic shows that META rows have their bodies.
            assert bodies.count(None) == 1 and any(b'"queues"' in (body or b"") for body in bodies)
            all_bytes = b"".join(body or b"" for body in bodies)
            assert secret not in all_bytes and base64.b64encode(secret) not in all_bytes
