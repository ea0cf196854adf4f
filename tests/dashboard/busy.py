"""A real busy broker, for tests of every page and for the pictures in docs/.

Messages, receives and subscriptions come over HTTP, as from the programs of users. What Spark would do is replaced: the
states of campaigns are set directly, and the reports of jobs are written by the class that the jobs use.
"""

from __future__ import annotations

import base64
import json
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.edges.http.client import Client, client_of
from tests.edges.http.handlers.test_campaigns import planned
from tests.edges.push.receiver import Receiver, Reply, Request, receiver_of
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.io.clock import SystemClock
from timeball.monitoring.figures import ReplicaFigures, ReplicaGroup, ReplicaReaders, ReplicaState
from timeball.spark.jobs.audit import AuditReport, Scope
from timeball.spark.run.runner import Board, Epoch, JobStatus

TOPICS = ("orders", "reminders", "invoices")
BATCH = 1_000
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
FAILING = 16  # messages that the receiver refuses: enough to open the circuit
PAUSE_S = 0.5


@contextmanager
def busy_node(data: Path, scheduled: int = 20_000) -> Iterator[RunningNode]:
    """A broker with data for each page, and with messages that are sent and received until the end of the block."""
    with (
        receiver_of(answer) as receiver,
        running_node(data, http_port=0, push_allow="127.0.0.1") as node,
        client_of(node) as client,
    ):
        schedule(client, scheduled)
        fall_behind(client)
        give_up(client)
        campaigns(node, client)
        recur(client)
        select(client)
        report(node)
        subscribe(client, receiver)
        join_cluster(node)
        with Traffic(node):
            eventually(lambda: is_busy(client), "every page has something to show")
            yield node


def join_cluster(node: RunningNode) -> None:
    """Let the node report that it leads two followers. It stays a single node."""
    now_ms = SystemClock().wall_ms()

    def figures() -> ReplicaFigures:
        rows = node.broker.log.writer.next_seq
        return ReplicaFigures("g1", "a/1", "leader", "a", epoch=4, log_seq=rows, committed_seq=rows)

    async def survey() -> list[ReplicaGroup]:
        """Return the group with the leader and two followers that are up to date."""
        rows = figures().log_seq
        replicas = [
            ReplicaState(
                name, f"{name}/1", role, is_in_record=True, log_seq=rows, committed_seq=rows, applied_seq=rows,
                lag_rows=0, clock_offset_ms=offset_ms, version="0.1.0", since_ms=now_ms - 3_817_000,
            )
            for name, role, offset_ms in (("a", "leader", 0.0), ("b", "follower", 0.2), ("c", "follower", -1.4))
        ]  # fmt: skip
        return [ReplicaGroup("g1", "a", 4, 1, replicas, "", [])]

    node.node.metrics.replica = node.node._replica = ReplicaReaders(figures, survey)


# ---- what waits ---------------------------------------------------------------------------------------------------


def schedule(client: Client, count: int) -> None:
    """Schedule messages for the next hour, day and month, with a peak in each."""
    now_ms = SystemClock().wall_ms()
    lines = [
        json.dumps(
            {
                "json": {"order": number, "total": f"{number % 97}.90"},
                "id": f"order-{number}-due",
                "key": f"order-{number}",
                "tag": ("eu", "us", "asia")[number % 3],
                "at": now_ms + MINUTE_MS + due_in_ms,
            }
        )
        for number, due_in_ms in enumerate(delays_ms(count))
    ]
    for begin in range(0, count, BATCH):
        body = "\n".join(lines[begin : begin + BATCH]).encode()
        # Three of five batches are for the first topic.
        topic = TOPICS[(0, 0, 1, 0, 2)[begin // BATCH % 5]]
        assert client.send(topic, body, content_type="application/x-ndjson").status == 201


def delays_ms(count: int) -> Iterator[int]:
    """Yield the delays of the messages, the same in each run. The load of each span is a wave with a peak."""
    generator = random.Random(7)
    spans = [(HOUR_MS, 60), (DAY_MS, 24), (30 * DAY_MS, 30)]
    waves = {
        steps: [0.6 + 0.4 * math.sin(step / 4) + (step == steps * 2 // 5) for step in range(steps)]
        for _, steps in spans
    }
    for span_ms, steps in generator.choices(spans, (2, 1, 1), k=count):
        (step,) = generator.choices(range(steps), waves[steps])
        yield span_ms // steps * step + generator.randrange(span_ms // steps)


# ---- groups, dead letters, campaigns, jobs ------------------------------------------------------------------------


def fall_behind(client: Client) -> None:
    """Create a group that has read little of its topic, and has leased messages."""
    assert (
        client.send(
            "mails", [{"body": f"mail {number}", "key": f"customer-{number}"} for number in range(BATCH)]
        ).status
        == 201
    )
    received = client.receive("mails", "mailers", max=64).value["messages"]
    receipts = [message["receipt"] for message in received[:32]]
    assert (
        client.ask("POST", "/v1/topics/mails/ack", {"receipts": receipts}, query={"group": "mailers"}).status
        == 200
    )


def give_up(client: Client) -> None:
    """Create a group with eight dead letters, of which one has a body that is no text."""
    binary = base64.b64encode(bytes(range(256)) * 4).decode()
    bodies = [{"json": {"order": n, "total": f"{n}.90"}} for n in range(7)] + [{"base64": binary}]
    letters = [{"key": f"order-{n}", "tag": "eu", **body} for n, body in enumerate(bodies)]
    assert client.send("payments", letters).status == 201
    unanswered = len(letters)
    while unanswered:
        messages = client.receive("payments", "accounting").value["messages"]
        body = {"receipts": [message["receipt"] for message in messages]}
        answer = client.ask("POST", "/v1/topics/payments/dead-letter", body, query={"group": "accounting"})
        assert answer.status == 200, answer
        unanswered -= len(messages)


def campaigns(node: RunningNode, client: Client) -> None:
    """Create a campaign in each state."""
    planned(node, "spring-2027", client, 800)
    planned(node, "win-back", client, 500)
    planned(node, "tariffs")
    planned(node, "summer-2027")
    for name, verb in (("win-back", "pause"), ("tariffs", "cancel")):
        answer = client.ask("POST", f"/v1/campaigns/{name}/{verb}", {})
        assert answer.status == 200, answer


def recur(client: Client) -> None:
    """Create six schedules with rules of each kind, of which one is due often and one is paused."""
    rules: dict[str, dict[str, object]] = {
        "daily-report": {"cron": "0 9 * * *", "zone": "Europe/Berlin"},
        "invoices": {
            "rrule": "DTSTART:20260131T180000\nRRULE:FREQ=MONTHLY;BYMONTHDAY=-1",
            "zone": "Europe/Berlin",
        },
        "nightly-backup": {"cron": "30 2 * * *", "zone": "America/New_York"},
        "ping": {"every": "15m"},
        "reminders": {"cron": "0,30 8-18 * * *", "zone": "Europe/Berlin", "exclude": ["2030-12-25"]},
        "tokyo-open": {"cron": "0 9 * * 1-5", "zone": "Asia/Tokyo"},
    }
    for name, rule in rules.items():
        request = {"rule": rule, "topic": "reminders", "json": {"do": name}}
        assert client.ask("PUT", f"/v1/schedules/{name}", request).status == 201
    assert client.ask("POST", "/v1/schedules/tokyo-open/pause").status == 200


def select(client: Client) -> None:
    """Cancel messages by two bulk operations with a condition, and undo the second one."""
    for where in ("tag = 'asia' AND campaign IS NULL", "tag = 'us'"):
        accepted = client.ask(
            "POST", "/v1/selections", {"action": "cancel", "topics": ["invoices"], "where": where}
        )
        assert accepted.status == 201, accepted
    assert client.ask("POST", f"/v1/selections/{accepted.value['id']}/undo").status == 200


def report(node: RunningNode) -> None:
    """Write the reports of three jobs and of an audit, as the jobs do."""
    board, now_ms = Board(str(node.settings.data / "pipeline")), SystemClock().wall_ms()
    seq = node.broker.log.writer.next_seq
    for n, (job, state) in enumerate((("compact", "running"), ("ledger", "waiting"), ("archive", "failed"))):
        error = "no space left in the archive" if state == "failed" else None
        last = Epoch(91 - n, "seq", seq - 112 * n, 420 + n, 112 * n, 9_000)
        status = JobStatus(
            job=job, state=state, updated_ms=now_ms - 600_000 * (n // 2), started_ms=now_ms - DAY_MS,  # type: ignore[arg-type]
            epochs=91 - n, rows=812_000 // (n + 1), last=last, last_ms=now_ms - 1_000, failures=n // 2, error=error,
        )  # fmt: skip
        board.write_status(status, 0)
    waiting = int(node.node.status()["schedule"]["tail_rows"])  # type: ignore[index,call-overload]
    scope = Scope(since=0, first=0, end=seq, ledger_end=0, watermark=0, version=0, now_ms=now_ms)
    audit = AuditReport(
        ok=True, scope=scope, accepted=waiting + 40, released=0, cancelled=40, expired=0,
        pending=waiting, lost=0, early=0, duplicate=0, unknown=0, overdue=0, queue_gaps=0, offenders={},
    )  # fmt: skip
    board.write_audit(msgspec.json.encode(audit))


# ---- push ---------------------------------------------------------------------------------------------------------


def answer(request: Request) -> Reply:
    """Return the answer of the receiver: an error for the path /failing, 410 for /gone, else success."""
    return Reply({"/failing": 500, "/gone": 410}.get(request.path, 204))


def subscribe(client: Client, receiver: Receiver) -> None:
    """Create a subscription in each state."""
    base = f"http://127.0.0.1:{receiver.port}"
    for name, topic, path in (
        ("orders-to-billing", "orders", "/orders"), ("alerts-to-pager", "alerts", "/failing"),
        ("invoices-to-archive", "invoices", "/invoices"), ("leads-to-crm", "leads", "/gone"),
    ):  # fmt: skip
        request = {"topic": topic, "group": name, "url": base + path}
        assert client.ask("PUT", f"/v1/subscriptions/{name}", request).status == 201
    assert client.ask("POST", "/v1/subscriptions/invoices-to-archive/pause").status == 200
    assert client.send("alerts", [{"body": "disk full"}] * FAILING).status == 201
    assert client.send("leads", {"body": "a lead"}).status == 201


# ---- what comes and goes ------------------------------------------------------------------------------------------


class Traffic:
    """In its block, one thread schedules messages for the next seconds, and another acknowledges them."""

    def __init__(self, node: RunningNode) -> None:
        self._node, self._stopped = node, threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._send, self._receive)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        """Schedule four messages, more or less, each PAUSE_S. They are due in the next seconds."""
        with client_of(self._node) as client:
            batch = 0
            while not self._stopped.wait(PAUSE_S):
                batch += 1
                rows = 4 + round(3 * math.sin(batch / 10))
                messages = [
                    {"json": {"order": batch}, "key": f"order-{batch}", "after": f"{200 + 370 * row}ms"}
                    for row in range(rows)
                ]
                assert client.send("orders", messages).status == 201

    def _receive(self) -> None:
        """Receive and acknowledge messages as the group "warehouse"."""
        with client_of(self._node) as client:
            while not self._stopped.is_set():
                messages = client.receive("orders", "warehouse", wait="1s").value["messages"]
                if messages:
                    body = {"receipts": [message["receipt"] for message in messages]}
                    client.ask("POST", "/v1/topics/orders/ack", body, query={"group": "warehouse"})


def is_busy(client: Client) -> bool:
    """Return whether subscriptions of all states exist, and messages have been released and delivered."""
    subscriptions: list[dict[str, Any]] = client.ask("GET", "/v1/subscriptions").value["subscriptions"]
    broker = client.ask("GET", "/v1/broker").value
    return (
        {subscription["state"] for subscription in subscriptions}
        == {"delivering", "failing", "paused", "gone"}
        and any(subscription["delivered"] for subscription in subscriptions)
        and broker["lateness"]["released"] > 0
        and broker["delivered"] > 0
    )
