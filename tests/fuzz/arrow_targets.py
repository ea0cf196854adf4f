"""Arrow's entry points, and the JSON beside them: Flight's messages, batches, sends over HTTP, bulk files."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.edges.http.test_send_codec import Ids
from tests.fuzz.choices import Choices
from tests.fuzz.target import Target
from tests.table.small_table import NOW_MS, small_groups, table_rows

from timeball.broker.accepting import admission
from timeball.edges.flight import codec
from timeball.edges.http import send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.http.send_codec import ARROW
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.arrow_ipc import SEND_SCHEMA, ReleaseColumns, SendColumns, SourceColumns
from timeball.model import limits, wire
from timeball.model.errors import Corrupt, InvalidMessage, OverLimit, RequestError, TimeballError
from timeball.model.message import TABLE_SCHEMA
from timeball.table import attachment, data_file, layout
from timeball.table.attachment import Attachment

# ---- Flight's messages: in any pieces, they have the same fields ---------------------------------------------


def fields_of(chunks: list[bytes]) -> object:
    """Return the fields of a message in chunks, or None if it is refused."""
    try:
        data = codec.parse_data(chunks)
    except InvalidMessage:
        return None
    return data.path, data.has_descriptor, bytes(data.header), bytes(data.metadata), b"".join(data.body)


def check_flight_messages(data: bytes) -> None:
    choices = Choices(data)
    sizes, message = Choices(choices.bytes_of(choices.byte() % 16)), choices.rest()
    fields = fields_of([message])
    assert fields_of(sizes.pieces(message)) == fields
    if isinstance(fields, tuple):
        header, metadata, body = fields[2:]
        repeated = fields_of([b"".join(codec.encode_data(header, memoryview(body), metadata))])
        assert repeated == (None, False, header, metadata, body)
    for parse in (codec.parse_action, codec.parse_ticket):
        try:
            parse(message)
        except InvalidMessage:
            pass


def flight_message_seeds() -> list[bytes]:
    path = b"\x08\x01\x1a\x04send"
    plain = b"".join(codec.encode_data(b"header", memoryview(b"body"), b'{"a": 1}'))
    return [b"\3\1\1\1" + b"\x0a" + bytes([len(path)]) + path + plain, b"\1\x09" + plain + b"\x1d1234"]


def break_flight_messages(patch: pytest.MonkeyPatch) -> None:
    """Let a number reach beyond the message."""

    def unchecked(message: memoryview, offset: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            byte = message[offset]
            value, shift, offset = value | (byte & 0x7F) << shift, shift + 7, offset + 1
            if byte < 0x80:
                return value, offset

    patch.setattr(codec, "_decode_varint", unchecked)


# ---- Flight's JSON: only typed errors leave, and a request stays the same after another encoding --------------------

VERBS = list(codec.ACTIONS)
TICKETS, KEYS, STEPS = range(len(VERBS), len(VERBS) + 3)


def decode_json(reader: int, data: bytes) -> Any:
    """Decode JSON with one of the readers: of an action (its index), of tickets, keys or steps."""
    if reader == TICKETS:
        return codec.decode_ticket(data)
    if reader in (KEYS, STEPS):
        metadata = codec.decode_metadata(memoryview(data))
        return (codec.decode_send_key if reader == KEYS else codec.decode_source_step)(metadata)
    return codec.decode_action(VERBS[reader], data)


def check_flight_json(data: bytes) -> None:
    choices = Choices(data)
    reader = choices.byte() % (STEPS + 1)
    try:
        request = decode_json(reader, choices.rest())
    except (RequestError, OverLimit):
        return
    assert decode_json(reader, msgspec.json.encode(request)) == request


def flight_json_seeds() -> list[bytes]:
    queues = msgspec.json.encode(wire.Queues(topic="t"))
    attach = attachment.encode(Attachment(job="bulk", job_id="x", epoch=1))
    read = msgspec.json.encode(wire.ReadLog(from_seq=1, to_seq=2))
    deep = b'{"x":' + b"[" * 3_000
    return [
        bytes([VERBS.index("queues")]) + queues, bytes([VERBS.index("attach")]) + attach,
        bytes([VERBS.index("attach")]) + deep, bytes([TICKETS]) + read, bytes([KEYS]) + b'{"idempotency_key":"k"}',
        bytes([STEPS]) + b'{"source":"s","begin":{"0":1},"end":{"0":2}}',
    ]  # fmt: skip


def break_flight_json(patch: pytest.MonkeyPatch) -> None:
    """Let an error of the JSON library leave."""

    def unchecked(data: bytes, kind: Any, subject: str) -> Any:
        return msgspec.json.decode(data, type=kind)

    patch.setattr(codec, "_decode", unchecked)


# ---- batches: a batch that is adopted is sound, within its limits, and of the broker's types ------------------------

KINDS = (SendColumns, SourceColumns, ReleaseColumns)


def check_batches(data: bytes) -> None:
    """Read a kind of stream, how many bytes each body lacks, and an IPC stream."""
    choices = Choices(data)
    kind, missing_bytes = choices.pick(KINDS), choices.byte() % 16
    try:
        messages = ipc.read_messages(choices.rest())
        header, _ = next(messages, (memoryview(b""), memoryview(b"")))
        schema = ipc.read_schema(header)
        columns = kind(schema)
        for header, body in messages:
            batch = ipc.read_batch(header, body[: max(0, len(body) - missing_bytes)], schema)
            check_batch(columns.check_and_convert(batch, lambda *_, **__: None), kind)
    except (RequestError, OverLimit):
        pass


def check_batch(batch: pa.RecordBatch, kind: Any) -> None:
    """Check that a batch is sound, within the limits, and of the types of its kind of stream."""
    batch.validate(full=True)
    expected = TABLE_SCHEMA if kind is ReleaseColumns else SEND_SCHEMA
    assert all(field.type == expected.field(field.name).type for field in batch.schema)
    assert batch.num_rows <= limits.ROWS_PER_REQUEST_MAX and batch.nbytes <= limits.BATCH_BYTES_MAX
    # Reading all values follows every offset.
    assert len(batch.to_pylist()) == batch.num_rows


def stream_of(*batches: pa.RecordBatch) -> bytes:
    """Encode batches as an IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


FEW = {"body": [b"x", b"body"], "tag": ["t", None], "due_ms": pa.array([NOW_MS, None], pa.int64())}


def batch_seeds() -> list[bytes]:
    plain = batch_of(topic=["t", "u"], **FEW)
    cast = batch_of(
        topic=pa.array(["t"], pa.large_string()), body=pa.array([b"four"], pa.binary(4)),
        delay_ms=pa.array([7], pa.uint16()), tag=pa.nulls(1),
    )  # fmt: skip
    [released] = table_rows([NOW_MS, NOW_MS + 1]).to_batches()
    return [b"\0\0" + stream_of(plain, plain), b"\1\0" + stream_of(cast), b"\2\0" + stream_of(released)]


def break_batches(patch: pytest.MonkeyPatch) -> None:
    """Let an error of Arrow leave."""
    patch.setattr(ipc, "_DECODING_ERRORS", (MemoryError,))


# ---- sends over HTTP ------------------------------------------------------------------------------------------------


def check_sends(data: bytes) -> None:
    choices = Choices(data)
    kind, now_ms = choices.pick((JSON, NDJSON, ARROW)), choices.pick((None, NOW_MS))
    content = choices.rest()
    try:
        decoded = send_codec.decode_messages("t", kind, content, Ids(), now_ms)
        columns = admission.as_columns(decoded.rows)
    except TimeballError as error:
        assert str(error)
        return
    columns.validate(full=True)
    assert 0 < decoded.row_count == len(columns.to_pylist()) <= limits.ROWS_PER_REQUEST_MAX


def send_seeds() -> list[bytes]:
    timed = b'{"body": "x", "after": "5m", "tag": "t", "keys": ["a", "b"], "properties": {"a": "b"}}'
    local = b'{"json": {"a": [1]}, "at": "2030-01-31T09:00", "zone": "Europe/Berlin", "id": "i"}'
    window = b'{"base64": "eA==", "at": 1900000000000, "window": "1h", "spread": "even", "expires_in": "1d"}'
    unique = b'{"body": "x", "after": "1s", "unique_key": "k", "on_pending": "replace"}'
    return [
        *(bytes([0, now]) + body for now in (0, 1) for body in (timed, local, window, unique)),
        b"\1\0" + timed + b"\n" + window, b"\0\0[" + timed + b"," + local + b"]",
        b"\2\0" + stream_of(batch_of(**FEW)), b'\0\0{"json": ' + b"[" * 2_000,
    ]  # fmt: skip


def break_sends(patch: pytest.MonkeyPatch) -> None:
    """Let an error of the JSON library leave."""
    patch.setattr(send_codec, "decoding_error", lambda error, _: error)


# ---- bulk files: a damaged file is refused, or gives the rows that were written --------------------------------------


CHANGES_MAX = 4


@cache
def bulk_file() -> tuple[bytes, pa.Table]:
    """Return a sealed data file, and its rows."""
    rows = layout.sort_rows(table_rows([NOW_MS + 1_000 * number for number in range(20)]))
    with small_groups():
        [(_, data)] = layout.cut_files(rows, NOW_MS)
    return data, rows


def check_bulk_file(data: bytes) -> None:
    """Change a sealed file, each time by a position and the bytes that are written there."""
    choices, (written, rows) = Choices(data), bulk_file()
    file = bytearray(written)
    for _ in range(CHANGES_MAX):
        if choices.are_left:
            position = int.from_bytes(choices.bytes_of(2), "big") % len(file)
            new = choices.bytes_of(1 + choices.byte() % 4)
            file[position : position + len(new)] = new
    changed = pa.py_buffer(bytes(file[: len(written)]))
    try:
        data_file.check_all(changed)
    except Corrupt:
        return
    assert pq.read_table(io.BytesIO(changed), schema=TABLE_SCHEMA).equals(rows)


def bulk_file_seeds() -> list[bytes]:
    size_bytes = len(bulk_file()[0])
    return [
        b"",
        *(position.to_bytes(2, "big") + b"\0\xff" for position in range(4, size_bytes, size_bytes // 8)),
    ]


def break_bulk_file(patch: pytest.MonkeyPatch) -> None:
    """Compare no checksums of pages."""
    parquet_file = pq.ParquetFile
    patch.setattr(data_file.pq, "ParquetFile", lambda source, **_: parquet_file(source))


TARGETS = [
    Target(
        "flight-messages", "Flight's protobuf, cut anywhere", check_flight_messages, flight_message_seeds,
        break_flight_messages,
    ),
    Target("flight-json", "actions, tickets, metadata", check_flight_json, flight_json_seeds, break_flight_json),
    Target("arrow-batches", "streams of sends, of a source, of releases", check_batches, batch_seeds, break_batches),
    Target("http-sends", "sends as JSON, lines of JSON, Arrow", check_sends, send_seeds, break_sends),
    Target("bulk-files", "sealed Parquet files", check_bulk_file, bulk_file_seeds, break_bulk_file),
]  # fmt: skip
