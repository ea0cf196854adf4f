"""A manual clock over HTTP: it exists only with --clock manual, and an advance releases the due messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, running_node

from timeball.edges.http.handlers import operators
from timeball.io.clock import ManualClock
from timeball.model.config import Settings
from timeball.model.errors import SetupError


@pytest.fixture(scope="module")
def clock_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    clock = ManualClock()
    with running_node(tmp_path_factory.mktemp("clock") / "data", clock, http_port=0) as running:
        yield running


@pytest.fixture
def client(clock_node: RunningNode) -> Iterator[Client]:
    with client_of(clock_node) as client:
        yield client


def test_a_broker_with_the_system_clock_has_no_path_to_advance_it(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node, client_of(node) as client:
        assert client.ask("GET", "/v1/clock").status == 404
        assert client.ask("POST", "/v1/clock/advance", {"after": "1d"}).status == 404
        assert client.ask("GET", "/v1/broker").value["clock"] == "system"


def test_an_advance_lists_the_released_messages_in_order(client: Client) -> None:
    begin_ms = client.ask("GET", "/v1/clock").value["now_ms"]
    sent = [{"body": day, "after": f"{day}d", "id": day, "keys": ["a", "b"]} for day in ("40", "2", "3")]
    assert client.send("orders", sent).status == 201
    advanced = client.ask("POST", "/v1/clock/advance", {"after": "3d"}).value
    assert (advanced["now_ms"] - begin_ms, advanced["released_rows"]) == (3 * 86_400_000, 2)
    assert [message["id"] for message in advanced["released"]] == ["2", "3"]
    assert advanced["released"][0] == {
        "topic": "orders", "due": "2023-11-16T22:13:20.000Z", "due_ms": begin_ms + 2 * 86_400_000, "id": "2",
        "keys": ["a", "b"],
    }  # fmt: skip
    assert [message["body"] for message in client.receive("orders", max=10).value["messages"]] == ["2", "3"]
    assert client.ask("GET", "/v1/clock").value["now_ms"] == advanced["now_ms"]
    assert client.ask("GET", "/v1/broker").value["clock"] == "manual"


def test_the_clock_is_advanced_to_a_given_time(client: Client) -> None:
    at = "2026-01-01T00:00:00.000Z"
    assert client.ask("POST", "/v1/clock/advance", {"at": at}).value["now"] == at


def test_an_advance_lists_the_first_released_messages_and_counts_all(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "RELEASED_ROWS_MAX", 3)
    client.send("many", [{"body": "x", "after": f"{seconds % 2 + 1}s"} for seconds in range(10)])
    advanced = client.ask("POST", "/v1/clock/advance", {"after": "1m"}).value
    assert (advanced["released_rows"], len(advanced["released"])) == (10, 3)


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"after": "1d", "at": 5}, 400), ({"after": 5}, 400), ({"by": "1d"}, 400),
     ({"at": "2020-01-01T00:00:00Z"}, 416)],
    ids=["neither", "both", "no unit", "unknown", "past"],
)  # fmt: skip
def test_an_invalid_advance_is_refused_and_changes_nothing(
    client: Client, body: dict[str, object], status: int
) -> None:
    before = client.ask("GET", "/v1/clock").value
    assert client.ask("POST", "/v1/clock/advance", body).status == status
    assert client.ask("GET", "/v1/clock").value == before


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_form_of_another_site_cannot_advance_the_clock(client: Client, kind: str) -> None:
    before = client.ask("GET", "/v1/clock").value
    assert client.ask("POST", "/v1/clock/advance", b'{"after": "1d"}', content_type=kind).status == 415
    assert client.ask("GET", "/v1/clock").value == before


def test_a_cluster_has_no_manual_clock() -> None:
    with pytest.raises(SetupError, match="--clock manual: a cluster follows the clocks of its machines"):
        Settings(clock="manual", cluster="c", node="n", etcd="http://127.0.0.1:1")
