"""Recurring schedules: the rule and template of each, and its progress, as META rows.

    schedule/<name>      ScheduleFacts: changed by its users
    occurrence/<name>    Progress: in the frame of each row that ends an occurrence
    schedules/<n>        a part of all schedules, only in snapshots

An active schedule has exactly one pending *occurrence*, an ordinary scheduled message. Its successor is in the same
frame as the row that ends it (recurring/successors.py). `Progress.number` says which message that is.

In memory the schedules are columns (schedule_columns.py). Objects are built for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.registry.meta import Change, MetaLog, Values
from timeball.broker.registry.schedule_columns import INT_COLUMNS, Numbers, Planned, ScheduleColumns
from timeball.broker.registry.topics import check_name
from timeball.broker.registry.zones import zone_of_rule
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.message import Int64Array, Kind, build_rows
from timeball.model.send_options import EXPIRY_NAMES, ON_PENDING, check_expiry
from timeball.model.send_options import UNIQUE_KEY as UNIQUE_KEY_PROPERTY
from timeball.model.time_parsing import LOCAL_TIME
from timeball.model.values import CatchUp, Overlap

_FACTS, _PROGRESS, _PARTS = "schedule", "occurrence", "schedules"  # prefixes of the keys

# Properties that each occurrence has, so a template may not have them.
SCHEDULE, OCCURRENCE, SCHEDULED_MS = "schedule", "occurrence", "scheduled_ms"


class ScheduleFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rule of a schedule, and the template of its messages. `rule` is the canonical JSON form of the rule."""

    rule: msgspec.Raw
    topic: str
    body: bytes
    tag: str | None = None
    keys: str | None = None
    properties: dict[str, str] = {}
    catch_up: CatchUp = "latest"
    catch_up_within_ms: int = limits.DAY_MS
    overlap: Overlap = "allow"
    group: str = ""  # with `skip`: it must have finished the previous occurrence

    @property
    def rule_text(self) -> str:
        """The canonical JSON form of the rule (`Rule.from_text`)."""
        return bytes(self.rule).decode()

    def check(self) -> None:
        """Raise InvalidMessage, InvalidDelay or OutOfRange for a template or bound that no schedule may have.

        The other rules of messages are those of a send.
        """
        for name in (SCHEDULE, OCCURRENCE, SCHEDULED_MS, LOCAL_TIME):
            if name in self.properties:
                raise InvalidMessage(f"property {name!r}: the broker sets it in each occurrence")
        for name in (UNIQUE_KEY_PROPERTY, ON_PENDING):
            if name in self.properties:
                raise InvalidMessage(f"property {name!r}: the messages of a schedule have no unique key")
        if not EXPIRY_NAMES.isdisjoint(self.properties):
            check_expiry(self.properties)
        if len(self.body) > limits.SCHEDULE_BODY_BYTES_MAX:
            raise OutOfRange(f"a body of {len(self.body)} bytes: at most {limits.SCHEDULE_BODY_BYTES_MAX}")
        if len(self.rule) > limits.SCHEDULE_RULE_BYTES_MAX:
            raise OutOfRange(f"a rule of {len(self.rule)} bytes: at most {limits.SCHEDULE_RULE_BYTES_MAX}")
        if not 0 <= self.catch_up_within_ms <= limits.DELAY_MS_MAX:
            raise OutOfRange(f"catch_up_within {self.catch_up_within_ms} ms: 0 to {limits.DELAY_MS_MAX}")
        if (self.overlap == "skip") != bool(self.group):
            raise InvalidMessage(
                "overlap skip needs the group that must have finished, and only skip has a group"
            )
        if self.group:
            check_name(self.group, limits.GROUP_BYTES_MAX, "group")


class State(IntEnum):
    """The state of a schedule. Values are on disk: never reuse one."""

    ACTIVE = 0
    PAUSED = 1
    ENDED = 2  # the rule has no further occurrence
    FAILED = 3  # the rule cannot be evaluated; `Progress.error` has the reason


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a schedule. Times in ms since 1970."""

    state: State
    # The next occurrence is later than this time: the last one that was released, skipped or cancelled.
    after_ms: int
    # The pending occurrence of an active schedule: its number, its time, and when it was appended. Otherwise 0.
    number: int = 0
    due_ms: int = 0
    at_ms: int = 0
    # Releases so far, without `run`: their number, and of the last one the time of the rule and of the release.
    runs: int = 0
    last_due_ms: int = 0
    last_ms: int = 0
    error: str = ""
    # The queue position of the last release, if the schedule skips occurrences that overlap. Otherwise -1, also if a
    # selection has moved it to another topic.
    last_queue: int = -1
    last_offset: int = -1


class _Plan(msgspec.Struct, array_like=True):
    """The part of the facts that schedules often share."""

    rule: bytes
    catch_up: CatchUp
    catch_up_within_ms: int
    group: str


class Template(msgspec.Struct, array_like=True):
    """The message of a schedule."""

    topic: str
    body: bytes
    tag: str | None
    keys: str | None
    properties: dict[str, str]


class _Topic(msgspec.Struct, array_like=True):
    """The beginning of a template. The rest is not decoded."""

    topic: str


class _Rest(msgspec.Struct, array_like=True):
    """Values of the progress that few schedules have."""

    error: str
    last_queue: int
    last_offset: int


# Made once: a start decodes many.
_decode_facts = msgspec.json.Decoder(ScheduleFacts).decode
_decode_progress = msgspec.json.Decoder(Progress).decode
_decode_part = msgspec.json.Decoder(bytes).decode
_decode_plan = msgspec.msgpack.Decoder(_Plan).decode
_decode_template = msgspec.msgpack.Decoder(Template).decode
_decode_rest = msgspec.msgpack.Decoder(_Rest).decode
_decode_topic = msgspec.msgpack.Decoder(_Topic).decode
_encode_json, _encode = msgspec.json.Encoder().encode, msgspec.msgpack.Encoder().encode
_NO_POSITION = b",-1,-1]"


_STATES = tuple(State)
Bools = npt.NDArray[np.bool_]


def _encode_facts(facts: ScheduleFacts) -> tuple[bytes, bytes]:
    """Encode facts for the columns. Returns (template, plan)."""
    template = Template(facts.topic, facts.body, facts.tag, facts.keys, facts.properties)
    plan = _Plan(bytes(facts.rule), facts.catch_up, facts.catch_up_within_ms, facts.group)
    return _encode(template), _encode(plan)


def topic_of(text: bytes) -> str:
    """Read the topic in a text of the columns."""
    return _decode_topic(text.partition(b"\0")[2]).topic


def rule_of(plan: bytes) -> str:
    """Read the canonical JSON form of the rule in a plan of the columns."""
    return _decode_plan(plan).rule.decode()


def _facts(plan_text: bytes, template: Template) -> ScheduleFacts:
    """Build facts from a plan of the columns and a template."""
    plan = _decode_plan(plan_text)
    return ScheduleFacts(
        rule=msgspec.Raw(plan.rule), topic=template.topic, body=template.body, tag=template.tag,
        keys=template.keys, properties=template.properties, catch_up=plan.catch_up,
        catch_up_within_ms=plan.catch_up_within_ms, overlap="skip" if plan.group else "allow", group=plan.group,
    )  # fmt: skip


def encode_progress(progress: Progress) -> bytes:
    """Encode the value of a META row. It has no position if the schedule needs none."""
    value = _encode_json(progress)
    # Most schedules have none, and a row for each release should be short.
    return value[: -len(_NO_POSITION)] + b"]" if value.endswith(_NO_POSITION) else value


class Entry(NamedTuple):
    """A change of one schedule: its new progress, or None to delete it, and its new facts, or None to keep them.

    `slot`: its slot in the columns, or None if the caller does not know it.
    """

    name: str
    progress: Progress | None
    facts: ScheduleFacts | None = None
    slot: int | None = None


class Schedule(NamedTuple):
    """A schedule: its rule and template, and its progress."""

    facts: ScheduleFacts
    progress: Progress


class Stored(NamedTuple):
    """A schedule with its name and plan. Schedules with the same `plan` have the same rule and policies."""

    name: str
    facts: ScheduleFacts
    progress: Progress
    plan: int  # index of its plan in the columns


class Many(NamedTuple):
    """Many schedules, as parallel columns."""

    slots: Int64Array
    names: list[str]
    plan: list[int]  # as in `Stored`
    templates: list[Template]
    due_ms: Int64Array  # of the pending occurrences
    runs: Int64Array

    def at(self, index: Int64Array) -> Many:
        """Select the schedules at these indexes."""
        indexes = index.tolist()
        names, plan, templates = (
            [column[position] for position in indexes] for column in (self.names, self.plan, self.templates)
        )
        return Many(self.slots[index], names, plan, templates, self.due_ms[index], self.runs[index])


class Schedules:
    """All schedules by name. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta, self._columns = meta, ScheduleColumns()
        meta.register(_FACTS, _Restoring(self._restore_facts), holds=self)
        meta.register(_PROGRESS, _Restoring(self._restore_progress), holds=self)
        meta.register(_PARTS, _Restoring(self._restore_part), holds=self)

    def __len__(self) -> int:
        return len(self._columns.names)

    @property
    def occurrences(self) -> Numbers:
        """The pending occurrences, by the numbers of their messages. Updated with each change."""
        return self._columns.numbers

    @property
    def size_bytes(self) -> int:
        """The bytes of all rules, templates and progress, about as a snapshot has them."""
        return self._columns.size_bytes

    def find(self, name: str) -> Schedule | None:
        """Find a schedule, or None if there is none of this name."""
        slot = self._columns.names.find(name)
        if slot is None:
            return None
        [stored] = self.at(np.array([slot]))
        return Schedule(stored.facts, stored.progress)

    def get(self, name: str) -> Schedule:
        """Find a schedule. Raises NotFound."""
        schedule = self.find(name)
        if schedule is None:
            raise NotFound(f"no schedule {name[: limits.GROUP_BYTES_MAX]!r}")
        return schedule

    def planned(self) -> Planned:
        """Copy the data from which the later occurrences of all schedules follow (`topic_of`, `rule_of`).

        Another thread may read it.
        """
        return self._columns.planned()

    def name_of(self, number: int) -> str:
        """Find the name of the schedule whose pending occurrence has this number. There must be one."""
        slot = self.occurrences.slot(number)
        assert slot is not None, "a pending occurrence"
        return self._columns.name(slot)

    def at(self, slots: Int64Array) -> list[Stored]:
        """Read the schedules in these slots."""
        columns, schedules = self._columns, list[Stored]()
        decoded: dict[tuple[int, bytes], ScheduleFacts] = {}  # schedules often differ only in their names
        for slot, row in zip(slots.tolist(), columns.progress(slots), strict=True):
            state, after_ms, number, due_ms, at_ms, runs, last_due_ms, last_ms = row
            text, plan = columns.texts[columns.text[slot]], columns.plan[slot]
            # A name contains no zero byte, but a template may.
            name, _, template = text.partition(b"\0")
            # The bytes are the key, because decoding them takes longer than a look-up.
            facts = decoded.get((plan, template))
            if facts is None:
                facts = decoded[plan, template] = _facts(columns.plans[plan], _decode_template(template))
            progress = Progress(_STATES[state], after_ms, number, due_ms, at_ms, runs, last_due_ms, last_ms)
            # Few schedules have these values, so they are no columns.
            if rest := columns.rest.get(slot):
                more = _decode_rest(rest)
                progress = msgspec.structs.replace(
                    progress, error=more.error, last_queue=more.last_queue, last_offset=more.last_offset
                )
            schedules.append(Stored(name.decode(), facts, progress, plan))
        return schedules

    def slots_by_zone(self) -> dict[str, Int64Array]:
        """Find the slots of the schedules with a pending occurrence, by the zone of their rules."""
        columns = self._columns
        slots = self.occurrences.slots(self.occurrences.all())
        plans, index_of = np.unique(np.array(columns.plan)[slots], return_inverse=True)
        zones = np.array([zone_of_rule(_decode_plan(columns.plans[plan]).rule) for plan in plans], object)
        slot_zones = zones[index_of]
        return {zone: slots[slot_zones == zone] for zone in set(zones.tolist())}

    def many_at(self, slots: Int64Array) -> Many:
        """Read the schedules in these slots, as columns."""
        columns, decoded = self._columns, dict[bytes, Template]()
        names, templates = list[str](), list[Template]()
        for text in columns.texts.take(np.frombuffer(columns.text, np.uint32)[slots]).to_pylist():
            name, _, encoded = text.partition(b"\0")
            template = decoded.get(encoded)
            if template is None:
                template = decoded[encoded] = _decode_template(encoded)
            names.append(name.decode())
            templates.append(template)
        due_ms, runs = (np.frombuffer(columns.ints[name], np.int64)[slots] for name in ("due_ms", "runs"))
        plan = np.frombuffer(columns.plan, np.uint32)[slots].tolist()
        return Many(slots, names, plan, templates, due_ms, runs)

    def facts_of(self, plan: int, template: Template) -> ScheduleFacts:
        """Build the facts of a schedule from its plan and its template."""
        return _facts(self._columns.plans[plan], template)

    def has_rest(self, slots: Int64Array) -> Bools:
        """Compute a mask of the schedules with values that are no columns: an error, or a queue position."""
        rest = self._columns.rest
        return np.array([slot in rest for slot in slots.tolist()] if rest else np.zeros(len(slots)), np.bool_)

    def released(
        self, many: Many, due_ms: Int64Array, first_seq: int, now_ms: int
    ) -> tuple[pa.RecordBatch, Callable[[], None]]:
        """Build the META rows (LOG_SCHEMA) for the release of the pending occurrences of these schedules.

        The next occurrences, with the numbers from `first_seq` on, are due at `due_ms`. No schedule has a rest
        (`has_rest`). Also returns the function that changes the progress in memory, to be called after the append.
        """
        count = len(many.slots)
        after, number, due, runs = (
            pc.cast(pa.array(column), pa.string())
            for column in (many.due_ms, first_seq + np.arange(count), due_ms, many.runs + 1)
        )
        # The JSON that `encode_progress` would build, in whole columns.
        value = pc.binary_join_element_wise(
            "[0,", after, ",", number, ",", due, f",{now_ms},", runs, ",", after, f',{now_ms},""]', ""
        )
        rows = build_rows(
            count, kind=int(Kind.META), unique_key=pc.binary_join_element_wise(_PROGRESS, pa.array(many.names), "/"),
            body=value.cast(pa.binary()), store_ms=self._meta.now_ms(),
        )  # fmt: skip

        def apply() -> None:
            """Change the progress in memory, in whole columns."""
            values: dict[str, Int64Array | int] = {
                "after_ms": many.due_ms, "number": first_seq + np.arange(count), "due_ms": due_ms, "at_ms": now_ms,
                "runs": many.runs + 1, "last_due_ms": many.due_ms, "last_ms": now_ms,
            }  # fmt: skip
            progress = np.empty((count, 1 + len(INT_COLUMNS)), np.int64)
            progress[:, 0] = State.ACTIVE
            for index, name in enumerate(INT_COLUMNS, 1):
                progress[:, index] = values[name]
            self._columns.set_progress(many.slots, progress, ())

        return rows, apply

    def names_after(self, name: str) -> Iterator[str]:
        """Yield the names of the schedules after this name, in order."""
        return map(self._columns.name, self._columns.names.after(name))

    def check_new(self, name: str, facts: ScheduleFacts, previous: ScheduleFacts | None) -> None:
        """Raise InvalidName, InvalidMessage, InvalidDelay, OutOfRange or OverLimit unless the schedule may be put.

        `previous`: the facts that it replaces, None for a new schedule.
        """
        check_name(name, limits.GROUP_BYTES_MAX, "schedule")
        facts.check()
        if previous is None and len(self) >= limits.SCHEDULES_MAX:
            raise OverLimit(f"{limits.SCHEDULES_MAX} schedules exist; delete some first")
        if self.size_bytes + sum(map(len, _encode_facts(facts))) > limits.SCHEDULES_BYTES_MAX:
            raise OverLimit(f"all schedules have {self.size_bytes} bytes; delete some, or use smaller bodies")

    def build_change(self, entries: Sequence[Entry]) -> Change:
        """Build the rows of these changes, for a frame with other rows."""
        pairs: list[tuple[str, bytes]] = []
        for entry in entries:
            name, progress, facts = entry.name, entry.progress, entry.facts
            if progress is None or facts is not None:
                pairs.append((f"{_FACTS}/{name}", b"" if facts is None else _encode_json(facts)))
            pairs.append((f"{_PROGRESS}/{name}", b"" if progress is None else encode_progress(progress)))

        def apply() -> None:
            """Apply the changes in memory."""
            # All progress at the end, together, so that a release changes whole columns.
            slots, new_progress = list[int](), list[Progress]()
            for name, progress, facts, entry_slot in entries:
                if progress is None:
                    self._columns.remove(name)
                    continue
                slot = entry_slot if facts is None else self._put(name, facts)
                slot = self._columns.names.find(name) if slot is None else slot
                assert slot is not None, "the schedule exists, or the entry has its facts"
                slots.append(slot)
                new_progress.append(progress)
            self._set(slots, new_progress)

        return Change(pairs, self._meta.now_ms(), apply)

    def copied(self) -> Callable[[], Values]:
        """Copy all schedules. Another thread may call the result, which encodes the values for a snapshot."""
        # The parts are encoded one by one, so that they are not all in memory twice.
        parts = self._columns.copied()
        return lambda: ((f"{_PARTS}/{number}", _encode_json(part)) for number, part in enumerate(parts()))

    # -- inside --------------------------------------------------------------------------------------------------

    def _put(self, name: str, facts: ScheduleFacts) -> int:
        """Add a schedule, or replace its facts. Returns its slot in the columns."""
        return self._columns.put(name, *_encode_facts(facts))

    def _set(self, slots: Sequence[int], progress: Sequence[Progress]) -> None:
        """Set the progress of the schedules in these slots."""
        rows = [
            (each.state, each.after_ms, each.number, each.due_ms, each.at_ms, each.runs, each.last_due_ms, each.last_ms)
            for each in progress
        ]  # fmt: skip
        rests = [
            _encode(_Rest(each.error, each.last_queue, each.last_offset))
            if each.error or each.last_queue >= 0
            else b""
            for each in progress
        ]
        self._columns.set_progress(slots, rows, rests)

    def _restore_facts(self, name: str, value: bytes) -> None:
        """Recovery: apply a row with the facts of a schedule. An empty value deletes the schedule."""
        if value:
            self._put(name, _decode_facts(value))
        else:
            self._columns.remove(name)

    def _restore_progress(self, name: str, value: bytes) -> None:
        """Recovery: apply a row with the progress of a schedule."""
        if value:
            progress, slot = _decode_progress(value), self._columns.names.find(name)
            # Without facts, the schedule was deleted.
            if slot is not None:
                self._set([slot], [progress])

    def _restore_part(self, _: str, value: bytes) -> None:
        """Recovery: add the schedules of a part of a snapshot. Raises msgspec.DecodeError for damaged bytes."""
        try:
            self._columns.add_part(_decode_part(value))
        except (pa.ArrowException, ValueError) as error:
            # `MetaLog.restore` reports damaged values by this error.
            raise msgspec.DecodeError(str(error)) from error


class _Restoring:
    """Passes the values of one prefix to a function during a recovery."""

    def __init__(self, apply: Callable[[str, bytes], None]) -> None:
        self.restore = apply
