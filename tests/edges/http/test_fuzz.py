"""Requests that no client would send (fuzzing.py).

Each request gets an answer that the document describes, or a problem with one of Timeball's codes. No request causes a
fault of the broker, which then accepts messages as before.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from schemathesis.core.failures import FailureGroup, ServerError
from tests.edges.http.client import Client
from tests.edges.http.fuzzing import KNOWN_TOPIC, LABELS, attack, status
from tests.node_fixture import RunningNode, running_node
from tests.rounds import rounds

from timeball import Timeball
from timeball.broker.service import Broker
from timeball.edges.http import connection as bounds
from timeball.edges.http import requests

pytestmark = [pytest.mark.slow, pytest.mark.siege]

# For each operation. In a siege 30,000 in all, beside a stream that must not stall: `timeball bench beside`.
EXAMPLES = rounds(20, 750)


@pytest.mark.parametrize("label", LABELS)
def test_requests_made_from_the_document_find_no_fault(node: RunningNode, client: Client, label: str) -> None:
    seen = attack(node.node.http_port, label, EXAMPLES)
    assert seen and max(seen) < 600
    assert client.send("fuzzed-after", {"body": "still here"}).status == 201


def test_valid_and_invalid_requests_are_generated(node: RunningNode, client: Client) -> None:
    assert client.send(KNOWN_TOPIC, {"body": "x"}).status == 201
    asked = {
        label: attack(node.node.http_port, label, 100) for label in LABELS if "/topics/{topic}/" in label
    }
    assert all(len(statuses) > 1 for statuses in asked.values()), asked
    assert {status for statuses in asked.values() for status in statuses} >= {200, 201, 400, 404, 416}


def test_a_fault_behind_a_handler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("on purpose")

    monkeypatch.setattr(Broker, "topics", broken)
    with running_node(tmp_path / "data", http_port=0) as node:
        with Timeball(node.http_endpoint) as ball:
            ball.send(KNOWN_TOPIC, b"x")
        with pytest.raises(FailureGroup) as result:
            attack(node.node.http_port, "GET /v1/topics", 5)
    assert [type(item) for item in result.value.exceptions] == [ServerError]


def test_bytes_that_are_nearly_http_are_answered_or_closed(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The missing bytes of a damaged request never come.
    monkeypatch.setattr(bounds, "HEAD_S", 0.2)
    monkeypatch.setattr(requests, "BODY_S", 0.2)
    rng = random.Random(7)
    statuses = Counter(status(node.node.http_port, rng) for _ in range(EXAMPLES * 4))
    assert not [item for item in statuses if item[:1] == b"5"], statuses
    assert statuses[b"201"] and statuses[b"400"], statuses
    assert client.send("raw-after", {"body": "still here"}).status == 201
