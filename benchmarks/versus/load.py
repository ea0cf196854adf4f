"""The load generator, compiled on the spot: `load.c` says what it does.

benchmarks/wire_load.py, which is Python, would not be the bottleneck, but uses 1.4 to 3 times the CPU for a request; it
has latencies only of one request in flight and no rate, and does not look into the answers of pulls.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tests.interop.environments import tool

SOURCE = Path(__file__).with_name("load.c")
MORE_S = 120.0  # beyond the load's own seconds: what was in flight is answered, and silence ends it


class Outcome(msgspec.Struct, frozen=True):
    """What a load did. `answers` and `messages` came within `seconds`; `answered` and `delivered` are of all."""

    seconds: float
    answers: int
    messages: int
    answered: int
    delivered: int
    failures: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_s: float
    codes: dict[str, int]  # of the answers that failed


class Generator:
    """The compiled load generator, in a folder that goes away with the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._program = folder, folder / "load"
        subprocess.run([tool("cc", "gcc"), "-O2", "-o", str(self._program), str(SOURCE)], check=True)

    def run(
        self, address: str, ring: Sequence[bytes], shape: tuple[int, int], seconds: float, **options: float
    ) -> Outcome:
        """Load a broker; `ring` holds encoded requests, the n-th with the opaque n + 1. `options`: see load.c."""
        host, _, port = address.rpartition(":")
        file = self.folder / "frames"
        file.write_bytes(b"".join(ring))
        words = {
            "file": file, "host": host, "port": port, "connections": shape[0], "in_flight": shape[1],
            "seconds": seconds, **options,
        }  # fmt: skip
        command = [str(self._program), *(f"{name}={value}" for name, value in words.items())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + MORE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{address}: {done.stderr.strip()}")
        return msgspec.convert(json.loads(done.stdout), Outcome)
