"""`timeball send` and `timeball schedule`: send a message for now, or for a due time.

The body comes from an argument or from stdin. With --lines, each line of a file is a message. Lines are sent as
columns, `CHUNK_LINES` at a time, so a file of any size needs bounded memory. The client splits a large chunk into
pipelined batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect, naming
from timeball.cli.output import print_json, print_line, print_note, progress_bar, show
from timeball.cli.units import parse_duration_ms, parse_property, show_instant, show_wait
from timeball.model.errors import InvalidDelay, RequestError, TimeballError
from timeball.model.time_parsing import instant_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client import Timeball
    from timeball.client.sender import Receipt

AFTER_ADVICE = "write 250ms, 90s, 1h30m or 7d, or a time with --at"
CHUNK_LINES = 50_000

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to send to.")]
BodyArgument = Annotated[
    str | None, typer.Argument(metavar="[BODY]", help="The message; '-' or nothing reads it from stdin.")
]
TagOption = Annotated[str | None, typer.Option("--tag", help="Tag that consumers can filter by.")]
KeysOption = Annotated[
    list[str] | None, typer.Option("--keys", metavar="KEY", help="A business key; may be repeated.")
]
IdOption = Annotated[str | None, typer.Option("--id", help="Message id; by default one is made.")]
PropertyOption = Annotated[
    list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="A property; may be repeated.")
]
LinesOption = Annotated[
    Path | None,
    typer.Option("--lines", metavar="FILE", help="Send each line of FILE as a message; '-' is stdin."),
]
AfterOption = Annotated[
    str | None, typer.Option("--after", metavar="DURATION", help="Delay: 250ms, 90s, 1h30m, 7d.")
]
AtOption = Annotated[
    str | None,
    typer.Option("--at", metavar="INSTANT", help="ISO 8601 with a zone, or milliseconds since 1970."),
]


def send(
    topic: TopicArgument,
    body: BodyArgument = None,
    tag: TagOption = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    message_id: IdOption = None,
    lines: LinesOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Send a message that is visible at once, and print its id.

    The id is printed when the broker has the message on disk.

    \b
    Examples:
      timeball send orders 'order 17 was paid' --tag paid --keys order-17 --keys anna
      echo 'order 18 was paid' | timeball send orders
      timeball send orders --lines orders.jsonl
      timeball send orders hello --property region=eu --json
    """
    check_lines_alone(lines, body, message_id)
    with connect(endpoint) as client:
        if lines is not None:
            encoded = encode_columns(topic, tag, keys, properties)
            send_lines(client, lines, encoded, as_json=as_json)
            return
        receipt = client.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            message_id=message_id,
        )
        report(receipt, as_json=as_json)


def schedule(
    topic: TopicArgument,
    body: BodyArgument = None,
    after: AfterOption = None,
    at: AtOption = None,
    tag: TagOption = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    message_id: IdOption = None,
    lines: LinesOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Schedule a message, and print the id by which you can cancel it.

    Give exactly one of --after and --at. The time of --at needs a time zone: a
    local time would mean another time on another machine.

    \b
    Examples:
      timeball schedule orders 'close order 17 if unpaid' --after 30m --keys order-17
      timeball schedule licences 'renew' --at 2030-01-31T09:00:00+01:00
      timeball schedule reminders --lines people.txt --after 7d
      timeball schedule orders hello --after 250ms --json
    """
    due = parse_due(after, at)
    check_lines_alone(lines, body, message_id)
    with connect(endpoint) as client:
        if lines is not None:
            due_columns = {name: value for name, value in due.items() if value is not None}
            columns = encode_columns(topic, tag, keys, properties) | due_columns
            send_lines(client, lines, columns, as_json=as_json)
            return
        due_ms, delay_ms = due["due_ms"], due["delay_ms"]
        receipt = client.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            after=None if delay_ms is None else after,
            at=due_ms,
            message_id=message_id,
        )
        report(receipt, as_json=as_json)


def parse_due(after: str | None, at: str | None) -> dict[str, int | None]:
    """Parse --after or --at into `due_ms` and `delay_ms`, one of them None. InvalidDelay unless one is given."""
    if (after is None) == (at is None):
        raise InvalidDelay(
            "give exactly one of --after (such as 30m) and --at (such as 2030-01-31T09:00:00Z)"
        )
    if after is None:
        assert at is not None
        with naming("--at"):
            return {"due_ms": instant_ms(at), "delay_ms": None}
    with naming("--after"):
        return {"due_ms": None, "delay_ms": parse_duration_ms(after, AFTER_ADVICE)}


def read_body(body: str | None) -> bytes:
    """Read the body from the argument, or all of stdin."""
    return sys.stdin.buffer.read() if body is None or body == "-" else body.encode()


def read_properties(texts: list[str] | None) -> dict[str, str] | None:
    """Parse NAME=VALUE pairs into a dictionary. None if there are none."""
    with naming("--property"):
        return dict(map(parse_property, texts)) if texts else None


def check_lines_alone(lines: Path | None, body: str | None, message_id: str | None) -> None:
    """Raise RequestError for arguments that have no effect with --lines, so that none is ignored silently."""
    if lines is None:
        return
    if body is not None:
        raise RequestError("--lines and a body: give one of them")
    if message_id is not None:
        raise RequestError("--lines and --id: each line gets its own id")


def send_lines(client: Timeball, file: Path, columns: dict[str, object], *, as_json: bool) -> None:
    """Send each line of `file` as a message body, with `columns` for all of them, and print the number of messages."""
    sent = past_rows = past_ms = 0
    source = sys.stdin.buffer if str(file) == "-" else _open_file(file)
    with source, progress_bar(quiet=as_json) as progress:
        task = progress.add_task("sending", total=None)
        for batch in _batches(source, columns):
            try:
                summary = client.send_many(batch)
            except TimeballError as error:
                raise _with_line_numbers(error, file, sent, batch.num_rows) from error
            sent += batch.num_rows
            past_rows, past_ms = past_rows + summary.past_rows, max(past_ms, summary.past_ms)
            progress.update(task, completed=sent)
    past = {"past_rows": past_rows, "past_ms": past_ms} if past_rows else {}
    show({"sent": sent, **past}, [f"{sent:,} messages sent"], as_json=as_json)
    due_ms = columns.get("due_ms")
    if past and isinstance(due_ms, int) and not as_json:
        print_note(f"the due time was in the past: {show_instant(due_ms)}; the messages are delivered now")


def _with_line_numbers(error: TimeballError, file: Path, sent: int, count: int) -> TimeballError:
    """Extend the error of a chunk with its line numbers, and the number of lines that were sent before it."""
    extended = type(error)(
        f"--lines {file}: lines {sent + 1} to {sent + count}, here rows 0 to {count - 1}: {error}. {sent} lines before "
        "these were sent"
    )
    extended.summary = error.summary
    return extended


def report(receipt: Receipt, *, as_json: bool) -> None:
    """Print the acknowledged message: its id on stdout and, for people, its due time on stderr."""
    if as_json:
        print_json(receipt)
        return
    print_line(receipt.id)
    if receipt.due_ms is not None and receipt.past_ms:
        print_note(
            f"the due time was in the past: {show_instant(receipt.due_ms)}; the message is delivered now"
        )
    elif receipt.due_ms is not None:
        print_note(f"due {show_instant(receipt.due_ms)}, in {show_wait(receipt.due_ms - receipt.store_ms)}")


def encode_columns(
    topic: str, tag: str | None, keys: list[str] | None, properties: list[str] | None
) -> dict[str, object]:
    """Build the columns that are the same for every line."""
    from timeball.model.rules import check_label, keys_text, properties_text

    pairs = read_properties(properties)
    return {
        "topic": topic,
        "tag": check_label("tag", tag),
        "keys": keys if keys_text(keys) else None,
        "properties": properties_text(pairs),
    }


def _open_file(file: Path) -> BinaryIO:
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
                arrow_type = pa.list_(pa.string()) if isinstance(value, list) else pa.string()
                arrow_type = pa.int64() if isinstance(value, int) else arrow_type
                arrays[name] = pa.repeat(pa.scalar(value, arrow_type), len(lines))
        yield pa.RecordBatch.from_pydict(arrays)
