"""A broker process that is killed repeatedly, its clients, and the answers that they received.

The broker is `timeball serve` with real files, and the clients are threads with real connections that never
stop: when the broker dies they get `Unavailable`, and continue. `Observed` has only
answers. A kill waits for a number of events of one kind, drawn from a seed, so that
it hits the other threads in the middle of their work.

At the end a node whose clock is ahead by more than the longest delay opens the folder: everything is due.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tests.cli.processes import COMMAND, Running
from tests.crash.checker import Fault, Observed, Outcome, Row, Sent, check
from tests.crash.world import GROUP, HOUR_MS, SECOND_MS, as_rows
from tests.edges.remoting.wire import Wire
from tests.node_fixture import BOUND_S, eventually, running_node
from tests.ports import free_ports

from timeball import Timeball
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.io.clock import SystemClock
from timeball.io.files import RealFiles
from timeball.model.errors import OutOfRange, Unavailable
from timeball.model.message import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    Kind,
    encode_properties,
    pairs_of,
)
from timeball.node.inspect_folder import FolderDump, InspectedFrame

AHEAD_MS = 26 * HOUR_MS
FAR_MS = (30 * SECOND_MS, 5 * 60 * SECOND_MS, 2 * HOUR_MS, 25 * HOUR_MS)
NEAR_MS = 3 * SECOND_MS
TOPICS = {"a": 2, "b": 3}
LEVELS_MS = (SECOND_MS, 5 * SECOND_MS, 10 * SECOND_MS, 30 * SECOND_MS)  # RocketMQ's first four
CLOCK = SystemClock()

# All limits are small: each run has compactions, checkpoints and several segments.
BUSY = {
    "segment-bytes": "1MiB",
    "checkpoint-interval-ms": "300",
    "compact-rows": "100",
    "compact-interval-ms": "300",
}


class Ahead(SystemClock):
    """The machine's clock after a day and some hours."""

    def wall_ms(self) -> int:
        return super().wall_ms() + AHEAD_MS


# `timeball` that loads bodies only a second ahead, so that each life reads some from the log and from files.
LATE_LOADING = """
import functools
from timeball.cli.main import main
from timeball.node import node
from timeball.schedule.loaded import LoadBounds
node.Node = functools.partial(node.Node, load_bounds=LoadBounds(ahead_ms=1_000))
main()
"""


class BrokerProcess:
    """`timeball serve` on one folder and the same ports in all its lives."""

    def __init__(self, data: Path, options: dict[str, str], program: Sequence[str] = COMMAND) -> None:
        self.data = data
        self._program = program
        # A flag has no value.
        self._options = [word for name, value in options.items() for word in (f"--{name}", value) if word]
        self._port, self._http_port, self._remoting_port = free_ports(3)
        self._process: Running | None = None
        self.endpoint = ""
        self.starts_ms: list[int] = []

    @property
    def is_up(self) -> bool:
        """Check whether a process was started and not killed."""
        return self._process is not None

    def start(self, give_up_ms: float = BOUND_S * 1_000) -> bool:
        """Start the process. Return whether it was ready before `give_up_ms` had passed."""
        begin_ns = CLOCK.monotonic_ns()
        arguments = ("--data", str(self.data), "--port", str(self._port))
        arguments += (
            "--remoting-port",
            str(self._remoting_port),
            "--name-server-port",
            "-1",
            "--grpc-port",
            "-1",
        )
        arguments += ("--http-port", str(self._http_port))
        command = [*self._program, "serve", "--json", *arguments, *self._options]
        process = self._process = Running(command=command)
        pause = threading.Event()
        while not process.lines:
            assert process.code is None, f"the broker ended by itself: {process.errors}"
            if CLOCK.monotonic_ns() - begin_ns > give_up_ms * 1e6:
                return False
            pause.wait(0.002)
        self.endpoint = process.lines[0]["endpoint"]
        self.starts_ms.append((CLOCK.monotonic_ns() - begin_ns) // 1_000_000)
        return True

    def client(self, **options: Any) -> Timeball:
        """Return a client over HTTP and Flight."""
        return Timeball(f"http://127.0.0.1:{self._http_port}", flight=self.endpoint, **options)

    @property
    def pid(self) -> int:
        """The pid of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def remoting_port(self) -> int:
        """The port for RocketMQ clients."""
        return self._remoting_port

    @property
    def http_port(self) -> int:
        """The port for HTTP clients."""
        return self._http_port

    def kill(self) -> None:
        """End the process with SIGKILL. An earlier end for another reason is a failure."""
        assert self._process is not None
        process, self._process = self._process, None
        code = process.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"ended with {code} before it was killed: {process.errors}"

    def clear(self) -> None:
        """End the process if it runs."""
        if self._process is not None:
            self._process.end(signal.SIGKILL)


class Siege:
    """One data folder over many runs of its broker."""

    def __init__(
        self,
        data: Path,
        seed: int,
        options: dict[str, str] | None = None,
        pause_ms: int = 0,
        schedule: str = "hour_log",
    ) -> None:
        """`schedule` is the broker's strategy. Strategies without a table compact nothing.

        `options` are the broker's (BUSY, if None). `pause_ms` is the pause of each client after each step. Without a
        pause the clients use the whole machine.
        """
        self._pause_s = pause_ms / 1_000
        chosen = {**(BUSY if options is None else options), "strategy": schedule}
        program = [sys.executable, "-c", LATE_LOADING] if options is None else COMMAND
        self.broker = BrokerProcess(data, chosen, program)
        self._compacts = schedule == "hour_log"
        self.seed = seed
        self.observed = Observed()
        self.moments: list[str] = []
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._changed = threading.Condition()
        self._up, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._broken: list[BaseException] = []
        self._promised: list[
            str
        ] = []  # keys of scheduled messages whose send has ended, with or without success
        self._keys = 0
        self._moved: list[Fault] = []

    def __enter__(self) -> Siege:
        assert self.broker.start()
        with self.broker.client() as ball:
            for topic, queues in TOPICS.items():
                ball.create_topic(topic, queues)
                self.observed.topics[topic] = queues
        self._up.set()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end_clients()
        finally:
            self.broker.clear()

    # -- the attack -------------------------------------------------------------------------------------------

    # Event -> the greatest number of further events of this kind before a kill.
    MOMENTS = {
        "acknowledged": 40,
        "seen": 300,
        "cancelled": 4,
        "rescheduled": 4,
        "committed": 6,
        "compacting": 3,
        "compacted": 2,
    }

    def clients(self, *steps: Step) -> None:
        """Start one client for each step, by default for each of STEPS and a second one for `send_one`."""
        steps = steps or (send_one, *(step for step in STEPS if self._compacts or step is not compact))
        for number, step in enumerate(steps):
            thread = threading.Thread(target=self._work, args=(step, number), name=step.__name__)
            self._threads.append(thread)
            thread.start()

    def kill(self) -> None:
        """Kill at a moment drawn from the seed, then start again."""
        events = [event for event in self.MOMENTS if self._compacts or not event.startswith("compact")]
        event = str(self._rng.choice(events))
        count = int(self._rng.integers(0, self.MOMENTS[event] + 1))
        self.moments.append(f"{count} more {event}")
        target = self.counts[event] + count
        self.until(lambda: self.counts[event] >= target, self.moments[-1])
        self.strike()

    def strike(self) -> None:
        """Kill the broker now and start it again, which may take more than one attempt."""
        self.broker.kill()
        self.counts["killed"] += 1
        self._up.clear()
        self._note_saved_offsets()
        while self._rng.random() < 0.4 and not self.broker.start(self._part_of_a_start_ms()):
            self.broker.kill()  # while it loads, recovers, or is about to answer
            self.counts["killed while starting"] += 1
        assert self.broker.is_up or self.broker.start(), "the broker does not start again"
        self._up.set()

    def end_clients(self) -> None:
        """Wait for the clients' last calls."""
        self._over.set()
        self._up.set()
        self.note("over")
        for thread in self._threads:
            thread.join(BOUND_S)
        self._threads = []
        if self._broken:
            raise self._broken[0]

    def until(self, condition: Callable[[], object], description: str) -> None:
        """Wait for an effect of the clients. A client that has failed has none."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._broken, BOUND_S)
            if self._broken:
                raise self._broken[0]
            assert condition(), f"did not happen in {BOUND_S} s: {description} ({self})"

    def faults(self, schedule: str = "hour_log") -> list[Fault]:
        """Kill once more, let everything become due, compare. `schedule` is the strategy of the last start."""
        self.end_clients()
        self.broker.kill()
        self._note_saved_offsets()
        return self.compared(self.broker.data, schedule)

    def compared(self, data: Path, schedule: str = "hour_log") -> list[Fault]:
        """Let everything in a folder without a broker become due, and compare it with the answers to clients."""
        sent = self.observed.sent.values()
        last_due_ms = max((ms for one in sent for ms in (one.due_ms or 0, *one.maybe_due)), default=0)
        with (
            running_node(data, Ahead(), strategy=schedule) as node,
            node.client() as ball,
        ):
            eventually(lambda: ball.status()["settled_before_ms"] > last_due_ms, "everything is settled")
            eventually(lambda: ball.status()["levels"]["waiting_rows"] == 0, "every level is settled")
            return [*self._moved, *check(self.observed, outcome(ball))]

    def __str__(self) -> str:
        sent = self.observed.sent.values()
        scheduled_rows = sum(one.acked and one.due_ms is not None for one in sent)
        lost_answers = sum(not one.acked for one in sent)
        return (
            f"seed={self.seed} kills={self.counts['killed']} sent={len(sent)} acknowledged_scheduled={scheduled_rows} "
            f"answers_lost={lost_answers} verdicts={len(self.observed.verdicts)} {dict(self.counts)} "
            f"starts_ms={self.broker.starts_ms[:1]}..{self.broker.starts_ms[-1:]} last moments={self.moments[-3:]}"
        )

    def _part_of_a_start_ms(self) -> float:
        """Draw a part of the usual time of a start."""
        return float(self._rng.uniform(0.3, 1.0)) * float(np.median(self.broker.starts_ms))

    def _note_saved_offsets(self) -> None:
        """Record the offsets of GROUP in the log of the stopped broker: a later start must not lose them."""
        folder = FolderDump(RealFiles(self.broker.data))
        rows = [
            item.rows
            for segment in folder.segments
            for item in folder.walk(segment)
            if isinstance(item, InspectedFrame)
        ]
        for key, value in itertools.chain.from_iterable(map(pairs_of, rows)):
            group, _, topic = (key or "").removeprefix("offsets/").partition("@")
            if group == GROUP and (key or "").startswith("offsets/") and topic:
                offsets = self.observed.saved_offsets.setdefault((group, topic), {})
                for queue, offset in json.loads(value).items():
                    # Not below an earlier life's: that would be a step back.
                    offsets[int(queue)] = max(offsets.get(int(queue), 0), offset)

    # -- for clients -------------------------------------------------------------------------------------------

    def _work(self, step: Step, number: int) -> None:
        """Repeat a step until the end."""
        rng, pause = np.random.default_rng([self.seed, number]), threading.Event()
        try:
            with self.broker.client(timeout_ms=BOUND_S * 1_000) as ball:
                while not self._over.is_set():
                    self._up.wait(BOUND_S)
                    try:
                        step(self, ball, rng)
                    except Exception as error:
                        if not self.is_lost(error):
                            raise
                        self.note("unavailable")
                        pause.wait(0.005)  # the broker is killed, and `_up` is not cleared yet
                    self._over.wait(self._pause_s)
        except BaseException as error:
            self._broken.append(error)
            self.note("broken")

    def is_lost(self, error: Exception) -> bool:
        """Check whether a call that raised this error has no answer, so that both outcomes are possible."""
        return isinstance(error, (Unavailable, OSError, EOFError))

    def note(self, event: str, count: int = 1) -> None:
        """Count events, and wake those who wait for them."""
        with self._changed:
            self.counts[event] += count
            self._changed.notify_all()

    def sends(self, count: int) -> None:
        """Wait for `count` further acknowledgements, or for the end."""
        target = self.counts["acknowledged"] + count
        with self._changed:
            self._changed.wait_for(
                lambda: self.counts["acknowledged"] >= target or self._over.is_set() or self._broken, BOUND_S
            )

    def ask(self, topic: str, dues_ms: list[int | None]) -> list[Sent]:
        """Return new messages to send, which `observed` has from now on: they may be stored without an answer."""
        with self._changed:
            numbers = range(self._keys, self._keys + len(dues_ms))
            self._keys += len(dues_ms)
            sent = [
                Sent(f"k{number:07d}", topic, b"body %d " % number * 5, due)
                for number, due in zip(numbers, dues_ms, strict=True)
            ]
            self.observed.sent.update({one.key: one for one in sent})
        return sent

    def ended(self, sent: list[Sent], acked: bool) -> None:
        """Record that a send has ended, and whether it was acknowledged. The messages may be cancelled from now on."""
        with self._changed:
            for one in sent:
                one.acked = acked
            self._promised += [one.key for one in sent if one.due_ms is not None]
        if acked:
            self.note("acknowledged")

    def some_promised(self, rng: np.random.Generator) -> list[str]:
        """Return up to five keys of scheduled messages, half of the time of the newest 40, which may be due now."""
        with self._changed:
            count = len(self._promised)
            first = max(0, count - 40) if rng.random() < 0.5 else 0
            picks = rng.integers(first, max(first + 1, count), int(rng.integers(1, 6)))
            return sorted({self._promised[index] for index in picks if index < count})

    def see(self, batch: pa.RecordBatch) -> None:
        """Record the rows of a pull. A place in a queue whose message has changed since is a fault."""
        now_ms = CLOCK.wall_ms()
        with self._changed:
            for row in as_rows(batch):
                if row.place.topic.startswith(RETRY_PREFIX):
                    continue  # handed out again to a consumer that had not answered
                before = self.observed.seen.get(row.place, row)
                if before != row:
                    self._moved.append(Fault("moved", f"{row.place} was {before.key} and became {row.key}"))
                self.observed.see(row, now_ms)
        self.note("seen", batch.num_rows)


# ---- the steps of clients; each client repeats one ------------------------------------------------------------


def some_due(rng: np.random.Generator) -> int | None:
    """Return no due time (None), or one after milliseconds, seconds, or up to 25 hours."""
    kind, now_ms = rng.random(), CLOCK.wall_ms()
    if kind < 0.2:
        return None
    if kind < 0.7:
        return now_ms + int(rng.integers(1, 50 if kind < 0.4 else NEAR_MS))
    return now_ms + int(rng.choice(FAR_MS)) + int(rng.integers(0, SECOND_MS))


def send_one(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send a message."""
    (one,) = sent = siege.ask(str(rng.choice(list(TOPICS))), [some_due(rng)])
    acked = False
    try:
        receipt = ball.send(one.topic, one.body, at=one.due_ms, message_id=one.key)
        acked = receipt.id == one.key
    finally:
        siege.ended(sent, acked)


def send_many(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send some messages in batches of 20."""
    sent = siege.ask(str(rng.choice(list(TOPICS))), [some_due(rng) for _ in range(int(rng.integers(1, 60)))])
    rows = [
        {"topic": one.topic, "body": one.body, "unique_key": one.key}
        | ({} if one.due_ms is None else {"due_ms": one.due_ms})
        for one in sent
    ]
    acked = False
    try:
        acked = ball.send_many(rows, batch_rows=20).rows == len(sent)
    finally:
        siege.ended(sent, acked)


def send_levels(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send some messages with delay levels as a RocketMQ client, after three sends of other clients."""
    siege.sends(3)
    with Wire(siege.broker.remoting_port) as wire:
        for _ in range(int(rng.integers(1, 10))):
            level = int(rng.choice(len(LEVELS_MS), p=[0.6, 0.2, 0.1, 0.1])) + 1
            topic = str(rng.choice(list(TOPICS)))
            (one,) = sent = siege.ask(topic, [CLOCK.wall_ms() + LEVELS_MS[level - 1]])
            one.is_at_least = True
            properties = encode_properties({"UNIQ_KEY": one.key, "DELAY": str(level)})
            acked = False
            try:
                answer = wire.ask(
                    RequestCode.SEND_MESSAGE_V2, one.body, a="besiegers", b=topic, c="TBW102", d=4, e=0, f=0,
                    g=CLOCK.wall_ms(), h=0, i=properties, j=0,
                )  # fmt: skip
                acked = answer.code == ResponseCode.SUCCESS
                siege.note("levels" if acked else "refused")
            finally:
                siege.ended(sent, acked)


def cancel(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Cancel some, after some more have been sent: too many cancels would leave little to deliver."""
    siege.sends(3)
    keys = siege.some_promised(rng)
    siege.observed.cancel_asked.update(keys)
    for verdict in ball.cancel(ids=keys):
        siege.observed.verdicts.setdefault(verdict.subject, []).append(verdict.verdict)
    siege.note("cancelled")


def reschedule(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Reschedule some, to a time that is still ahead when the broker receives the request."""
    siege.sends(3)
    keys, due_ms = siege.some_promised(rng), CLOCK.wall_ms() + NEAR_MS + int(rng.choice((0, *FAR_MS)))
    for key in keys:
        siege.observed.sent[key].maybe_due.add(due_ms)
    for verdict in ball.reschedule(ids=keys, at=due_ms):
        siege.observed.verdicts.setdefault(verdict.subject, []).append(verdict.verdict)
        if verdict.verdict == "rescheduled":
            assert verdict.due_ms is not None
            siege.observed.sent[verdict.subject].move(verdict.due_ms)
    siege.note("rescheduled")


def consume(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Pull and commit as a consumer that knows only the offsets that the broker has stored."""
    with siege.broker.client(timeout_ms=BOUND_S * 1_000) as fresh:
        for _ in range(int(rng.integers(1, 20))):
            topic = str(rng.choice(list(TOPICS)))
            siege.see(fresh.browse_batch(topic, GROUP, max_messages=int(rng.integers(1, 500)), wait="0.1s"))
            if rng.random() < 0.7:
                fresh.commit(topic, GROUP)
                siege.note("committed")


def compact(siege: Siege, ball: Timeball, rng: np.random.Generator) -> None:
    """Request a compaction after a random number of sends. The broker also compacts by itself."""
    siege.sends(int(rng.integers(1, 60)))
    siege.note("compacting")
    try:
        if ball.compact() is not None:
            siege.note("compacted")
    except OutOfRange:
        pass  # the broker's own compaction was faster


Step = Callable[[Siege, Timeball, np.random.Generator], None]
STEPS: tuple[Step, ...] = (send_one, send_many, send_levels, cancel, reschedule, consume, compact)


def outcome(ball: Timeball) -> Outcome:
    """Read all queues, offsets and the log, over the same interfaces as clients."""
    result = Outcome()
    for topic in ball.topics():
        if topic.startswith(RETRY_PREFIX):
            continue  # copies for consumers that had not answered: the message stands in its own topic
        result.offsets[(GROUP, topic)] = ball.offsets(GROUP, topic)
        is_dead = topic.startswith(DLQ_PREFIX)
        rows = result.waited if topic == SCHEDULE_TOPIC else result.dead if is_dead else result.rows
        for queue, span in ball.queues(topic).items():
            result.ranges[(topic, queue)] = (span.min, span.max)
        rows += rows_of(ball, topic)
    log: dict[str, Any] = ball.status()["log"]
    kinds = (Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL)
    for batch in ball.read_log(log["first_seq"], log["durable_seq"], kinds=kinds):
        # A half message waits for no due time. A message for a retry may be due after the end of the test.
        counts = np.asarray(batch.column("due_ms").is_valid())
        counts &= ~np.asarray(pc.starts_with(batch.column("topic"), RETRY_PREFIX).fill_null(False))
        is_scheduled_row = batch.column("kind").to_numpy() == Kind.SCHEDULED
        result.scheduled_rows.update(batch.column("seq").to_numpy()[is_scheduled_row & counts].tolist())
        result.settled += batch.column("source_seq").filter(pa.array(~is_scheduled_row)).to_pylist()
    return result


def rows_of(ball: Timeball, topic: str) -> list[Row]:
    """Read all rows of a topic."""
    rows: list[Row] = []
    for queue, span in ball.queues(topic).items():
        low = span.min
        while low < span.max:
            part = as_rows(ball.read_queue(topic, queue, low, 5_000).read_all())
            assert part, f"queue {queue} of {topic} ends at {span.max} and gives nothing at {low}"
            rows += part
            low += len(part)
    return rows
