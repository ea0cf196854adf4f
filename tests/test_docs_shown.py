"""The documentation's examples run with a real node, and its dumps can be read."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from tests.cli.in_process import run_here
from tests.docs_pages import page
from tests.node_fixture import running_node

from timeball.log import checkpoint, queue_index
from timeball.log import format as fmt
from timeball.model import errors
from timeball.model.key_hash import KeyRun, hash_string
from timeball.model.message import LOG_SCHEMA, Kind
from timeball.schedule import timer_wheel
from timeball.schedule.mapped_log import checksums_of

ENDPOINT = "http://127.0.0.1:7480"  # as the examples have it


def bytes_of(text: str, whole: bytes = b"") -> bytes:
    """The bytes of the `hexdump` block in a page; `*` repeats the line above up to the next address.

    A line `…` leaves out the bytes up to the next address: they are taken from `whole`.
    """
    block = re.search(r"^```hexdump\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "no dump"
    data, last, starred, omitted = bytearray(), b"", False, False
    for line in block[1].splitlines():
        if line == "*":
            starred = True
            continue
        if line == "…":
            omitted = True
            continue
        address, _, rest = line.partition("  ")
        while starred and len(data) < int(address, 16):
            data += last
        if omitted:
            data += whole[len(data) : int(address, 16)]
        starred = omitted = False
        assert len(data) == int(address, 16), line
        last = bytes.fromhex(rest.partition("|")[0])
        data += last
    return bytes(data)


SHOWN_ROW = {
    "kind": 2, "topic": "orders", "queue_id": -1, "keys": "order-17", "unique_key": "A17",
    "body": b"close order 17", "born_ms": 1_767_225_600_000, "born_host": "127.0.0.1",
    "store_ms": 1_767_225_600_000, "store_host": "127.0.0.1", "flag": 0, "sys_flag": 0, "reconsume_times": 0,
    "due_ms": 1_767_227_400_000,
}  # fmt: skip


def shown_segment() -> bytes:
    """The page omits most of Arrow's metadata. The writer adds it: the checksum in the page proves the bytes."""
    _, parts = fmt.encode_frame(
        pa.RecordBatch.from_pylist([SHOWN_ROW], LOG_SCHEMA),
        first_seq=17,
        span=1,
        append_ms=1_767_225_600_001,
        epoch=1,
        position=fmt.ALIGN,
        synced_to=fmt.ALIGN,
    )
    whole = bytes(fmt.ALIGN) + b"".join(bytes(part) for part in parts)
    return bytes_of(page("docs/formats/commit-log.md"), whole)


def test_the_frame_that_is_shown_can_be_read() -> None:
    segment = pa.py_buffer(shown_segment())
    assert fmt.read_segment_header(segment) == 17
    frame = fmt.read_frame(segment, fmt.ALIGN)
    assert frame is not None
    assert (frame.first_seq, frame.span, frame.rows, frame.payload) == (17, 1, 1, 1528)
    assert (frame.append_ms, frame.epoch, frame.synced_to, frame.end) == (1_767_225_600_001, 1, 64, 1_664)
    (row,) = fmt.decode_rows(segment, frame).to_pylist()
    assert (row["kind"], row["topic"], row["keys"], row["body"]) == (
        Kind.SCHEDULED,
        "orders",
        "order-17",
        b"close order 17",
    )
    assert row["due_ms"] == 1_767_227_400_000


def test_the_table_of_bytes_agrees_with_the_frame() -> None:
    text = page("docs/formats/commit-log.md")
    data = shown_segment()
    rows = re.findall(r"^\| `([0-9a-f]+)` \| (.+?) \|", text, re.MULTILINE)
    assert len(rows) > 10
    for address, told in rows:
        at = int(address, 16)
        for part in re.findall(r"`([^`]+)`", told):
            given = bytes.fromhex(part.replace("…", ""))
            assert data[at : at + len(given)] == given, address
            at += len(given)


def test_the_key_run_that_is_shown_can_be_read() -> None:
    text = page("docs/formats/key-run.md")
    run = KeyRun(pa.py_buffer(bytes_of(text)))
    told = {word: int(value, 16) for word, value in re.findall(r"^\| `(\S+)` \| `(\w{16})` \|", text, re.M)}
    assert told == {word: hash_string(word) for word in ("A17", "order-17", "anna")}
    for value in told.values():
        assert run.find_numbers(np.array([value], np.uint64)).tolist() == [0]
    assert hash_string("") == 0


def test_the_checkpoint_that_is_shown_is_whole() -> None:
    data = bytes_of(page("docs/formats/checkpoint.md"))
    magic, length, crc = checkpoint.HEADER.unpack_from(data)
    payload = data[checkpoint.HEADER.size :]
    assert (magic, length, crc) == (checkpoint.MAGIC, len(payload), google_crc32c.value(payload))


def test_the_queue_index_that_is_shown_is_whole() -> None:
    (part,) = queue_index.QueueFile("a.cq", bytes_of(page("docs/formats/queue-index.md"))).parts()
    assert (part.topic, part.queue_id, part.first_offset) == ("orders", 2, 40)
    assert part.entries["seq"].tolist() == [100, 113, 2**40]


def test_the_entries_of_the_wheel_that_are_shown_are_two() -> None:
    shown = np.frombuffer(bytes_of(page("docs/formats/timer-wheel.md")), timer_wheel.ENTRIES.checked)
    entries = np.ascontiguousarray(shown["record"])
    assert shown["crc32c"].tolist() == checksums_of(entries).tolist()
    assert entries["seq"].tolist() == entries["row_seq"].tolist() == [7, 8]
    assert np.diff(entries["due_ms"]).tolist() == [500]


def python_examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_example(code: str, endpoint: str) -> str:
    """Run an example against another broker than the one it names; returns what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(ENDPOINT, endpoint), "README.md", "exec"), {})
    return printed.getvalue()


def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    code = next(example for example in python_examples(page("README.md")) if "from timeball" in example)
    with running_node(tmp_path / "data") as node:
        printed = run_example(code, node.http_endpoint).splitlines()
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert printed[: len(promised)] == promised
    assert [line.split("'")[1] for line in printed[len(promised) :]] == [
        "order 17 was placed",
        "close order 17 if unpaid",
    ]
    assert len(code.splitlines()) <= 25, "a short example"


def test_the_first_steps_can_be_gone(tmp_path: Path) -> None:
    """Each command and the program of the page, one after the other, against one broker."""
    text = page("docs/first-steps.md")
    (code,) = python_examples(text)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("timeball ")]
    with running_node(tmp_path / "data") as node:
        for command in commands:
            words = shlex.split(command)[1:]
            if words[0] != "serve":
                ran = run_here(*words, TIMEBALL_ENDPOINT=node.http_endpoint, TIMEBALL_FLIGHT=node.endpoint)
                assert ran.returncode == 0, f"{command}: {ran.stderr}"
        assert len(commands) > 4
        printed = run_example(code, node.http_endpoint).splitlines()
    assert printed == re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, pytest.raises(errors.InvalidDelay):
        run_example(
            f'from timeball import Timeball\nTimeball("{ENDPOINT}").send("a", "b", after=-1)',
            node.http_endpoint,
        )


def test_a_dump_with_a_wrong_address_is_noticed() -> None:
    with pytest.raises(AssertionError):
        bytes_of("```hexdump\n00000000  00 01  |..|\n00000003\n```\n")
    assert bytes_of("```hexdump\n00000000  00 01  |..|\n*\n00000006\n```\n") == bytes([0, 1] * 3)
    assert bytes_of("```hexdump\n00000000  00 01  |..|\n…\n00000004\n```\n", b"abcdef") == b"\0\1cd"
