"""What `timeball up` holds in memory, process by process, and how soon it works: 1,000 messages through all of it.

`up --archive` is started in a fresh folder with settings by which all three jobs have work at once: it sends messages
for soon and for later, a batch a second while it samples, so that compact, ledger and archive run side by side. The
whole tree of processes is sampled five times a second. Memory is PSS, what belongs to a process alone and its share of
what it shares, so that the sum over the tree is what the machine would get back; RSS is shown beside. "idle" is the
state after REST_S without a message, when workers that nothing needs have ended.

Not measured: a cluster, memory under a load that fills a machine (see the benchmark pipeline), the page cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import ANY_PORTS, CHECKOUT, READY_S, wait_until
from benchmarks.report import Report
from timeball import Timeball

MIB = 1024 * 1024
SAMPLE_S = 0.2
REST_S = 90.0
LONGEST_S = 180.0
IDLE_BAR, RUNNING_BAR = 700.0, 900.0
KINDS = ("broker", "pipeline", "JVM", "Python daemons", "Python workers")
# Little is enough for each job, so that a small load shows all of them at work.
EAGER = ["--compact-rows", "1000", "--compact-interval-ms", "1s"]
OPTIONS = ["--archive"]
OFTEN = ["compact", "ledger"]


def run(small: bool = False) -> Report:
    """Measure; MiB, seconds."""
    report = Report("up", small)
    rows, rest_s = (50, 0.0) if small else (1_000, REST_S)
    with tempfile.TemporaryDirectory(prefix="timeball-bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "timeball",
            "up",
            "--json",
            "--port",
            "0",
            *ANY_PORTS,
            *EAGER,
            *OPTIONS,
        ]
        begun = time.perf_counter()
        up = subprocess.Popen(
            [*command, "--data", f"{folder}/data"], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
        )
        assert up.stdout is not None
        rest = threading.Thread(target=up.stdout.read, daemon=True)
        try:
            ready = json.loads(up.stdout.readline())
            report.add("broker: ready", time.perf_counter() - begun, "s")
            rest.start()
            _measure(report, up.pid, ready, Path(folder) / "data", rows, rest_s, begun)
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(READY_S)
            if rest.ident is not None:
                rest.join(READY_S)
            up.stdout.close()
    return report


def _measure(
    report: Report, pid: int, ready: dict[str, str], data: Path, rows: int, rest_s: float, begun: float
) -> None:
    tree = Tree(pid)
    with Timeball(f"http://{ready['http']}", flight=ready["endpoint"]) as ball:
        # Before the pipeline has its lease, the broker would compact the first messages.
        wait_until(
            lambda: _is_leased(ready["http"]), LONGEST_S, "the pipeline compacts in place of the broker"
        )
        _send(ball, rows)
        wait_until(lambda: not behind(ball, data, OFTEN), LONGEST_S, "the first messages are worked off")
        report.add("pipeline: has worked off the first messages", time.perf_counter() - begun, "s")
        tree.peak.clear()
        for _ in range(3):
            _send(ball, rows)
            wait_until(lambda: not behind(ball, data, OFTEN), LONGEST_S, "compact and ledger follow")
        if OPTIONS and not report.small:  # the archive has an epoch a minute
            wait_until(lambda: not behind(ball, data, ["archive"]), LONGEST_S, "the archive follows")
        running = dict(tree.peak)
        sent = 4 * rows
    time.sleep(rest_s)
    idle = tree.sample()
    tree.stop()
    for when, found, bar in (("running", running, RUNNING_BAR), ("idle", idle.pss, IDLE_BAR)):
        for kind in KINDS:
            report.add(f"{when}: {kind}", found.get(kind, 0.0), "MiB held")
        report.add(f"{when}: all, PSS", found["all"], "MiB", bar, "lower")
    report.add("running: all, RSS", running["rss"], "MiB")
    report.add("idle: all, RSS", idle.rss, "MiB")
    report.add("running: processes, at most", running["count"], "processes")
    report.add("idle: processes", idle.count, "processes")
    report.add("CPU of all", tree.cpu_s / sent * 1e6, "us/msg")


def _is_leased(http: str) -> bool:
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        return "\ntimeball_pipeline_compacts 1" in answer.read().decode()


def _send(ball: Timeball, rows: int) -> None:
    """Half for soon, so that something passes, half for later, so that something waits."""
    soon: list[dict[str, object]] = [{"body": "x" * 128, "delay_ms": 50 + n % 100} for n in range(rows // 2)]
    later: list[dict[str, object]] = [
        {"body": "x" * 128, "after": f"{3_600 + n}s"} for n in range(rows - rows // 2)
    ]
    ball.send_many(soon + later, topic="bench")


def behind(ball: Timeball, data: Path, jobs: list[str]) -> list[str]:
    """Return those of the jobs that have not come to the end of the log; what they append themselves may be left."""
    end = int(ball.status()["log"]["durable_seq"]) - 10
    found = []
    for name in jobs:
        try:
            told = json.loads((data / "pipeline/status" / f"{name}.json").read_text())
            at = int((told.get("last") or {}).get("position", 0))
        except (FileNotFoundError, ValueError):
            at = 0
        if at < end:
            found.append(name)
    return found


# ---- the tree of processes ------------------------------------------------------------------------------------


@dataclass
class Sample:
    """The tree at an instant: PSS in MiB by kind and in all, RSS in MiB, how many processes."""

    pss: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rss: float = 0.0
    count: int = 0


def kind_of(command: list[str], *, is_root: bool, parents: list[list[str]]) -> str:
    """Return what a process of the tree is for; `parents`: command lines from its parent up to the root."""
    if is_root:
        return "broker"
    name = os.path.basename(command[0]) if command else ""
    below_java = [each for each in parents if each and os.path.basename(each[0]) == "java"]
    if name == "java":
        return "JVM"
    if not below_java:
        return "pipeline"
    return (
        "Python daemons"
        if parents[0] is below_java[0] and "daemon" in " ".join(command)
        else "Python workers"
    )


class Tree:
    """A process and all below it, sampled by a thread of this process."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._used: dict[int, float] = {}
        self._stopped = threading.Event()
        self.peak: dict[str, float] = {}  # the largest sample since it was cleared
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        """User and system time of all of them, as last seen."""
        return sum(self._used.values())

    def stop(self) -> None:
        """Sample no more."""
        self._stopped.set()
        self._thread.join()

    def sample(self) -> Sample:
        """Look at each process once."""
        found = Sample()
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                commands = [each.cmdline() for each in process.parents()]
                kind = kind_of(process.cmdline(), is_root=process == self._root, parents=commands)
                memory, times = process.memory_full_info(), process.cpu_times()
            except psutil.Error:
                continue  # it has ended meanwhile
            found.pss[kind] += memory.pss / MIB
            found.pss["all"] += memory.pss / MIB
            found.rss += memory.rss / MIB
            found.count += 1
            self._used[process.pid] = times.user + times.system
        return found

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            try:
                seen = self.sample()
            except psutil.NoSuchProcess:
                return
            if seen.pss["all"] > self.peak.get("all", 0.0):
                self.peak = {**seen.pss, "rss": seen.rss, "count": max(seen.count, self.peak.get("count", 0))}


if __name__ == "__main__":
    print("\n".join(run(small="--small" in sys.argv).lines()))
