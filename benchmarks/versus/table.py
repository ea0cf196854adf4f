"""Figures of a run: medians of the rounds, ratios, and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from statistics import median

from benchmarks.report import brief
from benchmarks.versus.work import Row, Sample

BUSY = (
    "**The machine did other work when this run began: the rates and latencies are not to be quoted, and the CPU per"
    " message only with care.**"
)
HOW = """\
`make versus` writes this page. The first table shows the same work on both brokers, in turn in each round, while both
are running and warm. The second table shows deliveries to a consumer, also from other brokers. Each cell is the median
of {rounds}. In rows in s, ms or MB, less is better.

- Bodies have 128 bytes. Requests have the headers of unmodified RocketMQ clients for Java. An answer without success
  counts as failed, and so does a scheduled message that is early, missing or there twice.
- C x W: C connections, each with up to W unanswered requests.
- CPU: the server's user and system time in microseconds (us) for each message, until the last answer or release. For a
  burst, it counts from the due time on.
- Lateness: the time at which a message was stored in its queue, minus its due time. In rows of lateness, p50 and p99
  are those of the lateness. In other rows, they are those of the time until the answer.
- Burst and waiting (pending): about {waiting} scheduled messages. Memory is that of the server's process. Its anonymous
  part belongs to no file.
- Before each measurement, free memory is filled with page cache, as on a machine in use."""
AT_CONSUMER_HEAD = "## At the consumer"
AT_CONSUMER = """\
Each cell is the median of {rounds}. Lateness: the time at which a consumer holds the message, minus its due time.
Consumers lease and acknowledge each message. Producer and consumers are processes on the broker's machine. They use
plain sockets, except for the Python client. Over remoting, each message is sent and acknowledged by a request of its
own. One broker runs at a time, in another order in each round. A broker that is not durable answers before the disk has
the message. beanstalkd delays by whole seconds. *Not reached*: the broker accepts messages too slowly for the burst.

In rows of single requests, each connection has one request in flight. p50 and p99 are those of the time until the
answer. The row of 1,000 groups has the median of five messages, and p50 and p99 of all five together: so p99 can be
above the median. Memory is the growth of the process, without mapped files."""
OURS = "Timeball"
SMALL = "**A small run: the figures mean nothing.**"


@dataclass(frozen=True)
class ConsumerPeer:
    """A broker in the table of deliveries: how it was started, and whether an answer means that the disk has it."""

    name: str
    settings: str
    durable: bool


@dataclass
class ConsumerFigures:
    """The samples of deliveries to a consumer. A value of NaN means that the broker could not do the work."""

    peers: list[ConsumerPeer] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)  # by row and peer

    def add(self, peer: ConsumerPeer, row: Row, sample: Sample) -> None:
        """Keep one measurement."""
        if peer not in self.peers:
            self.peers.append(peer)
        if row not in self.rows:
            self.rows.append(row)
        self.samples.setdefault((row.name, peer.name), []).append(sample)

    def cell(self, row: Row, peer: ConsumerPeer) -> Sample | None:
        """Return the medians of a row, and the sum of its failures."""
        return _medians(self.samples.get((row.name, peer.name), []))

    def table(self) -> list[str]:
        """Return the Markdown table: a line for each work and broker. The first line of a work names it."""
        if not self.rows:
            return []
        head = ["at the consumer", "broker", "", "lateness p50/p99 ms", "CPU us/msg"]
        lines = [_line(head), "|---|---|" + "---:|" * 3]
        for row in self.rows:
            name = row.name
            for peer in self.peers:
                cell = self.cell(row, peer)
                if cell is None:
                    continue
                broker = peer.name if peer.durable else f"{peer.name} (**not durable**)"
                lines.append(_line([name, broker, value_text(row, cell), _latencies(cell), _cpu(cell)]))
                name = ""
        return lines

    def failures(self) -> list[str]:
        """Return a line for each row and broker with messages that failed."""
        cells = [(row.name, peer.name, self.cell(row, peer)) for row in self.rows for peer in self.peers]
        return _failures(cells)

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "peers": [asdict(peer) for peer in self.peers],
            "rows": [
                {
                    **asdict(row),
                    "samples": {
                        # JSON has no NaN.
                        peer.name: [
                            asdict(sample) | {"value": None if isnan(sample.value) else sample.value}
                            for sample in self.samples.get((row.name, peer.name), [])
                        ]
                        for peer in self.peers
                    },
                }
                for row in self.rows
            ],
        }


@dataclass
class Figures:
    """The samples of a run, and what has to be said with them. Ours is the last of `peers`."""

    machine: dict[str, str]
    date: str
    rounds: int
    small: bool
    waiting: int
    busy: bool
    load_averages: tuple[float, float]  # before and after
    not_measured: str
    peers: dict[str, list[str]] = field(default_factory=dict)  # name -> how it was started, in each way
    rows: list[Row] = field(default_factory=list)
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)  # by row and peer
    at_consumer: ConsumerFigures = field(default_factory=ConsumerFigures)

    def name_peer(self, peer: str, settings: str) -> None:
        """Give a peer its column, and say how it was started; ours is named last."""
        known = self.peers.setdefault(peer, [])
        if settings not in known:
            known.append(settings)

    def add(self, peer: str, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
        """Keep what one measurement said."""
        for row, sample in zip(rows, samples, strict=True):
            if row not in self.rows:
                self.rows.append(row)
            self.samples.setdefault((row.name, peer), []).append(sample)

    def cell(self, row: Row, peer: str) -> Sample | None:
        """Return the medians of a row, and the sum of its failures; None where the peer cannot do it."""
        return _medians(self.samples.get((row.name, peer), []))

    def ratio(self, row: Row, other: str) -> float | None:
        """Return ours divided by the other's."""
        ours, theirs = self.cell(row, list(self.peers)[-1]), self.cell(row, other)
        if ours is None or theirs is None or not theirs.value:
            return None
        return ours.value / theirs.value

    def failures(self) -> list[str]:
        """Return a line for each row and peer with requests that failed."""
        return _failures([(row.name, peer, self.cell(row, peer)) for row in self.rows for peer in self.peers])

    def as_dict(self) -> dict[str, object]:
        """For --json: one document, with each sample."""
        rows = []
        for row in self.rows:
            others = list(self.peers)[:-1]
            cells = {peer: self.cell(row, peer) for peer in self.peers}
            rows.append(
                {
                    **asdict(row),
                    "ratios": {other: self.ratio(row, other) for other in others},
                    "medians": {peer: cell and asdict(cell) for peer, cell in cells.items()},
                    "samples": {
                        peer: [asdict(s) for s in self.samples.get((row.name, peer), [])]
                        for peer in self.peers
                    },
                }
            )
        said = {
            "peers": self.peers, "machine": self.machine, "date": self.date, "rounds": self.rounds,
            "small": self.small, "waiting": self.waiting, "busy": self.busy, "load_averages": self.load_averages,
            "not_measured": self.not_measured,
        }  # fmt: skip
        return {"benchmark": "versus", **said, "rows": rows, "at_consumer": self.at_consumer.as_dict()}

    def table(self) -> list[str]:
        """Return the Markdown table."""
        if not self.rows:
            return []
        *others, ours = names = list(self.peers)
        head = ["", *names, *(f"{ours} / {other}" for other in others)]
        head += [f"p50/p99 ms, {name}" for name in names] + [f"CPU us/msg, {name}" for name in names]
        lines = [_line(head), "|---|" + "---:|" * (len(head) - 1)]
        for row in self.rows:
            cells = [self.cell(row, name) for name in names]
            words = [f"{row.name}, {row.unit}"]
            words += ["" if cell is None else brief(cell.value) for cell in cells]
            words += [_ratio(self.ratio(row, other)) for other in others]
            words += [_latencies(cell) for cell in cells]
            words += [_cpu(cell) for cell in cells]
            lines.append(_line(words))
        return lines


def page(figures: Figures, previous: str = "") -> str:
    """Return docs/versus.md. Tables that this run did not measure are those of the `previous` page."""
    in_queue, found, at_consumer = previous.partition(f"\n{AT_CONSUMER_HEAD}\n")
    at_consumer = f"{AT_CONSUMER_HEAD}\n{at_consumer}".rstrip("\n") if found else ""
    in_queue = in_queue.rstrip("\n")
    if figures.rows or not in_queue:
        in_queue = _in_queue(figures)
    if figures.at_consumer.rows:
        at_consumer = _at_consumer(figures)
    return "\n\n".join(part for part in (in_queue, at_consumer) if part) + "\n"


def _in_queue(figures: Figures) -> str:
    """Return the title, and the table of work up to the queue."""
    others = [name for name in figures.peers if name != OURS] or ["other brokers"]
    how = HOW.format(rounds=_rounds(figures), waiting=f"{figures.waiting:,}")
    settings = [setting for settings in figures.peers.values() for setting in settings]
    return "\n\n".join(
        [
            f"# {OURS} beside {', '.join(others)}",
            how,
            *_warnings(figures),
            *(["\n".join(figures.table())] if figures.rows else []),
            _failed("Requests", figures.failures()),
            *_circumstances(figures, settings),
            figures.not_measured,
        ]
    )


def _at_consumer(figures: Figures) -> str:
    """Return the table of work up to the consumer."""
    return "\n\n".join(
        [
            AT_CONSUMER_HEAD,
            AT_CONSUMER.format(rounds=_rounds(figures)),
            *_warnings(figures),
            "\n".join(figures.at_consumer.table()),
            _failed("Messages", figures.at_consumer.failures()),
            *_circumstances(figures, [peer.settings for peer in figures.at_consumer.peers]),
        ]
    )


def _warnings(figures: Figures) -> list[str]:
    return [*([SMALL] if figures.small else []), *([BUSY] if figures.busy else [])]


def _circumstances(figures: Figures, settings: Sequence[str]) -> list[str]:
    """Return how the brokers were started, and the machine."""
    before, after = figures.load_averages
    machine = "; ".join(f"{name}: {value}" for name, value in figures.machine.items())
    return [
        "\n".join(f"- {setting}" for setting in dict.fromkeys(settings)),
        f"Measured {figures.date}. {machine}. Load average {before:.1f} before, {after:.1f} after.",
    ]


def _rounds(figures: Figures) -> str:
    return f"{figures.rounds} round" + "s" * (figures.rounds > 1)


def value_text(row: Row, sample: Sample) -> str:
    """Return a value with its unit. NaN means that the broker could not do the work."""
    return "not reached" if isnan(sample.value) else f"{brief(sample.value)} {row.unit}"


def _line(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def _medians(samples: Sequence[Sample]) -> Sample | None:
    if not samples:
        return None
    return Sample(
        median(sample.value for sample in samples),
        _median([sample.p50_ms for sample in samples]),
        _median([sample.p99_ms for sample in samples]),
        _median([sample.cpu_us for sample in samples]),
        sum(sample.failures for sample in samples),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _failures(cells: Sequence[tuple[str, str, Sample | None]]) -> list[str]:
    return [f"{peer}, {row}: {c.failures}" for row, peer, c in cells if c is not None and c.failures]


def _failed(things: str, failures: Sequence[str]) -> str:
    return f"{things} that failed: " + ("; ".join(failures) if failures else "none") + "."


def _cpu(cell: Sample | None) -> str:
    return "" if cell is None or cell.cpu_us is None else brief(round(cell.cpu_us, 1))


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _latencies(cell: Sample | None) -> str:
    if cell is None or cell.p50_ms is None or cell.p99_ms is None:
        return ""
    return f"{brief(round(cell.p50_ms, 2))}/{brief(round(cell.p99_ms, 2))}"
