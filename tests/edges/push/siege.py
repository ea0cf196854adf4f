"""A push of many messages, with a receiver that fails, hangs and is killed twice, and a broker that is killed twice.

    python -m tests.edges.push.siege 100000

A *grant* is a request that the receiver has accepted. At the end each message was granted or is a dead letter. A second
grant of a message has a reason: a kill of one of the two, while an answer or an acknowledgement was in transit.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from tests.bounds import BOUND_S
from tests.cli.processes import Running
from tests.edges.http.client import Client
from tests.edges.remoting.wire import Wire
from tests.ports import free_ports

from timeball.edges.push.worker import LEASE_SLACK_MS
from timeball.edges.remoting.codec.codes import RequestCode

TOPIC = GROUP = NAME = "siege"
FAILS, HANGS = 0.2, 0.01
TIMEOUT_S = 2
IN_FLIGHT_MAX = 64
TIMES_MAX, RETRY_MS = 5, 500
SENT_AT_ONCE = 5_000
DOWN_S = 3.0  # time until a killed receiver starts again
# The share of the messages that are granted when one of the two is killed.
KILLS = [(0.15, "receiver"), (0.35, "broker"), (0.55, "receiver"), (0.75, "broker")]
# Longest time from a grant to a kill by which its answer, or the broker's acknowledgement, may have been lost.
IN_TRANSIT_S = 5.0


@dataclass
class Record:
    """The receiver's record, and the broker's dead letters."""

    sent: set[str] = field(default_factory=set)
    grants: dict[str, list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    _read_bytes: int = 0

    def read(self, path: Path) -> None:
        """Read the new lines of the receiver's record. Each line is one write, so none is cut."""
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        self._read_bytes += len(data)
        for line in data.decode().splitlines():
            at, what, _, message_id = line.split(" ")
            self.outcomes[what] += 1
            if what == "granted":
                self.grants.setdefault(message_id, []).append(float(at))

    def open(self) -> set[str]:
        """Return the messages without an outcome."""
        return self.sent - self.grants.keys() - set(self.dead)

    def duplicates(self) -> Counter[str]:
        """Count the second and later grants of messages, by the kill that explains them."""
        result: Counter[str] = Counter()
        for times in self.grants.values():
            for first in times[:-1]:
                near = [who for at, who in self.kills if -0.5 <= at - first <= IN_TRANSIT_S]
                result[near[0] if near else "unexplained"] += 1
        return result

    def faults(self) -> list[str]:
        """List all contradictions."""
        dead_twice = [item for item, count in Counter(self.dead).items() if count > 1]
        return [
            *(f"lost: {item}" for item in sorted(self.open())),
            *(f"never sent: {item}" for item in sorted(self.grants.keys() - self.sent)),
            *(f"dead twice: {item}" for item in sorted(dead_twice)),
            *([f"forged: {self.outcomes['forged']}"] if self.outcomes["forged"] else []),
            *([f"sent twice for no reason: {count}"] if (count := self.duplicates()["unexplained"]) else []),
        ]

    def summary(self) -> dict[str, Any]:
        """Return figures for people."""
        granted_and_dead = len(set(self.dead) & self.grants.keys())
        return {
            "messages": len(self.sent), "granted": len(self.grants), "dead_letters": len(set(self.dead)),
            "granted_and_dead": granted_and_dead, "lost": len(self.open()), "requests": dict(self.outcomes),
            "duplicates": dict(self.duplicates()), "seconds": round(self.seconds, 1),
        }  # fmt: skip


class Siege:
    """A broker and a receiver, each a process that may be killed."""

    def __init__(self, folder: Path) -> None:
        self._data, self.path = str(folder / "data"), folder / "record"
        self.path.touch()
        (self._port,) = free_ports(1)
        self.record, self._secret = Record(), ""
        self._broker = self._serve()
        self._receiver: Running | None = None

    def _serve(self) -> Running:
        """Start the broker, and wait until it is ready."""
        broker = Running("serve", "--json", "--data", self._data, "--port", "0", "--push-allow", "127.0.0.1")
        self.ready = broker.wait_line(event="ready")
        return broker

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        port = int(self.ready["http"].rpartition(":")[2])
        client = Client(SimpleNamespace(node=SimpleNamespace(http_port=port)))  # type: ignore[arg-type]
        try:
            yield client
        finally:
            client.close()

    def begin(self, messages: int) -> None:
        """Send all messages, half of them for later, and subscribe."""
        self._make_group()
        with self.client() as client:
            for first in range(0, messages, SENT_AT_ONCE):
                ids = [f"m-{at}" for at in range(first, min(first + SENT_AT_ONCE, messages))]
                lines = [
                    {"id": item, "body": item, **({"after": "10s"} if at % 2 else {})}
                    for at, item in enumerate(ids)
                ]
                assert client.send(TOPIC, lines).status == 201
                self.record.sent.update(ids)
            wanted = {
                "topic": TOPIC, "group": GROUP, "url": f"http://127.0.0.1:{self._port}/",
                "in_flight_max": IN_FLIGHT_MAX, "timeout": f"{TIMEOUT_S}s",
            }  # fmt: skip
            self._secret = client.ask("PUT", f"/v1/subscriptions/{NAME}", wanted).value["secret"]
        self._listen()

    def _make_group(self) -> None:
        """Create the group, with few attempts after short pauses."""
        config = {
            "groupName": GROUP, "retryMaxTimes": TIMES_MAX,
            "groupRetryPolicy": {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [RETRY_MS] * 3}},
        }  # fmt: skip
        with Wire(int(self.ready["remoting"].rpartition(":")[2])) as wire:
            wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)

    def _listen(self) -> None:
        """Start the receiver."""
        self._receiver = Running(
            command=[
                sys.executable, "-m", "tests.edges.push.flaky_receiver", str(self._port), str(self.path),
                self._secret, str(FAILS), str(HANGS),
            ]
        )  # fmt: skip

    def kill(self, who: str) -> None:
        """Kill one of the two with SIGKILL, and start it again."""
        self.record.kills.append((time.time(), who))
        if who == "broker":
            self._broker.end(signal.SIGKILL)
            self._broker = self._serve()
        else:
            assert self._receiver is not None
            self._receiver.end(signal.SIGKILL)
            time.sleep(DOWN_S)
            self._listen()

    def is_finished(self) -> bool:
        """Read the record and the dead letters. Check whether every message has an outcome, and none is in transit."""
        self.record.read(self.path)
        with self.client() as client:
            self._read_dead(client)
            # Until the leases from before the last kill have ended, messages may be sent again.
            last_kill = self.record.kills[-1][0] if self.record.kills else time.time()
            if self.record.open() or time.time() < last_kill + LEASE_SLACK_MS / 1_000 + 2 * TIMEOUT_S:
                return False
            in_transit = ("timeball_push_in_flight", f'timeball_group_lag_messages{{group="{GROUP}"')
            return not sum(value for name, value in self._metrics(client) if name.startswith(in_transit))

    @staticmethod
    def _metrics(client: Client) -> Iterator[tuple[str, float]]:
        """Yield the name, with its labels, and the value of each metric."""
        connection = client._connection
        connection.request("GET", "/metrics")
        for line in connection.getresponse().read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                yield name, float(value)

    def _read_dead(self, client: Client) -> None:
        """Receive and acknowledge the new dead letters."""
        topic = quote(f"%DLQ%{GROUP}", safe="")
        while True:
            answer = client.receive(topic, group="undertaker", wait="0", max="1024")
            result = answer.value.get("messages", [])
            if not result:
                return
            self.record.dead += [item["id"] for item in result]
            receipts = {"receipts": [item["receipt"] for item in result]}
            client.ask("POST", f"/v1/topics/{topic}/ack", receipts, query={"group": "undertaker"})

    def close(self) -> None:
        """End both."""
        for item in (self._receiver, self._broker):
            if item is not None:
                item.end()


def run_siege(folder: Path, messages: int) -> Record:
    """Run a siege to its end, and return its record."""
    siege = Siege(folder)
    try:
        siege.begin(messages)
        began, kills = time.monotonic(), list(KILLS)
        # The longest time without an outcome: after a kill, the leases of its requests must end.
        quiet_s = BOUND_S + (LEASE_SLACK_MS / 1_000 + TIMEOUT_S) * 2
        outcomes, changed_s = -1, time.monotonic()
        while not siege.is_finished():
            now = len(siege.record.grants) + len(siege.record.dead)
            if now != outcomes:
                outcomes, changed_s = now, time.monotonic()
            assert time.monotonic() - changed_s < quiet_s, siege.record.summary()
            if kills and len(siege.record.grants) >= kills[0][0] * messages:
                siege.kill(kills.pop(0)[1])
            time.sleep(0.2)
        siege.record.seconds = time.monotonic() - began
        assert not kills
        return siege.record
    finally:
        siege.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record = run_siege(Path(folder), int(sys.argv[1]))
    print(json.dumps(record.summary(), indent=1))
    sys.exit("\n".join(record.faults()) or 0)
