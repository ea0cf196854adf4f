"""`make demo`: what it is given, what it leaves behind, and its end before the end."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from examples.flights.__main__ import _folder, main
from tests.cli.in_process import run_here
from tests.cli.processes import SRC, running
from tests.cluster.etcd_cluster import need_etcd
from tests.node_fixture import eventually
from tests.rounds import only_in_a_siege, rounds


@pytest.fixture
def signals() -> Iterator[None]:
    """The command takes signals for the rest of its process; here that is the tests'."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        *[("--day", day, "write a day of 2013 as MM-DD") for day in ("13-01", "02-29", "2-8", "friday", "")],
        *[("--seconds", seconds, "from 5 to 3600") for seconds in ("4", "3601", "soon")],
        *[("--strategy", name, "hour_log") for name in ("delay_levels", "hour-log", "")],
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    option: str, value: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([option, value])
    shown = capsys.readouterr()
    assert (refused.value.code, shown.out) == (2, "")
    assert option in shown.err and advice in shown.err


def test_a_folder_that_is_named_stays_and_another_goes(tmp_path: Path) -> None:
    """The data's folder itself is made by the broker, which wants it new or its own."""
    with _folder(tmp_path / "kept") as kept:
        assert kept == tmp_path / "kept" and not kept.exists()
        kept.mkdir()
    assert kept.is_dir()
    with _folder(None) as passing:
        passing.mkdir()
    assert not passing.parent.exists()


def test_help_says_what_exit_code_1_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "make demo ARGS='--day 12-25 --seconds 30'" in shown
    assert "Exit code 1" in shown
    assert "--flights-max" not in shown  # for tests


def test_a_folder_that_is_not_a_brokers_is_named_and_left_alone(
    tmp_path: Path, signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    code = main(["--json", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert (code, shown.out) == (4, "")
    assert "holiday.jpg" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def _has_ended(process: psutil.Process) -> bool:
    """Also when nobody has asked yet how it ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_whoever_interrupts_it_finds_nothing_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Once its broker runs: no process, no temporary folder, one sentence, exit code 130."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "examples.flights", "--json", "--out", str(tmp_path / "out")]
    here = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join([str(SRC), str(SRC.parent)])}
    with running(command=command, **here) as demo:
        process = psutil.Process(demo.pid)
        eventually(process.children, "the demo's broker started")
        children = process.children(recursive=True)
        assert demo.end(number) == 130
        assert demo.lines == []
        assert demo.errors == ["demo: interrupted; all its processes have stopped"]
    eventually(lambda: all(_has_ended(child) for child in children), "no process left")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.siege
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("hour_log", []),
        pytest.param("hour_log", ["--spark"], marks=pytest.mark.spark),
        ("timer_wheel", []),
        pytest.param("timer_wheel", ["--spark"], marks=pytest.mark.spark),
    ][: rounds(2, 4)],
)
def test_a_small_demo_is_faultless(
    tmp_path: Path, signals: None, strategy: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A day of five seconds; fewer than 10,000 flights would not be worth compacting."""
    data, out = tmp_path / "data", tmp_path / "out"
    options = ["--day", "12-25", "--seconds", "5", "--flights-max", "12000", "--strategy", strategy, *more]
    code = main(["--json", *options, "--data", str(data), "--out", str(out)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    [report] = [json.loads(line) for line in shown.out.splitlines()]
    assert (report["day"], report["strategy"], report["balanced"]) == ("2013-12-25", strategy, True)
    assert (report["compacted_s"] is None) == (strategy != "hour_log")
    assert (report["bulk_rows"], report["sent_rows"], report["waiting"]) == (12_000, 12_000, 24_000)
    assert report["campaign"] == {"rows": 10_000, "cancelled": 10_000, "released": 0}
    assert report["forecast"]["rows"] == 24_000 and len(report["forecast"]["busiest"]) == 3
    became = {(row["topic"], row["state"]): row["messages"] for row in report["sql"]}
    assert became["newsletter", "cancelled"] == 10_000
    assert became["departures-year", "waiting"] == became["check-in-year", "waiting"] == 12_000
    assert became["departures", "released"] == report["outcome"]["released"]
    assert [Path(picture).parent for picture in report["pictures"]] == [out] * len(report["pictures"])
    assert all(Path(picture).stat().st_size > 0 for picture in report["pictures"])
    assert run_here("dump", "--data", str(data), "--verify").returncode == 0


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("etcd")
def test_a_small_demo_on_a_cluster_is_faultless(
    tmp_path: Path, signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The leader is killed in the middle of the day."""
    need_etcd()
    options = ["--day", "12-25", "--seconds", "20", "--flights-max", "12000", "--cluster"]
    code = main(["--json", *options, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    [report] = [json.loads(line) for line in shown.out.splitlines()]
    assert report["balanced"] and report["waiting"] == 24_000
    assert (report["outcome"]["lost"], report["outcome"]["early"], report["outcome"]["duplicates"]) == (
        0,
        0,
        0,
    )
