"""Topics: offsets are dense and in log order, whoever selects the queue, and a replay gives the same offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.registry.state_rows import StateRows
from tests.crash_files import CrashFiles
from tests.log.small_log import SEGMENT_BYTES

from timeball.broker.filters import tag_hash, tag_mask
from timeball.broker.registry.rates import Rates
from timeball.broker.registry.topics import (
    FilterType,
    Placement,
    Queues,
    Topic,
    TopicConfig,
    TopicFacts,
    Topics,
    apply_attribute_changes,
    check_config,
    check_name,
    raise_queues,
)
from timeball.io.files import Files
from timeball.log.queue_index import Lengths, QueueIndexes
from timeball.log.reader import LogReader
from timeball.log.recovery import open_log
from timeball.model import limits
from timeball.model.errors import InvalidMessage, NotFound, OutOfRange, OverLimit, RequestError
from timeball.model.message import Kind, build_rows, stored_sizes

QUEUES = 3

END_SEQ = 10_000  # a number after all rows of a test


def open_topics(log: StateRows, files: Files, queues: int = QUEUES) -> Topics:
    """Topics restored from `log`, before their queue indexes are loaded."""
    return log.opened(lambda meta: Topics(files, meta, queues_per_topic=queues))


def new_topics(files: Files | None = None, *, queues: int = QUEUES, log: StateRows | None = None) -> Topics:
    """Topics restored from `log` and `files`, by default none, for a log without messages."""
    topics = open_topics(log or StateRows(), files or CrashFiles(), queues)
    topics.load(empty_log(), {}, 1)
    return topics


def empty_log() -> LogReader:
    return LogReader(open_log(CrashFiles(), segment_bytes=SEGMENT_BYTES, now_ms=0).segments)


def save_queues(topics: Topics, next_seq: int = END_SEQ) -> Lengths:
    """Write the queue indexes to files, as a checkpoint does. Returns their lengths, which it contains."""
    flush = topics.indexes.flush(next_seq)
    flush.write()
    topics.indexes.finish(flush)
    return flush.lengths()


def visible(names: list[str], queue_ids: list[int] | None = None, **columns: Any) -> pa.RecordBatch:
    """Rows of messages of these topics that are about to become visible, by default in any queue."""
    count = len(names)
    return build_rows(
        count, kind=int(Kind.MESSAGE), topic=names, queue_id=queue_ids or [-1] * count, body=b"body", **columns
    )  # fmt: skip


def with_offsets(rows: pa.RecordBatch, placement: Placement) -> pa.RecordBatch:
    """The rows with their queues and offsets, as the log contains them."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    columns["queue_id"] = pa.array(placement.queue_id, pa.int32())
    columns["queue_offset"] = pa.array(placement.queue_offset)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=rows.schema)


def entries(topics: Topics) -> dict[tuple[str, int], list[int]]:
    """Sequence numbers by queue."""
    return {
        (topic.name, at): queue.index.read(queue.index.min_offset, 1_000)["seq"].tolist()
        for topic in topics.all()
        for at, queue in enumerate(topic.queues)
        if queue.index.max_offset
    }


BATCHES = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 5)), min_size=1, max_size=12), max_size=6
)


@settings(max_examples=50)
@given(BATCHES, st.integers(0, 6))
def test_offsets_have_no_gaps_and_a_replay_of_any_part_gives_the_same_queues(
    batches: list[list[tuple[str, int]]], saved_batches: int
) -> None:
    """The queues are saved after `saved_batches` batches (0: never), and restored by a replay of all batches."""
    files, log = CrashFiles(), StateRows()
    topics, replays, next_seq, model = new_topics(files, log=log), [], 1, {}
    lengths_and_next_seq: tuple[Lengths, int] = {}, 1
    for batch in batches:
        rows = visible([name for name, _ in batch], [queue for _, queue in batch])
        placement = topics.place(rows)
        placed = with_offsets(rows, placement)
        for i, (name, wanted) in enumerate(batch):
            queue, offset = int(placement.queue_id[i]), int(placement.queue_offset[i])
            assert queue == wanted % QUEUES if wanted >= 0 else 0 <= queue < QUEUES
            assert offset == len(model.setdefault((name, queue), []))
            model[name, queue].append(next_seq + i)
        placement.index(next_seq)
        assert set(placement.count(Rates())) == {
            (name, int(queue)) for (name, _), queue in zip(batch, placement.queue_id, strict=True)
        }
        replays.append((placed, np.arange(next_seq, next_seq + len(batch))))
        next_seq += len(batch)
        if len(replays) == saved_batches:
            lengths_and_next_seq = save_queues(topics, next_seq), next_seq
    assert entries(topics) == model
    restored = open_topics(log, files)
    restored.load(empty_log(), *lengths_and_next_seq)
    for placed, seqs in replays:  # batches that are saved already are skipped
        restored.replay(placed, seqs)
    assert entries(restored) == model


def test_rows_without_a_queue_go_to_all_queues_in_turn() -> None:
    topics = new_topics()
    first = topics.place(visible(["a"] * 4)).queue_id.tolist()
    second = topics.place(visible(["a"] * 3)).queue_id.tolist()
    assert [*first, *second] == [0, 1, 2, 0, 1, 2, 0]


def test_rows_without_consecutive_numbers_are_indexed_by_their_own_numbers() -> None:
    """Rows between them may be scheduled messages, which have no offsets."""
    topics = new_topics()
    topics.place(visible(["a"] * 2, [0, 0])).index(10, np.array([11, 15]))
    assert entries(topics) == {("a", 0): [11, 15]}


def test_ensure_creates_a_missing_topic_with_the_default_number_of_queues() -> None:
    assert len(new_topics().ensure("new").queues) == QUEUES
    topics = new_topics()
    assert len(topics.ensure("new", 2).queues) == 2
    assert topics.ensure("new").name == topics.get("new").name == "new"
    with pytest.raises(NotFound, match="'other' does not exist"):
        topics.get("other")


def test_a_topic_grows_and_never_shrinks() -> None:
    topics = new_topics()
    assert [len(topics.ensure("a", queues).queues) for queues in (2, 5, 3)] == [2, 5, 5]


def test_topics_and_their_numbers_of_queues_survive_a_restart() -> None:
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, log=log)
    assert log.count == 0
    topics.ensure("a")
    topics.ensure("b", 5)
    assert log.count == 2
    assert topics.ensure("b", 4) and log.count == 2
    again = new_topics(files, log=log)
    assert {topic.name: len(topic.queues) for topic in again.all()} == {"a": QUEUES, "b": 5}


def test_the_retry_topic_of_the_longest_group_and_topic_is_valid() -> None:
    longest = f"%RETRY%{'g' * limits.GROUP_BYTES_MAX}_{'t' * limits.TOPIC_BYTES_MAX}"
    assert new_topics().ensure(longest).name == longest
    for name in (longest + "x", "t" * (limits.TOPIC_BYTES_MAX + 1)):
        with pytest.raises(InvalidMessage, match="topic"):
            new_topics().ensure(name)


def test_creating_a_topic_makes_no_call_to_the_disk() -> None:
    """The indexes of all topics are one file, which a checkpoint writes and syncs."""
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, log=log)
    calls = files.calls
    topics.place(visible([f"%RETRY%g{n}" for n in range(1_000)])).index(1)
    assert files.calls == calls
    save_queues(topics, 1_001)
    assert files.list_dir("queues") == ["00000000000000000001.cq"]


def test_at_the_limit_a_new_topic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOPICS_MAX", 2)
    topics = new_topics()
    for name in "aba":
        topics.ensure(name)
    with pytest.raises(OverLimit, match="2 topics exist"):
        topics.ensure("c")


@pytest.mark.parametrize("name", ["", "a b", "a/b", ".", "a\n", "ä", "x" * 6])
def test_invalid_topic_names_are_refused(name: str) -> None:
    check_name("%a|B_9-"[:5], 5, "topic")
    with pytest.raises(InvalidMessage, match=r"group .*: 1 to 5 of the characters"):
        check_name(name, 5, "group")


def tags_indexed(topics: Topics) -> dict[str, list[int]]:
    """The tag fields of the index entries in the first queue of each topic with messages."""
    tags_by_topic = {topic.name: topic.queues[0].index.read(0, 100)["tag"].tolist() for topic in topics.all()}
    return {name: tags for name, tags in tags_by_topic.items() if tags}


TAGS = ["a", None, "b||c", "Aa", "BB", ""]  # "Aa" and "BB" have the same hash
SINGLE = [tag_hash("a"), 0, tag_hash("b||c"), tag_hash("Aa"), tag_hash("BB"), 0]
MULTI = [tag_mask("a"), 0, tag_mask("b") | tag_mask("c"), tag_mask("Aa"), tag_mask("BB"), 0]


def test_the_tag_of_an_index_entry_is_a_hash_or_a_mask_by_the_filter_type() -> None:
    assert SINGLE[3] == SINGLE[4] == 2112 and MULTI != SINGLE
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, log=log)
    topics.ensure("single")
    topics.ensure("multi", filter_type="MULTI_TAG")
    names = ["single", "multi"] * len(TAGS)
    rows = visible(names, [0] * len(names), tag=[tag for tag in TAGS for _ in range(2)])
    placement = topics.place(rows)
    placement.index(1)
    assert tags_indexed(topics) == {"single": SINGLE, "multi": MULTI}
    again = new_topics(files, log=log)
    again.replay(with_offsets(rows, placement), np.arange(1, 1 + len(names)))
    assert tags_indexed(again) == {"single": SINGLE, "multi": MULTI}


@pytest.mark.parametrize(("filter_type", "expected"), [("SINGLE_TAG", SINGLE), ("MULTI_TAG", MULTI)])
def test_the_tags_of_a_batch_of_one_topic_follow_its_filter_type(
    filter_type: FilterType, expected: list[int]
) -> None:
    topics = new_topics()
    topics.ensure("t", 1, filter_type=filter_type)
    topics.place(visible(["t"] * len(TAGS), tag=TAGS)).index(1)
    assert tags_indexed(topics) == {"t": expected}
    topics.place(visible(["t"] * 2)).index(7)
    assert tags_indexed(topics) == {"t": [*expected, 0, 0]}


def test_a_filter_type_is_saved_and_changes_only_on_request() -> None:
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, log=log)
    assert topics.ensure("old").filter_type == topics.ensure("old", 5).filter_type == "SINGLE_TAG"
    assert topics.ensure("new", 1, filter_type="MULTI_TAG").filter_type == "MULTI_TAG"
    assert topics.ensure("new", 2).filter_type == "MULTI_TAG"
    assert {topic.name: topic.filter_type for topic in new_topics(files, log=log).all()} == {
        "old": "SINGLE_TAG",
        "new": "MULTI_TAG",
    }


def test_the_filter_type_of_a_topic_changes_only_while_it_is_empty() -> None:
    log = StateRows()
    topics = new_topics(log=log)
    topics.ensure("t", 1)
    assert topics.ensure("t", filter_type="MULTI_TAG").filter_type == "MULTI_TAG"
    assert log.count == 2
    topics.place(visible(["t"], tag=["a"]))
    with pytest.raises(RequestError, match="has messages: its filter type stays MULTI_TAG"):
        topics.ensure("t", 4, filter_type="SINGLE_TAG")
    assert len(topics.get("t").queues) == 1, "the refused call has not added queues"
    assert topics.ensure("t", filter_type="MULTI_TAG").filter_type == "MULTI_TAG"
    assert log.count == 2


def test_an_unknown_filter_type_is_refused() -> None:
    topics = new_topics()
    with pytest.raises(RequestError, match="'HEAVY': it is SINGLE_TAG or MULTI_TAG"):
        topics.ensure("t", filter_type="HEAVY")
    assert not topics.all()


def test_the_size_of_an_index_entry_is_that_of_rocketmqs_stored_message() -> None:
    rows = visible(["ab", "c"], properties=["k\1v\2", None])
    # 91 bytes of fixed fields, then topic, body ("body") and properties.
    assert stored_sizes(rows).tolist() == [91 + 2 + 4 + 4, 91 + 1 + 4]


# ---- configuration and deletion -----------------------------------------------------------------------------


def append_rows(topics: Topics, first_seq: int, name: str, rows: int = 1) -> pa.RecordBatch:
    """Rows with offsets that are durable, as they are in the log."""
    batch = visible([name] * rows)
    placement = topics.place(batch)
    placement.index(first_seq)
    return with_offsets(batch, placement)


def reopen_topics(
    topics: Topics,
    log: StateRows,
    files: CrashFiles,
    lengths: dict[str, dict[int, tuple[int, int]]] | None = None,
) -> Topics:
    """The topics after a restart, by default with a checkpoint of this moment."""
    saved = save_queues(topics)
    again = open_topics(log, files, 1)
    again.load(empty_log(), saved if lengths is None else lengths, END_SEQ if lengths is None else 1)
    return again


def test_a_topic_has_its_configuration_also_after_a_restart() -> None:
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, log=log)
    config = TopicConfig(2, 3, perm=4, order=True, sys_flag=1, attributes={"message.type": "FIFO"})
    topics.configure("t", config, filter_type="MULTI_TAG")
    for read in (topics, reopen_topics(topics, log, files)):
        topic = read.get("t")
        assert (topic.read_queues, topic.write_queues, topic.perm, len(topic.queues)) == (2, 3, 4, 3)
        assert (topic.config, topic.filter_type) == (config, "MULTI_TAG")


def test_a_topic_without_configuration_shows_all_its_queues() -> None:
    topic = new_topics().ensure("t")
    assert (topic.read_queues, topic.write_queues, topic.perm) == (QUEUES, QUEUES, 6)


def test_queues_beyond_a_smaller_configuration_are_hidden_and_not_deleted() -> None:
    topics = new_topics()
    append_rows(topics, 0, "t", rows=8)
    topics.configure("t", TopicConfig(3, 2))
    assert len(topics.get("t").queues) == 3
    before = [queue.next_offset for queue in topics.get("t").queues]
    append_rows(topics, 8, "t", rows=8)
    after = [queue.next_offset for queue in topics.get("t").queues]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4, 0]


@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
def test_ensure_shows_at_least_the_requested_number_of_queues(wanted: int) -> None:
    topics = new_topics()
    topics.ensure("t", 3)
    topics.configure("t", TopicConfig(1, 2, perm=4))
    topic = topics.ensure("t", wanted)
    assert (topic.read_queues, topic.write_queues) == (max(1, wanted), max(2, wanted))
    assert len(topic.queues) == max(3, wanted)
    assert topic.perm == 4


def test_an_invalid_configuration_changes_nothing() -> None:
    topics = new_topics()
    topics.configure("t", TopicConfig(2, 2))
    for config in (TopicConfig(0, 0), TopicConfig(2, 2, perm=9)):
        with pytest.raises(RequestError):
            topics.configure("t", config)
        with pytest.raises(RequestError):
            topics.configure("u", config)
    assert topics.get("t").config == TopicConfig(2, 2)
    assert [topic.name for topic in topics.all()] == ["t"]


def test_a_topic_created_after_a_deletion_has_no_old_messages() -> None:
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, queues=1, log=log)
    append_rows(topics, 0, "t", rows=3)
    topics.configure("t", TopicConfig(1, 1, perm=4))
    assert topics.delete("t", 3)
    assert not topics.delete("t", 3)
    for read in (topics, reopen_topics(topics, log, files)):
        assert read.find_topic("t") is None
        assert read.all() == []
        with pytest.raises(NotFound):
            read.get("t")
    append_rows(topics, 3, "t", rows=2)
    for read in (topics, reopen_topics(topics, log, files)):
        (queue,) = read.get("t").queues
        assert (queue.index.min_offset, queue.index.max_offset) == (3, 5)
        assert queue.index.read(3, 9)["seq"].tolist() == [3, 4]
        assert read.get("t").perm == 6, "the new topic does not have the configuration of the deleted one"


@pytest.mark.parametrize("sent_again", [False, True])
def test_a_replay_hides_the_messages_before_a_deletion(sent_again: bool) -> None:
    """There is no checkpoint after the deletion."""
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, queues=1, log=log)
    old = append_rows(topics, 0, "t", rows=3)
    topics.delete("t", 3)
    fresh_rows = append_rows(topics, 3, "t", rows=2) if sent_again else None
    again = reopen_topics(topics, log, files, lengths={})
    again.replay(old, np.arange(3))
    if fresh_rows is None:
        assert again.find_topic("t") is None
    else:
        again.replay(fresh_rows, np.arange(3, 5))
        (queue,) = again.get("t").queues
        assert (queue.index.min_offset, queue.index.max_offset) == (3, 5)


def test_a_deletion_that_a_crash_lost_is_undone() -> None:
    files, log = CrashFiles(), StateRows()
    topics = new_topics(files, queues=1, log=log)
    append_rows(topics, 0, "t", rows=35)
    lengths = save_queues(topics)
    topics.delete("t", 35)
    log.appended.pop()
    again = open_topics(log, files, 1)
    again.load(empty_log(), lengths, END_SEQ)
    assert entries(again) == {("t", 0): list(range(35))}


def test_an_accepted_message_creates_its_deleted_topic_again() -> None:
    topics = new_topics(queues=1)
    topics.ensure("t", 1)
    topics.delete("t", 0)
    append_rows(topics, 0, "t")
    assert topics.get("t").queues[0].index.max_offset == 1


def test_an_emptied_topic_may_have_another_filter_type() -> None:
    topics = new_topics(queues=1)
    append_rows(topics, 0, "t")
    topics.delete("t", 1)
    assert topics.ensure("t", filter_type="MULTI_TAG").filter_type == "MULTI_TAG"


def test_every_change_of_a_topic_increases_the_version() -> None:
    topics = new_topics(queues=1)
    versions = [topics.version]
    for change in (
        lambda: topics.ensure("t"),
        lambda: topics.ensure("t", 2),
        lambda: topics.configure("t", TopicConfig(1, 1)),
        lambda: topics.delete("t", 0),
    ):
        change()
        versions.append(topics.version)
    assert versions == sorted(set(versions))
    topics.configure("u", TopicConfig(1, 1))
    before = topics.version
    topics.configure("u", TopicConfig(1, 1))
    topics.ensure("u")
    assert topics.version == before


def queues(count: int) -> Queues:
    """The queues of a topic without messages."""
    return Queues(QueueIndexes(CrashFiles()), "t", count)


def test_a_queue_is_created_at_its_first_use_and_stays_the_same_object() -> None:
    many = queues(1_000)
    assert (len(many), len(many._created)) == (1_000, 0)
    many[7].index.append(*[np.array([1])] * 3)
    many[7].next_offset = 5
    assert (many[7].index.max_offset, many[7].next_offset, len(many._created)) == (1, 5, 1)
    assert (many[8].index.topic, many[8].index.queue_id) == ("t", 8)


def test_queues_are_a_sequence() -> None:
    three = queues(3)
    assert [queue.index.queue_id for queue in three] == [0, 1, 2]
    assert three[:2] == [three[0], three[1]]
    for queue_id in (3, -1):
        with pytest.raises(IndexError, match=f"queue {queue_id} of 3"):
            three[queue_id]
    three.widen(5)
    three.widen(2)
    assert len(three) == 5, "never fewer than before"


def test_a_topic_is_restored_from_its_facts() -> None:
    facts = TopicFacts(4, "MULTI_TAG", TopicConfig(2, None, perm=4), emptied_before_seq=9, made_by="anna")
    topic = Topic("t", queues(4), facts)
    assert topic.facts() == facts
    assert (topic.read_queues, topic.write_queues, topic.perm) == (2, 4, 4)


MAX = limits.QUEUES_PER_TOPIC_MAX


@pytest.mark.parametrize(
    "config",
    [
        TopicConfig(),
        TopicConfig(1, 0),
        TopicConfig(0, 1),
        TopicConfig(MAX, MAX),
        TopicConfig(perm=0),
        TopicConfig(perm=7, order=True, sys_flag=3),
    ],
)
def test_configurations_that_rocketmq_allows_are_accepted(config: TopicConfig) -> None:
    check_config(config)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (TopicConfig(0, 0), OutOfRange),
        (TopicConfig(-1, 1), OutOfRange),
        (TopicConfig(1, MAX + 1), OutOfRange),
        (TopicConfig(perm=8), RequestError),
        (TopicConfig(perm=-1), RequestError),
        (TopicConfig(sys_flag=4), RequestError),
    ],
)
def test_invalid_configurations_are_refused(config: TopicConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_config(config)


def test_raise_queues_never_lowers_a_number_and_keeps_none() -> None:
    assert raise_queues(TopicConfig(1, 4, perm=4), 3) == TopicConfig(3, 4, perm=4)
    assert raise_queues(TopicConfig(), 3) == TopicConfig()


def test_attribute_changes_set_and_remove_single_attributes() -> None:
    attributes = apply_attribute_changes({}, "+message.type=DELAY, +cleanup.policy=DELETE")
    assert attributes == {"message.type": "DELAY", "cleanup.policy": "DELETE"}
    assert apply_attribute_changes(attributes, "") == attributes
    assert apply_attribute_changes(attributes, "-cleanup.policy,+message.type=FIFO,-queue.type") == {
        "message.type": "FIFO"
    }
    assert attributes["message.type"] == "DELAY", "the call does not change its argument"


@pytest.mark.parametrize(
    "changes",
    [
        "message.type=DELAY", "+message.type", "-message.type=DELAY", "+", "+=", "+a=b", "-a", "+message.type=delay",
        "+cleanup.policy=COMPACTION",
    ],
)  # fmt: skip
def test_unknown_attributes_and_values_are_refused(changes: str) -> None:
    with pytest.raises(RequestError):
        apply_attribute_changes({}, changes)
