"""Fuzz one target in this process: `python -m tests.fuzz.fuzz_one NAME [--break] FOLDER... -OPTION=VALUE...`.

The folders and the options with one dash are libFuzzer's. `--break` makes the target's fault on purpose. The process
ends with the first error, and the input that causes it is in a file (libFuzzer's `-artifact_prefix`).
"""

from __future__ import annotations

import ctypes
import logging
import sys

import atheris
import pytest

NAME, *OPTIONS = sys.argv[1:]

# These Python modules count their edges. To prepare all others takes longer than a short run. Compiled modules count
# theirs if they were built for it (sanitized.py).
READERS = ["edges", "log", "cluster.protocol", "table", "broker.filters", "model"]
# An asynchronous generator loses its variables when atheris 2.3.0 has prepared it.
WITHOUT = ["timeball.edges.http2.exchange"]
with atheris.instrument_imports(include=[f"timeball.{name}" for name in READERS], exclude=WITHOUT):
    from tests.fuzz.targets import TARGETS

logging.disable()  # a line for each input would be most of the work
target = TARGETS[NAME]
if "--break" in OPTIONS:
    OPTIONS.remove("--break")
    target.break_it(pytest.MonkeyPatch())
if begin := getattr(ctypes.CDLL(None), "begin_counting", None):
    begin()
atheris.Setup([sys.argv[0], *OPTIONS], target.check)
atheris.Fuzz()
