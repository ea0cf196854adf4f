"""One topic, a producer and its consumers, all of one stock client for gRPC, for the tests of that edge."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

from tests.interop.drivers import BOUND_S, Driver, Json
from tests.interop.stock_broker import StockBroker

from timeball.broker.consuming.redelivery_rows import FIRST_POP_TIME
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.model.message import decode_properties

PYTHON, NODE, JAVA, GO = "grpc_python", "grpc_node", "grpc_java", "grpc_go"
ALL = [PYTHON, NODE, JAVA]
WITH_GO = [*ALL, GO]  # each kind of call once: Go's client takes seconds to start, and has no recall
INVISIBLE_S = 60  # longer than any test: an unacknowledged message does not come again by itself


class GrpcConversation:
    """Names contain the test's name, so that tests share a broker.

    The topic exists before any request for it, unless `queues` is 0.
    """

    def __init__(
        self,
        which: str,
        client: Driver,
        broker: StockBroker,
        name: str,
        *,
        queues: int = 1,
        group: Json | None = None,
        **client_options: Any,
    ) -> None:
        """Create the topic unless `queues` is 0, configure the group, and start the producer.

        `which` is the client's name. `group` has settings for `configure_group`, and `client_options` are those of the
        producer and of all consumers.
        """
        self.which, self.client, self.broker, self._client_options = which, client, broker, client_options
        self.topic, self.group = f"{name}-topic", f"{name}-group"
        self._producer, self._consumers = f"{name}-producer", 0
        if queues:
            broker.create_topic(self.topic, queues)
        if group is not None:
            self.configure_group(group)
        client.call("producer", name=self._producer, topic=self.topic, **client_options)

    def configure_group(self, config: Json) -> None:
        """Change settings of the group by RocketMQ's names. `retry_ms` has the pauses before the retries."""
        settings = {"groupName": self.group, "consumeEnable": True, "retryQueueNums": 1, **config}
        if pauses_ms := settings.pop("retry_ms", None):
            policy = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": pauses_ms}}
            settings["groupRetryPolicy"] = policy
        code, body = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(settings).encode()
        answer = self.broker.request(code, body=body)
        assert answer.code == 0, answer.remark

    # ---- producing

    def send(self, body: str, **options: Any) -> Json:
        """Send, and return the client's result. The send was acknowledged."""
        sent: Json = self.call("send", topic=self.topic, body=body, **options)
        assert sent["message_id"]
        return sent

    def call(self, op: str, **options: Any) -> Any:
        """Make a request that names the producer."""
        return self.client.call(op, producer=self._producer, **options)

    def due_ms(self, after_ms: int) -> int:
        """Return the time of the broker's clock plus `after_ms`. The Python client has whole seconds: round it up."""
        due_ms = self.broker.now_ms() + after_ms
        return -(-due_ms // 1000) * 1000 if self.which == PYTHON else due_ms

    # ---- consuming

    def listen(self, *, kind: str = "push", **options: Any) -> str:
        """Start one more consumer of the group, and return its name."""
        self._consumers += 1
        name = f"{self.group}-{self._consumers}"
        request = {"topic": self.topic, "group": self.group, **self._client_options, **options}
        self.client.call(kind, name=name, **request)
        return name

    def simple(self, **options: Any) -> str:
        """Start a consumer that requests its messages."""
        return self.listen(kind="simple", **{"wait_s": 5, **options})

    def receive(
        self, consumer: str, bodies: Collection[str], *, count: int = 16, invisible_s: int = INVISIBLE_S
    ) -> list[Json]:
        """Receive until messages with all these bodies are received, at most for BOUND_S. Return them in order."""
        received: list[Json] = []
        end_s = time.monotonic() + BOUND_S
        while not set(bodies) <= {message["body"] for message in received}:
            assert time.monotonic() < end_s, f"not {bodies}, but {received} was received"
            received += self.receive_once(consumer, count=count, invisible_s=invisible_s)
        return received

    def receive_once(self, consumer: str, *, count: int = 16, invisible_s: int = INVISIBLE_S) -> list[Json]:
        """Return the messages of one receive, none if its wait is over."""
        received: list[Json] = self.client.call(
            "receive", consumer=consumer, count=count, invisible_s=invisible_s
        )
        return received

    def ack(self, consumer: str, *messages: Json) -> None:
        """Acknowledge messages that a simple consumer has received."""
        for message in messages:
            self.client.call("ack", consumer=consumer, number=message["number"])

    def change(self, consumer: str, message: Json, invisible_s: int) -> None:
        """Change how long a received message stays invisible, counted from now."""
        self.client.call("change", consumer=consumer, number=message["number"], invisible_s=invisible_s)

    def stop(self, consumer: str) -> None:
        """Stop a consumer that `listen` has started."""
        self.client.call("stop", name=consumer)

    # ---- the state of messages in the broker's log

    def is_early(self, body: str, due_ms: int) -> bool:
        """Check whether the message with this body entered its queue before `due_ms`, by the broker's clock."""
        [row] = [row for row in self.broker.rows(self.topic) if row["body"] == body.encode()]
        return came_early({**row, "due_ms": due_ms})

    def returned(self) -> list[Json]:
        """Return the rows of the retry topic: messages that were not acknowledged in time."""
        return self.broker.rows(f"%RETRY%{self.group}_{self.topic}")

    def dead_letters(self) -> list[str]:
        """Return the bodies of the group's dead letters, by queue and then by offset."""
        return self.broker.bodies(f"%DLQ%{self.group}")


def came_early(row: Json, invisible_ms: int | None = None) -> bool:
    """Check whether a row of the log entered its queue before it was due.

    A message whose lease has ended has no due time. It may come `invisible_ms` after its first delivery.
    """
    if row["due_ms"] is not None:
        return bool(row["store_ms"] < row["due_ms"])
    assert invisible_ms is not None, "a message that a consumer gave back"
    first_ms = int(decode_properties(row["properties"])[FIRST_POP_TIME])
    return bool(row["store_ms"] < first_ms + invisible_ms)
