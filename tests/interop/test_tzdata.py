"""Two versions of tzdata with a restart between: local times of all zones keep their wall clock, nothing else moves."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import SRC
from tests.cluster.besieged import served
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import running_cluster
from tests.interop.environments import Missing
from tests.interop.tzdata_broker import broker_with, tzdata

from timeball import Timeball
from timeball.model.time_parsing import VERSION, local_due_ms

pytestmark = pytest.mark.interop

FORMER = "2025.2"
LOCALS = ("2030-01-31T09:00:00", "2030-07-31T09:00:00")
# The winter time of this zone in 2030 differs between the two versions, its summer time does not.
CHANGED = "America/Vancouver"


def due_times(endpoint: str) -> dict[str, int]:
    """Read the due times of all pending messages in ms, by id, page by page."""
    found: dict[str, int] = {}
    page = ""
    while True:
        with urllib.request.urlopen(f"{endpoint}/v1/messages?max=1000{page}", timeout=BOUND_S) as answer:
            document = json.load(answer)
        found |= {message["id"]: message["due_ms"] for message in document["messages"]}
        if (next_page := document.get("next_page")) is None:
            return found
        page = f"&page={next_page}"


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the former version of tzdata."""
    try:
        return tzdata(FORMER)
    except Missing as missing:
        pytest.skip(str(missing))


def test_local_times_of_all_zones_follow_an_update(tmp_path: Path, packages: Path) -> None:
    """Messages and schedules with local times are moved and reported. Messages with instants keep their due times."""
    zones = (packages / "tzdata" / "zones").read_text().split()
    messages = {f"{zone}_{local}": (zone, local) for zone in zones for local in LOCALS}
    data = tmp_path / "data"
    with broker_with(data, packages) as endpoint, Timeball(endpoint) as ball:
        assert ball.schedules.zones().tzdata == FORMER
        rows = [
            {"body": "x", "at": at, "zone": zone, "unique_key": key} for key, (zone, at) in messages.items()
        ]
        ball.send_many(rows, topic="local")
        for number, zone in enumerate(zones):
            rule = {"at": [*LOCALS], "zone": zone}
            ball.schedules.put(f"zone-{number}", rule, topic="local", body="x")
        before = due_times(endpoint)
        ball.send_many(
            [{"body": "x", "due_ms": due, "unique_key": f"instant-{due}"} for due in set(before.values())],
            topic="instants",
        )
        instants = due_times(endpoint).items() - before.items()
    with broker_with(data) as endpoint, Timeball(endpoint) as ball:
        after, shown = due_times(endpoint), ball.schedules.zones()
        schedules = ball.schedules.all()
    assert instants <= after.items() and len(after) == len(before) + len(instants)
    expected = {key: local_due_ms(local, zone)[0] for key, (zone, local) in messages.items()}
    assert {key: after[key] for key in messages} == expected
    moved = {key for key in messages if before[key] != expected[key]}
    assert f"{CHANGED}_{LOCALS[0]}" in moved and f"{CHANGED}_{LOCALS[1]}" not in moved
    next_due_ms = {schedule.name: schedule.next.due_ms for schedule in schedules if schedule.next is not None}
    expected_next_due_ms = {f"zone-{n}": expected[f"{zone}_{LOCALS[0]}"] for n, zone in enumerate(zones)}
    assert next_due_ms == expected_next_due_ms
    assert shown.tzdata == VERSION and shown.update is not None
    assert (shown.update.former, shown.update.tzdata) == (FORMER, VERSION)
    reported = {(each.zone, each.before_ms, each.after_ms): each for each in shown.update.moved}
    assert sum(each.messages for each in shown.update.moved) == len(moved)
    moved_schedules = [zone for zone in zones if f"{zone}_{LOCALS[0]}" in moved]
    assert sum(each.schedules for each in shown.update.moved) == len(moved_schedules)
    changed_key = f"{CHANGED}_{LOCALS[0]}"
    assert reported[CHANGED, before[changed_key], after[changed_key]].messages == 1
    # After another start with the same version, nothing is moved.
    with broker_with(data) as endpoint, Timeball(endpoint) as ball:
        assert (due_times(endpoint), ball.schedules.zones()) == (after, shown)


@pytest.mark.xdist_group("etcd")
def test_the_tzdata_of_the_leader_applies_to_the_whole_cluster(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_etcd()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(SRC)]))
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        leader = cluster.leader()
        with leader.client(timeout_ms=BOUND_S * 1_000) as ball:
            sent = ball.send("local", "x", at=LOCALS[0], zone=CHANGED, message_id="moving")
            ball.send("local", "x", at=LOCALS[0], zone="Europe/Berlin", message_id="other")
            other_ms = ball.get("other").due_ms
            ball.schedules.put("nine", {"at": [LOCALS[0]], "zone": CHANGED}, topic="local", body="x")
        assert sent.due_ms is not None
        for node in cluster.nodes.values():
            node.environment = {"PYTHONPATH": str(SRC)}
            if node is not leader:
                node.kill(signal.SIGTERM)
                node.start()
        epoch = served(leader)
        leader.kill(signal.SIGTERM)
        successor = cluster.leader(epoch)
        assert successor is not leader
        with successor.client(timeout_ms=BOUND_S * 1_000) as ball:
            moved_ms = local_due_ms(LOCALS[0], CHANGED)[0]
            assert moved_ms != sent.due_ms
            assert (ball.get("moving").due_ms, ball.get("other").due_ms) == (moved_ms, other_ms)
            (schedule,) = ball.schedules.all()
            assert schedule.next is not None and schedule.next.due_ms == moved_ms
            shown = ball.schedules.zones()
            assert shown.update is not None and shown.tzdata == VERSION
            (moved,) = shown.update.moved
            assert (moved.zone, moved.messages, moved.schedules) == (CHANGED, 1, 1)
