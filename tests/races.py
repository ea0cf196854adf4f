"""A recorder of the answers that clients got about messages, and its comparison with the log.

A `Recorder` gets every call that may settle or move a scheduled message, with its answer. In the end the
log of the broker is the witness: each scheduled message has one end, each answer agrees with it, and a call that began
after the answer to another is not older in the log. The deliveries of a consumer are compared with both.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from timeball.model.message import Kind

COLUMNS = ["seq", "kind", "unique_key", "due_ms", "store_ms", "source_seq", "version_seq", "from_due_ms"]
KINDS = [Kind.SCHEDULED, Kind.MOVED, Kind.RELEASE, Kind.CANCEL]
CANCELLED = (
    "cancelled",
    "already_cancelled",
    "recalled",
)  # recalled: by this call or by another, RocketMQ's success


@dataclass
class Call:
    """One call about one message, and its answer. `began`, `ended`: by a count that all calls share."""

    key: str
    began: int
    ended: int = 0
    verdict: str = ""
    seq: int | None = None
    at_ms: int | None = None
    due_ms: int | None = None

    def told(
        self, verdict: str, seq: int | None = None, at_ms: int | None = None, due_ms: int | None = None
    ) -> None:
        """Set the answer."""
        self.verdict, self.seq, self.at_ms, self.due_ms = verdict, seq, at_ms, due_ms


@dataclass
class Life:
    """The rows of the log about one message: its own, those that moved it, in order, and the one that ended it."""

    key: str
    scheduled_rows: list[dict[str, Any]]
    ends: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any]:
        return self.ends[-1]

    @property
    def is_released(self) -> bool:
        return bool(self.end["kind"] == Kind.RELEASE)


class Recorder:
    """The calls and deliveries of all threads. `first_seq`: the row of each sent message, by its id."""

    def __init__(self) -> None:
        self.first_seq: dict[str, int] = {}
        self.calls: list[Call] = []
        self.delivered: Counter[str] = Counter()
        self._ticks = itertools.count(1)
        self._lock = threading.Lock()

    @contextmanager
    def call(self, key: str) -> Iterator[Call]:
        """Record the call of a block, in which its answer is set."""
        call = Call(key, next(self._ticks))
        yield call
        call.ended = next(self._ticks)
        with self._lock:
            self.calls.append(call)

    def verdicts(self) -> Counter[str]:
        """Count the verdicts of all calls."""
        return Counter(call.verdict for call in self.calls)

    def faults(self, log: Iterable[dict[str, Any]]) -> list[str]:
        """List every disagreement with the rows (of `KINDS`, with `COLUMNS`) of the log."""
        lives: dict[int, Life] = {}
        faults = []
        for row in log:
            if row["kind"] == Kind.SCHEDULED:
                lives[row["seq"]] = Life(row["unique_key"], [row])
            elif row["kind"] == Kind.MOVED:
                faults += _of_move(lives[row["source_seq"]], row)
                lives[row["source_seq"]].scheduled_rows.append(row)
            elif row["source_seq"] in lives:
                lives[row["source_seq"]].ends.append(row)
        by_key = defaultdict(list)
        for call in self.calls:
            by_key[call.key].append(call)
        faults += [
            f"scheduled message {seq} has {len(life.ends)} ends"
            for seq, life in lives.items()
            if len(life.ends) != 1
        ]
        if faults:
            return faults
        counts = Counter(life.key for life in lives.values())
        for key, seq in self.first_seq.items():
            life = lives[seq]
            faults += _of_life(life, counts[key], self.delivered[key])
            faults += [fault for call in by_key[key] for fault in _of_call(life, call)]
            faults += _of_order(life, by_key[key])
        return faults


def _of_move(life: Life, row: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a row that moves a message."""
    before = life.scheduled_rows[-1]
    moved_seq = row["source_seq"] if row["version_seq"] is None else row["version_seq"]
    if life.ends or (moved_seq, row["from_due_ms"]) != (before["seq"], before["due_ms"]):
        yield f"{life.key} was moved by row {row['seq']} from an instant at which it did not wait"


def _of_life(life: Life, count: int, delivered: int) -> Iterator[str]:
    """Yield the faults of a message's end and of its deliveries."""
    if count != 1:
        yield f"{life.key}: {count} scheduled messages"
    ended_seq = life.end["source_seq"] if life.end["version_seq"] is None else life.end["version_seq"]
    if (ended_seq, life.end["due_ms"]) != (life.scheduled_rows[-1]["seq"], life.scheduled_rows[-1]["due_ms"]):
        yield f"{life.key}: ended at another instant than its last"
    if delivered != int(life.is_released):
        yield f"{life.key}: delivered {delivered} times, and released: {life.is_released}"
    if life.is_released and life.end["store_ms"] < life.scheduled_rows[-1]["due_ms"]:
        yield f"{life.key}: early"


def _of_call(life: Life, call: Call) -> Iterator[str]:
    """Yield the disagreements of an answer with the log."""
    answer = f"{call.key} was told {call.verdict} ({call.seq}, {call.at_ms}, {call.due_ms})"
    if call.verdict in CANCELLED:
        if life.is_released:
            yield f"{answer}, and was released"
        elif call.at_ms not in (None, life.end["store_ms"]) or call.seq not in (None, life.end["source_seq"]):
            yield f"{answer}, and was cancelled otherwise"
    elif call.verdict == "released":
        if not life.is_released or call.at_ms not in (None, life.end["store_ms"]):
            yield f"{answer}, and was not released then"
    elif call.verdict == "rescheduled":
        moves = [(row["store_ms"], row["due_ms"]) for row in life.scheduled_rows[1:]]
        if call.seq != life.scheduled_rows[0]["seq"] or (call.at_ms, call.due_ms) not in moves:
            yield f"{answer}, and was not moved so"
    else:
        yield f"{answer}, which is no answer to a message that was sent"


def _of_order(life: Life, calls: list[Call]) -> Iterator[str]:
    """Yield the disagreements of all answers about a message with its moves and with the order of the log."""
    verdicts = Counter(call.verdict for call in calls)
    if verdicts["cancelled"] > 1:
        yield f"{life.key} was cancelled twice"
    answered = Counter((call.at_ms, call.due_ms) for call in calls if call.verdict == "rescheduled")
    moves = Counter((row["store_ms"], row["due_ms"]) for row in life.scheduled_rows[1:])
    if answered != moves:
        yield f"{life.key} was moved {dict(moves)}, and the answers say {dict(answered)}"
    # Of moves in the same millisecond to the same instant it is not known which call made which: the last one stands
    # for a call that came before another, the first one for the other, so that no call is a fault.
    last_seqs = {(row["store_ms"], row["due_ms"]): row["seq"] for row in life.scheduled_rows[1:]}
    first_seqs = {(row["store_ms"], row["due_ms"]): row["seq"] for row in reversed(life.scheduled_rows[1:])}

    def row(call: Call, seqs: dict[tuple[Any, Any], int]) -> int:
        """Return the row of the log that decided a call. A call that only looked has seen the last row."""
        moved_by = seqs.get((call.at_ms, call.due_ms), 0)
        return moved_by if call.verdict == "rescheduled" else int(life.end["seq"])

    for one, other in itertools.permutations(calls, 2):
        first, second = row(one, first_seqs), row(other, last_seqs)
        if one.ended < other.began and first > second:
            yield f"{life.key}: {other.verdict} came after {one.verdict}, and stands before it in the log"
