"""Readers of the log, of messages between nodes and of filters: frames, rows, checkpoints, replication, SQL."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from tests.broker.filters.reference import NAMES, TEXTS
from tests.cluster.protocol.test_messages import ENDS, encoded
from tests.edges.remoting.codec.test_stored_messages import RIGHT, segment_of
from tests.fuzz.choices import Choices
from tests.fuzz.target import Target

from timeball.broker.filters import sql_conditions, sql_filter
from timeball.broker.filters.compiler import SQL92, compile_filter
from timeball.cluster.protocol import messages as replication
from timeball.cluster.protocol.messages import Receiver
from timeball.log import checkpoint, row_encoder
from timeball.log import format as fmt
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.log.row_encoder import build_compiled, rows_of
from timeball.model.errors import Corrupt, InvalidFilter, PeerError, SetupError
from timeball.model.message import LOG_SCHEMA, build_rows

# ---- frames of the log: a frame that is read has its checksum, and its rows are those that were written ------------

CHECKSUM_AT = 52


def check_log_frames(data: bytes) -> None:
    """Read whether the first frame gets a valid checksum, then a part of a segment."""
    is_resealed, data = bool(data[:1].strip(b"\0")), data[1:]
    if is_resealed:
        data = with_checksum(data)
    segment, position = pa.py_buffer(data), 0
    try:
        fmt.read_segment_header(segment)
    except (Corrupt, SetupError):
        pass
    while True:
        try:
            frame = fmt.read_frame(segment, position)
        except (Corrupt, SetupError):
            return
        if frame is None:
            return
        raw = bytearray(data[position : frame.end])
        stored = int.from_bytes(raw[CHECKSUM_AT : CHECKSUM_AT + 4], "little")
        raw[CHECKSUM_AT : CHECKSUM_AT + 4] = bytes(4)
        assert google_crc32c.value(bytes(raw)) == stored
        assert position < frame.end <= len(data) and 0 < frame.rows <= frame.span
        if not is_resealed:
            try:
                assert fmt.decode_rows(segment, frame).num_rows == frame.rows
            except Corrupt:
                return  # the fuzzer solves checksums
        position = frame.end


def with_checksum(data: bytes) -> bytes:
    """Set the checksum of the frame at the beginning, as far as its header states its length."""
    raw = bytearray(data[: int.from_bytes(data[8:12], "little")])
    if len(raw) >= fmt.ALIGN:
        raw[CHECKSUM_AT : CHECKSUM_AT + 4] = bytes(4)
        raw[CHECKSUM_AT : CHECKSUM_AT + 4] = google_crc32c.value(bytes(raw)).to_bytes(4, "little")
    return bytes(raw) + data[len(raw) :]


def log_frame_seeds() -> list[bytes]:
    frames = [bytes(segment_of([RIGHT] * count, before=0)[0]) for count in (1, 3)]
    header = fmt.encode_segment_header(1, 2)
    plain = [*frames, header, frames[0] + bytes(64), frames[0] + frames[1]]
    return [*(b"\0" + part for part in plain), b"\1" + frames[0]]


def break_log_frames(patch: pytest.MonkeyPatch) -> None:
    """Compare no checksums."""
    patch.setattr(fmt, "_matches_checksum", lambda *_: True)


# ---- rows of the log: the compiled encoder writes pyarrow's bytes, and reads its own rows ---------------------------


def value_of(kind: pa.DataType, choices: Choices) -> object:
    """Draw a value of a type, or None."""
    way = choices.byte()
    if way % 3 == 0:
        return None
    if kind == pa.string():
        return choices.text()
    if kind == pa.binary():
        return choices.short_bytes()
    half, number = 1 << kind.bit_width - 1, choices.number()
    return number if way == 0xFF else (number + half) % (2 * half) - half


def check_log_rows(data: bytes) -> None:
    choices, values = Choices(data), list[Any]()
    while choices.are_left and len(values) < 40:
        values.append(tuple(value_of(field.type, choices) for field in LOG_SCHEMA))
    if not values:
        return
    results: list[object] = []
    for build in (build_compiled, rows_of):
        try:
            rows = build(values)
            results.append(bytes(rows.message if build is build_compiled else row_encoder.encode(rows)))
        except (pa.ArrowException, OverflowError, ValueError) as error:
            results.append(type(error))
    assert results[0] == results[1]
    encoder = row_encoder.LOG_ENCODER
    message = encoder.encode(values)
    if message is not None:
        assert [encoder.row(message, index, index) for index in range(len(values))] == [
            (index, *row) for index, row in enumerate(values)
        ]


def log_row_seeds() -> list[bytes]:
    return [bytes(30), bytes(21 * 20), bytes(range(256)), b"\1\4text" * 40, b"\2\1\7" * 200]


def break_log_rows(patch: pytest.MonkeyPatch) -> None:
    """Do not share the zeros of many rows."""
    patch.setattr(row_encoder, "encode", lambda rows: rows.serialize())


# ---- checkpoints: only Corrupt leaves, and a state that was read is the same after another encoding ----------------


def check_checkpoints(data: bytes) -> None:
    """Read a checkpoint file, or the value of a snapshot row."""
    for read in (checkpoint.parse, checkpoint.decode):
        try:
            state = read(data)
        except Corrupt:
            continue
        repeated = checkpoint.decode(checkpoint.encode(state))
        assert repeated.facts == state.facts
        assert np.array_equal(repeated.settled_due, state.settled_due)
        assert np.array_equal(repeated.settled_seq, state.settled_seq)


def checkpoint_seeds() -> list[bytes]:
    facts = Facts(seq=9, reserved=[(3, 4)], queues={"t": {0: (1, 2)}}, kept={"a": [1]}, settled_released=1)
    payload = checkpoint.encode(Checkpoint(facts, np.array([5, 6]), np.array([7, 8])))
    header = checkpoint.HEADER.pack(checkpoint.MAGIC, len(payload), google_crc32c.value(payload))
    deep = b'{"kept":{"a":' + b"[" * 3_000
    return [payload, header + payload, len(deep).to_bytes(8, "little") + bytes(8) + deep]


def break_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """Write only one of several settled messages that are not in the order of their due times."""
    encode = checkpoint.encode

    def wrong(state: Checkpoint) -> bytes:
        due, seq = state.settled_due, state.settled_seq
        is_sorted = bool((due[1:] >= due[:-1]).all())
        return encode(state if is_sorted else Checkpoint(state.facts, due[:1], seq[:1]))

    patch.setattr(checkpoint, "encode", wrong)


# ---- replication: only PeerError leaves, and each message has one encoding -----------------------------------------


def check_replication(data: bytes) -> None:
    choices = Choices(data)
    sizes = Choices(choices.bytes_of(choices.byte() % 16))
    stream, receiver, received = choices.rest(), Receiver(), list[replication.Message]()
    try:
        for piece in sizes.pieces(stream):
            received += receiver.receive(piece)
    except PeerError:
        pass
    for message in received:
        assert list(Receiver().receive(encoded(message))) == [message]


def replication_seeds() -> list[bytes]:
    members = replication.Members(2, ("a/1", "b/2"))
    sent = [
        replication.Hello(1, "g", "a/1", members=members), replication.Promise(2, "b/1", ENDS),
        replication.Begin(1, 1, 64, 1, bytes(64)), replication.Data(1, 1, 64, 9, 8, b"frames"),
        replication.File(1, 0, 9, "bucket=2030-01/x.parquet", 7, b"chunk"), replication.Want(1, 0, "path"),
        replication.Ping(1, 2, 3, 4), replication.Ack(1, 1, 64, 9),
    ]  # fmt: skip
    deep = replication.HEADER.pack(replication.MAGIC, replication.Hello.TYPE, 1, 0, 0, 0, 0, 3_000)
    return [
        *(b"\0" + encoded(message) for message in sent),
        b"\2\7\50" + b"".join(map(encoded, sent)),
        b"\0" + deep + b'{"x":' + b"[" * 2_995,
    ]


def break_replication(patch: pytest.MonkeyPatch) -> None:
    """Do not check that a path is UTF-8."""
    patch.setattr(replication, "_decode_path", lambda raw: raw.decode())


# ---- SQL filters: only InvalidFilter leaves, and a program matches the rows of the reference -------------------------


def check_filters(data: bytes) -> None:
    """Read rows, then the text of a filter."""
    choices = Choices(data)
    rows = []
    for _ in range(1 + choices.byte() % 8):
        parts = (
            (choices.pick(NAMES), choices.pick(TEXTS) if choices.byte() % 2 else choices.text())
            for _ in range(choices.byte() % 4)
        )
        rows.append(("\2".join(f"{name}\1{value}" for name, value in parts), choices.pick([None, *TEXTS])))
    text = choices.rest().decode("utf-8", "surrogateescape")
    try:
        compile_filter(text, SQL92)
    except InvalidFilter:
        return
    condition, names = sql_filter.parse(text)
    batch = build_rows(len(rows), properties=[row for row, _ in rows], tag=[tag for _, tag in rows])
    matched = [bool(match) for match in sql_filter.Program(condition, names).matches(batch)]
    assert matched == sql_conditions.matches(condition, names, batch).tolist()


def filter_seeds() -> list[bytes]:
    rows = bytes([2, 2, 0, 1, 0, 1, 1, 2, 0, 3, 1, 4, 1, 5, 1])
    texts = (
        "a > 5 AND b = 'x'", "a BETWEEN 1 AND 2.5 OR NOT (b IS NULL)", "TAGS IN ('a', 'b') -- all",
        "a CONTAINS 'x' AND a NOT STARTSWITH 'y'", "(a = TRUE) = (b <> 'q')", "((((((((a>1))))))))",
    )  # fmt: skip
    return [rows + text.encode() for text in texts]


def break_filters(patch: pytest.MonkeyPatch) -> None:
    """Let the reference match no row."""
    patch.setattr(sql_conditions, "matches", lambda *arguments: np.zeros(arguments[2].num_rows, np.bool_))


TARGETS = [
    Target("log-frames", "segments of the log", check_log_frames, log_frame_seeds, break_log_frames),
    Target("log-rows", "rows of the log, compiled and by pyarrow", check_log_rows, log_row_seeds, break_log_rows),
    Target("checkpoints", "checkpoints and snapshots", check_checkpoints, checkpoint_seeds, break_checkpoints),
    Target("replication", "messages between replicas", check_replication, replication_seeds, break_replication),
    Target("sql-filters", "texts of filters, and rows", check_filters, filter_seeds, break_filters),
]  # fmt: skip
