"""Runs that the compiled codec encodes as rows of the log give the same bytes and index entries as row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.edges.remoting.codec.test_implementation import (
    NOW_MS,
    PLAIN,
    batch,
    needs_compiled,
    record,
    send,
)

from timeball.broker.accepting import admission
from timeball.broker.accepting.admission import SmallBatch
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.topics import Queues, Topic, TopicConfig, TopicFacts
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.frame import BINARY, FRAME_BYTES_MAX, JSON, Frame
from timeball.edges.remoting.codec.implementation import COMPILED, Codec
from timeball.edges.remoting.handlers.sends import Runs
from timeball.log.queue_index import QueueIndexes
from timeball.log.row_encoder import build_by_pyarrow
from timeball.model import limits
from timeball.model.message import encode_properties

FIRST_SEQ = 1_000
LAST_MS = NOW_MS + limits.DELAY_MS_MAX
Written = tuple[Any, ...]


def topics() -> dict[str, Topic]:
    """Return three topics that already have a row each.

    `orders` has 4 queues with one tag per message, `many` has 3 queues with several tags per message, and `narrow` has
    5 queues of which 2 can be written.
    """
    indexes, result = QueueIndexes(CrashFiles()), {}
    for name, facts in (
        ("orders", TopicFacts(4)),
        ("many", TopicFacts(3, "MULTI_TAG")),
        ("narrow", TopicFacts(5, config=TopicConfig(5, 2))),
    ):
        topic = result[name] = Topic(name, Queues(indexes, name, facts.queues), facts)
        topic.turn = 1
        topic.queues[1].next_offset = topic.queues[1].index.max_offset
    return result


def write_rows(encode: Callable[[dict[str, Topic]], SmallBatch | None]) -> Written | None:
    """Encode rows for fresh topics, and index them. Return all that is written, and the state of the topics then."""
    known_topics, rates = topics(), Rates()
    small_batch = encode(known_topics)
    if small_batch is None:
        return None
    rows, places, pending_count, pending_bytes = small_batch
    encoded = [bytes(rows.message), rows.batch.to_pylist(), rows.queue_ids, rows.queue_offsets]
    counts: list[object] = [rows.num_rows, pending_count, pending_bytes]
    if places is not None:
        places.index(FIRST_SEQ)
        places.reserve_offsets()
        counts += sorted(places.count(rates))
    counts += [
        rates.total(stat, name)
        for stat in (Stat.TOPIC_PUT_NUMS, Stat.TOPIC_PUT_SIZE)
        for name in known_topics
    ]
    queues = [
        (topic.turn, queue.next_offset, queue.index.read(0, 1_000).tolist())
        for topic in known_topics.values()
        for queue in topic.queues
    ]
    return (*encoded, counts, queues)


def runs_of(parts: list[bytes], codec: Codec | None = COMPILED) -> Runs:
    """Return the runs in the bytes of several connections. All frames must be plain sends."""
    assert codec is not None
    runs = [run for data in parts for run in codec.cut(data, FRAME_BYTES_MAX)[0]]
    assert not any(isinstance(run, Frame) for run in runs)
    for number, run in enumerate(runs):
        run.plan(b"10.0.0.%d:51234" % number, NOW_MS, limits.DELAY_MS_MAX, frozenset())
    return Runs(codec, runs)


def encode_by_rows(runs: Runs) -> Written | None:
    return write_rows(lambda known: admission.log_rows(list(runs), known, NOW_MS, "host:1", build_by_pyarrow))


def encode_in_c(runs: Runs, last_ms: int = LAST_MS) -> Written | None:
    return write_rows(lambda known: runs.log_rows(known, NOW_MS, last_ms, "host:1"))


TEXTS = st.sampled_from(["", "a", "b", "a||b", "ключ", "order-17 änne"])
PROPERTIES = st.fixed_dictionaries(
    {"UNIQ_KEY": st.sampled_from(["AB", "k" * 40, "ü"])},
    optional={
        "TAGS": TEXTS,
        "KEYS": TEXTS,
        "TIMER_DELAY_MS": st.sampled_from(["1", "5000"]),
        "OTHER": TEXTS,
    },
)
NUMBERS = st.integers(-(2**31), 2**31 - 1).map(str)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw a send or a batch."""
    form = draw(st.sampled_from([JSON, BINARY]))
    queues = st.sampled_from(["-1", "0", "1", "2", "7"])
    fields = {
        "b": draw(st.sampled_from(["orders", "many", "narrow"])),
        "e": draw(queues),
        "f": draw(st.sampled_from(["0", "1", "16"])),
        "g": draw(st.integers(0, 2**62).map(str).filter(lambda text: len(text) < 19)),
        "h": draw(NUMBERS),
        "j": draw(NUMBERS),
    }
    body = draw(st.binary(max_size=9))
    if draw(st.integers(0, 3)) == 0:
        texts = draw(st.lists(PROPERTIES, min_size=1, max_size=4))
        for text in texts:
            text.pop("TIMER_DELAY_MS", None)  # a batch is plain only without a delay and with a queue
        records = [record(encode_properties(text), body) for text in texts]
        return batch(records, {**PLAIN, **fields, "e": "1"}, form)
    return send({**PLAIN, **fields, "i": encode_properties(draw(PROPERTIES))}, body, form)


@needs_compiled
@given(st.lists(st.lists(requests(), min_size=1, max_size=5).map(b"".join), min_size=1, max_size=4))
def test_runs_are_encoded_as_their_rows_are(parts: list[bytes]) -> None:
    runs = runs_of(parts)
    written = encode_in_c(runs)
    assert written is not None and written == encode_by_rows(runs)


@needs_compiled
def test_runs_with_thousands_of_rows_are_encoded_as_their_rows_are() -> None:
    requests = [
        send({**PLAIN, "e": str(n % 9 - 1), "b": "narrow" if n % 7 == 0 else "orders"}, bytes(n % 50))
        for n in range(2_500)
    ]
    runs = runs_of([b"".join(requests[:1_100]), b"".join(requests[1_100:])])
    written = encode_in_c(runs)
    assert len(runs) == 2_500 and written is not None and written == encode_by_rows(runs)


@needs_compiled
@pytest.mark.parametrize(
    "other",
    [
        {"i": encode_properties({"UNIQ_KEY": "AB", "DELAY": "3"})},
        {"i": encode_properties({"UNIQ_KEY": "AB", "TIMER_DELIVER_MS": str(NOW_MS + 9)})},
        {"b": "%DLQ%group"},
    ],
    ids=["a delay level", "due later than last_ms", "a dead letter"],
)
def test_an_unusual_send_leaves_the_whole_batch_to_the_reference(other: dict[str, str]) -> None:
    runs = runs_of([send() + send({**PLAIN, **other}) + send()])
    known_topics = topics()
    known_topics["%DLQ%group"] = known_topics["orders"]
    before = [queue.next_offset for topic in known_topics.values() for queue in topic.queues]
    assert runs.log_rows(known_topics, NOW_MS, NOW_MS + 8, "host:1") is None
    assert before == [queue.next_offset for topic in known_topics.values() for queue in topic.queues]
    assert runs.batch() == list(runs) and len(runs) == 3


@needs_compiled
def test_a_row_that_is_written_otherwise_is_noticed() -> None:
    """The negative control of the comparison: this codec swaps the rows of two queues."""
    assert COMPILED is not None
    data = [send({**PLAIN, "e": "0"}) + send({**PLAIN, "e": "1"}, code=RequestCode.SEND_MESSAGE_V2)]

    def swap_queues(*arguments: Any) -> Any:
        message, queue_ids, offsets, queues, *more = COMPILED.log_rows(*arguments)
        (topic, first, *rows_of_first), (_, second, *rows_of_second) = queues
        swapped = [(topic, first, *rows_of_second), (topic, second, *rows_of_first)]
        return message, queue_ids, offsets, swapped, *more

    right, wrong = (runs_of(data, codec) for codec in (COMPILED, replace(COMPILED, log_rows=swap_queues)))
    assert encode_in_c(right) == encode_by_rows(right)
    assert encode_in_c(wrong) != encode_by_rows(wrong)
