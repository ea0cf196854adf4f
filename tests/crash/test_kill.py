"""kill -9 of a real broker, repeatedly, with real clients: no acknowledged message is lost, early or doubled.

The page cache survives a killed process, so this does not test syncs (test_every_call.py does). It tests the whole
program with its sockets, threads and start. KILL_SEED selects other moments.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.crash.checker import Sent
from tests.crash.siege import CLOCK, Siege
from tests.crash.world import HOUR_MS
from tests.rounds import rounds

KEEPERS = ["timer_wheel", "level_cascade"]
SEED = int(os.environ.get("KILL_SEED", "1"))


def kill_under_load(
    data: Path, seed: int, kills: int, schedule: str = "hour_log", last_schedule: str = "hour_log"
) -> None:
    """Kill a broker so many times while clients work, and check that no message is lost or doubled."""
    with Siege(data, seed, schedule=schedule) as siege:
        siege.clients()
        for _ in range(kills):
            siege.kill()
        # Work that was never done cannot have been damaged: each kind of work is done once before the last kill.
        events = ["acknowledged", "levels", "seen", "cancelled", "rescheduled", "committed"]
        events += ["compacted"] if schedule == "hour_log" else []
        siege.until(lambda: all(siege.counts[event] for event in events), f"each of {events}")
        faults = siege.faults(last_schedule)
    lines = "\n  ".join(f"{fault.kind}: {fault.text}" for fault in faults[:20])
    print(siege)
    assert not faults, f"{len(faults)} faults after {siege}\nmoments {siege.moments}:\n  {lines}"
    assert kills < 5 or siege.counts["unavailable"], f"no answer was lost: {siege}"


def test_some_kills_lose_nothing(tmp_path: Path) -> None:
    kill_under_load(tmp_path / "data", SEED, 2)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("schedule", KEEPERS)
def test_some_kills_of_another_strategy_lose_nothing(tmp_path: Path, schedule: str) -> None:
    kill_under_load(tmp_path / "data", SEED, rounds(2, 6), schedule, last_schedule=schedule)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("schedule", KEEPERS)
def test_a_change_of_the_strategy_after_some_kills_loses_nothing(tmp_path: Path, schedule: str) -> None:
    kill_under_load(tmp_path / "data", SEED + 2, rounds(2, 5), schedule)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    kill_under_load(tmp_path / "data", SEED + 1, rounds(4, 30))


# ---- control: a log that loses an acknowledged row must be noticed --------------------------------------------

QUIET = {"checkpoint-interval-ms": "1h", "segment-bytes": "1MiB", "compact-rows": "1000000"}


def lose_tail(data: Path) -> None:
    """Tear the last frame of the log, as if its write had never finished."""
    newest = max(path for path in (data / "log").glob("*.log") if path.read_bytes().strip(b"\0"))
    content = newest.read_bytes().rstrip(b"\0")
    with newest.open("r+b") as file:
        file.seek(len(content) - 20)
        file.write(bytes(20))


@pytest.mark.parametrize(
    "is_lost", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tail lost", "tail kept"]
)
def test_a_log_that_loses_its_acknowledged_tail_is_noticed(tmp_path: Path, is_lost: bool) -> None:
    with Siege(tmp_path / "data", SEED, QUIET) as siege:
        with siege.broker.client() as ball:
            for _ in range(10):
                sent: list[Sent] = siege.ask("a", [CLOCK.wall_ms() + HOUR_MS])
                ball.send("a", sent[0].body, at=sent[0].due_ms, message_id=sent[0].key)
                siege.ended(sent, acked=True)
        siege.broker.kill()
        if is_lost:
            lose_tail(tmp_path / "data")
        assert siege.broker.start()
        faults = siege.faults()
    assert [fault.kind for fault in faults] == (["lost"] if is_lost else [])
    assert not is_lost or sent[0].key in faults[0].text
