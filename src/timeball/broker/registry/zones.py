"""The time zones in use, as one META row: the rules by which due times were computed from local times.

    zones/used    ZoneFacts

A zone is *in use* while a message with a local time (`LOCAL_TIME`) or a schedule may need its rules. It is recorded
before its first message, in the same commit. So a start with other rules knows whether any due time may have changed,
without reading a message (pending/zone_updates.py).
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits, time_parsing
from timeball.model.message import decode_properties
from timeball.model.time_parsing import LOCAL_TIME, rules_hash, stored_local_time

UTC = "UTC"  # its rules never change, so it is not recorded
_NAME = "used"
# `until_ms` is rounded up, so that it is written a few times a year and zone, and not with each message.
_STEP_MS = 90 * limits.DAY_MS
LOCAL_TIME_BYTES = LOCAL_TIME.encode()


class ZoneUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A zone in use. `rules`: the hash of its rules. `until_ms`: no message in it was due later, 0 without messages."""

    rules: str
    until_ms: int = 0


class ZoneMoves(msgspec.Struct, frozen=True, omit_defaults=True):
    """The messages and occurrences of a zone that an update of the rules moved by the same distance."""

    zone: str
    before_ms: int  # the due time of the first one before the update
    after_ms: int  # and after it
    messages: int = 0  # number of messages
    schedules: int = 0  # number of occurrences


class ZoneUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the rules: the versions of tzdata before and after, its time, and its moves."""

    before: str  # "" if it is not known
    after: str
    at_ms: int
    moved: list[ZoneMoves] = []


class ZoneFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of the META row. All due times agree with the rules of `tzdata`, except during an update."""

    tzdata: str
    zones: dict[str, ZoneUse] = {}
    # The last update. It is not finished if its `after` differs from `tzdata`.
    update: ZoneUpdate | None = None


class _Rule(msgspec.Struct):
    """The zone in the JSON form of a rule. Its other fields are ignored."""

    zone: str = UTC


_decode_rule = msgspec.json.Decoder(_Rule).decode


def zone_of_rule(rule: bytes) -> str:
    """Read the zone of a recurring rule in its canonical form. UTC if it has none."""
    return _decode_rule(rule).zone


class Zones:
    """The zones in use. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "zones", ZoneFacts)

    @property
    def facts(self) -> ZoneFacts | None:
        """The recorded state. None if no local time was ever used."""
        return self._table.values.get(_NAME)

    def use(self, zone: str, due_ms: int = 0) -> None:
        """Record that a zone is in use, by a message due at `due_ms`, or by a schedule (0).

        Appends nothing if the record already says so. UTC and names that are no zones are ignored.
        """
        facts = self.facts or ZoneFacts(tzdata=time_parsing.VERSION)
        recorded = facts.zones.get(zone)
        if zone == UTC or (recorded is not None and due_ms <= recorded.until_ms):
            return
        until_ms = -(-due_ms // _STEP_MS) * _STEP_MS  # rounded up
        # A recorded hash stays until an update has moved the messages that were sent by these rules.
        rules = rules_hash(zone) if recorded is None else recorded.rules
        if rules:
            zones = facts.zones | {zone: ZoneUse(rules, until_ms)}
            self._table.put([(_NAME, msgspec.structs.replace(facts, zones=zones))])

    def use_in(self, rows: pa.RecordBatch) -> None:
        """Record the zones of the scheduled messages with a local time among these rows of LOG_SCHEMA."""
        properties = rows.column("properties")
        if properties.null_count == len(properties):
            return
        has_local_time = pc.match_substring(properties, LOCAL_TIME)
        # Few batches contain a local time, so nothing is decoded before this check.
        if not pc.any(has_local_time).as_py():
            return
        rows = rows.filter(pc.and_(has_local_time, rows.column("due_ms").is_valid()))
        for text, due_ms in zip(
            rows.column("properties").to_pylist(), rows.column("due_ms").to_pylist(), strict=True
        ):
            _, zone = stored_local_time(decode_properties(text).get(LOCAL_TIME, ""))
            self.use(zone, due_ms)

    def build_change(self, facts: ZoneFacts) -> Change:
        """Build the row of a new state, for a frame with other rows."""
        return self._table.build_change([(_NAME, facts)])
