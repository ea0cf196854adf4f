"""The bridge's topic in Timeball, on a real node."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import running_node

from timeball.client.calls import Calls
from timeball.client.http_calls import HttpCalls
from timeball.edges.kafka.options import BridgeQueue
from timeball.model.errors import OutOfRange, SetupError


def test_messages_of_the_queue_are_pulled_and_cancelled(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, node.client() as ball:
        operations, columns = HttpCalls(node.http_endpoint, 30_000), Calls(node.endpoint, 30_000)
        queue = BridgeQueue(operations, columns, "kafka-in")
        queue.ensure()
        queue.ensure()
        assert (queue.span().min, queue.span().max) == (0, 0)
        ball.send("kafka-in", "now")
        ball.send("kafka-in", "later", after="1h", keys="in/k")
        assert queue.pull(0, 10, 10_000).column("body").to_pylist() == [b"now"]
        assert queue.pull(1, 10, 0).num_rows == 0 and queue.span().max == 1
        with pytest.raises(OutOfRange):
            queue.pull(5, 10, 0)
        assert queue.cancel(["in/k", "in/none"]) == 1 and queue.cancel(["in/k"]) == 0
        ball.create_topic("kafka-many", 3)
        with pytest.raises(SetupError, match="--name: Timeball's topic 'kafka-many' has 3 queues"):
            BridgeQueue(operations, columns, "kafka-many").ensure()
        operations.close()
        columns.close()
