"""`timeball demo` as a command: what it is given, what it leaves behind, and its end before the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.cli.in_process import run_here
from tests.cli.processes import running
from tests.node_fixture import eventually

from timeball.cli.demo.command import _folder
from timeball.config import SCHEDULES

needs_the_extra = pytest.mark.usefixtures("extra")


@pytest.fixture(scope="module")
def extra() -> None:
    pytest.importorskip("matplotlib", reason="the extra `demo` is not installed")


@pytest.fixture
def signals() -> Iterator[None]:
    """The command takes signals for the rest of its process; here that is the tests'."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("day", ["13-01", "02-29", "2-8", "02-08T10:00", "friday", ""])
def test_a_day_that_2013_did_not_have_is_refused(day: str) -> None:
    refused = run_here("demo", "--day", day)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"timeball: --day {day}: write a day of 2013 as MM-DD, such as 02-08\n"


@pytest.mark.parametrize("seconds", ["4", "3601", "soon"])
def test_a_day_of_another_length_is_refused_by_name(seconds: str) -> None:
    refused = run_here("demo", "--seconds", seconds)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--seconds" in refused.stderr


@pytest.mark.parametrize("schedule", ["delay_levels", "hour-log", ""])
def test_a_schedule_that_is_none_is_refused_by_name(schedule: str) -> None:
    refused = run_here("demo", "--schedule", schedule)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"timeball: --schedule {schedule}: one of hour_log, timer_wheel, level_cascade\n"


def test_a_folder_that_is_named_stays_and_another_goes(tmp_path: Path) -> None:
    """The data's folder itself is made by the broker, which wants it new or its own."""
    with _folder(tmp_path / "kept") as kept:
        assert kept == tmp_path / "kept" and not kept.exists()
        kept.mkdir()
    assert kept.is_dir()
    with _folder(None) as passing:
        passing.mkdir()
    assert not passing.parent.exists()


def test_help_says_what_exit_code_1_means() -> None:
    shown = run_here("demo", "--help")
    assert shown.returncode == 0
    assert "timeball demo --day 12-25 --seconds 30" in shown.stdout
    assert "Exit code 1" in shown.stdout
    assert "--flights-max" not in shown.stdout  # for tests


@needs_the_extra
def test_a_folder_that_is_not_a_brokers_is_named_and_left_alone(tmp_path: Path, signals: None) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    refused = run_here("demo", "--json", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "holiday.jpg" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def _has_ended(process: psutil.Process) -> bool:
    """Also when nobody has asked yet how it ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@needs_the_extra
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_whoever_interrupts_it_finds_nothing_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Once its broker runs: no process, no temporary folder, one sentence, exit code 130."""
    (tmp_path / "tmp").mkdir()
    options = ["demo", "--json", "--out", str(tmp_path / "out")]
    with running(*options, TMPDIR=str(tmp_path / "tmp")) as demo:
        process = psutil.Process(demo.pid)
        eventually(process.children, "the demo's broker started")
        children = process.children(recursive=True)
        assert demo.end(number) == 130
        assert demo.lines == []
        assert demo.errors == ["timeball: interrupted; the broker and Spark have stopped"]
    eventually(lambda: all(_has_ended(child) for child in children), "no process left")
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_the_extra
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "level_cascade"])
def test_a_small_demo_is_faultless(tmp_path: Path, signals: None, schedule: str) -> None:
    """A day of five seconds; fewer than 10,000 flights would not be worth compacting."""
    data, out = tmp_path / "data", tmp_path / "out"
    options = ["--day", "12-25", "--seconds", "5", "--flights-max", "12000", "--schedule", schedule]
    ended = run_here("demo", "--json", *options, "--data", str(data), "--out", str(out))
    assert ended.returncode == 0, ended.stderr
    [report] = [json.loads(line) for line in ended.stdout.splitlines()]
    assert (report["day"], report["schedule"], report["balanced"]) == ("2013-12-25", schedule, True)
    assert (report["compacted_s"] is None) == (schedule != "hour_log")
    assert (report["bulk_rows"], report["sent_rows"], report["waiting"]) == (12_000, 12_000, 24_000)
    assert report["campaign"] == {"rows": 10_000, "cancelled": 10_000, "released": 0}
    assert report["forecast"]["rows"] == 24_000 and len(report["forecast"]["busiest"]) == 3
    became = {(row["topic"], row["state"]): row["promises"] for row in report["sql"]}
    assert became["newsletter", "cancelled"] == 10_000
    assert became["departures-year", "waiting"] == became["check-in-year", "waiting"] == 12_000
    assert became["departures", "released"] == report["outcome"]["released"]
    assert [Path(picture).parent for picture in report["pictures"]] == [out] * len(report["pictures"])
    assert all(Path(picture).stat().st_size > 0 for picture in report["pictures"])
    assert run_here("dump", "--data", str(data), "--verify").returncode == 0
