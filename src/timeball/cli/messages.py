"""The commands for messages: `timeball send`, `schedule`, `get`, `pull`, `cancel` and `reschedule`.

send, schedule        send a message for now, or for a due time
get                   show the state of a message, by its id, and the progress of each consumer group with it
pull                  read the visible messages of a topic, as a group's member or, with --peek, without taking them
cancel, reschedule    cancel or move pending messages, with one verdict for each
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer

from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    DEFAULT_FLIGHT,
    EndpointOption,
    FlightOption,
    JsonOption,
    as_parameter,
    connect,
    naming,
    parse_duration_ms,
    parse_property,
    show_instant,
    show_wait,
)
from timeball.cli.output import (
    ExitCode,
    body_fields,
    decode_text,
    print_json,
    print_line,
    print_note,
    progress_bar,
    show,
)
from timeball.model.answers import KEPT
from timeball.model.errors import InvalidDelay, NotFound, RequestError, TimeballError
from timeball.model.send_options import OnExpiry, OnPending, Spread
from timeball.model.time_parsing import instant_ms, local_due_ms
from timeball.model.values import check_label, keys_text, properties_text

if TYPE_CHECKING:
    from timeball.client import Timeball
    from timeball.client.messages import Message
    from timeball.client.receipts import Receipt
    from timeball.model.answers import GroupPlace, MessagePlace, Verdict

# ---- send and schedule ----------------------------------------------------------------------------------------
# The body comes from an argument or from stdin. With --lines, each line of a file is a message. `CHUNK_LINES` of them
# are sent in a request, so a file of any size needs bounded memory.

AFTER_ADVICE = "write 250ms, 90s, 1h30m or 7d, or a time with --at"
CHUNK_LINES = 10_000

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
UniqueKeyOption = Annotated[
    str | None,
    typer.Option("--unique-key", metavar="KEY", help="Of messages with this key, at most one is pending."),
]
OnPendingOption = Annotated[
    OnPending | None,
    typer.Option("--on-pending", help="If one is pending: reject this one, keep the other, or replace it."),
]
ExpiresAtOption = Annotated[
    str | None,
    typer.Option("--expires-at", metavar="INSTANT", help="Do not deliver it later than this. As --at."),
]
ExpiresInOption = Annotated[
    str | None,
    typer.Option(
        "--expires-in", metavar="DURATION", help="Do not deliver it later than this after it is due."
    ),
]
OnExpiryOption = Annotated[
    OnExpiry | None,
    typer.Option("--on-expiry", help="If it expires: cancel it, or move it to the topic %EXPIRED%TOPIC."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window", metavar="DURATION", help="The broker chooses the due time, at most this much later."
    ),
]
SpreadOption = Annotated[
    Spread | None,
    typer.Option("--spread", help="How: by the message id, or the second with the fewest pending messages."),
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
ZoneOption = Annotated[
    str | None,
    typer.Option("--zone", metavar="ZONE", help="--at is a local time in this zone: Europe/Berlin."),
]


def send(
    topic: TopicArgument,
    body: BodyArgument = None,
    tag: TagOption = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    message_id: IdOption = None,
    unique_key: UniqueKeyOption = None,
    on_pending: OnPendingOption = None,
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
    check_lines_alone(lines, body, message_id, unique_key)
    with connect(endpoint) as client:
        if lines is not None:
            send_lines(client, lines, encode_fields(topic, tag, keys, properties), as_json=as_json)
            return
        receipt = client.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            message_id=message_id,
            unique_key=unique_key,
            on_pending=on_pending,
        )
        report(receipt, as_json=as_json)


def schedule(
    topic: TopicArgument,
    body: BodyArgument = None,
    after: AfterOption = None,
    at: AtOption = None,
    zone: ZoneOption = None,
    tag: TagOption = None,
    keys: KeysOption = None,
    properties: PropertyOption = None,
    message_id: IdOption = None,
    unique_key: UniqueKeyOption = None,
    on_pending: OnPendingOption = None,
    expires_at: ExpiresAtOption = None,
    expires_in: ExpiresInOption = None,
    on_expiry: OnExpiryOption = None,
    window: WindowOption = None,
    spread: SpreadOption = None,
    lines: LinesOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Schedule a message, and print the id by which you can cancel it.

    Give exactly one of --after and --at. The time of --at needs an offset from UTC,
    or --zone. With --zone, the due time follows changes of the zone's rules.

    \b
    Examples:
      timeball schedule orders 'close order 17 if unpaid' --after 30m --keys order-17
      timeball schedule licences 'renew' --at 2030-01-31T09:00:00+01:00
      timeball schedule licences 'renew' --at 2030-01-31T09:00 --zone Europe/Berlin
      timeball schedule reminders --lines people.txt --after 7d
      timeball schedule orders hello --after 250ms --json
    """
    # A copy with values of any type, because the two functions return dicts of different types.
    due: dict[str, Any] = {**(parse_due(after, at) if zone is None else parse_local(after, at, zone))}
    check_lines_alone(lines, body, message_id, unique_key)
    if lines is not None and (expires_at or expires_in or on_expiry):
        raise RequestError("--lines and an expiry: give each line the property TIMEBALL_EXPIRES_AFTER_MS")
    if lines is not None and (window or spread):
        raise RequestError("--lines and a window: send the messages one by one")
    with connect(endpoint) as client:
        if lines is not None:
            send_lines(client, lines, encode_fields(topic, tag, keys, properties) | due, as_json=as_json)
            return
        receipt = client.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            after=None if due.get("delay_ms") is None else after,
            at=due.get("at", due.get("due_ms")),
            zone=zone,
            message_id=message_id,
            unique_key=unique_key,
            on_pending=on_pending,
            expires_at=expires_at,
            expires_in=expires_in,
            on_expiry=on_expiry,
            window=window,
            spread=spread,
        )
        report(receipt, as_json=as_json)


def parse_local(after: str | None, at: str | None, zone: str) -> dict[str, str]:
    """Check --at and --zone, and return them as `at` and `zone`. InvalidDelay unless both are valid."""
    if at is None or after is not None:
        raise InvalidDelay("--zone: needs --at alone, a local time such as 2030-01-31T09:00")
    with naming("--at"):
        local_due_ms(at, zone)
    return {"at": at, "zone": zone}


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


def check_lines_alone(
    lines: Path | None, body: str | None, message_id: str | None, unique_key: str | None
) -> None:
    """Raise RequestError for arguments that have no effect with --lines, so that none is ignored silently."""
    if lines is None:
        return
    if body is not None:
        raise RequestError("--lines and a body: give one of them")
    if message_id is not None:
        raise RequestError("--lines and --id: each line gets its own id")
    if unique_key is not None:
        raise RequestError("--lines and --unique-key: only one message of the key can be pending")


def send_lines(client: Timeball, file: Path, fields: dict[str, object], *, as_json: bool) -> None:
    """Send each line of `file` as a message body, with `fields` for all of them, and print the number of messages."""
    sent = past_rows = past_ms = 0
    source = sys.stdin.buffer if str(file) == "-" else _open_file(file)
    with source, progress_bar(quiet=as_json) as progress:
        task = progress.add_task("sending", total=None)
        for messages in _chunks(source, fields):
            try:
                summary = client.send_many(messages)
            except TimeballError as error:
                raise _with_line_numbers(error, file, sent, len(messages)) from error
            sent += len(messages)
            past_rows, past_ms = past_rows + summary.past_rows, max(past_ms, summary.past_ms)
            progress.update(task, completed=sent)
    past = {"past_rows": past_rows, "past_ms": past_ms} if past_rows else {}
    show({"sent": sent, **past}, [f"{sent:,} messages sent"], as_json=as_json)
    due_ms = fields.get("due_ms")
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
        fields = msgspec.to_builtins(receipt)
        if receipt.replaced is None:  # only a send with a unique key replaces a message
            del fields["replaced"]
        print_json(fields)
        return
    print_line(receipt.id)
    if receipt.outcome == KEPT:
        print_note("kept: this message was pending before, and nothing was sent")
    if receipt.replaced is not None:
        print_note(f"replaced {receipt.replaced.id}, which was due {show_instant(receipt.replaced.due_ms)}")
    if receipt.due_ms is not None and receipt.past_ms:
        print_note(
            f"the due time was in the past: {show_instant(receipt.due_ms)}; the message is delivered now"
        )
    elif receipt.due_ms is not None:
        print_note(f"due {show_instant(receipt.due_ms)}, in {show_wait(receipt.due_ms - receipt.store_ms)}")


def encode_fields(
    topic: str, tag: str | None, keys: list[str] | None, properties: list[str] | None
) -> dict[str, object]:
    """Build the fields that are the same for every line. Raises RequestError for an invalid one."""
    pairs = read_properties(properties)
    return {
        "topic": topic,
        "tag": check_label("tag", tag),
        "keys": keys if keys_text(keys) else None,
        "properties": properties_text(pairs),
    }


def _open_file(file: Path) -> BinaryIO:
    """Open the file of --lines. Raises RequestError."""
    try:
        return file.open("rb")
    except OSError as error:
        raise RequestError(f"--lines {file}: {error.strerror}") from error


def _chunks(source: BinaryIO, fields: dict[str, object]) -> Iterator[list[dict[str, object]]]:
    """Yield lists of at most CHUNK_LINES messages, one for each line. A line has the `fields` that are not None."""
    set_fields = {name: value for name, value in fields.items() if value is not None}
    while lines := [line.rstrip(b"\r\n") for line in islice(source, CHUNK_LINES)]:
        yield [{"body": line, **set_fields} for line in lines]


# ---- get ------------------------------------------------------------------------------------------------------


def get(
    message_id: Annotated[
        str, typer.Argument(metavar="ID", help="The message's id, as printed by send and schedule.")
    ],
    topic: Annotated[str | None, typer.Option("--topic", help="Only a message of this topic.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Show where a message is (waiting, visible in a queue, cancelled or expired), and how far each group is with it.

    If several messages have this id, the newest is shown.

    \b
    Examples:
      timeball get 0d50af5b8e604b4ab4bf7a2f5b5f1f55
      timeball get order-17-reminder --topic orders
      timeball get 0d50af5b8e604b4ab4bf7a2f5b5f1f55 --json | jq .due_ms
    """
    with connect(endpoint) as client:
        located = client.get(message_id, topic)
    document = {"id": message_id, **msgspec.to_builtins(located)}
    show(document, _place_lines(located), as_json=as_json)


def _place_lines(located: MessagePlace) -> Iterator[str]:
    """Yield the lines about a message: its state first, then a line for each consumer group."""
    words = [located.state]
    if located.topic is not None:
        words.append(f"topic {located.topic}")
    if located.queue_id is not None:
        words.append(f"queue {located.queue_id} at {located.queue_offset}")
    if located.due_ms is not None:
        words.append(f"due {show_instant(located.due_ms)}")
    if located.at_ms is not None:
        words.append(f"since {show_instant(located.at_ms)}")
    if located.by is not None:
        words.append(f"by {located.by}")
    if located.reason is not None:
        words.append(f"reason: {located.reason}")
    yield ", ".join(words)
    for group in located.groups:
        yield ", ".join(_group_words(group))


def _group_words(progress: GroupPlace) -> Iterator[str]:
    """Yield the words about a consumer group's progress with the message."""
    yield f"  group {progress.group}: {progress.state}"
    if progress.until_ms is not None:
        yield f"until {show_instant(progress.until_ms)}"
    if progress.attempts:
        yield f"attempt {progress.attempts}"


# ---- pull -----------------------------------------------------------------------------------------------------


def pull(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to read.")],
    group: Annotated[
        str, typer.Option("--group", help="Consumer group; each message goes to one of its members.")
    ] = "cli",
    max_messages: Annotated[int, typer.Option("--max", min=1, help="At most this many.")] = 10,
    wait_ms: Annotated[
        int | None,
        typer.Option(
            "--wait",
            parser=as_parameter(parse_duration_ms),
            metavar="DURATION",
            help="How long to wait for the first message, or for the topic; by default not at all.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until Ctrl-C.")] = False,
    peek: Annotated[
        bool,
        typer.Option("--peek", help="Read from the group's position without acknowledging, over Flight."),
    ] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    flight: FlightOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Pull visible messages and acknowledge them.

    For a message that was scheduled, the output shows how late it was stored in
    its queue.

    \b
    Examples:
      timeball pull orders --max 100 --wait 5s
      timeball pull orders --group billing --follow
      timeball pull orders --peek --json | jq .body
    """
    count = 0
    # --follow waits anyway, so let the broker hold each call: for 5 s, or for --wait if that is longer.
    wait = timedelta(milliseconds=max(wait_ms or 0, 5_000 if follow else 0))
    with connect(endpoint, flight if peek else None) as client:
        try:
            while True:
                pull_messages = client.browse if peek else client.pull
                messages = pull_messages(topic, group, max_messages=max_messages, wait=wait)
                for message in messages:
                    _print_message(message, as_json)
                count += len(messages)
                if messages and not peek:
                    client.ack(messages)
                if not follow or peek:
                    break
        except KeyboardInterrupt:
            pass
        except NotFound as error:
            if wait:  # the wait time has passed, so do not advise to wait
                raise
            raise NotFound(f"{error}; to wait for its first message, say --wait 30s or --follow") from error
        explanation = "" if count else f": {_explain_empty(client, topic, group)}"
    if not as_json:
        print_note(f"{count:,} message{'s' if count != 1 else ''}{explanation}")


def _explain_empty(client: Timeball, topic: str, group: str) -> str:
    """Explain an empty result: a topic with a typing error in its name must not look like an empty topic."""
    try:
        client.queues(topic)
    except NotFound:
        return f"there is no topic {topic!r} yet"
    return f"nothing new for group {group}"


def _print_message(message: Message, as_json: bool) -> None:
    """Print a message: one JSON document, or a line with its time, id, lateness and body."""
    if not as_json:
        text = decode_text(message.body)
        late = f"  {message.lateness_ms:+d} ms" if message.due_ms is not None else ""
        print_line(
            f"{show_instant(message.store_ms)}  {message.id}{late}  {text if text is not None else repr(message.body)}"
        )
        return
    print_json(
        {
            "id": message.id,
            "topic": message.topic,
            **body_fields(message.body),
            "tag": message.tag,
            "keys": message.keys,
            "properties": message.properties,
            "seq": message.seq,
            "queue_id": message.queue_id,
            "queue_offset": message.queue_offset,
            "born_ms": message.born_ms,
            "store_ms": message.store_ms,
            "due_ms": message.due_ms,
            "lateness_ms": message.lateness_ms,
        }
    )


# ---- cancel and reschedule ------------------------------------------------------------------------------------


SENTENCES = {
    "cancelled": "{subject}: cancelled",
    "rescheduled": "{subject}: rescheduled, due {due}",
    "already_cancelled": "{subject}: was cancelled before",
    "released": "{subject}: too late, released at {at}",
    "expired": "{subject}: no longer pending, and the broker no longer keeps its outcome",
    "not_found": "{subject}: no such scheduled message",
    "handed": "{subject}: is pending in another group of the cluster; use its id or key",
    "unavailable": "{subject}: a group of the cluster did not answer; try again",
}

IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Message ids.")]


def cancel(
    ids: IdsArgument = None,
    key: Annotated[str | None, typer.Option("--key", help="Cancel all that carry this business key.")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Cancel scheduled messages by id or by key.

    Each message gets one verdict: cancelled, cancelled before, released (with
    the time), not found, or expired. Expired means: the message is not pending,
    and its outcome is older than the broker keeps. In a cluster, a verdict can
    also state that a group did not answer.

    Exit code 1: at least one verdict was neither cancelled nor cancelled
    before.

    \b
    Examples:
      timeball cancel 0A1B2C3D4E5F60718293A4B5C6D7E8F9
      timeball cancel --key order-17
      timeball schedule orders close --after 30m | xargs timeball cancel --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("give either message ids or --key")
    with connect(endpoint) as client:
        verdicts = client.cancel(key=key) if key is not None else client.cancel(ids=ids or [])
    report_ends(verdicts, success_verdicts={"cancelled", "already_cancelled"}, as_json=as_json)


def reschedule(
    ids: IdsArgument = None,
    key: Annotated[str | None, typer.Option("--key", help="Move all that carry this business key.")] = None,
    after: AfterOption = None,
    at: AtOption = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Move scheduled messages to another due time, by id or by key.

    Each message moves in one step: it is released once, at the new due time and
    not at the old one. Give exactly one of --after and --at. A time in the past
    means now. A message that was released or cancelled before stays as it is,
    and its verdict states which.

    Exit code 1: at least one message was not moved.

    \b
    Examples:
      timeball reschedule 0A1B2C3D4E5F60718293A4B5C6D7E8F9 --after 30m
      timeball reschedule --key order-17 --at 2030-01-31T09:00:00+01:00
      timeball schedule orders close --after 30m | xargs timeball reschedule --after 2h --json
    """
    if bool(ids) == (key is not None):
        raise RequestError("give either message ids or --key")
    due = parse_due(after, at)
    delay = None if due["delay_ms"] is None else f"{due['delay_ms']}ms"
    with connect(endpoint) as client:
        if key is not None:
            verdicts = client.reschedule(key=key, after=delay, at=due["due_ms"])
        else:
            verdicts = client.reschedule(ids=ids or [], after=delay, at=due["due_ms"])
    report_ends(verdicts, success_verdicts={"rescheduled"}, as_json=as_json)


def report_ends(verdicts: Iterable[Verdict], *, success_verdicts: set[str], as_json: bool) -> None:
    """Print each verdict, as a sentence or as JSON, and exit with code 1 when one is not in `success_verdicts`."""
    failed = False
    for verdict in verdicts:
        failed |= verdict.verdict not in success_verdicts
        show(verdict, [sentence(verdict)], as_json=as_json)
    if failed:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def sentence(verdict: Verdict) -> str:
    """Format a verdict as a line for people."""
    return SENTENCES[verdict.verdict].format(
        subject=verdict.subject, at=_time_text(verdict.at_ms), due=_time_text(verdict.due_ms)
    )


def _time_text(time_ms: int | None) -> str:
    return "an unknown time" if time_ms is None else show_instant(time_ms)
