"""Pop: the broker hands messages to whoever asks, and takes back those that are not acknowledged in time."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker
from tests.interop.stock_clients import mqadmin

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_pop(client: Driver, broker: StockBroker, name: str) -> None:
    """Queues are shared without being divided; a failed message comes again when its time is up."""
    talk = Conversation(client, broker, name, queues=2)
    mqadmin(
        broker,
        "setConsumeMode",
        "-b",
        broker.remoting,
        "-t",
        talk.topic,
        "-g",
        talk.group,
        "-m",
        "POP",
        "-q",
        "8",
    )
    # Only one of them fails: a body that failed with both would wait for 10 and then for 30 seconds.
    consumers = [talk.listen(server_rebalance=True, fail=fail) for fail in (1, 0)]
    sent = [f"message {n}" for n in range(4)]
    for body in sent:
        talk.send(body)
    talk.send("late", level=1)

    def done() -> set[str]:
        return {m["body"] for c in consumers for m in client.deliveries(c, done=True)}

    client.wait_until(lambda: done() == {*sent, "late"}, "every message was consumed")
    tries = [m for c in consumers for m in client.deliveries(c)]
    assert any("POP_CK" in m["properties"] for m in tries), "they were popped, not pulled"
