"""One topic, a producer and its consumers, all of one stock client. Most tests of this folder use it."""

from __future__ import annotations

from typing import Any

from tests.interop.drivers import Driver, Json
from tests.interop.stock_broker import StockBroker

CPP, ALI_ONS, JAVA4, JAVA5, JAVA5_BINARY = "cpp", "ali_ons", "java4", "java5", "java5_binary"
JAVA5_5 = "java5_5"
ALL = [CPP, ALI_ONS, JAVA4, JAVA5, JAVA5_BINARY]
JAVA = [JAVA4, JAVA5]


class Conversation:
    """Names contain the test's name, so that tests share a broker.

    The topic exists before any request for it, unless `queues` is 0.
    """

    def __init__(
        self, client: Driver, broker: StockBroker, name: str, *, queues: int = 1, **producer: Any
    ) -> None:
        self.client, self.broker = client, broker
        self.topic, self.group = f"{name}-topic", f"{name}-group"
        self._producer, self._consumers = f"{name}-producer", 0
        if queues:
            broker.create_topic(self.topic, queues)
        client.call("producer", name=self._producer, group=self._producer, **producer)

    def listen(self, *, kind: str = "consumer", topic: str = "", **options: Any) -> str:
        """Start one more consumer of the group, and return its name."""
        self._consumers += 1
        name = f"{self.group}-{self._consumers}"
        options = {"group": self.group, "topic": topic or self.topic, "expression": "*", **options}
        self.client.call(kind, name=name, **options)
        return name

    def send(self, body: str, **options: Any) -> Json:
        """Send, and return the client's result. The send was acknowledged."""
        sent: Json = self.call("send", topic=self.topic, body=body, **options)
        assert sent["status"] == "SEND_OK"
        return sent

    def call(self, op: str, **options: Any) -> Any:
        """Make a request that names the producer."""
        return self.client.call(op, producer=self._producer, **options)

    def stop(self, consumer: str) -> None:
        """Stop a consumer that `listen` has started."""
        self.client.call("stop", name=consumer)


def by_body(messages: list[Json]) -> dict[str, Json]:
    """Return the message of each body. Fail if two messages have the same body."""
    messages_by_body = {message["body"]: message for message in messages}
    assert len(messages_by_body) == len(messages), [message["body"] for message in messages]
    return messages_by_body


def is_early(message: Json, due_ms: int) -> bool:
    """Check whether a message entered its queue before it was due, by the broker's clock."""
    return bool(message["store_ms"] < due_ms)
