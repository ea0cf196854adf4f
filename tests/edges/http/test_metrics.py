"""/metrics over HTTP: its content, and which accounts may read it."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.accounts import SECRETS, guarded_node, keys
from tests.bounds import BOUND_S
from tests.edges.http.client import Client
from tests.node_fixture import RunningNode


def scrape(node: RunningNode, authorization: str = "") -> tuple[str, str]:
    """Get /metrics, and return its content type and its text."""
    request = urllib.request.Request(f"http://127.0.0.1:{node.node.http_port}/metrics")
    if authorization:
        request.add_header("authorization", authorization)
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        return answer.headers["content-type"], answer.read().decode()


def bearer(account: str) -> str:
    named = keys(account)
    return f"Bearer {named['access_key']}:{named['secret_key']}"


def test_the_metrics_count_sent_messages(node: RunningNode, client: Client) -> None:
    client.send("measured", [{"body": "one"}, {"body": "two"}])
    kind, text = scrape(node)
    assert kind.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    accepted = families["timeball_accepted_messages"].samples
    assert [sample.value for sample in accepted if sample.labels == {"topic": "measured"}] == [2]
    assert "process_resident_memory_bytes" in families
    open_now = {sample.labels["edge"]: sample.value for sample in families["timeball_connections"].samples}
    assert set(open_now) == {"flight", "remoting", "grpc", "http"}
    assert open_now["http"] >= 1, "the connection of this client"


def test_with_an_access_file_the_metrics_need_an_account(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(node)
        assert "timeball_build_info" in scrape(node, bearer("root"))[1]


def test_names_of_forbidden_topics_and_groups_are_hidden(tmp_path: Path) -> None:
    def series(node: RunningNode, account: str, name: str) -> dict[tuple[str, ...], float]:
        text = scrape(node, bearer(account))[1]
        (family,) = (item for item in text_string_to_metric_families(text) if item.name == name)
        return {tuple(sample.labels.values()): sample.value for sample in family.samples}

    with guarded_node(tmp_path, http_port=0, auto_create_topics=True) as node:
        root, shop = Client(node, bearer("root")), Client(node, bearer("shop"))
        assert root.send("news", [{"body": "x"}] * 2).status == 201
        assert shop.send("orders", [{"body": "x"}] * 3).status == 201
        assert len(shop.receive("orders").value["messages"]) == 3
        accepted = {account: series(node, account, "timeball_accepted_messages") for account in SECRETS}
        held = {account: series(node, account, "timeball_group_in_flight_messages") for account in SECRETS}
        root.close()
        shop.close()
    assert (accepted["root"]["news",], accepted["root"]["orders",]) == (2, 3)
    assert (accepted["shop"]["orders",], accepted["other"]["news",]) == (3, 2)
    assert ("news",) not in accepted["shop"] and ("orders",) not in accepted["other"]
    totals = {account: sum(counts.values()) for account, counts in accepted.items()}
    assert len(set(totals.values())) == 1, "messages of hidden topics are counted without their names"
    assert held["root"]["workers", "orders"] == held["shop"]["workers", "orders"] == 3
    assert held["other"] == {("(others)", "(others)"): 3}
