"""Idempotency keys: the identity of a send, and the keys that are remembered, compared with a model."""

from __future__ import annotations

import asyncio

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball.broker.accepting.admission import batch_of
from timeball.broker.registry import idempotency
from timeball.broker.registry.idempotency import IdempotencyKeys, KeyedSend, SourcePositions
from timeball.model import limits
from timeball.model.errors import Conflict, OverLimit
from timeball.model.message import encode_properties, send_row
from timeball.model.wire import SourceStep

KEPT_MS = 10  # a key is known for so long after its send and its due times
# A step, a key, and the ms that pass before it. "move" reschedules the messages of the key, "start" restarts.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "schedule", "move", "drop", "start"]),
        st.sampled_from("abcdef"),
        st.integers(0, 5),
    ),
    max_size=30,
)


def test_rows_and_columns_of_the_same_messages_have_the_same_hash() -> None:
    row = send_row(
        topic="t", body=b"x", tag="a", keys="k", unique_key="u", properties=encode_properties({"p": "1"}), due_ms=5_000
    )  # fmt: skip
    for rows in (
        [row],
        [row, send_row(topic="t", body=b"y", tag=None, keys=None, unique_key=None, properties=None)],
    ):
        use = idempotency.key_use("one", "key", rows)
        assert use == idempotency.key_use("one", "key", batch_of(rows)) and use.due_ms == 5_000
        assert use.content != idempotency.key_use("one", "key", [*rows, row]).content


def test_the_content_hash_depends_on_the_messages_and_not_on_their_arrow_layout() -> None:
    rows = batch(3, body=[b"a", b"b", b"a"], tag=["x", None, "y"])
    use = idempotency.key_use("one", "key", rows)
    slice_of_copies = pa.concat_batches([rows, rows]).slice(3)
    assert idempotency.key_use("one", "key", slice_of_copies) == use
    assert idempotency.key_use("one", "key", rows.append_column("keys", pa.nulls(3, pa.string()))) == use
    assert idempotency.key_use("one", "key", rows.slice(1)).content != use.content
    with pytest.raises(Conflict):
        idempotency.check_same(use.content, idempotency.key_use("one", "key", rows.slice(1)))


@given(STEPS)
@example(
    [("use", "a", 0), ("start", "a", 0), ("use", "b", 0), ("use", "a", 5), ("use", "b", 5), ("drop", "a", 0)]
)  # in an earlier version, a key from before a start was not deleted when a later key had two entries in the heap
def test_the_known_keys_equal_those_of_a_model_before_and_after_a_restart(
    steps: list[tuple[str, str, int]],
) -> None:
    log, model, now_ms = StateRows(), dict[str, KeyedSend](), 1_000
    keys, moved = log.opened(IdempotencyKeys), dict[int, int]()

    def is_known(send: KeyedSend) -> bool:
        return max(send.store_ms, send.last_due_ms, moved.get(send.first_seq, 0)) > now_ms - KEPT_MS

    def last_due_ms(first_seq: int, _: int) -> int:
        return moved.get(first_seq, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "IDEMPOTENCY_KEYS_MAX", 4)
        patch.setattr(idempotency, "STALE_MAX", 2)
        for step, name, passed_ms in steps:
            now_ms += passed_ms
            if step == "start":
                keys = log.opened(IdempotencyKeys)
            elif step == "drop":
                keys.drop(now_ms - KEPT_MS, last_due_ms)
                model = {key: send for key, send in model.items() if is_known(send)}
                assert len(keys) == len(model)
            elif step == "move" and name in model:
                moved[model[name].first_seq] = now_ms + 3 * passed_ms
            elif step in ("use", "schedule") and keys.get(name, now_ms - KEPT_MS, last_due_ms) is None:
                due_ms = now_ms + 4 * passed_ms if step == "schedule" else 0
                send = KeyedSend(len(log.appended), 1, now_ms, "content", "", due_ms)
                change = keys.build_change([(name, send)])
                log.appended.append(change.rows)
                change.apply()
                model = {key: value for key, value in model.items() if key != name} | {name: send}
                model = dict(list(model.items())[-4:])
            for key in "abcdef":
                known = model.get(key)
                expected = known if known is not None and is_known(known) else None
                assert keys.get(key, now_ms - KEPT_MS, last_due_ms) == expected


def test_a_key_row_of_an_older_format_is_read() -> None:
    old = msgspec.json.decode(b'[7,1,1000,"content"]', type=KeyedSend)
    assert (old.first_seq, old.attempt, old.last_due_ms, old.last_ms) == (7, "", -1, 1_000)


def test_the_last_due_time_of_a_send_is_computed_from_due_times_and_delays() -> None:
    use = idempotency.key_use("one", "key", batch(3, due_ms=[5_000, None, None], delay_ms=[None, 70, None]))
    assert use.sent(7, 4_000).last_due_ms == 5_000
    assert use.sent(7, 6_000).last_due_ms == 6_070
    assert idempotency.key_use("one", "key", batch(2)).sent(7, 6_000).last_due_ms == 0


def test_the_hash_of_an_attempt_depends_on_the_account() -> None:
    attempts = [idempotency.key_use(account, "key", batch(), "r").attempt for account in ("one", "two")]
    assert len({"", *attempts}) == 3


def move(world: World, caller: str, begin: dict[int, int], end: dict[int, int], source: str = "s") -> None:
    """Append the step of an account's source from the positions `begin` to `end`, by partition."""
    change = positions(world).moved(caller, SourceStep(source=source, begin=begin, end=end))
    world.broker.log.writer.append(change.rows)
    change.apply()


def positions(world: World) -> SourcePositions:
    return world.broker.tables.source_positions


@on_node()
async def test_a_step_that_does_not_begin_at_the_current_position_is_refused(world: World) -> None:
    move(world, "", {0: 5}, {0: 9})  # the first step begins anywhere
    move(world, "", {0: 9, 3: 100}, {0: 9, 3: 101})
    assert positions(world).of("", "s") == {0: 9, 3: 101}
    with pytest.raises(Conflict, match="stands at 101 in partition 3, this batch begins at 100"):
        move(world, "", {0: 9, 3: 100}, {0: 10, 3: 101})
    assert positions(world).of("", "s") == {0: 9, 3: 101}


@on_node()
async def test_sources_of_two_accounts_are_independent(world: World) -> None:
    move(world, "one", {0: 0}, {0: 9})
    assert positions(world).of("two", "s") == {} and positions(world).of("one", "other") == {}
    move(world, "two", {0: 0}, {0: 1})
    assert len(positions(world)) == 2 and positions(world).of("one", "s") == {0: 9}


@on_node()
async def test_too_many_sources_or_partitions_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SOURCES_MAX", 1)
    monkeypatch.setattr(limits, "SOURCE_PARTITIONS_MAX", 2)
    move(world, "", {0: 0}, {0: 9})
    with pytest.raises(OverLimit, match="1 sources are known"):
        move(world, "", {0: 0}, {0: 1}, "other")
    with pytest.raises(OverLimit, match="at most 2 partitions"):
        move(world, "", {1: 0, 2: 0}, {1: 1, 2: 1})


@on_node()
async def test_positions_survive_a_restart_from_a_snapshot(world: World) -> None:
    move(world, "", {0: 0}, {0: 9})
    await world.broker.log.writer.flushed()
    assert await asyncio.wait_for(world.node.maintenance.snapshot(), 60)  # type: ignore[union-attr]
    await world.stop()
    world.files.remove("checkpoint")
    await world.start()
    assert positions(world).of("", "s") == {0: 9}
