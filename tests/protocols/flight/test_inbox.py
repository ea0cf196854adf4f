"""Small batches travel together and are still accepted or refused one by one."""

import asyncio
import json
from collections import deque

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import RunningNode, eventually

from timeball.access import ANONYMOUS, Caller
from timeball.protocols.flight import inbox
from timeball.protocols.flight.inbox import Inbox, groups
from timeball.protocols.flight.window import Budget, Slot, Window

PLAIN = pa.schema([("topic", pa.string()), ("body", pa.binary())])
TAGGED = pa.schema([*PLAIN, pa.field("tag", pa.string())])


def entry(
    window: Window, rows: int, schema: pa.Schema = PLAIN, topic: str = "inbox"
) -> tuple[pa.RecordBatch, Slot, Caller]:
    columns = [pa.array([topic] * rows), pa.array([b"x"] * rows), pa.nulls(rows, pa.string())]
    batch = pa.RecordBatch.from_arrays(columns[: len(schema)], schema=schema)
    slot = window.enter(batch.nbytes)
    assert slot is not None
    return batch, slot, ANONYMOUS


@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from([PLAIN, TAGGED])), max_size=40))
def test_groups_keep_order_and_lose_nothing(sizes: list[tuple[int, pa.Schema]]) -> None:
    window = Window(Budget())
    entries = [entry(window, rows, schema) for rows, schema in sizes]
    waiting = deque(entries)
    found = list(groups(waiting))
    assert not waiting
    assert [one for group in found for one in group] == entries
    for group in found:
        rows = [batch.num_rows for batch, _, _ in group]
        assert len({batch.schema.to_string() for batch, _, _ in group}) == 1
        if len(group) > 1:
            assert max(rows) <= inbox.SMALL_ROWS and sum(rows) <= inbox.TOGETHER_ROWS


def test_small_neighbours_go_together_and_large_ones_alone() -> None:
    window = Window(Budget())
    sizes = [1, 1, 1, inbox.SMALL_ROWS + 1, 1, 1]
    found = list(groups(deque(entry(window, rows) for rows in sizes)))
    assert [len(group) for group in found] == [3, 1, 2]


def test_each_batch_has_its_own_answer_though_one_is_refused(node: RunningNode) -> None:
    window = Window(Budget())
    topics = ["inbox", "inbox", "a/b", "inbox"]
    entries = [entry(window, rows, topic=topic) for rows, topic in enumerate(topics, 1)]
    box = Inbox(node.broker, node.loop)

    async def put_all() -> None:  # on the loop, so that all of them are there when it drains
        for batch, slot, _ in entries:
            box.put(batch, slot, ANONYMOUS)

    node.run(put_all())
    eventually(lambda: all(slot.answer for _, slot, _ in entries), "all are answered")
    first, second, refused, last = (json.loads(slot.answer or b"") for _, slot, _ in entries)
    assert refused["error"] == "invalid_name"
    assert [answer["rows"] for answer in (first, second, last)] == [1, 2, 4]
    assert second["first_seq"] == first["first_seq"] + 1
    assert last["first_seq"] == second["first_seq"] + 2


def test_a_closed_loop_is_an_answer_too(node: RunningNode) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    window = Window(Budget())
    batch, slot, _ = entry(window, 1)
    Inbox(node.broker, loop).put(batch, slot, ANONYMOUS)
    assert json.loads(slot.answer or b"")["error"] == "unavailable"
    assert window.wait_empty(0) is False
