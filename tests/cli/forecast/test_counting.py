"""Counting for `timeball forecast`, on a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.unreachable import NOWHERE
from tests.node_fixture import running_node
from tests.pipeline.traffic import send

from timeball.cli.forecast.counting import count
from timeball.cli.forecast.wishes import Moment, Window
from timeball.errors import NotFound, Unavailable
from timeball.limits import DAY_MS


def test_what_waits_within_the_window_as_of_now_or_of_a_version(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_self=False) as node:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        send(node.endpoint, 5, topic="mail", after_ms=DAY_MS)
        found = count(node.endpoint, None, Window(), by_topic=True)
        assert {name: part.total for name, part in found.load.by_topic().items()} == {"orders": 10, "mail": 5}
        assert (found.version, found.is_whole, found.due) == (1, True, (None, None))
        near = count(node.endpoint, None, Window(end=Moment(2 * DAY_MS, is_relative=True)))
        assert (near.load.total, near.load.topics) == (5, ("",))
        node.run(node.broker.compact())
        send(node.endpoint, 5)
        assert count(node.endpoint, None, Window(version=1)).load.total == 10  # what waited when it was made
        assert count(node.endpoint, None, Window(version=0)).load.total == 0
        made = count(node.endpoint, None, Window(timestamp_ms=found.now_ms + DAY_MS))
        assert (made.version, made.load.total) == (2, 15)
        with pytest.raises(NotFound, match="no version so old"):
            count(node.endpoint, None, Window(timestamp_ms=1_000))


def test_a_broker_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(Unavailable, match="no broker answers"):
        count(NOWHERE, None, Window())
