"""The unit file and its settings: systemd accepts it, grants little of the machine, and a broker starts with it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.processes import client_of, running
from tests.docs_pages import ROOT

from timeball.cli.options import build_settings
from timeball.cli.output import ExitCode

FOLDER = ROOT / "deploy/systemd"
UNIT = (FOLDER / "timeball.service").read_text()
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here (Debian: systemd)")
EXPOSURE_MAX = 12  # in tenths, as systemd rates a unit; without the lines on protection it would be 96
PR_SET_MDWE, NO_SUCH_SWITCH = (
    65,
    77,
)  # the option of prctl, and the exit code of the program if the kernel lacks it
COMMAND = "/opt/timeball/bin/timeball"


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, check=False)


def unit_in(folder: Path, text: str = UNIT) -> Path:
    """Write the unit with Python in the place of the installed program, which systemd would miss. Returns its path."""
    assert COMMAND in text
    unit = folder / "timeball.service"
    unit.write_text(text.replace(COMMAND, sys.executable))
    return unit


@needs_systemd
def test_systemd_accepts_the_unit_without_a_warning(tmp_path: Path) -> None:
    process = analyze("verify", "--man=no", str(unit_in(tmp_path)))
    assert (process.returncode, process.stderr) == (0, "")


@needs_systemd
def test_a_word_that_systemd_does_not_know_is_noticed(tmp_path: Path) -> None:
    unit = unit_in(tmp_path, UNIT.replace("ProtectSystem=strict", "ProtectSystems=strict"))
    assert "ProtectSystems" in analyze("verify", "--man=no", str(unit)).stderr


@needs_systemd
def test_the_exposure_of_the_unit_is_at_most_its_limit(tmp_path: Path) -> None:
    process = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(unit_in(tmp_path)))
    assert process.returncode == 0, process.stdout


def test_a_process_with_a_set_up_error_is_not_restarted() -> None:
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.M)
    assert codes.split() == [str(int(code)) for code in (ExitCode.USAGE, ExitCode.SETUP)]


def test_a_broker_accepts_the_settings_and_its_folders_are_those_of_the_unit() -> None:
    settings = build_settings(FOLDER / "timeball.toml", {})
    (state,) = re.findall(r"^StateDirectory=(.*)$", UNIT, re.M)
    assert settings.data == Path("/var/lib") / state
    assert f"ConfigurationDirectory={Path('/etc/timeball').name}" in UNIT


def test_a_broker_accepts_the_settings_that_are_commented_out(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", (FOLDER / "timeball.toml").read_text(), flags=re.M)
    text = text.replace('host = "127.0.0.1"\n', "")
    (tmp_path / "all.toml").write_text(text)
    assert build_settings(tmp_path / "all.toml", {}).advertise


def test_a_broker_runs_without_memory_that_is_both_writable_and_executable(tmp_path: Path) -> None:
    """As under MemoryDenyWriteExecute: a process sets this protection of the kernel, and then becomes the broker."""
    program = (
        "import ctypes, os, sys\n"
        f"if ctypes.CDLL(None, use_errno=True).prctl({PR_SET_MDWE}, 1, 0, 0, 0): sys.exit({NO_SUCH_SWITCH})\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'timeball', *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", program, "serve", "--json", "--port", "0", "--data", str(tmp_path / "d")]
    with running(command=command) as server:
        try:
            ready = server.wait_line(event="ready")
        except AssertionError:
            if server.code == NO_SUCH_SWITCH:
                pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
            raise
        with client_of(ready) as ball:
            ball.send("orders", "kept", after="1d")
            ball.compact()
            assert ball.status()["schedule"]["table_rows"] == 1
        assert server.end(signal.SIGTERM) == 0
