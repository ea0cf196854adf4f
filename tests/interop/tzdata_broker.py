"""A broker that runs with a version of tzdata from PyPI."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.processes import SRC, http_endpoint_of, running
from tests.interop.environments import LOCKS, fetch, kept


def tzdata(version: str) -> Path:
    """Return a folder with this version of tzdata and nothing else. Raise Missing if it cannot be fetched."""
    lock = LOCKS / f"tzdata-{version}.txt"

    def make(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        fetch([*pip, "--require-hashes", "--no-deps", "--target", str(folder), "-r", str(lock)])

    return kept(f"tzdata-{version}", [lock], make)


@contextmanager
def broker_with(data: Path, packages: Path | None = None) -> Iterator[str]:
    """Run a broker that finds the packages in `packages` before the installed ones. Yields its HTTP address.

    At the end of the block the broker is killed.
    """
    path = [str(SRC)] if packages is None else [str(packages), str(SRC)]
    arguments = ["serve", "--json", "--port", "0", "--data", str(data)]
    with running(*arguments, PYTHONPATH=os.pathsep.join(path)) as server:
        yield http_endpoint_of(server.wait_line(event="ready"))
        server.end(signal.SIGKILL)
