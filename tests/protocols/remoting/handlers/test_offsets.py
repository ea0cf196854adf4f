"""Offsets: stored, begun, searched."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node
from tests.protocols.remoting.handlers.test_sends import sent
from tests.protocols.remoting.wire import Wire

from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode

QUERY, UPDATE = RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET


def queue(topic: str = "orders", queue_id: int = 0, **more: object) -> dict[str, object]:
    return {"topic": topic, "queueId": queue_id, "consumerGroup": "group", **more}


def test_what_was_stored_comes_back_after_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        sent(wire)
        wire.ask_ok(UPDATE, **queue(commitOffset=1))
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        assert wire.ask_ok(QUERY, **queue()).ext["offset"] == "1"


def test_one_way_is_stored_too(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    wire.send(UPDATE, one_way=True, **queue(commitOffset=1))
    assert wire.ask_ok(QUERY, **queue()).ext["offset"] == "1"
    assert not wire._answers


def test_a_new_group_begins_at_the_beginning_while_there_is_one(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    assert wire.ask_ok(QUERY, **queue()).ext["offset"] == "0"
    assert wire.ask(QUERY, **queue(setZeroIfNotFound=False)).code == ResponseCode.QUERY_NOT_FOUND
    index = node.broker.parts.topics.get("orders").queues[0].index

    async def remove() -> None:
        index.min_offset = 1

    node.run(remove())
    assert wire.ask(QUERY, **queue()).code == ResponseCode.QUERY_NOT_FOUND


@pytest.mark.parametrize("offset", [2, -1, 1 << 40])
def test_an_offset_beyond_the_queue_is_refused(wire: Wire, offset: int) -> None:
    sent(wire)
    assert wire.ask(UPDATE, **queue(commitOffset=offset)).code == ResponseCode.INVALID_PARAMETER


def test_begin_end_and_time(wire: Wire) -> None:
    receipts = [sent(wire) for _ in range(3)]
    assert all(receipt.code == 0 for receipt in receipts)
    assert wire.ask_ok(RequestCode.GET_MAX_OFFSET, **queue()).ext["offset"] == "3"
    assert wire.ask_ok(RequestCode.GET_MIN_OFFSET, **queue()).ext["offset"] == "0"
    stored_ms = int(wire.ask_ok(RequestCode.GET_EARLIEST_MSG_STORETIME, **queue()).ext["timestamp"])
    search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    assert wire.ask_ok(search, **queue(timestamp=stored_ms)).ext["offset"] == "0"
    assert wire.ask_ok(search, **queue(timestamp=stored_ms + 60_000)).ext["offset"] == "3"
    assert wire.ask_ok(search, **queue(timestamp=0, boundaryType="UPPER")).ext["offset"] == "0"


@pytest.mark.parametrize("code", [UPDATE, RequestCode.GET_MAX_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP])
def test_an_unknown_topic_or_queue(wire: Wire, code: int) -> None:
    sent(wire)
    more = {"commitOffset": 0, "timestamp": 0}
    assert wire.ask(code, **queue("nobody", **more)).code == ResponseCode.TOPIC_NOT_EXIST
    assert wire.ask(code, **queue(queue_id=99, **more)).code == ResponseCode.INVALID_PARAMETER
