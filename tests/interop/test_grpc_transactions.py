"""Transactions over gRPC: committed at once, rolled back, or asked about on the client's open stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import by_body
from tests.interop.grpc_conversation import WITH_GO, GrpcConversation

pytestmark = pytest.mark.interop

COMMIT, ROLLBACK, UNKNOWN = "COMMIT", "ROLLBACK", "UNKNOWN"
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_commit_rollback_and_neither(talks: Talks) -> None:
    """An open transaction is checked after six seconds."""
    talk = talks(transactions=True)
    consumer = talk.simple()
    for check in (COMMIT, ROLLBACK):
        send(talk, f"asked: {check}", UNKNOWN, check)
    for number, local in enumerate((COMMIT, ROLLBACK, COMMIT)):
        send(talk, f"{local} {number}", local, UNKNOWN)
    talk.send("plain")
    got = by_body(talk.receive(consumer, {"COMMIT 0", "COMMIT 2", "plain"}))
    assert set(got) == {"COMMIT 0", "COMMIT 2", "plain"}, "nothing else is seen before its commit"
    assert got["COMMIT 0"]["tag"] == "t"
    asked = talk.client.wait_checks(2)
    assert {m["body"] for m in asked if m["topic"] == talk.topic} == {"asked: COMMIT", "asked: ROLLBACK"}
    later = by_body(talk.receive(consumer, {"asked: COMMIT"}))
    assert set(later) == {"asked: COMMIT"}
    talk.send("end")
    assert set(by_body(talk.receive(consumer, {"end"}))) == {"end"}


def send(talk: GrpcConversation, body: str, local: str, check: str) -> None:
    sent = talk.call(
        "send_transaction", topic=talk.topic, body=body, tag="t", local=local, properties={"check": check}
    )
    assert sent["message_id"]
