"""kill -9 of a bulk write, of the commands on its campaign, and of the broker under them: the books balance.

Every command is a process of its own, killed at a moment that is drawn from a seed: when a file of its work is seen, or
after a part of the time that it takes. Then it is given again. KILL_SEED makes other moments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.cli.processes import COMMAND, environment, timeball
from tests.crash.siege import CLOCK, Siege
from tests.rounds import only_in_a_siege
from tests.spark import bulk_campaign
from tests.spark.campaigning import attach, released, waiting
from tests.spark.test_kill_spark import kill_tree

from timeball.model.limits import HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit
from timeball.spark.jobs.campaign import Campaign

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("KILL_SEED", "1"))
BOUND_S = 240
QUIET = {"compact-rows": "1000000"}
ROWS = 20_000
BAD = ROWS // bulk_campaign.REJECT_EVERY


def eventually(true: Callable[[], object], what: str) -> None:
    pause, begin_ns = threading.Event(), CLOCK.monotonic_ns()
    while not true():
        assert CLOCK.monotonic_ns() - begin_ns < BOUND_S * 1e9, f"did not happen in {BOUND_S} s: {what}"
        pause.wait(0.002)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process, which is killed when the block ends."""
    child = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        kill_tree(child.pid)
        child.wait(BOUND_S)


def files_below(folder: Path, pattern: str) -> int:
    return len(list(folder.rglob(pattern))) if folder.is_dir() else 0


def balances(spark: SparkSession, endpoint: str) -> audit.AuditReport:
    report = audit.run(spark, endpoint)
    assert report.ok, report
    return report


# ---- bulk -----------------------------------------------------------------------------------------------------


@pytest.mark.siege
@only_in_a_siege
def test_bulk_job_killed_at_any_step_schedules_its_rows_once(tmp_path: Path, spark: SparkSession) -> None:
    data = tmp_path / "data"
    with Siege(data, SEED, QUIET) as siege, Endpoint(siege.broker.endpoint) as broker:
        endpoint, rng = siege.broker.endpoint, np.random.default_rng(SEED)
        due_ms = broker.status().now_ms + 2 * HOUR_MS
        command = [sys.executable, bulk_campaign.__file__, endpoint, "spring", str(ROWS), str(due_ms)]

        def killed_when(true: Callable[[], object], what: str, *, broker_too: bool = False) -> None:
            """Start the command and kill it once `true` returns a true value. `what`: for the error texts."""
            with process(*command) as running:
                eventually(lambda: true() or running.poll() is not None, what)
                assert running.poll() is None, f"it ended before it was killed: {what}"
                if broker_too:
                    siege.strike()

        def version() -> int:
            return broker.status().table.version

        empty = version()
        early: list[tuple[Callable[[], object], str]] = [
            (lambda: broker.campaigns() != [], "planned"),
            (lambda: files_below(data / "rejects", "*.parquet"), "rejects written"),
        ]
        for true, what in early:
            killed_when(true, what)
        some = int(rng.integers(1, 10))
        killed_when(
            lambda: files_below(data / "pending", "*.parquet") >= some, f"{some} files", broker_too=True
        )
        assert version() == empty
        killed_when(lambda: version() > empty, "attached")
        with process(*command) as running:
            assert running.wait(BOUND_S) == 0
        assert version() == empty + 1
        assert sorted(waiting(broker)) == sorted(
            f"k{n}" for n in range(ROWS) if n % bulk_campaign.REJECT_EVERY
        )
        assert len(DeltaTable(str(data / "rejects")).to_pyarrow_table()) == BAD
        assert Campaign(broker, "spring").read_state().state == "running"
        report = balances(spark, endpoint)
        assert (report.accepted, report.pending) == (ROWS - BAD, ROWS - BAD)


# ---- campaigns ------------------------------------------------------------------------------------------------


class Books:
    """The progress of one campaign, observed from outside its commands."""

    def __init__(self, siege: Siege) -> None:
        self.siege = siege
        self.rng = np.random.default_rng(SEED)
        self.moments: list[str] = []
        self.cut = 0  # commands that were at work when they were killed
        self.undone = 0  # of these, those after which the campaign was what it had been

    def status(self) -> dict[str, object]:
        """Read the progress of the campaign. Checks that its parts add up to its rows."""
        done = timeball("campaign", "status", "spring", "--json", "--endpoint", self.siege.broker.endpoint)
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        parts = [result[name] for name in ("released", "cancelled", "waiting", "held")]
        assert result["rows"] == sum(parts), (result, self.moments)
        return result

    def killed(self, act: str, *, broker_too: bool) -> None:
        """Run the command, and kill it at a drawn moment after its process has begun to work, or let it end before."""
        wait_s, before = float(self.rng.uniform(0, 1.5)), self.status()["state"]
        self.moments.append(f"{act} after {wait_s:.3f} s{', and the broker' if broker_too else ''}")
        command = [*COMMAND, "campaign", act, "spring", "--endpoint", self.siege.broker.endpoint]
        with process(*command) as running:
            threading.Event().wait(wait_s)
            self.cut += running.poll() is None
            if broker_too:
                self.siege.strike()
        self.undone += self.status()["state"] == before

    def done(self, act: str) -> dict[str, object]:
        done = timeball("campaign", act, "spring", "--json", "--endpoint", self.siege.broker.endpoint)
        assert done.returncode == 0, (done.stderr, self.moments)
        result: dict[str, object] = json.loads(done.stdout)
        return result


def test_pause_resume_and_cancel_killed_at_any_step_apply_once(tmp_path: Path, spark: SparkSession) -> None:
    """While messages fall due all the time; in the end each was released once or cancelled, and never both."""
    with Siege(tmp_path / "data", SEED, QUIET) as siege, Endpoint(siege.broker.endpoint) as broker:
        books = Books(siege)
        attach(Campaign(broker, "spring"), ROWS, after_ms=1_000, step_ms=25)
        for turn in range(2):
            for act in ("pause", "resume"):
                for broker_too in (False, turn > 0):
                    books.killed(act, broker_too=broker_too)
                books.done(act)
                state = books.status()["state"]
                assert state == ("paused" if act == "pause" else "running"), books.moments
        books.killed("cancel", broker_too=True)
        done = books.done("cancel")
        assert done["cancelled"] + done["released"] == ROWS, books.moments  # type: ignore[operator]
        out = released(broker)
        assert set(out.values()) == {1} and len(out) == done["released"], books.moments
        assert waiting(broker) == {}
        report = balances(spark, siege.broker.endpoint)
        assert report.pending == 0 and report.released == len(out)
        assert books.cut and books.undone, f"no kill came before its command was done: {books.moments}"
