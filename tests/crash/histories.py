"""Histories of messages, recorded at real brokers under faults, and checked by Porcupine (tests/crash/porcupine).

Each message is an object with the operations send, cancel, reschedule, look-up and release. Clients record when each
call began and ended, in nanoseconds since 1970, and its answer. A call without a clear answer is "unknown". A release
is a row of a queue: it takes effect after the row's `store_ms`, and before the row was read.

Clients speak HTTP by Python's own library, because a client of Timeball repeats calls: a repeated cancel is another
operation.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.bounds import BOUND_S
from tests.interop.environments import Missing, fetch, kept, run, tool

from timeball import Timeball

HERE = Path(__file__).parent / "porcupine"
UNKNOWN, NOT_SENT = "unknown", "not sent"
PHASES = {"waiting": "pending", "visible": "released"}  # HTTP's names -> the checker's
TOPIC, QUEUES = "histories", 4
RECENT = 40  # messages that clients cancel, reschedule and look up: so several do at the same time
ANSWER_S = 4.0
AHEAD_MS = (20, 3_000)
Address = tuple[str, int]


class Op(NamedTuple):
    """One operation, as the checker reads it."""

    message: str
    kind: str
    outcome: str
    call_ns: int
    return_ns: int
    due_ms: int = 0
    store_ms: int = 0


@dataclass
class History:
    """The operations of all clients."""

    ops: list[Op] = field(default_factory=list)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))
    messages: list[str] = field(default_factory=list)


class Client:
    """One connection, which records each call, also a failed one."""

    def __init__(
        self, history: History, addresses: Callable[[], list[Address]], name: str, seed: int
    ) -> None:
        self._history, self._addresses, self._name = history, addresses, name
        self._random = random.Random(f"{seed} {name}")
        self._connection: http.client.HTTPConnection | None = None
        self._sent = 0

    def send(self) -> str:
        """Send a message that is due within seconds. Returns the outcome, as all operations do."""
        self._sent += 1
        message, due_ms = f"{self._name}-{self._sent}", self._due_ms()
        body = {"id": message, "body": "x", "at": due_ms}
        return self._call(message, "send", "POST", f"/v1/topics/{TOPIC}/messages", body, due_ms)

    def cancel(self, message: str) -> str:
        """Cancel a message."""
        return self._call(message, "cancel", "POST", "/v1/cancel", {"ids": [message]})

    def reschedule(self, message: str) -> str:
        """Give a message another due time."""
        due_ms = self._due_ms()
        return self._call(
            message, "reschedule", "POST", "/v1/reschedule", {"ids": [message], "at": due_ms}, due_ms
        )

    def look_up(self, message: str) -> str:
        """Look a message up."""
        return self._call(message, "look-up", "GET", f"/v1/messages/{message}", None)

    def act(self) -> str:
        """Do one operation, drawn from the seed."""
        chance = self._random.random()
        if chance < 0.3 or not self._history.recent:
            return self.send()
        message = self._random.choice(list(self._history.recent))
        if chance < 0.4:
            return self.cancel(message)
        if chance < 0.55:
            return self.reschedule(message)
        return self.look_up(message)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _due_ms(self) -> int:
        """Draw a due time."""
        return time.time_ns() // 1_000_000 + self._random.randint(*AHEAD_MS)

    def _call(
        self, message: str, kind: str, method: str, path: str, body: dict[str, Any] | None, due_ms: int = 0
    ) -> str:
        """Send the request of an operation, and record it. Returns its outcome."""
        if not self._connect():
            return NOT_SENT
        if kind == "send":
            self._history.recent.append(message)
            self._history.messages.append(message)
        call_ns = time.time_ns()
        try:
            outcome, answered_due_ms = outcome_of(kind, *self._ask(method, path, body))
        except (OSError, http.client.HTTPException, ValueError):
            self.close()
            outcome, answered_due_ms = UNKNOWN, 0
        if outcome == NOT_SENT:
            return outcome
        op = Op(message, kind, outcome, call_ns, time.time_ns(), answered_due_ms or due_ms)
        self._history.ops.append(op)
        if outcome == UNKNOWN and kind != "look-up":
            # Each of them may take effect at any later time, so the orders to try double with each.
            with suppress(ValueError):
                self._history.recent.remove(message)
        return outcome

    def _connect(self) -> bool:
        """Connect if there is no connection. Returns whether there is one: without it, nothing is sent."""
        if self._connection is None:
            host, port = self._random.choice(self._addresses())
            connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
            try:
                connection.connect()
            except OSError:
                return False
            self._connection = connection
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Send a request. Returns the status and the JSON of its answer."""
        assert self._connection is not None
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


def outcome_of(kind: str, status: int, answer: dict[str, Any]) -> tuple[str, int]:
    """Return the outcome of an operation, and the due time that the answer has."""
    if status == 503 and answer.get("code") == "unavailable":
        return NOT_SENT, 0  # the broker starts or stops, and has done nothing (timeball.client.attempts)
    if kind == "look-up":
        if status == 404:
            return "not_found", 0
        if status == 200:
            newest = answer["messages"][0]
            state = PHASES.get(newest["state"], newest["state"])
            return state, newest["due_ms"] if state == "pending" else 0
    elif kind == "send" and status in (200, 201):
        return "sent", 0
    elif kind in ("cancel", "reschedule") and status == 200:
        (verdict,) = answer["verdicts"]
        # The due time of a reschedule that came late is the broker's present time.
        due_ms = verdict["due_ms"] if verdict["verdict"] == "rescheduled" else 0
        return (UNKNOWN if verdict["verdict"] == "unavailable" else verdict["verdict"]), due_ms
    return UNKNOWN, 0


class Recording:
    """Clients in threads, until `end`."""

    def __init__(self, addresses: Callable[[], list[Address]], seed: int, clients: int) -> None:
        self.history = History()
        self._addresses, self._seed = addresses, seed
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(f"m{number}",)) for number in range(clients)
        ]

    def __enter__(self) -> Recording:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Wait for the clients' last calls."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _work(self, name: str) -> None:
        client = Client(self.history, self._addresses, name, self._seed)
        try:
            while not self._over.is_set():
                if client.act() in (UNKNOWN, NOT_SENT):
                    self._over.wait(0.02)  # nobody answers
        except BaseException as error:
            self._failed.append(error)
        finally:
            client.close()

    def settle(self, ball: Timeball) -> None:
        """Look each message up until none is pending, and add the releases. All faults must be over."""
        client = Client(self.history, self._addresses, "last", self._seed)
        deadline = time.monotonic() + BOUND_S
        for message in self.history.messages:
            while client.look_up(message) in ("pending", UNKNOWN, NOT_SENT):
                assert time.monotonic() < deadline, f"{message} stays pending, or nobody answers"
                time.sleep(0.05)
            deadline = time.monotonic() + BOUND_S
        client.close()
        self.history.ops += releases(ball)


def releases(ball: Timeball) -> list[Op]:
    """Return an operation for each row of the queues."""
    ops = []
    for queue, span in ball.queues(TOPIC).items():
        low = span.min
        while low < span.max:
            rows = ball.read_queue(TOPIC, queue, low, 5_000).read_all()
            read_ns = time.time_ns()
            assert rows.num_rows
            ops += [
                Op(
                    row["unique_key"],
                    "release",
                    "",
                    row["store_ms"] * 1_000_000,
                    read_ns,
                    row["due_ms"],
                    row["store_ms"],
                )
                for row in rows.select(["unique_key", "due_ms", "store_ms"]).to_pylist()
            ]
            low += rows.num_rows
    return ops


# ---- the checker ----------------------------------------------------------------------------------------------


def checker() -> Path:
    """Compile the checker once. Skips the test where Go or the module is missing."""
    inputs = [HERE / name for name in ("go.mod", "go.sum", "main.go")]

    def make(folder: Path) -> None:
        """Compile into a folder."""
        go = ["go", "-C", str(HERE)]
        fetch([*go, "mod", "download"])
        run([*go, "build", "-buildvcs=false", "-o", str(folder / "porcupine"), "."])

    try:
        tool("go", "golang-go")
        return kept("porcupine", inputs, make) / "porcupine"
    except Missing as error:
        pytest.skip(f"Porcupine: {error}")


@dataclass(frozen=True)
class Judgement:
    """The checker's counts, and the text about the messages whose history has no order."""

    counts: Counter[str]
    text: str

    @property
    def wrong(self) -> int:
        """The number of messages whose history has no order."""
        return self.counts["wrong"]


def judge(ops: Iterable[Op], folder: Path) -> Judgement:
    """Check a history. It stays in the folder as `history.jsonl`."""
    path = folder / "history.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(op._asdict()) + "\n" for op in ops)
    with path.open() as file:
        result = subprocess.run([checker()], stdin=file, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    *lines, counts = result.stdout.splitlines()
    return Judgement(Counter(json.loads(counts)), "\n".join(lines[:60]))


def make_topic(ball: Timeball) -> None:
    """Create the topic of the messages."""
    with suppress(Exception):  # it may exist
        ball.create_topic(TOPIC, QUEUES)
