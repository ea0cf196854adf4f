"""`make demo`: its options, its reports, and the processes and files after its end or an interrupt."""

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
    """Restore the handlers of signals. The command installs its own, and here it runs in the process of the tests."""
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
def test_a_wrong_value_of_an_option_is_refused_by_name_with_advice(
    option: str, value: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, value])
    output = capsys.readouterr()
    assert (caught.value.code, output.out) == (2, "")
    assert option in output.err and advice in output.err


def test_a_named_data_folder_stays_and_a_temporary_one_is_deleted(tmp_path: Path) -> None:
    """The broker creates the data folder itself, so `_folder` does not."""
    with _folder(tmp_path / "kept") as named:
        assert named == tmp_path / "kept" and not named.exists()
        named.mkdir()
    assert named.is_dir()
    with _folder(None) as temporary:
        temporary.mkdir()
    assert not temporary.parent.exists()


def test_the_help_explains_exit_code_1_and_hides_options_for_tests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert "make demo ARGS='--day 12-25 --seconds 30'" in help_text
    assert "Exit code 1" in help_text
    assert "--flights-max" not in help_text, "an option for tests only"


def test_a_folder_with_foreign_files_is_refused_by_their_names_and_not_changed(
    tmp_path: Path, signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    code = main(["--json", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert (code, output.out) == (4, "")
    assert "holiday.jpg" in output.err
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, also if nobody has read its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupted_demo_leaves_no_process_and_no_temporary_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    """It is interrupted when its broker runs. It prints one line, and its exit code is 130."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "examples.flights", "--json", "--out", str(tmp_path / "out")]
    variables = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join([str(SRC), str(SRC.parent)])}
    with running(command=command, **variables) as demo:
        process = psutil.Process(demo.pid)
        eventually(process.children, "the broker of the demo has started")
        children = process.children(recursive=True)
        assert demo.end(number) == 130
        assert demo.lines == []
        assert demo.errors == ["demo: interrupted; all its processes have stopped"]
    eventually(lambda: all(_has_ended(child) for child in children), "all processes have ended")
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
    """A day takes five seconds. With fewer than 10,000 flights the demo would skip the compaction."""
    data, out = tmp_path / "data", tmp_path / "out"
    options = ["--day", "12-25", "--seconds", "5", "--flights-max", "12000", "--strategy", strategy, *more]
    code = main(["--json", *options, "--data", str(data), "--out", str(out)])
    output = capsys.readouterr()
    assert code == 0, output.err
    [report] = [json.loads(line) for line in output.out.splitlines()]
    assert (report["day"], report["strategy"], report["balanced"]) == ("2013-12-25", strategy, True)
    assert (report["compacted_s"] is None) == (strategy != "hour_log")
    assert (report["bulk_rows"], report["sent_rows"], report["waiting"]) == (12_000, 12_000, 24_000)
    assert report["campaign"] == {"rows": 10_000, "cancelled": 10_000, "released": 0}
    assert report["forecast"]["rows"] == 24_000 and len(report["forecast"]["busiest"]) == 3
    counts = {(row["topic"], row["state"]): row["messages"] for row in report["sql"]}
    assert counts["newsletter", "cancelled"] == 10_000
    assert counts["departures-year", "waiting"] == counts["check-in-year", "waiting"] == 12_000
    assert counts["departures", "released"] == report["outcome"]["released"]
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
    """The demo kills the leader in the middle of the day."""
    need_etcd()
    options = ["--day", "12-25", "--seconds", "20", "--flights-max", "12000", "--cluster"]
    code = main(["--json", *options, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert code == 0, output.err
    [report] = [json.loads(line) for line in output.out.splitlines()]
    assert report["balanced"] and report["waiting"] == 24_000
    outcome = report["outcome"]
    assert (outcome["lost"], outcome["early"], outcome["duplicates"]) == (0, 0, 0)
