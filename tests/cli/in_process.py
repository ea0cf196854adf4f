"""Commands without a process for each: the same `main`, in this interpreter.

Starting Python and its imports costs half a second of CPU, many times the work of a command. processes.py tests what
only a process has (signals, a closed pipe, file descriptors). The results have the same shape.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import pytest
import typer.main

from timeball.cli import output
from timeball.cli.main import app, main

WIDTH = "100"  # width of the terminal, by which help and errors are folded


def run_here(*arguments: str, text: str | bytes = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. `text` is its stdin, `more` is added to its environment."""
    out, err = io.StringIO(), io.StringIO()
    output.out.cache_clear()  # a console reads the width of its terminal when it is made
    output.err.cache_clear()
    with _stdin(text), in_environment(**more), redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int), f"an exit code is a number: {code!r}"
    return subprocess.CompletedProcess(["timeball", *arguments], code, out.getvalue(), err.getvalue())


@contextmanager
def _stdin(text: str | bytes) -> Iterator[None]:
    """Give the block a stdin with this content."""
    stdin_before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode() if isinstance(text, str) else text))
    try:
        yield
    finally:
        sys.stdin = stdin_before


@contextmanager
def in_environment(**more: str) -> Iterator[None]:
    """Set the environment like that of a process, with few changes: a broker's threads may be reading it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TIMEBALL_")]:
            patch.delenv(name)
        for name, value in {"COLUMNS": WIDTH, **more}.items():
            patch.setenv(name, value)
        yield


def parsed(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Parse the arguments of a container as `timeball` would, and return the result."""
    command: Any = typer.main.get_command(app)
    words = list(arguments)
    while hasattr(command, "commands"):
        command = command.get_command(None, words.pop(0))
        assert command is not None, arguments
    with in_environment(**environment):
        parameters: dict[str, Any] = command.make_context("timeball", words).params
    return parameters
