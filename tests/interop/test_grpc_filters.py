"""Filters over gRPC: tags and SQL, for simple and for push consumers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import by_body
from tests.interop.drivers import ClientError
from tests.interop.grpc_conversation import ALL, WITH_GO, GrpcConversation

pytestmark = pytest.mark.interop

ILLEGAL_FILTER_EXPRESSION = 40010
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_tag_filter_selects_messages(talks: Talks) -> None:
    talk = talks()
    push = talk.listen(expression="A || B")
    simple = talk.simple(expression="A || B", group=f"{talk.topic}-simple")
    for tag in ("C", "Aa", "A", "B", "AB"):
        talk.send(tag, tag=tag)
    talk.send("none")
    talk.send("delayed A", tag="A", due_ms=talk.due_ms(1_000))
    talk.send("delayed C", tag="C", due_ms=talk.due_ms(1_000))
    talk.send("end", tag="B", due_ms=talk.due_ms(2_000))
    expected = {"A", "B", "delayed A", "end"}
    assert set(by_body(talk.receive(simple, expected))) == expected
    assert set(by_body(talk.client.wait_deliveries(push, 4))) == expected


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_an_sql_filter_selects_messages(talks: Talks) -> None:
    talk = talks()
    sql = "colour = 'red' AND (size > 3 OR size IS NULL) AND TAGS <> 'old'"
    push, simple = talk.listen(sql=sql), talk.simple(sql=sql, group=f"{talk.topic}-simple")
    rows = [("red", 4, "new"), ("red", 3, "new"), ("blue", 9, "new"), ("red", None, "new"), ("red", 7, "old")]
    for colour, size, tag in rows:
        properties = {"colour": colour} if size is None else {"colour": colour, "size": size}
        talk.send(f"{colour} {size} {tag}", tag=tag, properties=properties)
    due_ms = talk.due_ms(1_000)
    talk.send("delayed blue", tag="new", properties={"colour": "blue"}, due_ms=due_ms)
    talk.send("end", tag="new", properties={"colour": "red"}, due_ms=due_ms + 1_000)
    expected = {"red 4 new", "red None new", "end"}
    assert set(by_body(talk.receive(simple, expected))) == expected
    assert set(by_body(talk.client.wait_deliveries(push, 3))) == expected


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_invalid_sql_is_refused_when_the_consumer_receives(talks: Talks) -> None:
    """A client starts with any filter. The broker checks it with each receive."""
    talk = talks()
    with pytest.raises(ClientError) as refused:
        talk.receive_once(talk.simple(sql="colour = = 'red'"))
    assert refused.value.code == ILLEGAL_FILTER_EXPRESSION
