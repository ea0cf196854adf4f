"""Readers of the remoting protocol: frames, plain sends and pulls, rows for the log, stored messages."""

from __future__ import annotations

from typing import Any

import pytest
from tests.edges.remoting.codec import test_implementation as sends
from tests.edges.remoting.codec import test_plain_pulls as pulls
from tests.edges.remoting.codec import test_send_frames as log_rows
from tests.edges.remoting.codec import test_stored_messages as stored
from tests.fuzz.choices import Choices
from tests.fuzz.target import Target

from timeball.broker.accepting import admission
from timeball.edges.remoting.codec import frame, records
from timeball.edges.remoting.codec.codes import Language, RequestCode
from timeball.edges.remoting.codec.frame import BINARY, FRAME_BYTES_MAX, JSON, BadFrame, Command, Frame
from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON
from timeball.model.errors import TimeballError
from timeball.model.message import LOG_SCHEMA, encode_properties

# ---- any bytes of a connection: both codecs give the same sends, columns, answers and errors ----------------------


def check_frames(data: bytes) -> None:
    sends.agree(data)


def frame_seeds() -> list[bytes]:
    delayed = {
        **sends.PLAIN,
        "i": encode_properties({"UNIQ_KEY": "AB", "TIMER_DELAY_MS": "5", "KEYS": "k ä"}),
    }
    long = {sends.LONG_NAMES[name]: sends.PLAIN[short] for name, short in sends.SHORT_NAMES.items()}
    pull = pulls.pull()
    return [
        *(sends.send(form=form) + sends.send(delayed, b"body", form) for form in (JSON, BINARY)),
        *(sends.batch([sends.record(), sends.record(body=b"")], form=form) for form in (JSON, BINARY)),
        sends.java({**sends.PLAIN, "e": 3, "k": False}) + sends.java(long, code=10, end=b"\n"),
        sends.send(long, code=10, form=BINARY) + sends.framed(pull.header, b"", JSON),
    ]


def break_frames(patch: pytest.MonkeyPatch) -> None:
    """Reverse the rows of the reference."""
    batch_of = sends.batch_of
    patch.setattr(sends, "batch_of", lambda rows: batch_of(rows[::-1]))


# ---- headers: only BadFrame leaves, and a command that is encoded again is the same --------------------------------


def check_headers(data: bytes) -> None:
    choices = Choices(data)
    form, body_bytes = choices.byte() % 3, choices.byte() % 8
    body, header = choices.bytes_of(body_bytes), choices.rest()
    try:
        command = frame.decode(Frame(form, header, body))
    except BadFrame:
        return
    if command.language not in set(Language):
        return  # read as a number, and never written
    written = frame.encode(command)
    [repeated], end, _ = frame.cut(written, FRAME_BYTES_MAX)
    assert end == len(written) and frame.decode(repeated) == command


def header_seeds() -> list[bytes]:
    commands = [
        Command(
            RequestCode.HEART_BEAT, 7, ext={"a": "b", "n": ""}, remark="r", serialisation=form, version=409
        )
        for form in (JSON, BINARY)
    ]
    framed = [frame.cut(frame.encode(command), FRAME_BYTES_MAX)[0][0] for command in commands]
    java = frame.cut(sends.java({"e": 3, "k": False, "x": None}), FRAME_BYTES_MAX)[0][0]
    return [bytes([cut.serialisation, 2]) + b"bo" + cut.header for cut in [*framed, java]]


def break_headers(patch: pytest.MonkeyPatch) -> None:
    """Read a text of the binary header that has a digit with a further digit."""

    def wrong(header: bytes, position: int, size_bytes: int) -> tuple[str, int]:
        text, end = read_text(header, position, size_bytes)
        return text + "9" * any(map(str.isdigit, text)), end

    read_text = frame._read_text
    patch.setattr(frame, "_read_text", wrong)


# ---- pulls: a plain pull has the fields and the answer of the reference ---------------------------------------------


def check_pulls(data: bytes) -> None:
    pulls.agree(Frame(JSON, data, b""))


def pull_seeds() -> list[bytes]:
    few = {name: pulls.PLAIN[name] for name in ("consumerGroup", "topic", "queueId", "queueOffset")}
    return [pulls.pull(ext).header for ext in (pulls.PLAIN, few)]


def break_pulls(patch: pytest.MonkeyPatch) -> None:
    """Let the reference read an offset of 17 as 18."""
    decode = pulls.decode

    def wrong(request: Frame) -> Command:
        command = decode(request)
        if command.ext.get("queueOffset") == "17":
            command.ext["queueOffset"] = "18"
        return command

    patch.setattr(pulls, "decode", wrong)


# ---- rows of the log: the same bytes, positions and index entries as row by row -------------------------------------

PROPERTY_NAMES = ("TAGS", "KEYS", "TIMER_DELAY_MS", "OTHER")


def sends_of(choices: Choices) -> bytes:
    """Make a request that is plain, unless a text is too long."""
    form = choices.pick((JSON, BINARY))
    fields = {
        "b": choices.pick(("orders", "many", "narrow")), "e": str(choices.byte() % 9 - 1),
        "f": choices.pick(("0", "1", "16")), "g": str(abs(choices.number()) % 10**18),
        "h": str(choices.number() % 2**31), "j": str(choices.number() % 2**31),
    }  # fmt: skip
    texts = {"UNIQ_KEY": choices.text() or "k"}
    for name in PROPERTY_NAMES[: choices.byte() % 5]:
        texts[name] = str(choices.byte() + 1) if name == "TIMER_DELAY_MS" else choices.text()
    properties, body = encode_properties(texts), choices.short_bytes()
    if choices.byte() % 4 or "TIMER_DELAY_MS" in texts:
        return sends.send({**sends.PLAIN, **fields, "i": properties}, body, form)
    return sends.batch([sends.record(properties, body)] * 3, {**sends.PLAIN, **fields, "e": "1"}, form)


def check_log_rows(data: bytes) -> None:
    assert COMPILED is not None
    choices, parts = Choices(data), []
    while choices.are_left and len(parts) < 3:
        parts.append(b"".join(sends_of(choices) for _ in range(1 + choices.byte() % 4)))
    cut = [COMPILED.cut(part, FRAME_BYTES_MAX)[0] for part in parts]
    if not parts or any(isinstance(request, Frame) for part in cut for request in part):
        return
    try:
        runs = log_rows.runs_of(parts)
    except TimeballError:
        return  # a text that looks like a delay
    encoded = log_rows.encode_in_c(runs)
    assert encoded is None or encoded == log_rows.encode_by_rows(runs)


def log_row_seeds() -> list[bytes]:
    return [bytes(40), bytes(range(200)), b"\x03\1\0\1\2" * 40]


def break_log_rows(patch: pytest.MonkeyPatch) -> None:
    """Store the rows of the reference a millisecond later if there are several."""
    build = admission.log_rows

    def wrong(rows: Any, topics: Any, now_ms: int, host: str, builder: Any) -> Any:
        return build(rows, topics, now_ms + (len(rows) > 1), host, builder)

    patch.setattr(admission, "log_rows", wrong)


# ---- stored messages: opened frames of both codecs give the same bytes, or the same error ---------------------------

KINDS = {"int8": 1, "int32": 4, "int64": 8}


def stored_row(choices: Choices) -> dict[str, Any]:
    """Draw a row of the log."""
    row: dict[str, Any] = dict(stored.RIGHT)
    for field in LOG_SCHEMA:
        if field.name == "kind" or choices.byte() % 2:
            continue
        width = KINDS.get(str(field.type))
        if width is not None:
            half = 1 << (8 * width - 1)
            row[field.name] = (choices.number() + half) % (2 * half) - half
        elif field.name == "born_host":
            row[field.name] = choices.pick(("10.0.0.7:1", "[::1]:99", "", "x", "1.2.3.4:99999999999"))
        else:
            row[field.name] = choices.short_bytes() if field.name == "body" else choices.text()
    return row


def check_stored(data: bytes) -> None:
    choices = Choices(data)
    bytes_max, host = choices.pick((1, 300, stored.ANY)), choices.pick((stored.V4, stored.V6))
    rows = [stored_row(choices)]
    while choices.are_left and len(rows) < 8:
        rows.append(stored_row(choices))
    picks = [index for index in range(len(rows)) if index == 0 or choices.byte() % 4]
    segment, frame_of_rows = stored.segment_of(rows)
    results = []
    for codec in (PYTHON, COMPILED):
        try:
            results.append(repr(stored.put(codec, segment, frame_of_rows, picks, bytes_max, host)))
        except Exception as error:  # of any kind: it must be the same
            if codec is PYTHON and bytes_max != stored.ANY:
                return  # the error may be that of a row after the limit, which only the reference writes
            results.append(f"{type(error).__name__}: {error}")
    assert results[0] == results[1]


def stored_seeds() -> list[bytes]:
    return [bytes(60), b"\2" + bytes(range(1, 250)), b"\2\1" + b"\1\4TAGS" * 30]


def break_stored(patch: pytest.MonkeyPatch) -> None:
    """Let the reference write another region."""
    patch.setattr(records, "REGION", records.REGION.replace(b"D", b"d"))


TARGETS = [
    Target("remoting-frames", "any bytes: frames, sends, batches, pulls", check_frames, frame_seeds, break_frames),
    Target("remoting-headers", "headers of commands", check_headers, header_seeds, break_headers),
    Target("remoting-pulls", "headers of pulls", check_pulls, pull_seeds, break_pulls),
    Target("remoting-log-rows", "sends, as rows of the log", check_log_rows, log_row_seeds, break_log_rows),
    Target("remoting-stored", "frames of the log, as stored messages", check_stored, stored_seeds, break_stored),
]  # fmt: skip
