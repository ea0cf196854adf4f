"""Search the model of the replication protocol with Spin: `python -m tests.cluster.model.spin`, or `make model`.

Each search compiles `replication.pml` with its bounds and visits all states, unless a rule is broken. It prints a row
of the table in docs/cluster-protocol.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("replication.pml")
# In the order of the model.
BUGS = ("unsynced_ack", "forgotten_promise", "alone", "no_fetch", "older_epoch", "promised_twice")
STEPS = ("last_epoch_served", "fetched", "wiped_replica_counts", "set_of_two", "handed_over")
DEPTH = 100_000
MEMORY_MB = 12_000


@dataclass(frozen=True)
class Bounds:
    """How often each event may happen."""

    epochs: int
    entries: int
    crashes: int
    wipes: int = 0
    changes: int = 0
    hand_overs: int = 0
    disconnects: int = 0
    restores: int = 0

    def options(self) -> list[str]:
        """Return the bounds as options of Spin."""
        return [f"-D{name.upper()}={value}" for name, value in vars(self).items()]

    def __str__(self) -> str:
        return ", ".join(f"{value} {name.replace('_', '-')}" for name, value in vars(self).items() if value)


@dataclass(frozen=True)
class Found:
    """The result of a search. `error` is empty if no rule is broken."""

    states: int
    seconds: float
    memory_mb: int
    error: str
    is_exhaustive: bool


# The rows of the table in docs/cluster-protocol.md. Three epochs, three entries and two crashes are too many states.
LARGE = (
    Bounds(2, 3, 2),
    Bounds(3, 1, 0),
    Bounds(3, 0, 1),
    Bounds(4, 0, 0),
    Bounds(2, 1, 0, wipes=1),
    Bounds(2, 1, 0, changes=1, hand_overs=1),
    Bounds(2, 1, 0, disconnects=1, restores=1),
)
QUICK = (Bounds(2, 1, 1),)
# The smallest bounds in which each bug breaks a rule.
BUG_BOUNDS = {
    "unsynced_ack": Bounds(2, 1, 1),
    "forgotten_promise": Bounds(2, 1, 1),
    "alone": Bounds(2, 1, 0),
    "no_fetch": Bounds(2, 1, 0),
    "older_epoch": Bounds(4, 0, 0),
    "promised_twice": Bounds(2, 0, 0, restores=1),
}
STEP_BOUNDS = {
    "last_epoch_served": Bounds(2, 1, 1),
    "fetched": Bounds(2, 1, 1),
    "wiped_replica_counts": Bounds(1, 0, 0, wipes=1),
    "set_of_two": Bounds(1, 0, 0, changes=1),
    "handed_over": Bounds(2, 0, 0, hand_overs=1),
}


def need_spin() -> str:
    """Return Spin's command. Skips the test where it or a C compiler is missing."""
    spin = shutil.which("spin")
    if spin is None or shutil.which("cc") is None:
        pytest.skip("Spin or a C compiler is not installed (Debian: spin gcc libc6-dev)")
    return spin


def search(
    bounds: Bounds, *, bug: str = "", step: str = "", memory_mb: int = MEMORY_MB, optimize: bool = True
) -> Found:
    """Search all states within the bounds, for a broken rule or for the step."""
    spin = need_spin()
    options = bounds.options()
    options += [f"-DBUG={BUGS.index(bug) + 1}"] if bug else []
    options += [f"-DREACH={STEPS.index(step) + 1}"] if step else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(MODEL, folder)
        run(folder, spin, "-a", *options, MODEL.name)
        run(
            folder, "cc", "-O2" if optimize else "-O0", "-w", "-DSAFETY", "-DNOFAIR", "-DCOLLAPSE", "-DSEPQS",
            f"-DMEMLIM={memory_mb}", "-o", "pan", "pan.c",
        )  # fmt: skip
        text = run(folder, "./pan", f"-m{DEPTH}", "-w24")
    return read(text)


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder, and return its output."""
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def read(text: str) -> Found:
    """Parse the output of a compiled search."""
    error = re.search(r"pan:\d+: (.+)", text)
    states = re.search(r"([\d.e+]+) states, stored", text)
    seconds = re.search(r"elapsed time ([\d.e+]+) seconds", text)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", text)
    assert states and seconds and memory, text
    return Found(
        int(float(states[1])), float(seconds[1]), int(float(memory[1])), error[1] if error else "",
        "Search not completed" not in text and "max search depth too small" not in text,
    )  # fmt: skip


def main() -> int:
    """Search with the large bounds, or with given ones, and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.model.spin")
    parser.add_argument(
        "--bounds", help="EPOCHS,ENTRIES,CRASHES,WIPES,CHANGES,HAND_OVERS,DISCONNECTS,RESTORES"
    )
    parser.add_argument("--memory-mb", type=int, default=MEMORY_MB)
    options = parser.parse_args()
    all_bounds = [Bounds(*map(int, options.bounds.split(",")))] if options.bounds else [*LARGE]
    is_good = True
    for bounds in all_bounds:
        outcome = search(bounds, memory_mb=options.memory_mb)
        is_good &= outcome.is_exhaustive and not outcome.error
        result = outcome.error or ("no fault" if outcome.is_exhaustive else "not exhaustive")
        print(
            f"| {bounds} | {outcome.states:,} | {outcome.seconds:.0f} s, {outcome.memory_mb:,} MB | {result} |",
            flush=True,
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
