"""Answers of a simulated busy broker, for pages that the small broker of a test would leave empty."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

HOSTILE = "<img src=x onerror=\"alert(1)\"><script>alert('2')</script>\u202e\u0000\u001b[2J{{7*7}}javascript:alert(3)"
SIZES = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
BUCKETS = {"<=1ms": 56, "<=2ms": 37, "<=5ms": 5, "<=10ms": 1, "<=50ms": 1}  # lateness of a hundred releases


class BusyBroker:
    """Answers requests to the HTTP API. At each `GET /v1/broker`, 300 more messages have been released.

    `texts` is added to each text that a user could have chosen. `body` has the fields of a message's body.
    """

    def __init__(self, *, may_admin: bool = True, texts: str = "", body: Any = None) -> None:
        self.may_admin, self.texts = may_admin, texts
        self.body: dict[str, Any] = body or {"body": '{"order": 17, "total": "29.90"}'}
        self.hundreds = 0

    def __call__(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        """Return the status and the JSON value of the answer."""
        parts = path.split("/")[2:]
        match method, *parts:
            case "GET", "broker":
                return 200, self.broker()
            case "GET", "cluster":
                return 200, {"groups": [self.replicas(row) for row in range(2)]}
            case "GET", "topics":
                topics = [
                    {"topic": name, "queues": 4, "messages": 9, "kind": "normal"} for name in self.topics()
                ]
                return 200, {"topics": topics}
            case "GET", "forecast":
                return 200, self.forecast({name: values[0] for name, values in query.items()})
            case "GET", "messages":
                return 200, {"messages": [self.waiting(row) for row in range(12)], "next_page": "2"}
            case "GET", "messages", _:
                place = {
                    "state": "waiting",
                    **self.waiting(0),
                    **self.body,
                    "properties": {self.text("p"): self.text("v")},
                }
                return 200, {"id": "0", "messages": [place]}
            case "GET", "groups":
                return 200, {"groups": [self.group(row) for row in range(3)]}
            case "GET", "groups", _, "dead-letters":
                return 200, {"dead_letters": [self.dead_letter(row) for row in range(7)]}
            case "GET", "campaigns":
                return 200, {"campaigns": [self.campaign(row) for row in range(4)]}
            case "GET", "schedules":
                return 200, {
                    "schedules": [self.schedule(row) for row in range(4)],
                    "next_page": self.text("weekly"),
                }
            case "POST", "preview":
                return 200, {"times": list(self.quarters())}
            case "GET", "selections":
                return 200, {"selections": [self.selection(row) for row in range(3)]}
            case "GET", "subscriptions":
                return 200, {"subscriptions": [self.subscription(row) for row in range(4)]}
            case "GET", "jobs":
                return 200, {"jobs": [self.job(row) for row in range(3)], "audit": self.audit()}
        return 404, {"status": 404, "code": "not_found", "title": "not_found", "detail": f"no path {path!r}"}

    def text(self, plain: str) -> str:
        """Return a text of a user, with `texts` after it."""
        return f"{plain} {self.texts}" if self.texts else plain

    def topics(self) -> list[str]:
        return ["orders", "reminders", "a-topic-with-a-name-of-some-length-that-has-to-find-its-place"]

    def broker(self) -> dict[str, Any]:
        """Return the status of the broker, with 300 more releases at each call."""
        self.hundreds += 3
        return {
            "version": "0.1.0", "format": 1, "pid": 4711, "rss_bytes": 431_000_000, "anon_bytes": 197_000_000,
            "disk": {"free_bytes": 41_000_000_000, "no_room": ""}, "access": {"accounts": 3, "refused": 1},
            "codec": "compiled", "tzdata": "2026.6", "now_ms": now_ms(), "strategy": "hour_log", "durability": "sync",
            "log": {"first_seq": 0, "next_seq": 2_903_112, "durable_seq": 2_903_112, "bytes": 1_300_000_000,
                    "commits": 8_123, "rows": 812_345},
            "waiting_messages": 1_914_646, "redelivery_messages": 41,
            "watermark": 2_800_000, "settled_before_ms": now_ms() - 4,
            "schedule": {"near_rows": 1_204, "tail_rows": 90_312, "table_rows": 1_823_441, "table_files": 42,
                         "cancelled_rows": 311, "moving_rows": 0, "moved_rows": 0},
            "levels": {"waiting_rows": 12}, "transactions": {"open": 0, "oldest_seq": None},
            "table": {"uri": "file:///data/pending", "version": 91}, "clock_suspect": False,
            "lateness": {"released": 100 * self.hundreds, "max_ms": 41,
                         "buckets": {name: count * self.hundreds for name, count in BUCKETS.items()}},
            "delivered": 96 * self.hundreds, "may_admin": self.may_admin,
            "replica": {"group": "g1", "role": "leader", "leader": "a"},
        }  # fmt: skip

    def replicas(self, row: int) -> dict[str, Any]:
        """Return a healthy group, or one with a replica behind and another one missing."""
        rows = 2_903_112 - 71_000 * row
        figures: dict[str, Any] = {
            "is_in_record": True, "log_seq": rows, "committed_seq": rows, "applied_seq": rows, "lag_rows": 0,
            "clock_offset_ms": 0.0, "version": "0.1.0", "since_ms": now_ms() - 3_817_000,
        }  # fmt: skip
        nodes = [
            {
                **figures,
                "node": name,
                "replica": f"{name}/{row}",
                "role": "leader" if name == "a" else "follower",
            }
            for name in "abc"
        ]
        if row:
            nodes[1] |= {"applied_seq": rows - 41_000, "lag_rows": 1_200_417, "clock_offset_ms": -812.5}
            nodes[2] = {"node": "c", "replica": "c/1", "role": "gone", "is_in_record": True}
        problems = [self.text("replica c (c/1) is missing: its node does not run, or does not reach etcd")]
        return {
            "group": f"g{row + 1}", "leader": self.text("a"), "epoch": 4 + row, "generation": 1, "replicas": nodes,
            "asked": "a hand-over to b" if row else "", "problems": problems if row else [],
        }  # fmt: skip

    def forecast(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the due load of the window of the query: two waves, with a peak in the middle."""
        size, begin, end = SIZES[query["by"]], at_ms(query["from"]), at_ms(query["to"])
        counts = [
            round((20 + 15 * math.sin(step / 7) + 8 * math.sin(step / 2)) * size / 1_000)
            for step in range((end - begin) // size)
        ]
        counts[len(counts) // 2] *= 3
        buckets = [
            {"from_ms": begin + step * size, "due": count} for step, count in enumerate(counts) if count
        ]
        shares = dict(zip(map(self.text, self.topics()), (0.6, 0.3, 0.1), strict=True))
        topics = {name: round(sum(counts) * part) for name, part in shares.items()}
        return {"by": query["by"], "from_ms": begin, "to_ms": end, "buckets": buckets, "topics": topics}

    def waiting(self, row: int) -> dict[str, Any]:
        """Return the n-th pending message."""
        due_ms = now_ms() + 20_000 + row * row * 37_123
        return {
            "id": f"{row:x}5f0c2a7be1d94c3f8a6b4e2d1c0f9a7", "topic": self.topics()[row % 2],
            "due": "", "due_ms": due_ms,
            "seq": 2_900_000 + row, "keys": [self.text(f"order-{17 + row}")], "tag": self.text("eu"),
            "size_bytes": 90 + 47 * row * row, "campaign": None,
        }  # fmt: skip

    def group(self, row: int) -> dict[str, Any]:
        """Return the n-th group. The first has dead letters."""
        name, topic = ("billing", "mailers", "search")[row], self.topics()[row]
        counts = {"lag": (1_203, 0, 17)[row], "in_flight": (32, 0, 4)[row]}
        topics = [{"topic": topic, **counts}, {"topic": f"%RETRY%{name}", "lag": 0, "in_flight": 0}]
        return {
            "group": name,
            **counts,
            "dead_letters": (7, 0, 0)[row],
            "topics": topics,
            "attempts_max": 16,
            "retry": {},
        }

    def dead_letter(self, row: int) -> dict[str, Any]:
        """Return the n-th dead letter. The body of one of them is no text."""
        body = {"base64": base64.b64encode(bytes(range(256)) * 4).decode()} if row == 3 else self.body
        return {
            "dead_letter": f"AQE{row}", "id": f"{row:x}a7be1d94c3f8a6b4e2d1c0f9a75f0c2", "topic": "orders", "died": "",
            "died_ms": now_ms() - 4_000 - row * 600_000, "attempts": 16, "reason": self.text("the shop answered 500"),
            "tag": self.text("eu"), "keys": [self.text(f"order-{row}")], "properties": {self.text("k"): self.text("v")},
            **body,
        }  # fmt: skip

    def campaign(self, row: int) -> dict[str, Any]:
        """Return the n-th campaign: running, paused, planned or cancelled."""
        return {
            "campaign": ("spring-2027", "win-back", "tariff-letter", "test-run")[row],
            "state": ("running", "paused", "planned", "cancelled")[row],
            "since_ms": now_ms() - 7_000_000 * (row + 1) ** 2,
            "planned_ms": 0, "planned_seq": 0, "rows": (1_200_000, 50_000, 8_000, 10)[row], "cancelled": row // 3,
        }  # fmt: skip

    def subscription(self, row: int) -> dict[str, Any]:
        """Return the n-th push subscription: delivering, failing, paused or gone."""
        state = ("delivering", "failing", "paused", "gone")[row]
        failure = self.text("timeout: no answer in time") if state == "failing" else None
        return {
            "name": self.text(("billing", "mailers", "search", "audit")[row]), "topic": self.text("orders"),
            "group": ("billing", "mailers", "search", "audit")[row], "filter": self.text("eu"), "filter_type": "tag",
            "url": "https://hooks.example/" + (self.texts or "orders"), "in_flight_max": 16, "rate_per_s": None,
            "timeout": "15s", "state": state, "in_flight": (3, 1, 0, 0)[row], "delivered": 81_311 // (row + 1),
            "failed": 40 * row, "failures_in_row": 12 if state == "failing" else 0, "last_failure": failure,
        }  # fmt: skip

    def schedule(self, row: int) -> dict[str, Any]:
        """Return the n-th schedule: two active, one paused and one failed."""
        state, due_ms = ("active", "active", "paused", "failed")[row], now_ms() + 700_000 * (row + 1)
        pending = {
            "id": f"daily-{row}.{due_ms}",
            "due": "",
            "due_ms": due_ms,
            "local": "2030-01-31T09:00:00",
        }
        return {
            "name": self.text(("daily", "weekly", "nightly", "former")[row]), "state": state,
            "topic": self.text("reports"), "rule": {"cron": self.text("0 9 * * 1-5"), "zone": "Europe/Berlin"},
            **self.body, "keys": [], "properties": {}, "catch_up": "latest", "catch_up_within": "1d", "runs": 812 * row,
            **({"next": pending} if state == "active" else {}),
            **({"error": self.text("no such zone")} if state == "failed" else {}),
        }  # fmt: skip

    def quarters(self) -> Iterator[dict[str, Any]]:
        """Yield each quarter of an hour for four days from yesterday on, as the times of any rule in any zone."""
        first_ms = now_ms() // 86_400_000 * 86_400_000 - 86_400_000
        for due_ms in range(first_ms, first_ms + 4 * 86_400_000, 900_000):
            local = datetime.fromtimestamp(due_ms / 1_000, UTC).replace(tzinfo=None).isoformat()
            yield {"due": "", "due_ms": due_ms, "local": local}

    def selection(self, row: int) -> dict[str, Any]:
        """Return the n-th bulk operation: over, undone or active."""
        return {
            "id": str(4_711 + row), "action": "cancel", "state": ("over", "undone", "active")[row],
            "where": self.text("region = 'eu'"), "topics": [self.text("orders")], "by": self.text("root"),
            "accepted": "", "accepted_ms": now_ms() - 900_000 * (3 - row), "from": "2030-01-31T09:00:00Z",
            "first_due": "2030-01-31T09:00:00Z", "last_due": "2030-02-01T09:00:00Z", "count": 81_311,
        }  # fmt: skip

    def job(self, row: int) -> dict[str, Any]:
        """Return the status of the n-th job: running, waiting or failed."""
        last = {
            "epoch": 91,
            "unit": "seq",
            "position": 2_903_000,
            "took_ms": 420,
            "lag": 112 * row,
            "rows": 9_000,
        }
        return {
            "job": ("compact", "ledger", "archive")[row], "state": ("running", "waiting", "failed")[row],
            "updated_ms": now_ms() - 1_000 - 600_000 * (row // 2), "started_ms": now_ms() - 86_400_000,
            "pid": 4712, "host": "broker-1", "epochs": 91, "rows": 812_000, "last": last, "last_ms": now_ms() - 1_000,
            "failures": row // 2, "error": self.text("no space left in the archive") if row == 2 else None,
        }  # fmt: skip

    def audit(self) -> dict[str, Any]:
        """Return an audit that balances."""
        faults = dict.fromkeys(("lost", "early", "duplicate", "unknown", "overdue", "queue_gaps"), 0)
        counts = {
            "accepted": 2_903_112,
            "released": 987_804,
            "cancelled": 640,
            "expired": 0,
            "pending": 1_914_668,
        }
        return {"ok": True, "scope": {"now_ms": now_ms() - 3_600_000}, **counts, **faults}


def at_ms(text: str) -> int:
    """Return a time of ISO 8601 as Unix milliseconds."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
