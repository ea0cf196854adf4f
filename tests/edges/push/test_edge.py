"""Workers follow their subscriptions: created, changed, paused, deleted, and restored after a restart."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook
from tests.edges.http.client import Client, client_of
from tests.edges.push.conftest import LOOPBACK
from tests.edges.push.receiver import receiver_of
from tests.edges.push.test_worker import send, show, subscribe, wait_for_requests
from tests.node_fixture import RunningNode, eventually, running_node


def test_a_changed_url_applies_from_the_next_message_on(node: RunningNode, client: Client) -> None:
    with receiver_of() as first, receiver_of() as second:
        subscribe(client, "moves", first)
        send(client, "moves", 3)
        eventually(lambda: len(first.requests) == 3, "the first receiver has them")
        wait_for_requests(node, client, "moves")
        subscribe(client, "moves", second)
        send(client, "moves", 3)
        eventually(lambda: len(second.requests) == 3, "the second receiver has the others")
        assert len(first.requests) == 3


def test_a_paused_or_deleted_subscription_has_no_worker(node: RunningNode, client: Client) -> None:
    with receiver_of() as receiver:
        subscribe(client, "pauses", receiver)
        assert client.ask("POST", "/v1/subscriptions/pauses/pause").value["state"] == "paused"
        send(client, "pauses", 2)
        assert "pauses" not in node.node.edges.push._workers  # type: ignore[union-attr]
        client.ask("POST", "/v1/subscriptions/pauses/resume")
        eventually(lambda: len(receiver.requests) == 2, "they are sent")
        wait_for_requests(node, client, "pauses")
        client.ask("DELETE", "/v1/subscriptions/pauses")
        assert "pauses" not in node.node.edges.push._workers  # type: ignore[union-attr]
        assert "pauses" not in node.node.metrics.push


def test_each_request_is_signed_and_by_both_secrets_during_a_rotation(
    node: RunningNode, client: Client
) -> None:
    with receiver_of() as receiver:
        first = subscribe(client, "signed", receiver)["secret"]
        assert len(base64.b64decode(first.removeprefix("whsec_"))) == 32
        assert "secret" not in show(client, "signed")
        assert "secret" not in subscribe(client, "signed", receiver)
        send(client, "signed", 1)
        eventually(lambda: len(receiver.requests) == 1, "it is sent")
        second = subscribe(client, "signed", receiver, rotate_secret=True)["secret"]
        send(client, "signed", 1)
        eventually(lambda: len(receiver.requests) == 2, "the second is sent")
    before, during = receiver.requests  # the rotation
    Webhook(first).verify(before.body, before.headers, json_parse=False)
    for secret in (first, second):
        Webhook(secret).verify(during.body, during.headers, json_parse=False)


def test_a_restart_continues_subscriptions_except_those_no_longer_allowed(tmp_path: Path) -> None:
    with receiver_of() as receiver:
        with (
            running_node(tmp_path / "data", http_port=0, push_allow=LOOPBACK) as node,
            client_of(node) as client,
        ):
            subscribe(client, "stays", receiver)
            subscribe(client, "halts", receiver)
            client.ask("POST", "/v1/subscriptions/halts/pause")
            send(client, "halts", 1)
        with (
            running_node(tmp_path / "data", http_port=0, push_allow=LOOPBACK) as node,
            client_of(node) as client,
        ):
            send(client, "stays", 2)
            eventually(lambda: len(receiver.requests) == 2, "it goes on")
            wait_for_requests(node, client, "stays")
            assert show(client, "halts")["state"] == "paused"
        with running_node(tmp_path / "data", http_port=0) as node, client_of(node) as client:
            send(client, "stays", 1)
            eventually(lambda: show(client, "stays")["last_failure"], "it is not started")
            assert "push-allow" in show(client, "stays")["last_failure"]
            assert len(receiver.requests) == 2


def test_a_subscription_that_could_not_start_leaves_the_edge_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_read() -> ssl.SSLContext:
        """Fail as if the root certificates could not be read."""
        raise OSError("the root certificates cannot be read")

    with (
        receiver_of() as receiver,
        running_node(tmp_path / "data", http_port=0, push_allow=LOOPBACK) as node,
        client_of(node) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ssl, "create_default_context", fail_to_read)
            subscribe(client, "broken", receiver)
            eventually(lambda: show(client, "broken")["last_failure"], "its failure is shown")
            assert "OSError" in show(client, "broken")["last_failure"]
        assert not node.node.edges.push.is_busy  # type: ignore[union-attr]
        subscribe(client, "broken", receiver)
        send(client, "broken", 1)
        eventually(lambda: len(receiver.requests) == 1, "a change starts it")
