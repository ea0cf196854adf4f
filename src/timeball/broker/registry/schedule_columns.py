"""The memory of recurring schedules: columns and packed texts in place of objects, because there may be a million.

    texts      name and template of each schedule, one after the other in one block of bytes
    plans      rules with their policies. Schedules with equal ones share a plan
    columns    the progress of each schedule, by *slot*
    order      the slots in the order of the names, for look-ups by name
    numbers    the pending occurrences by the number of their message, with their slots

A schedule takes 85 bytes, and the bytes of its name and template. A plan takes 4 bytes and its text.

A snapshot contains the schedules as *parts*: Arrow streams of some thousand schedules each, in the order of the names.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import limits
from timeball.model.message import Int64Array

PART_ROWS = 16_384
# The columns of the progress, in the order of `Progress`, without those that few schedules have.
INT_COLUMNS = ("after_ms", "number", "due_ms", "at_ms", "runs", "last_due_ms", "last_ms")
FREE = -1  # the state of a slot that is not in use

UintArray = npt.NDArray[np.uint32]

_FEW = 16  # up to this many numbers, single searches take less time than one numpy search for all
_SPARE_MIN = 4_096  # unused entries that are kept before their memory is freed
_SPARE_BYTES = 4 * 1024 * 1024  # bytes of unused texts that are kept before their memory is freed
_PART_SCHEMA = pa.schema(
    [
        ("text", pa.binary()),
        ("plan", pa.dictionary(pa.int32(), pa.binary())),
        ("state", pa.int8()),
        *((name, pa.int64()) for name in INT_COLUMNS),
        ("rest", pa.binary()),
    ]
)
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


class Texts:
    """Texts one after the other, each found by its index. They never change."""

    def __init__(self) -> None:
        # 32 bits are enough: all schedules together have at most SCHEDULES_BYTES_MAX, and a sweep comes at twice that.
        self._bytes, self._ends = bytearray(), array("I", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._bytes[self._ends[index] : self._ends[index + 1]])

    @property
    def size_bytes(self) -> int:
        """The bytes of all texts."""
        return len(self._bytes)

    def read_until(self, index: int, separator: bytes) -> bytes:
        """Read the part of a text before the first separator. The text must contain one."""
        begin = self._ends[index]
        return bytes(self._bytes[begin : self._bytes.index(separator, begin)])

    def append(self, text: bytes) -> int:
        """Add a text. Returns its index."""
        self._bytes += text
        self._ends.append(len(self._bytes))
        return len(self._ends) - 2

    def extend(self, texts: pa.BinaryArray) -> int:
        """Add the texts of an array without nulls. Returns the index of the first one."""
        first, base = len(self), len(self._bytes)
        # The offsets of a slice do not begin with 0, so they are moved to the end of these texts.
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
        # An empty array may have no buffer for its data.
        if len(texts):
            if data is not None:
                self._bytes += memoryview(data)[ends[0] : ends[-1]]
            self._ends.frombytes((ends[1:] - ends[0] + base).astype(np.uint32).tobytes())
        return first

    def take(self, indexes: UintArray) -> pa.BinaryArray:
        """Build an array of the texts with these indexes."""
        # No copy of all texts: the buffers are those of this object, and the result has its own.
        buffers = [None, pa.py_buffer(self._ends), pa.py_buffer(self._bytes)]
        return pa.Array.from_buffers(pa.binary(), len(self), buffers).take(pa.array(indexes))

    def copy(self) -> Texts:
        """Build a copy that another thread may read."""
        texts = Texts()
        texts._bytes, texts._ends = self._bytes[:], self._ends[:]
        return texts


class Numbers:
    """The slots of pending occurrences, by the numbers of their messages. A later occurrence has a larger number.

    An entry whose occurrence has ended stays until there are a quarter more entries than pending occurrences.
    """

    def __init__(self, column: array[int]) -> None:
        """`column`: the number of the pending occurrence of each slot, 0 for none. The caller changes it."""
        self._column = column
        # Sorted once, at the end of a recovery. From then on each new number is the largest.
        numbers = np.array(column, np.int64)
        slots = np.flatnonzero(numbers)
        slots = slots[np.argsort(numbers[slots])]
        self.count = len(slots)  # a plain attribute, because every release reads it
        self._numbers, self._slots = array("q", numbers[slots].tobytes()), array("I")
        self._slots.frombytes(slots.astype(np.uint32).tobytes())

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        """Iterate over all numbers of pending occurrences."""
        return iter(self.all().tolist())

    def all(self) -> Int64Array:
        """Copy the numbers of all pending occurrences, in ascending order."""
        numbers = np.array(self._numbers, np.int64)
        return numbers[self._are_current(numbers, np.array(self._slots, np.uint32))]

    def slot(self, number: int) -> int | None:
        """Find the slot of the schedule whose pending occurrence has this number. None if there is none."""
        index = bisect_left(self._numbers, number)
        if index == len(self._numbers) or self._numbers[index] != number:
            return None
        slot = self._slots[index]
        return slot if self._column[slot] == number else None

    def slots(self, numbers: Int64Array) -> Int64Array:
        """Find the slots of the schedules whose pending occurrences have these numbers, -1 for other numbers."""
        if not self._numbers:
            return np.full(len(numbers), -1)
        # No copy. An array cannot grow while numpy has a view of it, so no view outlives this call.
        all_numbers = np.frombuffer(self._numbers, np.int64)
        indexes = np.minimum(all_numbers.searchsorted(numbers), len(all_numbers) - 1)
        slots = np.frombuffer(self._slots, np.uint32)[indexes]
        is_current = (all_numbers[indexes] == numbers) & self._are_current(numbers, slots)
        return np.where(is_current, slots.astype(np.int64), -1)

    def has_any(self, numbers: Int64Array | Sequence[int]) -> bool:
        """Check whether any of these messages is a pending occurrence."""
        if not self.count:
            return False
        if len(numbers) <= _FEW:
            return any(self.slot(int(number)) is not None for number in numbers)
        return bool((self.slots(np.asarray(numbers, np.int64)) >= 0).any())

    def change(self, numbers: Sequence[int], slots: Sequence[int], *, ended: int) -> None:
        """Add pending occurrences. The numbers ascend and are larger than all others. `slots` begins with their slots.

        `ended`: how many occurrences have ended. The caller has replaced their numbers in the column.
        """
        self._numbers.extend(numbers)
        self._slots.extend(slots[: len(numbers)])
        self.count += len(numbers) - ended
        # Ended entries cost memory and a step of a search, so a quarter of them may stay.
        if len(self._numbers) > _SPARE_MIN + self.count * 5 // 4:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the entries of ended occurrences."""
        numbers, slots = np.array(self._numbers, np.int64), np.array(self._slots, np.uint32)
        is_current = self._are_current(numbers, slots)
        self._numbers, self._slots = array("q", numbers[is_current].tobytes()), array("I")
        self._slots.frombytes(slots[is_current].tobytes())

    def _are_current(self, numbers: Int64Array, slots: UintArray) -> npt.NDArray[np.bool_]:
        """Compute a mask of the entries whose occurrence is still the pending one of its slot."""
        if not len(slots):
            return np.empty(0, np.bool_)
        is_current: npt.NDArray[np.bool_] = np.frombuffer(self._column, np.int64)[slots] == numbers
        return is_current


class Names:
    """The slots of schedules by name, in the order of the names."""

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._order = array("I")
        # Names of a recovery, in any order. Sorted once at its end: to insert each would take minutes for a million.
        self._unsorted: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order) + len(self._unsorted)

    def find(self, name: str) -> int | None:
        """Find the slot of a name. None if no schedule has it."""
        slot = self._unsorted.get(name)
        if slot is None:
            index = bisect_left(self._order, name, key=self._name_of)
            if index < len(self._order) and self._name_of(self._order[index]) == name:
                slot = self._order[index]
        return slot

    def after(self, name: str) -> Iterator[int]:
        """Yield the slots of the names after this one, in their order."""
        self.sort()
        for index in range(bisect_right(self._order, name, key=self._name_of), len(self._order)):
            yield self._order[index]

    def all(self) -> array[int]:
        """Copy all slots, in the order of the names."""
        self.sort()
        return self._order[:]

    def add(self, name: str, slot: int, *, is_recovery: bool) -> None:
        """Add a new name. During a recovery, the names are sorted at its end."""
        if is_recovery:
            self._unsorted[name] = slot
        else:
            self.sort()
            # The insertion moves 4 bytes for each later name, which takes less time than the search.
            self._order.insert(bisect_left(self._order, name, key=self._name_of), slot)

    def extend(self, slots: range) -> None:
        """Recovery: add the new names of these slots, which are in the order of the names."""
        if self._order and self._name_of(self._order[-1]) > self._name_of(slots[0]):
            self._unsorted |= {self._name_of(slot): slot for slot in slots}
        else:
            self._order.extend(slots)

    def remove(self, name: str) -> None:
        """Remove an existing name. Call it before the text of its slot changes, because the search reads the text."""
        if self._unsorted.pop(name, None) is None:
            del self._order[bisect_left(self._order, name, key=self._name_of)]

    def sort(self) -> None:
        """Sort the names that were added during a recovery."""
        if self._unsorted:
            self._order.extend(self._unsorted.values())
            self._unsorted = {}
            self._order = array("I", sorted(self._order, key=self._name_of))


class Planned(NamedTuple):
    """The texts and plans of all slots at one time, and the due times of their pending occurrences (0: none).

    `state`, `text`, `plan` and `due_ms` have one element for each slot. `text` and `plan` are indexes in `texts` and
    `plans`, which may grow meanwhile, but their entries do not change.
    """

    texts: Texts
    plans: Texts
    state: npt.NDArray[np.int8]
    text: UintArray
    plan: UintArray
    due_ms: Int64Array


class ScheduleColumns:
    """The schedules of a broker. A schedule is found by its slot, which stays the same as long as it exists.

    A text is a name, a zero byte and the template. `rest` contains, by slot, further values that few schedules have.
    """

    def __init__(self) -> None:
        self.texts, self.plans = Texts(), Texts()
        self.ints = {name: array("q") for name in INT_COLUMNS}
        self.state, self.text, self.plan = array("b"), array("I"), array("I")
        self.rest: dict[int, bytes] = {}
        self.names = Names(self.name)
        # Built at the first use, which is after the recovery.
        self._numbers: Numbers | None = None
        self._plan_index: dict[bytes, int] = {}
        self._free: list[int] = []
        self.size_bytes = 0

    @property
    def numbers(self) -> Numbers:
        """The pending occurrences. Updated with each change."""
        if self._numbers is None:
            self._numbers = Numbers(self.ints["number"])
            # Now and not for the first list, which may be long after the start.
            self.names.sort()
        return self._numbers

    def name(self, slot: int) -> str:
        """Read the name of a schedule."""
        return self.texts.read_until(self.text[slot], b"\0").decode()

    def record(self, slot: int) -> tuple[bytes, bytes]:
        """Read the text and the plan of a schedule."""
        return self.texts[self.text[slot]], self.plans[self.plan[slot]]

    def put(self, name: str, template: bytes, plan: bytes) -> int:
        """Add a schedule, or replace its template and plan. Returns its slot."""
        slot = self.names.find(name)
        if slot is None:
            slot = self._new_slot()
            self.state[slot] = 0  # in use from now on, so that a sweep keeps its text
            self.text[slot] = self.texts.append(name.encode() + b"\0" + template)
            self.names.add(name, slot, is_recovery=self._numbers is None)
        else:
            # The name is the same, so the order of the names is, too.
            self.size_bytes -= self._size(slot)
            self.text[slot] = self.texts.append(name.encode() + b"\0" + template)
        self.plan[slot] = self._plan(plan)
        self.size_bytes += self._size(slot)
        self._sweep()
        return slot

    def progress(self, slots: Int64Array) -> list[tuple[int, ...]]:
        """Read the progress of some schedules, a row for each: the state and the values of INT_COLUMNS."""
        columns = (np.frombuffer(column, np.int64)[slots].tolist() for column in self.ints.values())
        return list(zip(np.frombuffer(self.state, np.int8)[slots].tolist(), *columns, strict=True))

    def set_progress(
        self,
        slots: Sequence[int] | Int64Array,
        rows: Sequence[Sequence[int]] | Int64Array,
        rests: Sequence[bytes],
    ) -> None:
        """Set the progress of some schedules to these rows (as from `progress`). New numbers must ascend.

        `rests`: the value of `rest` for each schedule, b"" for none. Empty: all stay as they are.
        """
        # Releases change a thousand schedules at once, and a recovery one at a time.
        if len(slots) <= _FEW:
            for slot, row in zip(slots, rows, strict=True):
                self._set_row(slot, row)
        else:
            self._set_rows(np.array(slots, np.int64), np.array(rows, np.int64))
        for slot, rest in zip(slots, rests, strict=True) if len(rests) else ():
            if rest:
                self.rest[slot] = rest
            elif self.rest:
                self.rest.pop(slot, None)

    def _set_row(self, slot: int, row: Sequence[int]) -> None:
        """Set the progress of one schedule to this row (as from `progress`)."""
        # Read the old number before the columns change: `_numbers.change` must know whether an entry has ended.
        before = self.ints["number"][slot]
        self.state[slot] = row[0]
        for column, value in zip(self.ints.values(), row[1:], strict=True):
            column[slot] = value
        number = self.ints["number"][slot]
        if self._numbers is not None and number != before:
            self._numbers.change([number] if number else [], [slot], ended=before != 0)

    def _set_rows(self, slots: Int64Array, rows: Int64Array) -> None:
        """Set the progress of many schedules, by whole columns."""
        before = np.frombuffer(self.ints["number"], np.int64)[slots]
        np.frombuffer(self.state, np.int8)[slots] = rows[:, 0]
        for index, column in enumerate(self.ints.values(), 1):
            np.frombuffer(column, np.int64)[slots] = rows[:, index]
        if self._numbers is not None:
            numbers = rows[:, 1 + INT_COLUMNS.index("number")]
            is_new = (numbers != before) & (numbers != 0)
            ended = int(np.count_nonzero((numbers != before) & (before != 0)))
            self._numbers.change(numbers[is_new].tolist(), slots[is_new].tolist(), ended=ended)

    def remove(self, name: str) -> None:
        """Remove a schedule. An unknown name changes nothing."""
        slot = self.names.find(name)
        if slot is not None:
            self.size_bytes -= self._size(slot)
            self.set_progress([slot], [(FREE, *(0 for _ in INT_COLUMNS))], [b""])
            # Before the sweep, because the search for the name reads the text of the slot.
            self.names.remove(name)
            self._free.append(slot)
            self._sweep()

    def planned(self) -> Planned:
        """Copy the columns that `Planned` contains. Another thread may read the result."""
        # Copies, because an array cannot grow while numpy has a view of it. 17 bytes each, so it takes milliseconds
        # for a million.
        columns = (self.state, self.text, self.plan, self.ints["due_ms"])
        return Planned(self.texts, self.plans, *(np.array(column) for column in columns))

    # -- snapshots -----------------------------------------------------------------------------------------------

    def copied(self) -> Callable[[], Iterator[bytes]]:
        """Copy the schedules. Another thread may call the result, which yields the parts of a snapshot."""
        # Copies, because the event loop changes the columns while the other thread encodes them. To copy the hundred
        # megabytes of a million schedules takes some tens of milliseconds.
        texts, plans = self.texts.copy(), self.plans.copy()
        slots = np.array(self.names.all(), np.uint32)
        state, text, plan = np.array(self.state), np.array(self.text), np.array(self.plan)
        ints, rest = [np.array(column) for column in self.ints.values()], dict(self.rest)

        def encode_part(part_slots: UintArray) -> bytes:
            """Encode the schedules in these slots as an Arrow stream."""
            # A dictionary: each part contains a plan once, although many schedules share it.
            used_plans, indexes = np.unique(plan[part_slots], return_inverse=True)
            columns = [
                texts.take(text[part_slots]),
                pa.DictionaryArray.from_arrays(pa.array(indexes.astype(np.int32)), plans.take(used_plans)),
                pa.array(state[part_slots]),
                *(pa.array(column[part_slots]) for column in ints),
                pa.array([rest.get(slot) for slot in part_slots.tolist()], pa.binary()),
            ]
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, _PART_SCHEMA, options=_COMPRESSED) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_PART_SCHEMA))
            return bytes(sink.getvalue())

        return lambda: (
            encode_part(slots[begin : begin + PART_ROWS]) for begin in range(0, len(slots), PART_ROWS)
        )

    def add_part(self, data: bytes) -> None:
        """Recovery: add the schedules of a part, none of which exists yet. Raises Arrow's errors for damaged bytes."""
        [batch] = pa.ipc.open_stream(data).read_all().combine_chunks().to_batches()
        text, plan, state, *ints, rest = batch.columns
        # Whole columns at once: a million schedules, row by row, would take seconds of a start.
        slots = range(len(self.state), len(self.state) + batch.num_rows)
        texts_bytes_before = self.texts.size_bytes
        first_text = self.texts.extend(text)
        plans, indexes = self._add_plans(plan.dictionary), np.array(plan.indices)
        self.state.frombytes(np.array(state).tobytes())
        self.text.extend(range(first_text, first_text + len(slots)))
        self.plan.frombytes(plans[indexes].tobytes())
        for column, values in zip(self.ints.values(), ints, strict=True):
            column.frombytes(np.array(values).tobytes())
        self.rest |= {
            slot: value for slot, value in zip(slots, rest.to_pylist(), strict=True) if value is not None
        }
        self.names.extend(slots)
        plan_sizes = np.asarray(pc.binary_length(plan.dictionary))
        self.size_bytes += self.texts.size_bytes - texts_bytes_before
        self.size_bytes += int(plan_sizes[indexes].sum(dtype=np.int64))
        self.size_bytes += len(slots) * limits.SCHEDULE_PROGRESS_BYTES

    # -- inside --------------------------------------------------------------------------------------------------

    def _size(self, slot: int) -> int:
        """Compute the bytes of a schedule, as `size_bytes` counts them."""
        text, plan = self.record(slot)
        return len(text) + len(plan) + limits.SCHEDULE_PROGRESS_BYTES

    def _new_slot(self) -> int:
        """Find an unused slot, or add one to all columns."""
        if self._free:
            return self._free.pop()
        for column in (*self.ints.values(), self.state, self.text, self.plan):
            column.append(0)
        return len(self.state) - 1

    def _plan(self, plan: bytes) -> int:
        """Find the index of a plan in `plans`, or add it. Returns the index."""
        index = self._plan_index.get(plan)
        if index is None:
            # `_plan_index` is bounded. A plan that is no longer in it is stored again, which costs only memory.
            if len(self._plan_index) >= limits.RULES_KEPT:
                self._plan_index.clear()
            index = self._plan_index[plan] = self.plans.append(plan)
        return index

    def _add_plans(self, plans: pa.BinaryArray) -> UintArray:
        """Add the plans of a part. Returns their indexes."""
        if len(plans) > limits.RULES_KEPT // 2:
            # Most plans are different, so a look-up of each would find few, and takes a second for a million.
            first = self.plans.extend(plans)
            return np.arange(first, first + len(plans), dtype=np.uint32)
        return np.array([self._plan(plan) for plan in plans.to_pylist()], np.uint32)

    def _sweep(self) -> None:
        """Remove texts and plans that no schedule has any more, if these are half of the entries or of the bytes."""
        count = max(len(self.texts), len(self.plans))
        size_bytes = max(self.texts.size_bytes, self.plans.size_bytes)
        if count <= 2 * len(self.names) + _SPARE_MIN and size_bytes <= 2 * self.size_bytes + _SPARE_BYTES:
            return
        # Slots stay the same, because `Numbers` and `Names` contain them. Only texts and plans get new indexes.
        slots = np.flatnonzero(np.array(self.state) != FREE)
        text, plan = np.array(self.text), np.array(self.plan)
        # Schedules share plans, so each used plan is taken once.
        used_plans, indexes = np.unique(plan[slots], return_inverse=True)
        texts, plans = Texts(), Texts()
        texts.extend(self.texts.take(text[slots]))
        plans.extend(self.plans.take(used_plans))
        text[slots], plan[slots] = np.arange(len(slots)), indexes
        self.texts, self.plans = texts, plans
        self.text, self.plan = array("I", text.tobytes()), array("I", plan.tobytes())
        self._plan_index = {plans[index]: index for index in range(min(len(plans), limits.RULES_KEPT))}
