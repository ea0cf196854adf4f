"""Conversion of sends to rows and tickets: a send is converted as a whole or not at all."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.accepting.admission import batch_of
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.records import BatchRecord, UniqueKeys, encode_batch
from timeball.edges.remoting.codec.sends import SendFields, SendHeader
from timeball.edges.remoting.handlers.sends import SendRows, Ticket, with_property
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import decode_properties, encode_properties

NOW_MS = 1_800_000_000_000


class ConvertedSends:
    """The tickets of the sends that were converted so far, and the rows of all of them as one batch."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self._rows = SendRows(UniqueKeys(b"", 1, 1), limits.DELAY_MS_MAX, frozenset(), "cluster")

    def convert(self, body: bytes = b"x", code: int = RequestCode.SEND_MESSAGE_V2, **fields: Any) -> None:
        """Convert a send to the topic `t`. `fields` are those of SendFields, with `properties` as a dictionary."""
        properties = encode_properties(fields.pop("properties", {"UNIQ_KEY": "K"}))
        send_fields = SendFields(**{"topic": "t", "properties": properties, **fields})
        header = SendHeader(code, send_fields, opaque=len(self.tickets))
        self.tickets.append(self._rows.ticket("edge", "origin", header, body, 0, "host:1", -1, NOW_MS))

    def batch(self) -> pa.RecordBatch:
        """Return the rows of all sends."""
        return batch_of([row for ticket in self.tickets for row in ticket.rows])


def test_a_send_becomes_rows_and_a_ticket() -> None:
    converted = ConvertedSends()
    converted.convert(
        b"a", properties={"UNIQ_KEY": "K1", "TAGS": "A", "KEYS": "k"}, flag=3, reconsume_times=2
    )
    converted.convert(b"b", properties={"UNIQ_KEY": "K2"}, born_ms=5)
    batch, tickets = converted.batch(), converted.tickets
    first, second = batch.to_pylist()
    assert (first["body"], first["tag"], first["keys"], first["flag"]) == (b"a", "A", "k", 3)
    assert (second["born_ms"], second["tag"], second["unique_key"]) == (5, None, "K2")
    assert [(t.count, t.unique_key, t.opaque) for t in tickets] == [(1, "K1", 0), (1, "K2", 1)]
    assert "due_ms" not in batch.schema.names, "a column without values is omitted"


def test_a_delay_level_and_a_due_time_are_columns() -> None:
    converted = ConvertedSends()
    converted.convert(properties={"DELAY": "3", "TIMER_DELAY_MS": "5"})
    converted.convert(properties={"TIMER_DELAY_MS": "5"})
    converted.convert(properties={"TIMER_DELIVER_MS": "5"})
    batch, tickets = converted.batch(), converted.tickets
    assert batch.column("delay_level").to_pylist() == [3, None, None]
    assert batch.column("due_ms").to_pylist() == [None, NOW_MS + 5, 5]
    assert [ticket.due_ms for ticket in tickets] == [None, NOW_MS + 5, 5]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"body": bytes(limits.BODY_BYTES_MAX + 1)}, InvalidMessage),
        ({"properties": {"p": "ü" * 16_400}}, InvalidMessage),
        ({"properties": {"TAGS": "ü" * 128}}, InvalidMessage),
        ({"properties": {"UNIQ_KEY": "x" * 256}}, InvalidMessage),
        ({"properties": {"KEYS": " ".join("k" * (limits.KEYS_PER_MESSAGE_MAX + 1))}}, InvalidMessage),
        ({"properties": {"DELAY": "x"}}, InvalidDelay),
        ({"code": RequestCode.SEND_BATCH_MESSAGE, "body": b""}, InvalidMessage),
        ({"code": RequestCode.SEND_BATCH_MESSAGE, "body": b"nonsense"}, InvalidMessage),
    ],
)
def test_a_refused_send_leaves_no_rows(wrong: dict[str, Any], error: type[Exception]) -> None:
    converted = ConvertedSends()
    converted.convert()
    with pytest.raises(error):
        converted.convert(**wrong)
    assert converted.batch().num_rows == len(converted.tickets) == 1


def test_a_batch_with_one_invalid_record_is_refused_as_a_whole() -> None:
    converted = ConvertedSends()
    records = [BatchRecord(0, b"a", ""), BatchRecord(0, b"b", encode_properties({"TAGS": "x" * 256}))]
    with pytest.raises(InvalidMessage, match="tag: more than 255"):
        converted.convert(encode_batch(records), RequestCode.SEND_BATCH_MESSAGE)
    assert converted.tickets == []


def test_a_batch_has_one_ticket_with_all_unique_keys() -> None:
    converted = ConvertedSends()
    converted.convert()
    converted.convert(
        encode_batch([BatchRecord(7, b"%d" % n, "") for n in range(3)]), RequestCode.SEND_BATCH_MESSAGE
    )
    converted.convert()
    batch, tickets = converted.batch(), converted.tickets
    assert [t.count for t in tickets] == [1, 3, 1]
    assert tickets[1].unique_key.split(",") == batch.column("unique_key").to_pylist()[1:4]
    assert batch.column("flag").to_pylist() == [0, 7, 7, 7, 0]


text = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=8)


@given(properties=st.dictionaries(text, text, max_size=5), trailing=st.booleans(), value=text)
def test_a_property_is_appended(properties: dict[str, str], trailing: bool, value: str) -> None:
    before = encode_properties(properties)
    after = with_property(before if trailing else before[:-1], "NEW", value)
    assert decode_properties(after) == {**properties, "NEW": value}
