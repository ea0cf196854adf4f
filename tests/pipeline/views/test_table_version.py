"""Tests of timeball.pipeline.views.table_version: a status and a table that say the same, now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import send

from timeball.errors import NotFound, SetupError
from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.views.table_version import attach_mark, open_version, settled_status, status_of_version


def test_the_table_has_caught_up_with_the_log(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 3)
    node.run(node.broker.compact())
    reserved = broker.reserve(5)  # no attach, so no version of the table is waited for
    status = settled_status(broker)
    assert (status.table.version, status.watermark) == (1, 4)
    attached = [batch.num_rows for batch in broker.read_log(1, status.log.durable_seq, [Kind.TABLE])]
    assert sum(attached) == 2
    assert attach_mark(status.table.uri, 1) == reserved - 2
    assert attach_mark(status.table.uri, 0) == 0


def test_a_status_of_then_ends_where_its_version_was_made(node: RunningNode, broker: Endpoint) -> None:
    for _ in range(2):
        send(node.endpoint, 3)
        node.run(node.broker.compact())
    now = settled_status(broker)
    then, is_whole = status_of_version(broker, now, now.table.uri, 1)
    assert is_whole and (then.table.version, then.watermark, then.log.durable_seq) == (1, 4, 5)
    empty, _ = status_of_version(broker, now, now.table.uri, 0)
    assert (empty.watermark, empty.log.durable_seq) == (1, 1)
    with pytest.raises(NotFound, match="there are 0 to 2"):
        status_of_version(broker, now, now.table.uri, 3)


def test_a_table_out_of_reach_is_another_matter_than_a_version_that_is_not(
    node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match="run this where the broker's data folder is"):
        open_version(str(tmp_path / "elsewhere"), 1)
    with pytest.raises(NotFound, match="no version 7"):
        open_version(broker.status().table.uri, 7)
