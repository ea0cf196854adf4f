"""Campaigns over HTTP: their states, changes, and the permission that they need."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.accounts import SECRETS, guarded_node
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode

FAR_MS = 4_000_000_000_000  # the last due time of a running campaign: later than any test


def planned(node: RunningNode, name: str, client: Client | None = None, rows: int = 3) -> None:
    """Plan a campaign. With `client`, also send its messages and mark the campaign as running."""

    async def plan(first_seq: int | None) -> None:
        await node.broker.change_campaign(name, "plan", rows=rows)
        if first_seq is not None:
            campaigns = node.broker.tables.campaigns
            attached = {"state": "running", "last_due_ms": FAR_MS, "ranges": [(first_seq, rows)]}
            campaigns.put(name, msgspec.structs.replace(campaigns.get(name), **attached))

    if client is None:
        node.run(plan(None))
        return
    sent = client.send(name, [{"body": "x", "after": "1h"}] * rows)
    node.run(plan(sent.value["messages"][0]["seq"]))


def test_a_campaign_is_paused_resumed_and_cancelled(client: Client, node: RunningNode) -> None:
    planned(node, "spring", client)
    result = client.ask("GET", "/v1/campaigns/spring").value
    assert (result["state"], result["rows"]) == ("running", 3)
    assert result["since"].endswith("Z") and result["since_ms"] > 0
    (listed,) = client.ask("GET", "/v1/campaigns").value["campaigns"]
    assert {**listed, "ranges": result["ranges"]} == result
    planned(node, "autumn")
    for name, verb, states in (
        ("spring", "pause", {"paused"}),
        ("spring", "resume", {"running", "finished"}),
        ("autumn", "cancel", {"cancelled"}),
    ):
        answer = client.ask("POST", f"/v1/campaigns/{name}/{verb}", {})
        assert answer.status == 200 and answer.value["state"] in states, verb
        assert answer.value["repeated"] is False
    assert client.ask("POST", "/v1/campaigns/autumn/cancel", {}).value["repeated"]
    assert client.ask("POST", "/v1/campaigns/autumn/pause", {}).status == 400


def test_a_resume_with_shift_delays_the_messages(client: Client, node: RunningNode) -> None:
    planned(node, "shifted", client)
    assert client.ask("POST", "/v1/campaigns/shifted/pause", {}).status == 200
    assert client.ask("POST", "/v1/campaigns/shifted/resume", {"shift": "yes"}).status == 400
    answer = client.ask("POST", "/v1/campaigns/shifted/resume", {"shift": True}).value
    assert answer["state"] in ("running", "finished") and answer["shift_ms"] >= 0


def test_a_change_that_the_state_does_not_allow_is_refused(client: Client, node: RunningNode) -> None:
    planned(node, "not-yet")
    assert client.ask("POST", "/v1/campaigns/not-yet/pause", {}).value["code"] == "out_of_range"
    assert client.ask("GET", "/v1/campaigns/unknown").value["code"] == "not_found"
    assert client.ask("POST", "/v1/campaigns/unknown/cancel", {}).status == 404
    # A page of another site may send a form, and no JSON.
    answer = client.ask("POST", "/v1/campaigns/not-yet/cancel", b"", content_type="text/plain")
    assert answer.status == 415


@pytest.mark.parametrize(("account", "status"), [("root", 200), ("shop", 403)])
def test_campaigns_need_the_permission_to_administer(tmp_path: Path, account: str, status: int) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        planned(node, "spring")
        with client_of(node, f"Bearer {account}:{SECRETS[account]}") as client:
            assert client.ask("GET", "/v1/campaigns").status == status
            assert client.ask("POST", "/v1/campaigns/spring/cancel", {}).status == status
