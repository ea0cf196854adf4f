"""The entry point of the command: it runs the command line, or names the extra that has it."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from timeball import __main__ as command


def fail_on_import(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Let the import of the command line fail for a missing package."""
    real_import = builtins.__import__

    def import_or_fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "timeball.cli.main":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", import_or_fail)


def test_a_missing_package_of_the_command_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_on_import(monkeypatch, "typer")
    with pytest.raises(SystemExit) as caught:
        command.main(["topics"])
    assert caught.value.code == 4
    assert "typer is not installed" in capsys.readouterr().err


def test_a_missing_module_of_timeball_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_import(monkeypatch, "timeball.cli.gone")
    with pytest.raises(ModuleNotFoundError):
        command.main(["topics"])


def test_arguments_reach_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert not caught.value.code and "Run a broker" in capsys.readouterr().out
