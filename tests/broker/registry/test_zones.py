"""The zones in use: recorded once per zone and 90 days of due times, with the hash of their rules."""

from __future__ import annotations

import pyarrow as pa
import pytest

from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.zones import Zones, ZoneUse, zone_of_rule
from timeball.model import limits
from timeball.model.message import build_rows
from timeball.model.time_parsing import LOCAL_TIME, VERSION, rules_hash

STEP_MS = 90 * limits.DAY_MS


@pytest.fixture
def rows() -> list[pa.RecordBatch]:
    """The rows that the registry has appended."""
    return []


@pytest.fixture
def zones(rows: list[pa.RecordBatch]) -> Zones:
    meta = MetaLog()
    made = Zones(meta)
    meta.open(rows.append, lambda: 5)
    return made


def test_a_zone_is_recorded_once_and_again_for_much_later_messages(
    zones: Zones, rows: list[pa.RecordBatch]
) -> None:
    assert zones.facts is None
    zones.use("Europe/Berlin", STEP_MS + 1)
    assert zones.facts is not None and zones.facts.tzdata == VERSION
    recorded = ZoneUse(rules_hash("Europe/Berlin"), 2 * STEP_MS)
    assert zones.facts.zones == {"Europe/Berlin": recorded} and len(recorded.rules) == 8
    zones.use("Europe/Berlin", 2 * STEP_MS)
    zones.use("Europe/Berlin")
    assert len(rows) == 1
    zones.use("Europe/Berlin", 2 * STEP_MS + 1)
    zones.use("Asia/Tokyo")
    assert len(rows) == 3
    assert zones.facts.zones == {
        "Europe/Berlin": ZoneUse(recorded.rules, 3 * STEP_MS), "Asia/Tokyo": ZoneUse(rules_hash("Asia/Tokyo")),
    }  # fmt: skip


def test_utc_and_names_of_no_zones_are_not_recorded(zones: Zones, rows: list[pa.RecordBatch]) -> None:
    for name in ("UTC", "CEST", "", "../zones"):
        zones.use(name, 1)
    assert rows == [] and zones.facts is None


def test_only_scheduled_messages_with_a_local_time_record_a_zone(zones: Zones) -> None:
    stored = f"{LOCAL_TIME}\x012030-01-31T09:00:00 "
    batch = build_rows(
        4,
        properties=[None, "a\x01b\x02", f"{stored}Asia/Tokyo\x02", f"{stored}Europe/Berlin\x02"],
        due_ms=[1, 1, 1, None],
    )
    zones.use_in(batch)
    assert zones.facts is not None and list(zones.facts.zones) == ["Asia/Tokyo"]
    zones.use_in(batch.slice(0, 0))


def test_the_zone_of_a_rule_is_utc_if_it_names_none() -> None:
    assert zone_of_rule(b'{"cron":"@daily","zone":"Asia/Tokyo"}') == "Asia/Tokyo"
    assert zone_of_rule(b'{"every":"15m"}') == "UTC"
