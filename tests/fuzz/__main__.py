"""Fuzz all targets in turn: `python -m tests.fuzz --seconds 600 [--target NAME] [--plain] [--json FILE]`.

Each target gets an equal share of the time, in a process of its own, and begins with its seeds and with the corpus of
earlier runs (`.fuzz/corpus`). A target ends with its first fault. The input of the fault is then in `.fuzz/faults`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz import sanitized
from tests.fuzz.sanitized import FOLDER, ROOT
from tests.fuzz.targets import TARGETS

# For one input: 10 s, and 2 GiB of memory for the process.
BOUNDS = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"]
OPTIONS = [*BOUNDS, "-print_final_stats=1", "-use_value_profile=1", "-reload=0"]
GRACE_S = 120  # for the start, the seeds and the last input
COUNT = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
EDGES = re.compile(r"^#\d+\s.*\bcov: (\d+)", re.MULTILINE)
ERROR = re.compile(
    r"=== Uncaught Python exception: ===\s*\n(.+)|^(?:==\d+==\s*)?ERROR: (.+)|(\S+: runtime error: .+)", re.MULTILINE
)  # fmt: skip


@dataclass
class Result:
    """A run of one target. `fault` is its first error, "" if there was none."""

    target: str
    seconds: float
    executions: int
    edges: int
    fault: str


def write_seeds(name: str) -> Path:
    """Write the seeds of a target as files."""
    folder = FOLDER / "seeds" / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[name].seeds():
        (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    return folder


def fuzz(name: str, environment: dict[str, str], options: list[str], seconds_max: float) -> Result:
    """Fuzz one target with these options of libFuzzer, and of fuzz_one.py."""
    corpus, faults = FOLDER / "corpus" / name, FOLDER / "faults" / name
    for folder in (corpus, faults):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.fuzz_one", name, str(corpus), str(write_seeds(name))]
    command += [*OPTIONS, f"-artifact_prefix={faults}/", *options]
    log, begin = faults / "log.txt", time.monotonic()
    with log.open("wb") as out:
        try:
            process = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False,
                timeout=seconds_max,
            )  # fmt: skip
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status = None
    return result_of(name, time.monotonic() - begin, log.read_text(errors="replace"), status)


def result_of(name: str, seconds: float, log: str, status: int | None) -> Result:
    """Read the log of a run. A process that neither ended well nor names its fault is a fault."""
    count, edges, error = COUNT.findall(log), EDGES.findall(log), ERROR.search(log)
    fault = "" if status == 0 else f"the process ended with {status}"
    if fault and error:
        fault = next(text for text in error.groups() if text).strip()
    return Result(
        name, round(seconds, 1), int(count[-1]) if count else 0, int(edges[-1]) if edges else 0, fault
    )


def fuzz_all(names: list[str], seconds: float, environment: dict[str, str]) -> Iterator[Result]:
    """Fuzz these targets in turn, each for the same share of the time."""
    share = max(1, int(seconds / len(names)))
    for name in names:
        yield fuzz(name, environment, [f"-max_total_time={share}"], share + GRACE_S)


HEADING = f"{'target':20} {'seconds':>8} {'executions':>12} {'edges':>7}  fault"


def line(result: Result) -> str:
    """Format a result as a line of the table."""
    return f"{result.target:20} {result.seconds:8.1f} {result.executions:12,} {result.edges:7,}  {result.fault or '-'}"


def plain_environment() -> dict[str, str]:
    """Return the environment of a process that imports the package as it is."""
    folders = [ROOT / "src", ROOT, sanitized.atheris_folder()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def main() -> int:
    """Fuzz by the arguments of the command. Returns 1 if a target has a fault, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only this target")
    parser.add_argument("--plain", action="store_true", help="without sanitizers: the modules as they are")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    arguments = parser.parse_args()
    environment = plain_environment() if arguments.plain else sanitized.build()
    results = list[Result]()
    print(HEADING, flush=True)
    for result in fuzz_all(arguments.target or list(TARGETS), arguments.seconds, environment):
        results.append(result)
        print(line(result), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return any(result.fault for result in results)


if __name__ == "__main__":
    sys.exit(main())
