"""Questions of other groups over HTTP: answered by a group's leader, for that group alone."""

from __future__ import annotations

from tests.edges.http.client import Client


def test_a_broker_without_a_cluster_refuses_group_questions(client: Client) -> None:
    answer = client.ask("POST", "/v1/cluster/g1", {"ask": "cancel", "ids": ["x"]})
    assert (answer.status, answer.value["code"]) == (404, "not_found")
    assert "without --cluster" in answer.value["detail"]
