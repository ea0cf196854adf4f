"""Recall over gRPC: a recalled message is not delivered, and the recall of a delivered message is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import by_body
from tests.interop.drivers import ClientError
from tests.interop.grpc_conversation import ALL, GrpcConversation

pytestmark = pytest.mark.interop

BAD_REQUEST, NOT_FOUND = 40000, 40400
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_recalled_message_is_not_delivered(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    due_ms = talk.due_ms(5_000)
    kept, recalled = talk.send("kept", due_ms=due_ms), talk.send("recalled", due_ms=due_ms)
    talk.send("end", due_ms=due_ms + 1_000)
    assert recalled["recall_handle"] != kept["recall_handle"]
    message_id = talk.call("recall", topic=talk.topic, handle=recalled["recall_handle"])
    assert message_id == recalled["message_id"]
    assert set(by_body(talk.receive(consumer, {"kept", "end"}))) == {"kept", "end"}


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_delivered_message_cannot_be_recalled(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    sent = talk.send("delivered", due_ms=talk.due_ms(1_000))
    [first] = talk.receive(consumer, {"delivered"}, invisible_s=1)
    with pytest.raises(ClientError, match=r"released|delivered") as refused:
        talk.call("recall", topic=talk.topic, handle=sent["recall_handle"])
    assert refused.value.code == NOT_FOUND
    # The refused recall did not cancel the next delivery of the message.
    [second] = talk.receive(consumer, {"delivered"})
    assert (first["attempt"], second["attempt"]) == (1, 2)
    talk.ack(consumer, second)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_an_invalid_recall_handle_is_refused(talks: Talks) -> None:
    talk = talks()
    with pytest.raises(ClientError) as refused:
        talk.call("recall", topic=talk.topic, handle="not a handle")
    assert refused.value.code == BAD_REQUEST


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_only_a_delayed_message_has_a_recall_handle(talks: Talks) -> None:
    talk = talks()
    assert talk.send("delayed", due_ms=talk.due_ms(60_000))["recall_handle"]
    assert not talk.send("immediate").get("recall_handle")
