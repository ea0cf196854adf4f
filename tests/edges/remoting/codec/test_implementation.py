"""The compiled codec and the Python code give the same rows, columns, answers and errors, in the same order.

Here the Python code is called the reference. A codec returns a run of sends that it reads itself, the plain sends. The
tests read each send of a run with the reference as well, because a send that the reference refuses, or whose values it
reads otherwise, must not be in a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeball.broker.accepting.admission import batch_of
from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode
from timeball.edges.remoting.codec.frame import (
    BINARY,
    FRAME_BYTES_MAX,
    JSON,
    BadFrame,
    Command,
    Frame,
    cut,
    encode,
)
from timeball.edges.remoting.codec.implementation import CODEC, COMPILED, PYTHON, Codec
from timeball.edges.remoting.codec.records import BatchRecord, Host, UniqueKeys, encode_batch
from timeball.edges.remoting.codec.sends import LONG_NAMES, SHORT_NAMES, encode_reply, read_send
from timeball.edges.remoting.handlers.sends import SendRows, Ticket
from timeball.model import limits
from timeball.model.config import DELAY_PROPERTIES
from timeball.model.errors import TimeballError
from timeball.model.message import READ_SCHEMA, encode_properties

NOW_MS = 1_800_000_000_000
GOLDEN = Path(__file__).resolve().parents[3] / "golden/remoting"
RECORDED = sorted(path.name for path in GOLDEN.glob("*.bin"))

needs_compiled = pytest.mark.skipif(
    COMPILED is None,
    reason="the codec is not compiled here: no Cython, or no C compiler with Python's headers",
)


# ---- the comparison ------------------------------------------------------------------------------------------


@dataclass
class Result:
    """The result of one codec for some bytes.

    The first item has the number of split bytes and that of the bytes of the next frame. An item follows for each
    frame. `error` is the text of BadFrame, and `plain` the number of messages in runs.
    """

    items: list[Any] = field(default_factory=list)
    error: str = ""
    plain: int = 0


USER_NAMES = frozenset(DELAY_PROPERTIES)


def send_rows(names: frozenset[str] = USER_NAMES) -> SendRows:
    """Return a reader of sends. `names` are the properties with due times."""
    return SendRows(UniqueKeys(b"", 1, 1), limits.DELAY_MS_MAX, names, "cluster")


def read_by_reference(rows: SendRows, frame: Frame) -> Any:
    """Read one frame with the reference: a ticket, the text of an error, or the frame itself."""
    try:
        header = read_send(frame)
        if header is None:
            return frame
        field_value = header.fields.queue_id
        queue_id = -1 if field_value is None or field_value < 0 else field_value
        body, form = frame.body, frame.serialisation
        return rows.ticket("edge", "origin", header, body, form, "10.0.0.7:51234", queue_id, NOW_MS)
    except TimeballError as error:
        return f"{type(error).__name__}: {error}"


def handle(topic: str, due_ms: int, key: str) -> str:
    """Return a text in place of a recall handle, which shows the arguments."""
    return f"{topic}-{due_ms}-{len(key)}"


def answer(ticket: Ticket, first_seq: int, offset: int) -> bytes:
    """Encode the answer to a ticket as Sends.answer does, with queue 5 if it names none."""
    if not ticket.requests():
        return b""
    queue_id = ticket.queue_id if ticket.queue_id >= 0 else 5
    recall = "" if ticket.due_ms is None else handle(ticket.topic, ticket.due_ms, ticket.unique_key)
    ids = ",".join(f"7F{first_seq + n:016X}" for n in range(ticket.count))
    return encode_reply(ticket.opaque, ticket.serialisation, queue_id, offset, ids, ticket.unique_key, recall)


def comparable(item: Any) -> Any:
    """Convert a ticket to a tuple of its values. Tickets do not compare by value."""
    return msgspec.structs.astuple(item) if isinstance(item, Ticket) else item


def read(codec: Codec, data: bytes, names: frozenset[str] = USER_NAMES) -> Result:
    """Read bytes with a codec, and compare each run with the tickets that the reference creates from its frames."""
    result, rows = Result(), send_rows(names)
    try:
        pieces, at, awaited_bytes = codec.cut(data, FRAME_BYTES_MAX)
    except BadFrame as error:
        return Result(error=str(error))
    result.items.append((at, awaited_bytes))
    for piece in pieces:
        if type(piece) is codec.pull:  # see test_plain_pulls.py
            piece = piece.frame()
        if isinstance(piece, Frame):
            result.items.append(comparable(read_by_reference(rows, piece)))
            continue
        result.plain += len(piece)
        tickets = [read_by_reference(rows, frame) for frame in piece.frames()]
        try:
            # The edge does not read the clock for a run that needs no time, either.
            now_ms = NOW_MS if piece.needs_time else 0
            piece.plan(b"10.0.0.7:51234", now_ms, limits.DELAY_MS_MAX, names)
        except TimeballError as error:
            # The edge then reads the whole run with the reference. It must refuse one of the sends for this reason.
            assert f"{type(error).__name__}: {error}" in tickets
            result.items += map(comparable, tickets)
            continue
        check_run(codec, piece, tickets)
        rows_of_run = list(piece)
        for ticket in tickets:
            own, rows_of_run = rows_of_run[: ticket.count], rows_of_run[ticket.count :]
            result.items.append(comparable(msgspec.structs.replace(ticket, rows=own)))
        assert not rows_of_run
    return result


def check_run(codec: Codec, run: Any, tickets: list[Any]) -> None:
    """Compare a run with the tickets that the reference creates from the same frames."""
    assert all(isinstance(ticket, Ticket) for ticket in tickets), tickets
    rows = [row for ticket in tickets for row in ticket.rows]
    assert len(run) == len(rows) and list(run) == rows
    assert run.requests() == [request for ticket in tickets for request in ticket.requests()]
    greatest: dict[str, int] = {}
    for ticket in tickets:
        greatest[ticket.topic] = max(greatest.get(ticket.topic, -1), ticket.queue_id)
    assert dict(run.destinations) == greatest
    columns = codec.join([run])
    columns.validate(full=True)
    assert columns.equals(batch_of(rows)), "the columns differ"
    offsets = list(range(1 << 40, (1 << 40) + len(rows) + 3))
    written = codec.encode_replies(run, b"7F", 900, 3, [5] * len(offsets), offsets, handle)
    firsts = accumulate((ticket.count for ticket in tickets), initial=0)
    expected = [answer(ticket, 903 + n, offsets[3 + n]) for n, ticket in zip(firsts, tickets, strict=False)]
    assert written == b"".join(expected), "the answers differ"


def agree(data: bytes, codec: Codec | None = COMPILED, names: frozenset[str] = USER_NAMES) -> int:
    """Assert that a codec and the reference give the same. Return the number of messages in the runs of the codec."""
    assert codec is not None
    reference, other = read(PYTHON, data, names), read(codec, data, names)
    assert (other.error, other.items) == (reference.error, reference.items)
    return other.plain


# ---- sends of clients ----------------------------------------------------------------------------------------

PLAIN = {
    "a": "producers", "b": "orders", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1761000000000", "h": "7",
    "i": "UNIQ_KEY\x01AB\x02TAGS\x01A\x02", "j": "1", "k": "false", "l": "16", "m": "false", "n": "broker-0",
}  # fmt: skip


def send(ext: dict[str, Any] = PLAIN, body: bytes = b"x", form: int = JSON, **more: Any) -> bytes:
    """Return the frame of a send with these fields."""
    command = Command(code=RequestCode.SEND_MESSAGE_V2, opaque=5, ext=ext, body=body, serialisation=form)
    return encode(msgspec.structs.replace(command, **more))


def batch(
    records: list[BatchRecord] | bytes, ext: dict[str, Any] = PLAIN, form: int = JSON, **more: Any
) -> bytes:
    """Return the frame of a send of several messages."""
    body = records if isinstance(records, bytes) else encode_batch(records)
    ext = {**ext, "i": "WAIT\x01true\x02"} if ext["i"] == PLAIN["i"] else ext
    return send(ext, body, form, **{"code": RequestCode.SEND_BATCH_MESSAGE, **more})


def record(
    properties: str = "UNIQ_KEY\x01AB\x02TAGS\x01A\x02", body: bytes = b"x", flag: int = 3
) -> BatchRecord:
    """Return a message of a batch."""
    return BatchRecord(flag, body, properties)


def java(
    ext: dict[str, Any], opaque: int = 1, code: int = 310, body: bytes = b"x", end: bytes = b""
) -> bytes:
    """Encode a JSON header as fastjson does, with sorted names. extFields may have any values."""
    header = {
        "code": code, "extFields": ext, "flag": 0, "language": "JAVA", "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON", "version": 409,
    }  # fmt: skip
    return framed(msgspec.json.encode(header) + end, body)


def framed(header: bytes, body: bytes = b"x", form: int = JSON) -> bytes:
    """Return the frame with these bytes as its header."""
    size = (form << 24 | len(header)).to_bytes(4, "big")
    return (4 + len(header) + len(body)).to_bytes(4, "big") + size + header + body


@needs_compiled
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_frames_give_the_same_result_in_both_codecs(name: str) -> None:
    plain = agree((GOLDEN / name).read_bytes())
    # ali-ons sends messages without a unique key, which are not plain. The Java record also has a batch of three.
    assert plain == {"ali": 0, "java": 5}.get(name.partition("-")[0], 2)


@needs_compiled
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_split_anywhere_gives_the_same_result_in_both_codecs(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    for at in range(0, len(data), 61):
        agree(data[:at])


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
@pytest.mark.parametrize(
    "properties",
    [
        {"KEYS": "order-17 änne"}, {"TAGS": ""}, {"KEYS": ""}, {"DELAY": "3"}, {"DELAY": "0"}, {"DELAY": "-1"},
        {"TIMER_DELAY_MS": "5"}, {"TIMER_DELAY_SEC": "5"}, {"TIMER_DELIVER_MS": str(NOW_MS + 5)},
        {"TIMER_DELIVER_MS": "5"}, {"__STARTDELIVERTIME": str(NOW_MS + 9)}, {"TIMING": "08:00:00 Europe/Berlin"},
        {"DELAY": "3", "TIMER_DELAY_MS": "5"}, {"UNIQ_KEY": 'quo"ted'}, {"UNIQ_KEY": "ключ"}, {"UNIQ_KEY": "\x7f"},
    ],
)  # fmt: skip
def test_sends_with_delays_timers_and_any_texts_are_plain(form: int, properties: dict[str, str]) -> None:
    ext = {**PLAIN, "i": encode_properties({"UNIQ_KEY": "AB", **properties})}
    assert agree(send(form=form) + send(ext, form=form) + send(form=form)) == 3


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
@pytest.mark.parametrize("names", [frozenset(), frozenset({"TIMING"}), frozenset({"__STARTDELIVERTIME"})])
def test_disabled_user_delay_properties_give_the_same_result_in_both_codecs(
    form: int, names: frozenset[str]
) -> None:
    for properties in (
        {"TIMING": "8"}, {"TIMING": "08:00:00"}, {"__STARTDELIVERTIME": str(NOW_MS + 9)}, {"__STARTDELIVERTIME": "x"},
        {"TIMING": "08:00:00", "DELAY": "3"}, {"__STARTDELIVERTIME": "9", "TIMER_DELAY_MS": "5"},
    ):  # fmt: skip
        text = encode_properties({"UNIQ_KEY": "AB", **properties})
        assert agree(send({**PLAIN, "i": text}, form=form), names=names) == 1
        assert agree(batch([record(text)], {**PLAIN, "i": text}, form), names=names) == 0


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
@pytest.mark.parametrize(
    "wrong",
    [
        {"DELAY": "x"}, {"TIMER_DELAY_MS": "9" * 17}, {"TIMING": "8"}, {"TIMER_DEL_UNIQKEY": "k", "DELAY": "x"},
    ],
)  # fmt: skip
def test_an_invalid_delay_gives_the_same_error(form: int, wrong: dict[str, str]) -> None:
    ext = {**PLAIN, "i": encode_properties({"UNIQ_KEY": "AB", **wrong})}
    assert agree(send(form=form) + send(ext, form=form)) == 2


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
@pytest.mark.parametrize(
    "other",
    [
        {"b": "%RETRY%group"}, {"b": ""}, {"f": "4"}, {"f": "12"}, {"m": "true"}, {"e": "03"}, {"e": "+3"}, {"e": ""},
        {"e": "2147483648"}, {"g": "9" * 19}, {"h": " 7"}, {"k": "yes"}, {"i": ""}, {"i": "TAGS\x01A\x02"},
        {"i": "UNIQ_KEY\x01\x02"}, {"i": "UNIQ_KEY\x01" + "k" * 300}, {"i": "UNIQ_KEY\x01k\x02TAGS\x01" + "t" * 300},
        {"i": "UNIQ_KEY\x01k\x02REPLY_TO_CLIENT\x01c\x02"}, {"i": "UNIQ_KEY\x01k\x02" + "p" * 40_000},
        {"i": "UNIQ_KEY\x01k\x02_SYS_MSG_PRIORITY_\x013\x02"}, {"i": "UNIQ_KEY\x01k\x02__LITE_TOPIC\x01c\x02"},
        {"i": "UNIQ_KEY\x01k\x02KEYS\x01" + "k " * 1_024}, {"i": "UNIQ_KEY\x01k\x02KEYS\x01a\x01b\x02"},
        {"i": "UNIQ_KEY\x01k\x02TAGS\x01a\x01\x02"}, {"i": "UNIQ_KEY\x01k\x01\x02"},
    ],
)  # fmt: skip
def test_an_unusual_send_between_plain_sends_is_left_to_the_reference(
    form: int, other: dict[str, str]
) -> None:
    assert agree(send(form=form) + send({**PLAIN, **other}, form=form) + send(form=form)) == 2


@needs_compiled
def test_long_names_and_unquoted_values_are_plain() -> None:
    """The C++ client writes both."""
    numbers = {name: int(value) for name, value in PLAIN.items() if value.isdigit()}
    assert agree(java({**PLAIN, **numbers, "k": False, "m": False})) == 1
    ext = {LONG_NAMES[name]: PLAIN[short] for name, short in SHORT_NAMES.items()}
    assert agree(java({**ext, "batch": "0"}, code=10, end=b"\n") + send(ext, code=10, form=BINARY)) == 2
    assert agree(java(ext) + java(PLAIN, code=10)) == 0, "each code has the field names of the other one"


@needs_compiled
def test_one_way_requests_get_no_answer() -> None:
    one_way = [send(form=form, flag=CommandFlag.ONE_WAY, opaque=9) for form in (JSON, BINARY)]
    assert agree(one_way[0] + send() + one_way[1]) == 3


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
def test_batches_and_sends_share_a_run(form: int) -> None:
    keys = ["AB", 'quo"ted', "\x7f", "k" * 50]
    records = [record(f"UNIQ_KEY\x01{key}\x02", bytes(n), n) for n, key in enumerate(keys)]
    several = batch(records, form=form) + batch([record()], form=form, flag=CommandFlag.ONE_WAY)
    assert agree(send(form=form) + several + send(form=form)) == 7
    assert agree(batch([record()] * 40, {**PLAIN, "m": "true"}, form, code=310)) == 40
    assert agree(batch([record()] * 1_400, form=form) * 2) == 2_800


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
@pytest.mark.parametrize(
    ("ext", "records"),
    [
        ({"e": "-1"}, [record()]), ({"f": "8"}, [record()]), ({"b": "%RETRY%g"}, [record()]), ({}, b""),
        ({}, [record(), record("UNIQ_KEY\x01k\x02DELAY\x013\x02")]), ({}, [record(""), record()]),
        ({}, [record(), record("UNIQ_KEY\x01k\x02REPLY_TO_CLIENT\x01c\x02")]), ({}, [record()] * 3_000),
        ({}, encode_batch([record()]) + b"\0"), ({}, encode_batch([record()])[:-1]), ({}, bytes(22)),
        ({"i": "DELAY\x013\x02"}, [record()]), ({"i": "WAIT\x01true\x02TIMER_DELAY_SEC\x015"}, [record()]),
    ],
)  # fmt: skip
def test_an_unusual_batch_is_left_to_the_reference_as_a_whole(
    form: int, ext: dict[str, str], records: list[BatchRecord] | bytes
) -> None:
    assert agree(send(form=form) + batch(records, {**PLAIN, **ext}, form) + send(form=form)) == 2


@needs_compiled
@pytest.mark.parametrize("form", [JSON, BINARY])
def test_a_batch_with_one_changed_byte_gives_the_same_result_in_both_codecs(form: int) -> None:
    whole = batch([record(), record("UNIQ_KEY\x01ä\x02", b"body")], form=form)
    for at in range(8, len(whole)):  # not the lengths of frame and header, which are the first 8 bytes
        for value in {0, 1, 2, 0x20, 0x7F, 0x80, 0xFF, whole[at] ^ 1}:
            agree(whole[:at] + bytes([value]) + whole[at + 1 :])


@needs_compiled
def test_a_run_has_a_maximum_size() -> None:
    data = b"".join(send({**PLAIN, "b": f"topic{n % 40}", "e": str(n % 7)}) for n in range(3_000))
    assert agree(data) == 3_000
    assert COMPILED is not None
    runs = COMPILED.cut(data, FRAME_BYTES_MAX)[0]
    assert max(map(len, runs)) <= 1_024 and max(len(run.destinations) for run in runs) <= 16


@needs_compiled
def test_columns_of_several_runs_are_those_of_all_their_rows() -> None:
    assert COMPILED is not None
    for forms in ([JSON, BINARY], [BINARY, BINARY, JSON]):
        runs = []
        for number, form in enumerate(forms):
            tags = encode_properties({"UNIQ_KEY": f"k{number}", **({"TAGS": "t"} if number else {})})
            data = send({**PLAIN, "i": tags, "b": f"t{number}"}, form=form) * (number + 1)
            [run], _, _ = COMPILED.cut(data, FRAME_BYTES_MAX)
            run.plan(b"10.0.0.%d:7" % number, NOW_MS, limits.DELAY_MS_MAX, USER_NAMES)
            runs.append(run)
        assert COMPILED.join(runs).equals(batch_of([row for run in runs for row in run]))


@needs_compiled
def test_a_small_run_does_not_keep_a_large_read_in_memory() -> None:
    large = send(body=bytes(1_000_000))
    agree(large + send() + large)


# ---- drawn and damaged bytes ---------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.one_of(
    st.integers(-3, 9).map(str),
    st.integers(-(1 << 65), 1 << 65).map(str),
    st.sampled_from(["", "-0", "1.0", "1e3"]),
)
names = st.sampled_from(
    ["UNIQ_KEY", "TAGS", "KEYS", "DELAY", "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_OUT_MS",
     "TIMER_DEL_UNIQKEY", "__STARTDELIVERTIME", "REPLY_TO_CLIENT", "CLUSTER", "other", ""]
)  # fmt: skip
property_texts = st.lists(st.tuples(names, st.one_of(texts, numbers)), max_size=4).map(
    lambda pairs: "UNIQ_KEY\x01k\x02" + "".join(f"{name}\x01{value}\x02" for name, value in pairs)
)
values = {
    "b": st.one_of(st.sampled_from(["orders", "%RETRY%g", ""]), texts), "a": texts, "n": texts,
    "e": numbers, "f": numbers, "g": numbers, "h": numbers, "d": numbers, "j": numbers, "l": numbers,
    "k": st.sampled_from(["true", "false", "TRUE", "1", "0", "", "2"]),
    "m": st.sampled_from(["true", "false", "0", "1", ""]), "i": st.one_of(property_texts, texts),
}  # fmt: skip
changes = st.dictionaries(st.sampled_from(sorted(values)), st.integers(0), max_size=3).flatmap(
    lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen})
)


@needs_compiled
@given(
    st.lists(
        st.tuples(changes, st.sampled_from([JSON, BINARY]), st.booleans(), st.binary(max_size=9)), max_size=5
    )
)
@example([({"i": "UNIQ_KEY\x01k\x02\x01\x02\x02TAGS\x01"}, JSON, False, b"")])
def test_any_fields_give_the_same_result_in_both_codecs(
    sends: list[tuple[dict[str, str], int, bool, bytes]],
) -> None:
    agree(
        b"".join(
            send({**PLAIN, **ext}, body, form, opaque=n, flag=2 * one_way)
            for n, (ext, form, one_way, body) in enumerate(sends)
        )
    )


@needs_compiled
@given(
    st.lists(
        st.tuples(
            changes,
            st.lists(st.tuples(property_texts, st.binary(max_size=9), st.integers(-9, 9)), max_size=4),
        ),
        max_size=3,
    ),
    st.sampled_from([JSON, BINARY]),
)
def test_any_batches_give_the_same_result_in_both_codecs(
    batches: list[tuple[dict[str, str], list[tuple[str, bytes, int]]]], form: int
) -> None:
    agree(
        b"".join(
            batch([record(*values) for values in records], {**PLAIN, **ext}, form, opaque=n)
            for n, (ext, records) in enumerate(batches)
        )
    )


json_values = st.one_of(
    st.integers(-(1 << 70), 1 << 70), st.booleans(), st.none(), st.floats(allow_nan=False), texts, st.just([])
)


@needs_compiled
@given(
    st.dictionaries(st.sampled_from([*PLAIN, "topic", "x"]), json_values, max_size=3),
    st.lists(st.sampled_from(sorted(PLAIN)), max_size=2),
)
def test_any_json_gives_the_same_result_in_both_codecs(changed: dict[str, Any], removed: list[str]) -> None:
    ext = {name: value for name, value in {**PLAIN, **changed}.items() if name not in removed}
    agree(java(ext) + java(PLAIN))


def undamaged_frames() -> Iterator[bytes]:
    """Yield the frames that the following tests damage."""
    for form in (JSON, BINARY):
        yield send(form=form)
        yield send({**PLAIN, "i": "UNIQ_KEY\x01k\x02DELAY\x013\x02KEYS\x01ä\x02"}, form=form)
    yield java({**PLAIN, "e": 3})


@needs_compiled
@given(
    st.sampled_from(list(undamaged_frames())),
    st.integers(8, 600),
    st.binary(min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_damaged_headers_give_the_same_result_in_both_codecs(
    whole: bytes, at: int, damage: bytes, removed: int
) -> None:
    """The frame keeps valid lengths, because otherwise the whole connection would be refused."""
    at = min(at, len(whole) - 1)
    header_end = 8 + int.from_bytes(whole[5:8], "big")
    header = (whole[:at] + damage + whole[at + removed :])[8 : header_end + len(damage) - removed]
    agree(send() + framed(header, form=whole[4]) + send())


@needs_compiled
@pytest.mark.parametrize("whole", list(undamaged_frames()))
def test_a_send_with_one_changed_byte_gives_the_same_result_in_both_codecs(whole: bytes) -> None:
    random_bytes = random.Random(1)
    for at in range(len(whole)):
        for value in {0, 1, 2, 0x20, 0x22, 0x30, 0x5C, 0x7F, 0x80, 0xFF, random_bytes.randrange(256)}:
            agree(whole[:at] + bytes([value]) + whole[at + 1 :])


# ---- stored messages -----------------------------------------------------------------------------------------


def row_values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    """Return a strategy of the values of a column."""
    if pa.types.is_integer(data_type):
        highest = (1 << data_type.bit_width - 1) - 1
        return st.one_of(st.integers(-highest - 1, highest), st.sampled_from([0, 4, 8, 12, 48]))
    return st.one_of(texts, st.just("")) if data_type == pa.string() else st.binary(max_size=200)


SPECIAL = {
    "topic": st.one_of(st.sampled_from(["orders", "t" * 127, "t" * 128, "t" * 300]), texts),
    "born_host": st.sampled_from(
        ["10.0.0.7:51234", "[::1]:7", "10.0.0.8", "broker.example:1", "", "1.2.3.4:x", "1.2.3.4:-1", "::1"]
    ),
    "properties": st.one_of(
        property_texts, texts, st.sampled_from(["TAGS\x01", "a\x01b", "\x02TAGS\x01x", "XTAGS\x01"]),
        st.sampled_from(
            [
                "TIMER_DELAY_MS\x015\x02", "a\x01b\x02TIMER_DELIVER_MS\x015", "XTIMER_DELAY_MS\x015\x02", "TIMER_DE",
                "TIMER_DELAY_SEC\x015\x02REAL_TOPIC\x01t\x02", "TIMER_OUT_MS\x015\x02TIMER_DELAY_MS\x015\x02",
                "\x02TIMER_DELAY_SEC\x011",
            ]
        ),
    ),
    "unique_key": st.one_of(texts, st.just("k\x02TAGS\x01")),
}  # fmt: skip
NEVER_MISSING = {"seq", "topic", "queue_id"}
stored_rows = st.fixed_dictionaries(
    {
        column.name: SPECIAL.get(column.name, row_values(column.type))
        if column.name in NEVER_MISSING
        else st.one_of(st.none(), SPECIAL.get(column.name, row_values(column.type)))
        for column in READ_SCHEMA
        if column.name not in ("kind", "version_seq", "from_due_ms", "store_host")
    }
)
V4, V6 = Host(bytes([127, 0, 0, 1]), 10911), Host(bytes(15) + b"\x01", 10911)


def encode_or_error(codec: Codec | None, rows: pa.RecordBatch, **hosts: Host) -> list[bytes] | str:
    """Encode the rows as stored messages, or return the type and the text of the error."""
    assert codec is not None
    try:
        return codec.encode_each(rows, **hosts)
    except Exception as error:  # both codecs must raise the same one, whatever it is
        return f"{type(error).__name__}: {error}"


@needs_compiled
@given(
    st.lists(stored_rows, max_size=15),
    st.sampled_from([V4, V6]),
    st.sampled_from([V4, V6]),
    st.integers(0, 3),
)
def test_stored_messages_are_the_same_in_both_codecs(
    rows: list[dict[str, Any]], store: Host, born: Host, begin: int
) -> None:
    """The rows are a slice, so that the columns begin within their buffers."""
    batch = pa.RecordBatch.from_pylist(rows, READ_SCHEMA)[begin:]
    result = encode_or_error(COMPILED, batch, store_host=store, born_host=born)
    assert result == encode_or_error(PYTHON, batch, store_host=store, born_host=born)
    assert len(result) == batch.num_rows


@needs_compiled
@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": "p" * 65_536}, {"properties": "p" * 65_530, "tag": "x" * 9}, {"topic": "t" * 40_000},
        {"born_host": "1.2.3.4:99999999999"}, {"seq": None}, {"queue_id": None}, {"topic": None},
    ],
)  # fmt: skip
def test_a_row_that_no_stored_message_can_hold_gives_the_same_error(wrong: dict[str, Any]) -> None:
    valid = {"seq": 1, "topic": "orders", "queue_id": 0}
    batch = pa.RecordBatch.from_pylist([valid] * 5 + [{**valid, **wrong}], READ_SCHEMA)
    result = encode_or_error(COMPILED, batch, store_host=V4)
    assert isinstance(result, str)
    assert result == encode_or_error(PYTHON, batch, store_host=V4)


@needs_compiled
def test_rows_with_a_dictionary_column_are_left_to_the_reference() -> None:
    batch = pa.RecordBatch.from_pylist([{"seq": 1, "topic": "orders", "queue_id": 0}] * 5, READ_SCHEMA)
    at = batch.schema.get_field_index("topic")
    with_dictionary = batch.set_column(at, "topic", batch.column(at).dictionary_encode())
    assert encode_or_error(COMPILED, with_dictionary, store_host=V4) == encode_or_error(
        PYTHON, batch, store_host=V4
    )


# ---- the negative control of the comparison ------------------------------------------------------------------


def without_last(columns: Any) -> Any:
    """Return the rows but the last."""
    return columns.slice(0, columns.num_rows - 1)


@needs_compiled
@pytest.mark.parametrize(
    "fault",
    [
        lambda codec: replace(codec, join=lambda runs: without_last(codec.join(runs))),
        lambda codec: replace(codec, encode_replies=lambda *args: codec.encode_replies(*args)[:-1] + b"?"),
        lambda codec: replace(codec, cut=lambda *args: (codec.cut(*args)[0][::-1], *codec.cut(*args)[1:])),
        lambda codec: replace(codec, cut=lambda data, most: codec.cut(data.replace(b"AB", b"AC"), most)),
        lambda codec: replace(codec, cut=lambda data, most: codec.cut(data, 16)),
    ],
)
def test_a_difference_is_noticed(fault: Callable[[Codec], Codec]) -> None:
    assert COMPILED is not None
    data = send() * 2 + send({**PLAIN, "m": "true"}) + send({**PLAIN, "b": "others"})
    agree(data)
    with pytest.raises(AssertionError):
        agree(data, fault(COMPILED))


# ---- the choice of the codec ---------------------------------------------------------------------------------


def test_the_compiled_codec_is_used_if_it_is_installed() -> None:
    assert PYTHON.cut is cut
    assert CODEC is (COMPILED or PYTHON)
    assert (CODEC.name == "compiled") == (COMPILED is not None)
