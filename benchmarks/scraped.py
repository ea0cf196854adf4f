"""What a real Prometheus sees of a broker under load, drawn: the picture in docs/metrics.md.

    python -m benchmarks.scraped --seconds 150 --picture docs/pictures/metrics.png

Prometheus (Debian's package) scrapes once a second. A client schedules 400 messages a second, each due 1 to 30 seconds
later at a random millisecond; a third into the run it schedules 20,000 more, due together at two thirds. One consumer
takes what is released, and acknowledges each message. What is drawn is asked for over Prometheus' own API, with the
queries that the dashboard has.

Not measured: anything. Prometheus, the clients and the broker share this machine, and rates are means of ten seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import TOPIC, Server, messages, now_ms, serving, wait_until
from timeball import Timeball

ROWS_PER_S, BURST_ROWS = 400, 20_000
AHEAD_MS = (1_000, 30_000)
GROUP = "drawn"
RULES = Path(__file__).resolve().parents[1] / "deploy/prometheus/timeball.rules.yml"
BOUND_S = 60.0
# Wong's colours: they can be told apart by the colour-blind, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def _quantile(quantile: float) -> str:
    rate = "sum by (le) (rate(timeball_release_lateness_seconds_bucket[10s]))"
    return f"histogram_quantile({quantile}, {rate}) * 1000"


# Title, unit, logarithmic, and the curves: a name and a query.
PANELS: list[tuple[str, str, bool, dict[str, str]]] = [
    (
        "Messages", "a second", False, {
            "into topics": "sum(rate(timeball_accepted_messages_total[10s]))",
            "released": "sum(rate(timeball_released_messages_total[10s]))",
            "delivered": "sum(rate(timeball_delivered_messages_total[10s]))",
        },
    ),
    ("Lateness of releases", "ms", True, {"p50": _quantile(0.5), "p99": _quantile(0.99)}),
    (
        "What waits", "messages", False, {
            "near, in memory": 'timeball_schedule_rows{place="near"}',
            "in the log's tail": 'timeball_schedule_rows{place="tail"}',
            "for their instant": "timeball_waiting_messages",
        },
    ),
    ("The consumer's lag", "messages", False, {"lag": f'sum(timeball_group_lag_messages{{group="{GROUP}"}})'}),
]  # fmt: skip


class Prometheus:
    """A Prometheus of its own, in a folder that goes away with it."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        scrape = {"job_name": "timeball", "static_configs": [{"targets": [target]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML too
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error",
        ]  # fmt: skip
        self._process = subprocess.Popen(command)

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of the API."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return json.load(answer)["data"]

    def scrapes(self) -> bool:
        """Return whether it has had an answer of the broker."""
        try:
            return any(target["health"] == "up" for target in self.ask("targets")["activeTargets"])
        except OSError:
            return False

    def curve(self, query: str, begin_s: float, end_s: float) -> tuple[list[float], list[float]]:
        """Return a query's seconds since the begin and its values, once a second."""
        asked = {"query": query, "start": str(begin_s), "end": str(end_s), "step": "1"}
        found = self.ask("query_range", **asked)["result"]
        values = found[0]["values"] if found else []
        return [at - begin_s for at, _ in values], [float(value) for _, value in values]

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(BOUND_S)


@contextmanager
def scraping(server: Server) -> Iterator[Prometheus]:
    """Run a Prometheus that has scraped the broker once."""
    with tempfile.TemporaryDirectory(prefix="timeball-prometheus-") as folder:
        prometheus = Prometheus(Path(folder), server.http)
        try:
            wait_until(prometheus.scrapes, BOUND_S, "a scrape")
            yield prometheus
        finally:
            prometheus.stop()


def run(seconds: int, rows_per_s: int = ROWS_PER_S, burst_rows: int = BURST_ROWS) -> dict[str, Any]:
    """Load a broker and return the curves by panel and name, with the alerts that fired."""
    with serving() as (server, ball), scraping(server) as prometheus:
        ball.create_topic(TOPIC, 8)
        ended = threading.Event()
        consumer = threading.Thread(target=_consume, args=(server, ended))
        consumer.start()
        begin_s = time.time()
        try:
            _load(ball, seconds, rows_per_s, burst_rows)
        finally:
            ended.set()
            consumer.join()
        end_s = time.time()
        curves = {
            title: {name: prometheus.curve(query, begin_s, end_s) for name, query in asked.items()}
            for title, _, _, asked in PANELS
        }
        alerts = prometheus.curve('count(ALERTS{alertstate="firing"})', begin_s, end_s)[1]
    return {"curves": curves, "alerts": max(alerts, default=0)}


def _load(ball: Timeball, seconds: int, rows_per_s: int, burst_rows: int) -> None:
    rng, begun = np.random.default_rng(7), time.monotonic()
    burst_due_ms = now_ms() + seconds * 2_000 // 3
    for tick in range(seconds):
        due_ms = now_ms() + rng.integers(*AHEAD_MS, rows_per_s)
        ball.send_many(messages(rows_per_s, due_ms, seed=tick))
        if tick == seconds // 3:
            ball.send_many(messages(burst_rows, np.full(burst_rows, burst_due_ms), seed=-tick % 1_000))
        time.sleep(max(0.0, begun + tick + 1 - time.monotonic()))


def _consume(server: Server, ended: threading.Event) -> None:
    """Take what is there as a group, until told to end."""
    with server.client() as ball:
        while not ended.is_set():
            for _ in ball.consume(TOPIC, GROUP, until_idle="1s"):
                if ended.is_set():
                    break


def draw(found: dict[str, Any], file: Path, title: str) -> None:
    """Draw a panel for each title; without pyplot, so that no display is looked for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, (name, unit, is_log, _) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for (label, (at, values)), colour in zip(found["curves"][name].items(), COLOURS, strict=False):
            axes.plot(at, values, label=label, color=colour, linewidth=1.4)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_ylabel(unit, fontsize=9)
        axes.set_xlabel("seconds", fontsize=9)
        axes.set_yscale("symlog", linthresh=1) if is_log else axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=150)
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/metrics.png"))
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("no prometheus here (Debian: apt-get install prometheus)")
    found = run(options.seconds)
    title = f"A broker as Prometheus sees it: {ROWS_PER_S:,} scheduled a second, {BURST_ROWS:,} due at one instant"
    draw(found, options.picture, title)
    for panel, curves in found["curves"].items():
        for name, (_, values) in curves.items():
            print(f"{panel}, {name}: most {max(filter(lambda v: v == v, values), default=0):,.1f}")
    print(f"alerts firing: {found['alerts']:.0f}")


if __name__ == "__main__":
    main()
