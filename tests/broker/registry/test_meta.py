"""State as rows: the last value of a key counts, a frame is read whole, and unreadable rows are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows, rows_of
from tests.crash.world import World

from timeball.broker.registry.meta import MetaLog, MetaTable, combined
from timeball.log import row_encoder
from timeball.model.errors import Corrupt, SetupError
from timeball.model.message import Kind

CHANGES = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers()), max_size=3), max_size=8
)


def table(meta: MetaLog) -> MetaTable[int]:
    return MetaTable(meta, "number", int)


@given(CHANGES)
def test_the_last_value_of_a_key_counts_before_and_after_a_restart(
    frames: list[list[tuple[str, int | None]]],
) -> None:
    log, model = StateRows(), {}
    numbers = log.opened(table)
    for changes in frames:
        numbers.put(changes)
        model.update(changes)
    model = {name: value for name, value in model.items() if value is not None}
    restored = log.opened(table)
    assert numbers.values == restored.values == model
    assert log.count == sum(bool(changes) for changes in frames), "a put without changes appends no frame"
    assert {key: int(bytes(value)) for key, value in restored._log.values.items()} == {
        f"number/{name}": value for name, value in model.items()
    }


def test_unknown_prefixes_and_damaged_values_are_refused() -> None:
    meta = MetaLog()
    table(meta)
    with pytest.raises(SetupError, match=r"newer Timeball \('colour'\)"):
        meta.restore([("colour/a", b"1")])
    with pytest.raises(Corrupt, match="META row of 'number/a'"):
        meta.restore([("number/a", b'"x"')])


def test_rows_of_earlier_versions_are_ignored() -> None:
    meta = MetaLog()
    kept = table(meta)
    meta.restore([("in_flight/g@orders@1", b'{"group":"g"}'), ("number/a", b"1")])
    assert (kept.values, meta.values.keys()) == ({"a": 1}, {"number/a"})


def test_a_change_takes_effect_in_memory_when_keep_is_called() -> None:
    """A refused append changes nothing."""
    log = StateRows()
    kept = log.opened(table)
    kept.put([("b", 2)])
    change = kept.build_change([("a", 1), ("b", None)])
    assert (kept.values, log.count) == ({"b": 2}, 1)
    change.apply()
    assert kept.values == {"a": 1} and kept._log.values.keys() == {"number/a"}
    log.appended.append(change.rows)
    assert log.opened(table).values == {"a": 1}


def test_combined_changes_have_the_rows_of_all_tables() -> None:
    log = StateRows()
    meta = log.opened(lambda meta: meta)
    first, second = MetaTable(meta, "number", int), MetaTable(meta, "text", str)
    change = combined(
        first.build_change([("a", 1)]), second.build_change([]), second.build_change([("a", "x")])
    )
    assert change.rows.column("unique_key").to_pylist() == ["number/a", "text/a"]
    assert first.values == second.values == {}
    change.apply()
    assert (first.values, second.values) == ({"a": 1}, {"a": "x"})


@on_node()
async def test_the_row_of_a_new_topic_precedes_its_first_message_in_the_same_commit(world: World) -> None:
    writer = world.broker.log.writer
    before = writer.statistics.commits
    accepted = await world.broker.send(batch(2))
    assert writer.statistics.commits == before + 1
    rows = [row for part in world.broker.read_log(1, 99) for row in part.to_pylist()]
    assert [row["kind"] for row in rows] == [Kind.META, Kind.MESSAGE, Kind.MESSAGE]
    assert (rows[0]["unique_key"], accepted.first_seq) == ("topic/orders", 2)
    await world.broker.send(batch(2))
    assert rows_of(world.broker, "topic/").keys() == {"orders"}
    assert writer.next_seq == 6, "the topic's row is written once"


def test_a_change_has_the_same_rows_as_values_and_as_columns() -> None:
    change = StateRows().opened(table).build_change([("a", 1), ("b", None)])
    assert row_encoder.rows_of(change.log_rows) == change.rows
