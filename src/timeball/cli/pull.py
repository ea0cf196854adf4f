"""`timeball pull`: read the visible messages of a topic, as a group's member or, with --peek, without taking them."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, as_parameter, connect
from timeball.cli.output import print_json, print_line, print_note
from timeball.cli.units import parse_duration_ms, show_instant
from timeball.model.errors import NotFound

if TYPE_CHECKING:
    from timeball.client.messages import Message
    from timeball.client.timeball import Timeball


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
        bool, typer.Option("--peek", help="Read from the group's position without acknowledging.")
    ] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
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
    with connect(endpoint) as client:
        try:
            while True:
                pull_messages = client.browse if peek else client.pull
                messages = pull_messages(topic, group, max_messages=max_messages, wait=wait)
                for message in messages:
                    _print(message, as_json)
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


def _print(message: Message, as_json: bool) -> None:
    text = _decode_text(message.body)
    if not as_json:
        late = f"  {message.lateness_ms:+d} ms" if message.due_ms is not None else ""
        print_line(
            f"{show_instant(message.store_ms)}  {message.id}{late}  {text if text is not None else repr(message.body)}"
        )
        return
    body = {"body": text} if text is not None else {"body_base64": base64.b64encode(message.body).decode()}
    print_json(
        {
            "id": message.id,
            "topic": message.topic,
            **body,
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


def _decode_text(body: bytes) -> str | None:
    """Decode a body as UTF-8. None when it is not text."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
