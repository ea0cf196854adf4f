"""A real busy broker, for tests of every page and for the pictures in docs/.

All its data comes as from users' programs: messages, receives and subscriptions over HTTP. Two things replace what
would start Spark: the facts of campaigns, and the reports of jobs, which their own writer writes.
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
FAILING = 16  # more than open the circuit
PAUSE_S = 0.5


@contextmanager
def busy_node(data: Path, scheduled: int = 20_000) -> Iterator[RunningNode]:
    """A broker with something on every page, and messages that come and go until the end."""
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
        join(node)
        with Traffic(node):
            eventually(lambda: is_busy(client), "every page has something to show")
            yield node


def join(node: RunningNode) -> None:
    """Give the node the status of a leader with two followers."""
    now_ms = SystemClock().wall_ms()

    def figures() -> ReplicaFigures:
        rows = node.broker.log.writer.next_seq
        return ReplicaFigures("g1", "a/1", "leader", "a", epoch=4, log_seq=rows, committed_seq=rows)

    async def survey() -> list[ReplicaGroup]:
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


def schedule(client: Client, n: int) -> None:
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
        for number, due_in_ms in enumerate(instants(n))
    ]
    for at in range(0, n, BATCH):
        body = "\n".join(lines[at : at + BATCH]).encode()
        # Most of them for the first topic.
        topic = TOPICS[(0, 0, 1, 0, 2)[at // BATCH % 5]]
        assert client.send(topic, body, content_type="application/x-ndjson").status == 201


def instants(n: int) -> Iterator[int]:
    """Return the delays of the messages, the same for each run."""
    draw = random.Random(7)
    spans = [(HOUR_MS, 60), (DAY_MS, 24), (30 * DAY_MS, 30)]
    waves = {
        steps: [0.6 + 0.4 * math.sin(at / 4) + (at == steps * 2 // 5) for at in range(steps)]
        for _, steps in spans
    }
    for span_ms, steps in draw.choices(spans, (2, 1, 1), k=n):
        (step,) = draw.choices(range(steps), waves[steps])
        yield span_ms // steps * step + draw.randrange(span_ms // steps)


# ---- groups, dead letters, campaigns, jobs ------------------------------------------------------------------------


def fall_behind(client: Client) -> None:
    """Create a group that has read little of its topic, and has leased messages."""
    assert (
        client.send("mails", [{"body": f"mail {n}", "key": f"customer-{n}"} for n in range(BATCH)]).status
        == 201
    )
    received = client.receive("mails", "mailers", max=64).value["messages"]
    receipts = [each["receipt"] for each in received[:32]]
    assert (
        client.ask("POST", "/v1/topics/mails/ack", {"receipts": receipts}, query={"group": "mailers"}).status
        == 200
    )


def give_up(client: Client) -> None:
    """Create a group with dead letters, one of them without text."""
    binary = base64.b64encode(bytes(range(256)) * 4).decode()
    bodies = [{"json": {"order": n, "total": f"{n}.90"}} for n in range(7)] + [{"base64": binary}]
    letters = [{"key": f"order-{n}", "tag": "eu", **body} for n, body in enumerate(bodies)]
    assert client.send("payments", letters).status == 201
    left = len(letters)
    while left:
        messages = client.receive("payments", "accounting").value["messages"]
        body = {"receipts": [each["receipt"] for each in messages]}
        gone = client.ask("POST", "/v1/topics/payments/dead-letter", body, query={"group": "accounting"})
        assert gone.status == 200, gone
        left -= len(messages)


def campaigns(node: RunningNode, client: Client) -> None:
    """Create a campaign in each state."""
    planned(node, "spring-2027", client, 800)
    planned(node, "win-back", client, 500)
    planned(node, "tariffs")
    planned(node, "summer-2027")
    for name, verb in (("win-back", "pause"), ("tariffs", "cancel")):
        changed = client.ask("POST", f"/v1/campaigns/{name}/{verb}", {})
        assert changed.status == 200, changed


def recur(client: Client) -> None:
    """Create schedules in several states, some of which are due often."""
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
        wanted = {"rule": rule, "topic": "reminders", "json": {"do": name}}
        assert client.ask("PUT", f"/v1/schedules/{name}", wanted).status == 201
    assert client.ask("POST", "/v1/schedules/tokyo-open/pause").status == 200


def select(client: Client) -> None:
    """Cancel some messages by a condition, and undo one of two operations."""
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
    """Answer as the receiver of each subscription does."""
    return Reply({"/failing": 500, "/gone": 410}.get(request.path, 204))


def subscribe(client: Client, receiver: Receiver) -> None:
    """Create a subscription in each state."""
    base = f"http://127.0.0.1:{receiver.port}"
    for name, topic, path in (
        ("orders-to-billing", "orders", "/orders"), ("alerts-to-pager", "alerts", "/failing"),
        ("invoices-to-archive", "invoices", "/invoices"), ("leads-to-crm", "leads", "/gone"),
    ):  # fmt: skip
        wanted = {"topic": topic, "group": name, "url": base + path}
        assert client.ask("PUT", f"/v1/subscriptions/{name}", wanted).status == 201
    assert client.ask("POST", "/v1/subscriptions/invoices-to-archive/pause").status == 200
    assert client.send("alerts", [{"body": "disk full"}] * FAILING).status == 201
    assert client.send("leads", {"body": "a lead"}).status == 201


# ---- what comes and goes ------------------------------------------------------------------------------------------


class Traffic:
    """Schedule messages for the next seconds, which a group receives, until the end of the block."""

    def __init__(self, node: RunningNode) -> None:
        self._node, self._stopped = node, threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._receive)]

    def __enter__(self) -> Traffic:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for each in self._threads:
            each.join()

    def _send(self) -> None:
        with client_of(self._node) as client:
            n = 0
            while not self._stopped.wait(PAUSE_S):
                n += 1
                rows = 4 + round(3 * math.sin(n / 10))
                messages = [
                    {"json": {"order": n}, "key": f"order-{n}", "after": f"{200 + 370 * at}ms"}
                    for at in range(rows)
                ]
                assert client.send("orders", messages).status == 201

    def _receive(self) -> None:
        with client_of(self._node) as client:
            while not self._stopped.is_set():
                messages = client.receive("orders", "warehouse", wait="1s").value["messages"]
                if messages:
                    body = {"receipts": [each["receipt"] for each in messages]}
                    client.ask("POST", "/v1/topics/orders/ack", body, query={"group": "warehouse"})


def is_busy(client: Client) -> bool:
    """Return whether there is data of each kind."""
    subscriptions: list[dict[str, Any]] = client.ask("GET", "/v1/subscriptions").value["subscriptions"]
    broker = client.ask("GET", "/v1/broker").value
    return (
        {each["state"] for each in subscriptions} == {"delivering", "failing", "paused", "gone"}
        and any(each["delivered"] for each in subscriptions)
        and broker["lateness"]["released"] > 0
        and broker["delivered"] > 0
    )
