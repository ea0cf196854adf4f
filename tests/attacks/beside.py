"""A steady stream of clients beside an attack. It reports failed calls, and lost, doubled or early messages.

    with attacked_broker(folder, ACCESS_FILE) as broker:
        with steady_stream(broker) as figures:
            ...  # the attack, with harmless and bounded input
            figures.wait_rounds(50)  # while the attack runs by itself: at least five seconds of the stream
        figures.check(peak_mib_max=600)
        print(figures)

The broker is a process of its own with accounts. The clients of the stream send 1,000 messages a second, each due after
one second: batches over Flight, and one message after the other over HTTP and gRPC. `check` asserts the rules that hold
on any machine. The lateness depends on the machine's load, so it is printed and not asserted.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt
from tests.accounts import ACCESS_FILE, SECRETS, access_file, keys
from tests.bounds import BOUND_S
from tests.cli.processes import Running, running
from tests.node_fixture import eventually

from timeball import Timeball
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.model.message import Kind

TOPIC = "steady"
DELAY_S = 1
ROUNDS_PER_S, FLIGHT_ROWS = 10, 98  # with one message over HTTP and one over gRPC: 1,000 a second


class Peak:
    """The largest memory of a process within a block, without mapped files."""

    def __init__(self, pid: int) -> None:
        self._path, self._stop = Path(f"/proc/{pid}/status"), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.mib = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        """Read the memory every 5 ms until the end of the block or of the process."""
        while True:
            try:
                lines = dict(line.split(":", 1) for line in self._path.read_text().splitlines())
                self.mib = max(self.mib, int(lines["RssAnon"].split()[0]) // 1024)
            except (OSError, KeyError):
                return  # the process has ended
            if self._stop.wait(0.005):
                return


@dataclass(frozen=True)
class AttackedBroker:
    """A broker process, its addresses ("host:port"; `endpoint` is Flight's), and the account of the steady stream."""

    process: Running
    endpoint: str
    http: str
    grpc: str
    remoting: str
    name_server: str
    account: str = "root"

    @property
    def bearer(self) -> str:
        """The authorization header of the steady stream's account."""
        return f"Bearer {self.account}:{SECRETS[self.account]}"

    def client(self, **options: Any) -> Timeball:
        """Return a client of this broker over HTTP and Flight."""
        return Timeball(f"http://{self.http}", flight=self.endpoint, **options)


@contextmanager
def attacked_broker(folder: Path, accounts: str = ACCESS_FILE, *options: str) -> Iterator[AttackedBroker]:
    """Run a broker with these accounts, of which "root" must be one, or without accounts ("")."""
    access = ["--access-file", str(access_file(folder, accounts))] if accounts else []
    command = ["serve", "--json", "--port", "0", "--data", str(folder / "data"), *access, *options]
    with running(*command) as process:
        ready = process.wait_line(event="ready")
        addresses = ("endpoint", "http", "grpc", "remoting", "name_server")
        yield AttackedBroker(process, *(ready[name] for name in addresses))


@dataclass
class Figures:
    """The outcome of a steady stream. Complete after its block."""

    sent: set[str] = field(default_factory=set)  # ids of messages whose send was acknowledged
    unsure: set[str] = field(default_factory=set)  # ids of the others, which may be released
    calls: Counter[str] = field(default_factory=Counter)  # by edge
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0  # of all calls
    late_ms: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lost: int = 0
    doubled: int = 0
    early: int = 0
    peak_mib: int = 0
    seconds: float = 0.0
    exit_code: int | None = None

    def wait_rounds(self, rounds: int) -> None:
        """Return when each client has made `rounds` more calls, at best 10 a second."""
        targets = {edge: calls + rounds for edge, calls in self.calls.items()}
        eventually(
            lambda: all(self.calls[edge] >= calls for edge, calls in targets.items()), "the stream continues"
        )

    def judge(self, released: Iterable[tuple[str, int, int]]) -> None:
        """Count released messages: each an id, its due time and the time of its release."""
        times, late_ms = Counter[str](), []
        for message_id, due_ms, released_ms in released:
            times[message_id] += 1
            late_ms.append(released_ms - due_ms)
        self.late_ms = np.array(late_ms, np.int64)
        self.lost = sum(message_id not in times for message_id in self.sent)
        self.doubled = sum(count > 1 for count in times.values())
        self.early = int((self.late_ms < 0).sum())

    def check(self, peak_mib_max: int) -> None:
        """Assert everything that must hold on any machine, however busy."""
        assert self.exit_code is None, "the broker ended"
        assert not self.failed, f"{len(self.failed)} calls of other clients failed: {self.failed[:5]}"
        assert (self.lost, self.doubled, self.early) == (0, 0, 0), str(self)
        assert self.sent and len(self.late_ms) >= len(self.sent)
        assert 0 < self.peak_mib < peak_mib_max, str(self)

    def __str__(self) -> str:
        late = np.percentile(self.late_ms, (50, 99, 100)) if len(self.late_ms) else (-1, -1, -1)
        return (
            f"{len(self.sent)} messages in {self.seconds:.0f} s, {sum(self.calls.values())} calls, "
            f"{len(self.failed)} failed, the slowest {self.slowest_s * 1000:.0f} ms; late p50 {late[0]:.0f} ms, "
            f"p99 {late[1]:.0f} ms, worst {late[2]:.0f} ms; lost {self.lost}, doubled {self.doubled}, "
            f"early {self.early}; peak {self.peak_mib} MiB; load {os.getloadavg()[0]:.1f}"
        )


class _Client(Protocol):
    rows: int  # of one call

    def send(self, ids: list[str]) -> None:
        """Send messages with these ids, each due after DELAY_S."""

    def close(self) -> None:
        """Close the connection."""


class _Sender:
    """A thread that sends one round after the other."""

    def __init__(self, edge: str, client: _Client, figures: Figures, lock: threading.Lock) -> None:
        self._edge, self._client, self._figures, self._lock = edge, client, figures, lock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Wait for the last call."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        """Send round after round, and record the outcome of each."""
        for number in itertools.count():
            ids = [f"{self._edge}-{id(self._figures):x}-{number}-{row}" for row in range(self._client.rows)]
            begin_s, failure = time.perf_counter(), None
            try:
                self._client.send(ids)
            except Exception as error:  # any failure counts
                failure = f"{self._edge}: {type(error).__name__}: {str(error)[:200]}"
            duration_s = time.perf_counter() - begin_s
            with self._lock:
                self._figures.calls[self._edge] += 1
                self._figures.slowest_s = max(self._figures.slowest_s, duration_s)
                (self._figures.sent if failure is None else self._figures.unsure).update(ids)
                if failure is not None:
                    self._figures.failed.append(failure)
            if self._stop.wait(max(0.0, 1 / ROUNDS_PER_S - duration_s)):
                return


@contextmanager
def steady_stream(
    broker: AttackedBroker, edges: Sequence[str] = ("flight", "http", "grpc")
) -> Iterator[Figures]:
    """Send a steady stream over these edges during a block. Its figures are complete after the block."""
    figures, lock = Figures(), threading.Lock()
    with broker.client(**keys(broker.account)) as ball, Peak(broker.process.pid) as peak:
        first_seq = ball.status()["log"]["next_seq"]
        begin_s = time.perf_counter()
        clients: dict[str, Any] = {
            "flight": _FlightClient(ball),
            "http": _HttpClient(broker),
            "grpc": _GrpcClient(broker),
        }
        senders = [_Sender(edge, clients[edge], figures, lock) for edge in edges]
        try:
            eventually(lambda: len(figures.calls) == len(senders), "every client has made a call")
            yield figures
        finally:
            for sender in senders:
                sender.end()
            for client in clients.values():
                client.close()
            figures.seconds = time.perf_counter() - begin_s
        if broker.process.code is None:
            _await_releases(ball, first_seq, figures)
    figures.peak_mib, figures.exit_code = peak.mib, broker.process.code


def _await_releases(ball: Timeball, first_seq: int, figures: Figures) -> None:
    """Compare the releases in the log with the sends, once every sent message has a release or the time is up."""
    ids: set[str] = set()
    next_seq, released = first_seq, list[tuple[str, int, int]]()
    # All are released a second after the last due time. A lost message is waited for until the bound.
    deadline_s = time.perf_counter() + BOUND_S
    while not figures.sent <= ids and time.perf_counter() < deadline_s:
        end_seq = ball.status()["log"]["durable_seq"]
        columns = ["topic", "unique_key", "due_ms", "store_ms"]
        rows = ball.read_log(next_seq, end_seq, kinds=[Kind.RELEASE], columns=columns).read_all()
        for row in rows.to_pylist():
            if row["topic"] == TOPIC:
                released.append((row["unique_key"], row["due_ms"], row["store_ms"]))
                ids.add(row["unique_key"])
        next_seq = end_seq
        threading.Event().wait(0.1)
    figures.judge(released)


# ---- the clients ------------------------------------------------------------------------------------------------


class _FlightClient:
    rows = FLIGHT_ROWS

    def __init__(self, ball: Timeball) -> None:
        self._ball = ball

    def send(self, ids: list[str]) -> None:
        rows = [{"topic": TOPIC, "body": b"tick", "unique_key": key, "after": f"{DELAY_S}s"} for key in ids]
        self._ball.send_many(rows)

    def close(self) -> None:
        """Do nothing: the connection is the caller's."""


class _HttpClient:
    rows = 1

    def __init__(self, broker: AttackedBroker) -> None:
        self._headers = {"authorization": broker.bearer, "content-type": "application/json"}
        self._connection = http.client.HTTPConnection(broker.http, timeout=BOUND_S)

    def send(self, ids: list[str]) -> None:
        body = json.dumps({"id": ids[0], "body": "tick", "after": f"{DELAY_S}s"})
        try:
            self._connection.request("POST", f"/v1/topics/{TOPIC}/messages", body, self._headers)
            answer = self._connection.getresponse()
            data = answer.read()
        except Exception:
            self._connection.close()  # the next call dials again
            raise
        if answer.status >= 300:
            raise RuntimeError(f"{answer.status} {data[:200]!r}")

    def close(self) -> None:
        self._connection.close()


class _GrpcClient:
    rows = 1

    def __init__(self, broker: AttackedBroker) -> None:
        self._metadata = (("x-mq-client-id", f"steady@{os.getpid()}"), ("authorization", broker.bearer))
        self._channel = grpc.insecure_channel(broker.grpc)
        self._call = self._channel.unary_unary(
            f"/{SERVICE_NAME}/SendMessage",
            request_serializer=s.SendMessageRequest.SerializeToString,
            response_deserializer=s.SendMessageResponse.FromString,
        )

    def send(self, ids: list[str]) -> None:
        request = s.SendMessageRequest()
        message = request.messages.add()
        message.topic.name, message.body = TOPIC, b"tick"
        system = message.system_properties
        system.message_id, system.body_encoding = ids[0], d.Encoding.IDENTITY
        system.born_timestamp.seconds, system.born_host = int(time.time()), "client.example"
        system.message_type = d.MessageType.DELAY
        system.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 1000 * DELAY_S)
        answer = self._call(request, metadata=self._metadata, timeout=BOUND_S)
        if answer.status.code != d.Code.OK:
            raise RuntimeError(f"{answer.status.code} {answer.status.message}")

    def close(self) -> None:
        self._channel.close()
