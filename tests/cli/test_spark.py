"""cli/spark.py: a missing dependency is reported in one sentence, and Spark's own output goes to a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import timeball
from timeball.cli import spark as cli_spark
from timeball.model.errors import SetupError


@pytest.fixture
def no_pyspark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where only the broker is installed."""
    before = {name: sys.modules.pop(name) for name in _spark_modules()}
    # A new import also replaces the attribute `timeball.spark`. Restore it, so that later tests get the original.
    monkeypatch.setattr(timeball, "spark", getattr(timeball, "spark", None), raising=False)
    sys.modules["pyspark"] = None  # type: ignore[assignment]  # makes `import pyspark` raise ImportError
    yield
    for name in _spark_modules():
        del sys.modules[name]
    sys.modules.update(before)


def _spark_modules() -> list[str]:
    """List the imported modules of pyspark and of timeball.spark."""
    return [name for name in sys.modules if name.startswith(("timeball.spark", "pyspark"))]


@pytest.mark.usefixtures("no_pyspark")
def test_without_pyspark_the_error_names_the_extra_to_install() -> None:
    """Each function that needs pyspark raises the error."""
    with pytest.raises(SetupError, match=r"pip install '\.\[spark\]'"):
        cli_spark.load_runner()
    with pytest.raises(SetupError, match=r"pip install '\.\[spark\]'"):
        cli_spark.open_session("local[1]", "test")


def test_output_of_children_goes_to_the_file_and_gives_the_reason(tmp_path: Path) -> None:
    """The last line of this output usually says why Java did not start."""
    log = tmp_path / "spark.log"
    with pytest.raises(SetupError, match=r"no start \(out of memory\)"), cli_spark._redirected_stderr(log):
        subprocess.run(["sh", "-c", "echo hello >&2; echo out of memory >&2"], check=True)
        raise SetupError("no start")
    assert log.read_text() == "hello\nout of memory\n"


def test_stderr_is_restored_after_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    """A process that starts after the block writes to the terminal again."""
    with cli_spark._redirected_stderr(None):
        subprocess.run(["sh", "-c", "echo hidden >&2"], check=True)
    subprocess.run(["sh", "-c", "echo shown >&2"], check=True)
    assert capfd.readouterr().err == "shown\n"


def test_an_interrupt_kills_the_processes_of_the_block_and_no_others() -> None:
    """The children of these processes are killed, too. A process from before the block goes on."""
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with pytest.raises(KeyboardInterrupt), cli_spark.kill_children_on_failure():
                java = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
                raise KeyboardInterrupt
            # Its child may have been killed a moment earlier, and the shell may have ended by itself. Both are right.
            java.wait(60)
            assert psutil.pid_exists(other.pid) and other.poll() is None
        finally:
            other.kill()
