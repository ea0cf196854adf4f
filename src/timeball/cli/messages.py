"""What `send` and `schedule` share: a body from an argument or a stream, and one message or one a line.

Lines become columns chunk by chunk, so that a file of any size is sent in bounded memory and pipelined.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from timeball.cli.output import note, print_json, print_line, progress_bar
from timeball.cli.quantities import parse_property
from timeball.errors import RequestError

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client import Timeball
    from timeball.client.answers import Receipt

CHUNK_LINES = 50_000

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to send to.")]
BodyArgument = Annotated[
    str | None, typer.Argument(metavar="[BODY]", help="The message; '-' or nothing reads it from stdin.")
]
TagOption = Annotated[str | None, typer.Option("--tag", help="Tag that consumers can filter by.")]
KeysOption = Annotated[str | None, typer.Option("--keys", help="Business keys, separated by blanks.")]
IdOption = Annotated[str | None, typer.Option("--id", help="Message id; by default one is made.")]
PropertyOption = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="A property; may be repeated.")
]
LinesOption = Annotated[
    Path | None,
    typer.Option("--lines", metavar="FILE", help="Send each line of FILE as a message; '-' is stdin."),
]


def read_body(body: str | None) -> bytes:
    """The body given, or all of stdin."""
    return sys.stdin.buffer.read() if body is None or body == "-" else body.encode()


def read_properties(given: list[str] | None) -> dict[str, str] | None:
    """NAME=VALUE pairs as a dictionary."""
    with naming("--property"):
        return dict(map(parse_property, given)) if given else None


@contextmanager
def naming(option: str) -> Iterator[None]:
    """A value that is refused in this block is refused with its option's name in front."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{option} {error}") from error


def only_lines(lines: Path | None, body: str | None, message_id: str | None) -> None:
    """RequestError for what --lines would have no use for: nothing that was given is left out silently."""
    if lines is None:
        return
    if body is not None:
        raise RequestError("--lines and a body: give one of them")
    if message_id is not None:
        raise RequestError("--lines and --id: each line gets an id of its own")


def send_lines(ball: Timeball, file: Path, columns: dict[str, object], *, as_json: bool) -> None:
    """Send every line of `file`, each with the same `columns` beside its body, and say how many."""
    sent = 0
    source = sys.stdin.buffer if str(file) == "-" else _open(file)
    with source, progress_bar(quiet=as_json) as progress:
        task = progress.add_task("sending", total=None)
        for batch in _batches(source, columns):
            ball.send_many(batch)
            sent += batch.num_rows
            progress.update(task, completed=sent)
    if as_json:
        print_json({"sent": sent})
    else:
        print_line(f"{sent:,} messages sent")


def report(receipt: Receipt, *, as_json: bool) -> None:
    """Say what the broker has acknowledged: the id on stdout, for people the instant on stderr."""
    if as_json:
        print_json(receipt)
        return
    print_line(receipt.id)
    if receipt.due_ms is not None:
        note(f"due {show_instant(receipt.due_ms)}, in {show_wait(receipt.due_ms - receipt.store_ms)}")


def show_instant(instant_ms: int) -> str:
    """An instant as ISO 8601 in UTC, with milliseconds."""
    import numpy as np

    return f"{np.datetime64(instant_ms, 'ms')}Z"


def show_wait(wait_ms: int) -> str:
    """How long it is until then, in its two largest units: 1,166 d 15 h; below a minute to the millisecond."""
    if wait_ms < 60_000:
        return f"{wait_ms / 1000:.3f} s"
    minutes = wait_ms // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {wait_ms // 1000 % 60} s"


def _open(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise RequestError(f"--lines {file}: {error.strerror}") from error


def _batches(source: BinaryIO, columns: dict[str, object]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    while lines := [line.rstrip(b"\r\n") for line in islice(source, CHUNK_LINES)]:
        arrays = {"body": pa.array(lines, pa.binary())}
        for name, value in columns.items():
            if value is not None:
                kind = pa.int64() if isinstance(value, int) else pa.string()
                arrays[name] = pa.repeat(pa.scalar(value, kind), len(lines))
        yield pa.RecordBatch.from_pydict(arrays)
