"""Small batches are joined for the log, and are still accepted or refused one by one."""

import json
import logging

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode, eventually

from timeball.broker.accepting import admission
from timeball.edges.flight.exchange import Sends, Slot, Window, refusal_answer
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model.access import ANONYMOUS, Caller

PLAIN = pa.schema([("topic", pa.string()), ("body", pa.binary())])


def new_window() -> Window:
    """Return the window of a new stream."""
    return Window(MemoryQuota(10**6), "10.0.0.1", lambda: None, lambda: None)


def enter_batch(window: Window, rows: int, topic: str = "inbox") -> tuple[pa.RecordBatch, Slot, Caller]:
    """Enter a batch of `rows` messages in a window. Return the arguments for putting it."""
    batch = pa.record_batch([pa.array([topic] * rows), pa.array([b"x"] * rows)], PLAIN)
    slot = window.enter(batch.nbytes)
    assert slot is not None
    return batch, slot, ANONYMOUS


def test_each_batch_has_its_own_answer_even_if_one_is_refused(node: RunningNode) -> None:
    window = new_window()
    topics = ["inbox", "inbox", "a/b", "inbox"]
    entries = [enter_batch(window, rows, topic=topic) for rows, topic in enumerate(topics, 1)]
    sends = Sends(node.broker)

    async def put_all() -> None:  # in one turn of the loop, so that the broker joins them
        for batch, slot, _ in entries:
            sends.put(batch, slot, ANONYMOUS)

    node.run(put_all())
    eventually(lambda: all(slot.answer for _, slot, _ in entries), "all are answered")
    first, second, refused, last = (json.loads(slot.answer or b"") for _, slot, _ in entries)
    assert refused["error"] == "invalid_name"
    assert [answer["rows"] for answer in (first, second, last)] == [1, 2, 4]
    assert second["first_seq"] == first["first_seq"] + 1
    assert last["first_seq"] == second["first_seq"] + 2


def test_a_fault_of_the_broker_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    window = new_window()
    batch, slot, _ = enter_batch(window, 1)
    # Without a broker, each send fails.
    Sends(None).put(batch, slot, ANONYMOUS)  # type: ignore[arg-type]
    assert json.loads(slot.answer or b"")["error"] == "error"
    assert "AttributeError" not in caplog.text.splitlines()[0] and "NoneType" in caplog.text


def test_an_internal_fault_is_logged_with_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert b"secret" not in refusal_answer(ValueError("secret"))
    assert "secret" in caplog.text


@pytest.mark.parametrize("rows", [1, 2 * admission.ROWS_MAX])
@pytest.mark.parametrize("name", ["tag", "keys", "unique_key"])
@pytest.mark.parametrize("text", ["red\x02TIMER_DELIVER_MS\x011", "a\x01"])
def test_a_text_that_ends_a_property_is_refused(node: RunningNode, name: str, text: str, rows: int) -> None:
    """Such a character would change or remove properties for RocketMQ's consumers. Tested as rows and as columns."""
    sends, window = Sends(node.broker), new_window()
    columns = {"topic": ["inbox"] * rows, "body": [b"x"] * rows, name: [*["fine"] * (rows - 1), text]}
    batch = pa.record_batch(columns, PLAIN.append(pa.field(name, pa.string())))
    slot = window.enter(batch.nbytes)
    assert slot is not None
    node.loop.call_soon_threadsafe(sends.put, batch, slot, ANONYMOUS)
    eventually(lambda: slot.answer, "it is answered")
    answer = json.loads(slot.answer or b"")
    assert answer["error"] == "invalid_message"
    assert f"row {rows - 1}: {name}: the characters U+0001 and U+0002" in str(answer)
