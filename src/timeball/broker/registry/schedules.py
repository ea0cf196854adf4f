"""Recurring schedules: the rule and template of each, and its progress, as META rows.

    schedule/<name>      ScheduleFacts: changed by its users
    occurrence/<name>    Progress: in the frame of each row that ends an occurrence

An active schedule has exactly one pending *occurrence*, an ordinary scheduled message. Its successor is in the same
frame as the row that ends it (recurring/successors.py). `Progress.number` says which message that is.

The values stay encoded, because there may be a million schedules and each is read once per occurrence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from timeball.broker.registry.meta import Change, MetaLog
from timeball.broker.registry.topics import check_name
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.time_parsing import LOCAL_TIME
from timeball.model.values import CatchUp

_FACTS, _PROGRESS = "schedule/", "occurrence/"  # prefixes of the keys

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

    @property
    def rule_text(self) -> str:
        """The canonical JSON form of the rule (`Rule.from_text`)."""
        return bytes(self.rule).decode()

    def check(self) -> None:
        """Raise InvalidMessage or OutOfRange for a template or bound that no schedule may have.

        The other rules of messages are those of a send.
        """
        for name in (SCHEDULE, OCCURRENCE, SCHEDULED_MS, LOCAL_TIME):
            if name in self.properties:
                raise InvalidMessage(f"property {name!r}: the broker sets it in each occurrence")
        if len(self.body) > limits.SCHEDULE_BODY_BYTES_MAX:
            raise OutOfRange(f"a body of {len(self.body)} bytes: at most {limits.SCHEDULE_BODY_BYTES_MAX}")
        if len(self.rule) > limits.SCHEDULE_RULE_BYTES_MAX:
            raise OutOfRange(f"a rule of {len(self.rule)} bytes: at most {limits.SCHEDULE_RULE_BYTES_MAX}")
        if not 0 <= self.catch_up_within_ms <= limits.DELAY_MS_MAX:
            raise OutOfRange(f"catch_up_within {self.catch_up_within_ms} ms: 0 to {limits.DELAY_MS_MAX}")


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


# Made once: a start decodes all schedules.
_decode_facts = msgspec.json.Decoder(ScheduleFacts).decode
_decode_progress = msgspec.json.Decoder(Progress).decode


class Entry(NamedTuple):
    """A change of one schedule: its progress before and after, and its new facts, or None to keep them.

    Without `progress` the schedule is deleted.
    """

    name: str
    before: Progress | None
    progress: Progress | None
    facts: ScheduleFacts | None = None


class Schedules:
    """All schedules by name. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta = meta
        # Built from the META values at the first use, which is after the recovery.
        self._index: _Index | None = None
        meta.register("schedule", _Checked(_decode_facts))
        meta.register("occurrence", _Checked(_decode_progress))

    def __len__(self) -> int:
        return len(self._indexed.names)

    @property
    def occurrences(self) -> dict[int, str]:
        """The numbers of all pending occurrences, with the names of their schedules. Updated with each change."""
        return self._indexed.occurrences

    @property
    def size_bytes(self) -> int:
        """The bytes of all rules, templates and progress as a snapshot has them."""
        return self._indexed.size_bytes

    def find(self, name: str) -> tuple[ScheduleFacts, Progress] | None:
        """Find a schedule, or None if there is none of this name."""
        # Decoded for each call: a schedule is read once per occurrence, and decoded objects would take more memory.
        facts = self._meta.values.get(_FACTS + name)
        if facts is None:
            return None
        progress = self._meta.values[_PROGRESS + name]
        return _decode_facts(facts), _decode_progress(progress)

    def get(self, name: str) -> tuple[ScheduleFacts, Progress]:
        """Find a schedule. Raises NotFound."""
        found = self.find(name)
        if found is None:
            raise NotFound(f"no schedule {name[: limits.GROUP_BYTES_MAX]!r}")
        return found

    def names_after(self, name: str) -> Iterator[str]:
        """Yield the names after this one, in order."""
        names = self._indexed.names
        for position in range(bisect_right(names, name), len(names)):
            yield names[position]

    def check_new(self, name: str, facts: ScheduleFacts, known: ScheduleFacts | None) -> None:
        """Raise InvalidName, InvalidMessage, OutOfRange or OverLimit unless the schedule may be put."""
        check_name(name, limits.GROUP_BYTES_MAX, "schedule")
        facts.check()
        if known is None and len(self) >= limits.SCHEDULES_MAX:
            raise OverLimit(f"{limits.SCHEDULES_MAX} schedules exist; delete some first")
        if self.size_bytes + len(msgspec.json.encode(facts)) > limits.SCHEDULES_BYTES_MAX:
            raise OverLimit(f"all schedules have {self.size_bytes} bytes; delete some, or use smaller bodies")

    def changed(self, entries: Sequence[Entry]) -> Change:
        """Build the rows of these changes, for a frame with other rows."""
        values: list[tuple[str, object]] = []
        for name, _, progress, facts in entries:
            if progress is None or facts is not None:
                values.append((_FACTS + name, facts))
            values.append((_PROGRESS + name, progress))
        change = self._meta.changed(values)
        index = self._indexed

        def keep() -> None:
            # The sizes before and after, because a snapshot must fit into a frame.
            sizes = [self._size(key) for key, _ in change.pairs]
            change.keep()
            index.size_bytes += sum(self._size(key) for key, _ in change.pairs) - sum(sizes)
            for entry in entries:
                index.apply(entry)

        return change._replace(keep=keep)

    def _size(self, key: str) -> int:
        value = self._meta.values.get(key)
        return 0 if value is None else len(key) + len(value)

    @property
    def _indexed(self) -> _Index:
        if self._index is None:
            self._index = index = _Index()
            for key, value in self._meta.values.items():
                if key.startswith(_PROGRESS):
                    progress = _decode_progress(value)
                    index.names.append(name := key[len(_PROGRESS) :])
                    if progress.number:
                        index.occurrences[progress.number] = name
                elif not key.startswith(_FACTS):
                    continue
                index.size_bytes += len(key) + len(value)
            # Now and not for the first list, which may be long after the start: a million names take seconds.
            index.names.sort()
        return self._index


class _Index:
    """Data computed from the META values once, and updated with each change."""

    def __init__(self) -> None:
        self.occurrences: dict[int, str] = {}
        self.size_bytes = 0
        self.names: list[str] = []  # sorted

    def apply(self, entry: Entry) -> None:
        """Apply a change."""
        name, before, progress, _ = entry
        if before is not None and before.number:
            del self.occurrences[before.number]
        if progress is not None and progress.number:
            self.occurrences[progress.number] = name
        at = bisect_right(self.names, name)
        if progress is None:
            del self.names[at - 1]
        elif before is None:
            self.names.insert(at, name)


class _Checked:
    """Checks values during the recovery. They are decoded when they are needed."""

    def __init__(self, decode: Callable[[bytes], object]) -> None:
        self._decode = decode

    def restore(self, name: str, value: bytes) -> None:
        """Raise DecodeError for a damaged value, which would otherwise be noticed only when it is due."""
        if value:
            self._decode(value)
