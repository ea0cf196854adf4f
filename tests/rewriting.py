"""Processes of pytest-xdist compile a share of the test files each, before each of them imports all.

pytest rewrites the asserts of a test file and keeps the compiled module, as Python does. In a fresh clone nothing is
kept yet, and all processes would compile the same files at the same time, each with ten seconds of CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # pytest has no public name for it

TESTS = Path(__file__).parent


def compiled_file(path: Path) -> Path:
    """Return where pytest keeps a test file's rewritten module."""
    return rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)


def compile_files(paths: Iterable[Path], config: pytest.Config) -> None:
    """Rewrite and compile the files without a cached module. pytest itself checks whether a module is up to date."""
    for path in paths:
        cached = compiled_file(path)
        if not cached.exists() and rewrite.try_makedirs(cached.parent):
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, cached)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    process = getattr(session.config, "workerinput", None)
    runs_all = [Path(argument).resolve() for argument in session.config.args] == [TESTS]
    if process is None or not runs_all or sys.dont_write_bytecode:
        return
    number = int(process["workerid"].removeprefix("gw"))
    compile_files(sorted(TESTS.rglob("test_*.py"))[number :: process["workercount"]], session.config)
