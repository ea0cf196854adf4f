"""Offsets of a few rows: the same ones that `Topics.place` assigns, at the time when the caller asks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.registry.test_topics import new_topics, visible

from timeball.broker.registry.queue_offsets import QueueOffsets
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.topics import TopicConfig, Topics
from timeball.model.message import RETRY_TOPIC, encode_properties, stored_sizes

# A topic, the requested queue, a tag.
ROW = st.tuples(st.sampled_from("abc"), st.integers(-1, 9), st.sampled_from([None, "", "red", "red||blue"]))


def three_topics() -> Topics:
    """Topics of which one has fewer queues for writers, one has masks of tags, and one has no queue for writers."""
    topics = new_topics()
    topics.configure("a", TopicConfig(4, 2))
    topics.configure("b", TopicConfig(3, 3), filter_type="MULTI_TAG")
    topics.configure("c", TopicConfig(2, 0))
    return topics


def state_of(topics: Topics) -> list[object]:
    """All that a placement of rows may change."""
    return [
        (topic.name, at, topic.turn, queue.next_offset, queue.index.read(0, 1_000).tolist())
        for topic in topics.all()
        for at, queue in enumerate(topic.queues)
    ]


@settings(max_examples=50)
@given(st.lists(st.lists(ROW, min_size=1, max_size=9), max_size=4))
def test_queue_offsets_chosen_row_by_row_equal_those_of_columns(
    batches: list[list[tuple[str, int, str | None]]],
) -> None:
    by_rows, by_columns, next_seq = three_topics(), three_topics(), 1
    for batch in batches:
        rows = visible([name for name, _, _ in batch], [at for _, at, _ in batch], tag=[t for *_, t in batch])
        placement, few = by_columns.place(rows), QueueOffsets()
        sizes = stored_sizes(rows).tolist()
        chosen = [
            few.choose(by_rows.get(name), row, queue_id, sizes[row], tag, None)
            for row, (name, queue_id, tag) in enumerate(batch)
        ]
        assert chosen == list(zip(placement.queue_id.tolist(), placement.queue_offset.tolist(), strict=True))
        assert sorted(few.count(Rates())) == sorted(placement.count(Rates()))
        few.reserve_offsets()
        few.index(next_seq)
        placement.index(next_seq)
        next_seq += len(batch)
        assert state_of(by_rows) == state_of(by_columns)


def test_dead_letters_are_counted_by_their_original_topic_as_rows_and_as_columns() -> None:
    topics, few, counted = three_topics(), QueueOffsets(), (Rates(), Rates())
    properties = encode_properties({RETRY_TOPIC: "orders"})
    rows = visible(["%DLQ%g", "a", "%DLQ%g"], [0, 0, 0], properties=[properties, properties, None])
    topics.ensure("%DLQ%g", 1)
    for at, (name, text) in enumerate(
        zip(("%DLQ%g", "a", "%DLQ%g"), (properties, properties, None), strict=True)
    ):
        few.choose(topics.get(name), at, 0, 91, None, text)
    few.count(counted[0])
    topics.place(rows).count(counted[1])
    wanted = {"orders@g": 1, "%DLQ%g@g": 1}
    assert [rates.totals(Stat.DEAD_NUMS) for rates in counted] == [wanted, wanted]


def test_chosen_offsets_are_not_reserved_before_reserve_offsets() -> None:
    topics, refused = three_topics(), QueueOffsets()
    before = state_of(topics)
    refused.choose(topics.get("a"), 0, -1, 91, "red", None)
    assert state_of(topics) == before
    placed = QueueOffsets()
    assert placed.choose(topics.get("a"), 0, -1, 91, "red", None) == (0, 0)
    placed.reserve_offsets()
    assert state_of(topics) != before
