"""The documentation's examples run with a real node, and its bytes are those of the writer."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli.in_process import run_here
from tests.docs_pages import page
from tests.node_fixture import running_node

from timeball.log import format as fmt
from timeball.model import errors
from timeball.model.key_hash import hash_string
from timeball.model.message import LOG_SCHEMA, Kind

ENDPOINT = "http://127.0.0.1:7480"  # the address in the examples


SHOWN_ROW = {
    "kind": 2, "topic": "orders", "queue_id": -1, "keys": "order-17", "unique_key": "A17",
    "body": b"close order 17", "born_ms": 1_767_225_600_000, "born_host": "127.0.0.1",
    "store_ms": 1_767_225_600_000, "store_host": "127.0.0.1", "flag": 0, "sys_flag": 0, "reconsume_times": 0,
    "due_ms": 1_767_227_400_000,
}  # fmt: skip


def shown_segment() -> bytes:
    """Write the segment whose bytes the page explains."""
    _, parts = fmt.encode_frame(
        pa.RecordBatch.from_pylist([SHOWN_ROW], LOG_SCHEMA),
        first_seq=17,
        span=1,
        append_ms=1_767_225_600_001,
        epoch=1,
        position=fmt.ALIGN,
        synced_to=fmt.ALIGN,
    )
    return fmt.encode_segment_header(17, 1_767_225_500_000) + b"".join(bytes(part) for part in parts)


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
    for address, cell in rows:
        position = int(address, 16)
        for part in re.findall(r"`([^`]+)`", cell):
            expected = bytes.fromhex(part.replace("…", ""))
            assert data[position : position + len(expected)] == expected, address
            position += len(expected)


def test_the_hashes_that_are_shown_are_those_of_the_code() -> None:
    text = page("docs/formats/key-run.md")
    hashes = {word: int(value, 16) for word, value in re.findall(r"^\| `(\S+)` \| `(\w{16})` \|", text, re.M)}
    assert hashes == {word: hash_string(word) for word in ("A17", "order-17", "anna")}
    assert hash_string("") == 0


def python_examples(text: str) -> list[str]:
    """Return the Python programs of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_example(code: str, endpoint: str) -> str:
    """Run an example against another broker than the named one. Returns its output."""
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


def test_the_commands_and_the_program_of_the_first_steps_run(tmp_path: Path) -> None:
    """Each command and the program of the page, one after the other, against one broker."""
    text = page("docs/first-steps.md")
    (code,) = python_examples(text)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("timeball ")]
    with running_node(tmp_path / "data") as node:
        for command in commands:
            words = shlex.split(command)[1:]
            if words[0] != "serve":
                result = run_here(*words, TIMEBALL_ENDPOINT=node.http_endpoint, TIMEBALL_FLIGHT=node.endpoint)
                assert result.returncode == 0, f"{command}: {result.stderr}"
        assert len(commands) > 4
        printed = run_example(code, node.http_endpoint).splitlines()
    assert printed == re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)


@pytest.mark.parametrize("name", ["bulk-operations", "send-options"])
def test_the_examples_of_options_and_bulk_operations_run(name: str, tmp_path: Path) -> None:
    """All examples of a page, one after the other, against one broker."""
    code = "\n".join(python_examples(page(f"docs/{name}.md")))
    with running_node(tmp_path / "data") as node:
        printed = run_example(code, node.http_endpoint).splitlines()
    promised = re.findall(r"print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert printed == promised != []


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, pytest.raises(errors.InvalidDelay):
        run_example(
            f'from timeball import Timeball\nTimeball("{ENDPOINT}").send("a", "b", after=-1)',
            node.http_endpoint,
        )
