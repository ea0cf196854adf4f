"""Transactions over gRPC: committed, rolled back, or open until the broker checks them over the client's stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import by_body
from tests.interop.grpc_conversation import WITH_GO, GrpcConversation

pytestmark = pytest.mark.interop

COMMIT, ROLLBACK, UNKNOWN = "COMMIT", "ROLLBACK", "UNKNOWN"
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_transactions_are_committed_rolled_back_or_checked(talks: Talks) -> None:
    """An open transaction is checked after six seconds."""
    talk = talks(transactions=True)
    consumer = talk.simple()
    for check in (COMMIT, ROLLBACK):
        send(talk, f"checked: {check}", UNKNOWN, check)
    for number, local in enumerate((COMMIT, ROLLBACK, COMMIT)):
        send(talk, f"{local} {number}", local, UNKNOWN)
    talk.send("plain")
    received = by_body(talk.receive(consumer, {"COMMIT 0", "COMMIT 2", "plain"}))
    assert set(received) == {"COMMIT 0", "COMMIT 2", "plain"}, "an open half message is not delivered"
    assert received["COMMIT 0"]["tag"] == "t"
    checked = talk.client.wait_checks(2)
    assert {m["body"] for m in checked if m["topic"] == talk.topic} == {
        "checked: COMMIT",
        "checked: ROLLBACK",
    }
    after_check = by_body(talk.receive(consumer, {"checked: COMMIT"}))
    assert set(after_check) == {"checked: COMMIT"}
    talk.send("end")
    assert set(by_body(talk.receive(consumer, {"end"}))) == {"end"}


def send(talk: GrpcConversation, body: str, local: str, check: str) -> None:
    """Send a half message. `local` is the state after the send, and `check` the answer to a check."""
    sent = talk.call(
        "send_transaction", topic=talk.topic, body=body, tag="t", local=local, properties={"check": check}
    )
    assert sent["message_id"]
