"""Status and health over HTTP from a real node, and the permissions of each account."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.accounts import ACCESS_FILE, SECRETS, guarded_node
from tests.edges.http.client import Client, Reply, client_of
from tests.node_fixture import RunningNode, running_node

from timeball.broker.registry.rates import GROUPS_AT_ONCE
from timeball.model.access import Account, parse
from timeball.monitoring.figures import ReplicaFigures, ReplicaGroup, ReplicaReaders, ReplicaState


def test_topics_are_listed_and_the_broker_is_healthy(client: Client) -> None:
    client.send("listed", {"body": "x"})
    assert {"topic": "listed", "queues": 8, "messages": 1} in client.ask("GET", "/v1/topics").value["topics"]
    assert client.ask("GET", "/health/live").value == {"status": "live"}
    assert client.ask("GET", "/health/ready").value == {"status": "ready"}


def test_the_broker_shows_its_figures(client: Client, node: RunningNode) -> None:
    client.send("asked", {"body": "x"})
    delivered = client.ask("GET", "/v1/broker").value["delivered"]
    assert len(client.receive("asked").value["messages"]) == 1
    result = client.ask("GET", "/v1/broker").value
    assert result["delivered"] == delivered + 1
    assert result["may_admin"] is True and result["durability"] == "sync"
    assert result.keys() - {"may_admin"} == node.node.status().keys()


def test_a_broker_without_a_cluster_has_no_cluster_path(client: Client) -> None:
    answer = client.ask("GET", "/v1/cluster")
    assert (answer.status, answer.value["code"]) == (404, "not_found")
    assert "--cluster" in answer.value["detail"]


def test_a_node_of_a_cluster_shows_all_groups(client: Client, node: RunningNode) -> None:
    replica = ReplicaState("a", "a/1", "leader", is_in_record=True, log_seq=12, lag_rows=0)

    async def survey() -> list[ReplicaGroup]:
        return [ReplicaGroup("g1", "a", 3, 1, [replica], "", ["replicas: 1"])]

    node.node.metrics.replica = ReplicaReaders(lambda: ReplicaFigures("g1", "a/1", "leader", "a"), survey)
    try:
        (group,) = client.ask("GET", "/v1/cluster").value["groups"]
    finally:
        node.node.metrics.replica = None
    assert (group["leader"], group["problems"]) == ("a", ["replicas: 1"])
    assert group["replicas"][0]["log_seq"] == 12


def test_a_full_disk_is_not_ready(client: Client, node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(node.broker.log.writer), "no_room", True)
    answer = client.ask("GET", "/health/ready")
    assert (answer.status, answer.value["code"]) == (503, "unavailable")
    assert "disk full" in answer.value["detail"]


def test_each_account_has_only_the_permissions_of_the_access_file(tmp_path: Path) -> None:
    def bearer(account: str) -> str:
        """Return the header `authorization` of an account."""
        return f"Bearer {account}:{SECRETS[account]}"

    with guarded_node(tmp_path, http_port=0) as node:
        with client_of(node) as stranger, client_of(node, "Bearer shop:wrong") as wrong_key:
            for item in (stranger, wrong_key):
                answer = item.send("orders", {"body": "x"})
                assert (answer.status, answer.value["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            assert stranger.ask("GET", "/health/live").status == 200
            assert stranger.ask("GET", "/v1/broker").status == 401
        with client_of(node, bearer("root")) as root:
            assert root.ask("GET", "/v1/broker").value["may_admin"] is True
        with client_of(node, bearer("shop")) as shop, client_of(node, bearer("other")) as other:
            assert shop.ask("GET", "/v1/broker").value["may_admin"] is False
            sent = shop.send("orders", {"body": "x", "after": "1h"})
            assert sent.status == 201
            path = f"/v1/messages/{sent.value['id']}"
            for method, body in (("GET", None), ("PATCH", {"after": "2h"}), ("DELETE", None)):
                assert other.ask(method, path, body).status == 404
            assert other.send("orders", {"body": "x"}).value["code"] == "forbidden"
            assert other.receive("orders", group="readers").status == 403
            acked = other.ask(
                "POST", "/v1/topics/orders/ack", {"receipts": ["x"]}, query={"group": "workers"}
            )
            assert acked.status == 403
            assert other.ask("GET", "/v1/topics").value == {"topics": []}
            assert [item["topic"] for item in shop.ask("GET", "/v1/topics").value["topics"]] == ["orders"]
            assert shop.ask("DELETE", path).status == 200


def test_without_a_port_there_is_no_http_server(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=-1) as node:
        assert node.node.http_port == -1
        assert node.node.edges is not None and node.node.edges.http._server is None


class CountingAccounts(dict[str, Account]):
    """Accounts that count how often they are read. Each check of a permission reads one."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


def test_a_list_of_many_topics_is_built_in_shares_between_which_the_loop_runs(tmp_path: Path) -> None:
    names, accounts = [f"topic-{number}" for number in range(1_000)], CountingAccounts()

    async def create(node: RunningNode) -> None:
        for name in reversed(names):
            node.broker.tables.topics.ensure(name, 1)
        await node.broker.log.writer.flushed()

    async def most_reads(listing: Future[Reply]) -> int:
        """Return the largest number of reads in one turn of the loop until the answer."""
        most = 0
        while not listing.done():
            reads_before = accounts.reads
            await asyncio.sleep(0)
            most = max(most, accounts.reads - reads_before)
        return most

    with guarded_node(tmp_path, http_port=0) as node, ThreadPoolExecutor(1) as threads:
        accounts.update(parse(ACCESS_FILE.encode(), "access.toml"))
        access = node.node.security.access
        assert access is not None
        access.replace(accounts)
        node.run(create(node))
        with client_of(node, f"Bearer root:{SECRETS['root']}") as root:
            listing = threads.submit(root.ask, "GET", "/v1/topics")
            assert node.run(most_reads(listing)) < 3 * GROUPS_AT_ONCE
            listed = listing.result().value["topics"]
    assert [topic["topic"] for topic in listed] == sorted(names)


def test_a_topic_is_created_enlarged_and_deleted(client: Client) -> None:
    created = client.ask("PUT", "/v1/topics/made", {"queues": 3})
    assert (created.status, created.value) == (200, {"topic": "made", "queues": 3})
    assert client.ask("PUT", "/v1/topics/made", {"queues": 5}).value["queues"] == 5
    client.send("made", {"body": "x"})
    (topic,) = (item for item in client.ask("GET", "/v1/topics").value["topics"] if item["topic"] == "made")
    assert topic == {"topic": "made", "queues": 5, "messages": 1}
    assert client.ask("DELETE", "/v1/topics/made").value["verdict"] == "deleted"
    assert "made" not in {item["topic"] for item in client.ask("GET", "/v1/topics").value["topics"]}
    for wrong in ({"queues": 0}, {"queues": 10**6}, {"queue": 1}):
        assert client.ask("PUT", "/v1/topics/made", wrong).status in (400, 416)
    assert client.ask("PUT", "/v1/topics/a%20b", {}).value["code"] == "invalid_name"


def test_jobs_that_have_reported_are_listed(client: Client, node: RunningNode) -> None:
    assert client.ask("GET", "/v1/jobs").value == {"jobs": []}
    folder = node.settings.data / "pipeline" / "status"
    folder.mkdir(parents=True)
    (folder / "compact.json").write_text('{"job": "compact", "state": "running"}')
    (folder.parent / "audit.json").write_text('{"ok": true, "accepted": 3}')
    result = client.ask("GET", "/v1/jobs").value
    assert result == {"jobs": [{"job": "compact", "state": "running"}], "audit": {"ok": True, "accepted": 3}}
