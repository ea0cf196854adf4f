"""Queues and committed offsets, over each protocol."""

import pytest
from tests.node_fixture import RunningNode

from timeball import NotFound, OutOfRange, RequestError, Timeball


def test_offsets_are_committed_and_read(ball: Timeball) -> None:
    ball.create_topic("positions", 1)
    ball.send_many([{"body": "a"}, {"body": "b"}], topic="positions")
    assert (ball.queues("positions")[0].min, ball.queues("positions")[0].max) == (0, 2)
    assert ball.offsets("positioned", "positions") == {}
    ball.commit("positions", "positioned", {0: 1})
    assert ball.offsets("positioned", "positions") == {0: 1}
    with pytest.raises(OutOfRange):
        ball.commit("positions", "positioned", {0: 9})
    with pytest.raises(NotFound):
        ball.queues("no-positions")


def test_methods_with_columns_are_refused(http_node: RunningNode) -> None:
    with Timeball(http_node.endpoint) as ball:
        for call in (
            lambda: ball.browse("t"),
            lambda: ball.browse_batch("t"),
            lambda: ball.pull_batch("t", "g"),
            lambda: ball.commit("t", "g"),
            lambda: ball.read_log(0, 1),
            lambda: ball.read_queue("t", 0, 0, 1),
            lambda: ball.reserve(1),
            lambda: ball.compact(),
        ):
            with pytest.raises(RequestError, match="only over Flight"):
                call()
