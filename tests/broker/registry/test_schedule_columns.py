"""The columns of schedules, compared with a dictionary, through changes, sweeps and snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.broker.registry import schedule_columns
from timeball.broker.registry.schedule_columns import INT_COLUMNS, Numbers, ScheduleColumns

Row = tuple[bytes, bytes, tuple[int, ...], bytes]  # template, plan, state and INT_COLUMNS, rest
NUMBER = 1 + INT_COLUMNS.index("number")

NAMES = st.sampled_from(["a", "b", "c-1", "d_2", "zz", "m"])
TEXTS = st.binary(max_size=5)
PLANS = st.sampled_from([b"one", b"two", b"three"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, TEXTS, PLANS),
        st.tuples(st.just("move"), st.lists(NAMES, min_size=1, unique=True), st.booleans(), TEXTS),
        st.tuples(st.just("remove"), NAMES),
        st.tuples(st.just("use")),
        st.tuples(st.just("copy")),
    ),
    max_size=40,
)


def slot_of(columns: ScheduleColumns, name: str) -> int:
    """The slot of an existing schedule."""
    slot = columns.names.find(name)
    assert slot is not None
    return slot


def rows_of(columns: ScheduleColumns) -> dict[str, Row]:
    """All schedules by name, in the order of the names."""
    rows: dict[str, Row] = {}
    for slot in columns.names.after(""):
        text, plan = columns.record(slot)
        name, _, template = text.partition(b"\0")
        [progress] = columns.progress(np.array([slot]))
        rows[name.decode()] = template, plan, progress, columns.rest.get(slot, b"")
    return rows


def copied(columns: ScheduleColumns) -> ScheduleColumns:
    """The columns after a restart from a snapshot."""
    copy = ScheduleColumns()
    for part in columns.copied()():
        copy.add_part(part)
    return copy


def row(number: int, *, is_active: bool) -> tuple[int, ...]:
    """The progress of an active or paused schedule (as from `progress`), with different values for each number."""
    values = [0 if is_active else 1, *(number * 10 + at for at in range(len(INT_COLUMNS)))]
    values[NUMBER] = number if is_active else 0
    return tuple(values)


@settings(deadline=None)
@given(STEPS)
@pytest.mark.parametrize("few", [0, 16])
def test_schedule_columns_equal_a_dictionary(few: int, steps: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Small limits, so that there are sweeps, several parts, and changes by whole columns.
        patch.setattr(schedule_columns, "_SPARE_MIN", 2)
        patch.setattr(schedule_columns, "_FEW", few)
        patch.setattr(schedule_columns, "PART_ROWS", 2)
        compare_with_dictionary(steps)


def compare_with_dictionary(steps: list[tuple[Any, ...]]) -> None:
    """Apply the steps to columns and to a dictionary (`wanted`), and compare both and a copy of the columns."""
    columns, wanted, last_number = ScheduleColumns(), dict[str, Row](), 0
    for step in steps:
        match step:
            case ("put", name, template, plan):
                slot = columns.put(name, template, plan)
                before = wanted.get(name, (b"", b"", row(0, is_active=False), b""))
                wanted[name] = template, plan, before[2], before[3]
                columns.set_progress([slot], [before[2]], [before[3]])
            case ("move", names, is_active, rest):
                names = [name for name in names if name in wanted]
                rows = [row(last_number + at + 1, is_active=is_active) for at in range(len(names))]
                last_number += len(names)
                columns.set_progress([slot_of(columns, name) for name in names], rows, [rest] * len(names))
                for name, values in zip(names, rows, strict=True):
                    wanted[name] = (*wanted[name][:2], values, rest)
            case ("remove", name):
                columns.remove(name)
                wanted.pop(name, None)
            case ("use",):
                assert list(columns.numbers) == sorted(columns.numbers)  # the first use ends the recovery
            case ("copy",):
                columns = copied(columns)
    name_by_number = {
        progress[NUMBER]: name for name, (_, _, progress, _) in wanted.items() if progress[NUMBER]
    }
    for compared in (columns, copied(columns)):
        assert rows_of(compared) == wanted and list(rows_of(compared)) == sorted(wanted)
        assert len(compared.names) == len(wanted)
        numbers = compared.numbers
        assert list(numbers) == sorted(name_by_number) and len(numbers) == len(name_by_number)
        all_numbers = np.arange(last_number + 2)  # also numbers without a schedule
        slots = numbers.slots(all_numbers).tolist()
        names = [compared.name(slot) if slot >= 0 else None for slot in slots]
        assert names == [name_by_number.get(number) for number in all_numbers.tolist()]
        assert [numbers.slot(number) is None for number in all_numbers.tolist()] == [
            name is None for name in names
        ]
        assert numbers.has_any(all_numbers.tolist()) == bool(name_by_number)
        assert compared.size_bytes == columns.size_bytes
    assert ScheduleColumns().numbers.slots(np.array([1])).tolist() == [-1]


def test_unused_texts_and_plans_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_columns, "_SPARE_MIN", 8)
    columns = ScheduleColumns()
    for number in range(1_000):
        columns.put("one", b"%d" % number, b"plan %d" % number)
    assert len(columns.texts) <= 12 and len(columns.plans) <= 12
    assert columns.record(slot_of(columns, "one")) == (b"one\x00999", b"plan 999")


def test_few_large_unused_texts_are_removed() -> None:
    """The bytes of replaced texts and plans are limited, because the offsets of texts have 32 bits."""
    columns = ScheduleColumns()
    for number in range(400):
        columns.put("one", b"%d" % number * 20_000, b"plan %d" % number * 4_000)
        bound = 2 * columns.size_bytes + schedule_columns._SPARE_BYTES
        assert max(columns.texts.size_bytes, columns.plans.size_bytes) <= bound
    assert columns.record(slot_of(columns, "one")) == (b"one\0" + b"399" * 20_000, b"plan 399" * 4_000)


def test_equal_plans_are_stored_once_in_memory_and_in_a_part() -> None:
    columns = ScheduleColumns()
    for number in range(100):
        columns.put(f"s{number:02d}", b"", b"x" * 1_000)
    assert len(columns.plans) == len(copied(columns).plans) == 1
    assert sum(map(len, columns.copied()())) < 5_000


def test_a_copy_does_not_change_with_the_schedules() -> None:
    columns = ScheduleColumns()
    columns.put("a", b"before", b"plan")
    parts = columns.copied()
    columns.put("a", b"after", b"plan")
    columns.put("b", b"new", b"plan")
    copy = ScheduleColumns()
    for part in parts():
        copy.add_part(part)
    assert {name: template for name, (template, *_) in rows_of(copy).items()} == {"a": b"before"}


def test_a_damaged_part_raises_an_arrow_error() -> None:
    columns = ScheduleColumns()
    columns.put("a", b"body", b"plan")
    [part] = columns.copied()()
    with pytest.raises((pa.ArrowException, ValueError)):
        ScheduleColumns().add_part(part[: len(part) // 2])


def test_a_schedule_takes_less_than_200_bytes() -> None:
    columns, count = ScheduleColumns(), 20_000
    for number in range(count):
        slot = columns.put(f"schedule-{number:07d}", b"template of %011d" % number, b"plan of %051d" % number)
        columns.set_progress([slot], [row(number + 1, is_active=True)], [b""])
    assert list(columns.numbers)
    arrays = [*columns.ints.values(), columns.state, columns.text, columns.plan, columns.names._order]
    size_bytes = sum(len(memoryview(values).cast("B")) for values in arrays)
    for texts in (columns.texts, columns.plans):
        size_bytes += len(texts._bytes) + len(memoryview(texts._ends).cast("B"))
    numbers: Numbers = columns.numbers
    size_bytes += sum(len(memoryview(values).cast("B")) for values in (numbers._numbers, numbers._slots))
    assert size_bytes / count < 200, "85 bytes, and 103 bytes of name, template and plan"
