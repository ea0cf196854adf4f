"""Options are read as Typer reads them, and its validators are not imported for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from timeball.cli.main import main

READ = """
import sys
from timeball.cli.main import main

try:
    main(sys.argv[1:])
finally:
    print("validators" if "pydantic" in sys.modules else "plain")
"""


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--port", "7", "--json", "--data", "d", "--host", "h", "--retention-ms", "1h"], "plain"),
        # The control: a value that is refused is Typer's to explain.
        (["--port", "x"], "validators"),
    ],
)
def test_a_broker_reads_its_options_without_validators(tmp_path: Path, words: list[str], how: str) -> None:
    # The settings file is missing, so the command ends where the options have been read.
    missing = str(tmp_path / "missing.toml")
    command = [sys.executable, "-c", READ, "serve", *words, "--settings", missing]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [how]
    assert ("missing.toml" in done.stderr) == (how == "plain")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "1.5"], "valid integer"),
        (["--segment-bytes", "many"], "--segment-bytes"),
        (["--retention-ms", "3fx"], "write 500"),
    ],
)
def test_what_is_refused_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *words])
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_word_of_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Yes and no have many words, which Typer knows."""
    monkeypatch.setenv("TIMEBALL_AUTO_CREATE_TOPICS", "off")
    monkeypatch.setenv("TIMEBALL_PORT", "7")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--settings", str(tmp_path / "missing.toml")])
    assert end.value.code == 4
