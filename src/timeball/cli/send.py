"""`timeball send`: a message that is visible at once."""

from __future__ import annotations

from timeball.cli.connection import connect
from timeball.cli.messages import (
    BodyArgument,
    IdOption,
    KeysOption,
    LinesOption,
    PropertyOption,
    TagOption,
    TopicArgument,
    only_lines,
    read_body,
    read_properties,
    report,
    send_lines,
)
from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption


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
      timeball send orders 'order 17 was paid' --tag paid --keys 'order-17 anna'
      echo 'order 18 was paid' | timeball send orders
      timeball send orders --lines orders.jsonl
      timeball send orders hello --property region=eu --json
    """
    only_lines(lines, body, message_id)
    with connect(endpoint) as ball:
        if lines is not None:
            encoded = encode_columns(topic, tag, keys, properties)
            send_lines(ball, lines, encoded, as_json=as_json)
            return
        receipt = ball.send(
            topic,
            read_body(body),
            tag=tag,
            keys=keys,
            properties=read_properties(properties),
            message_id=message_id,
        )
        report(receipt, as_json=as_json)


def encode_columns(
    topic: str, tag: str | None, keys: str | None, properties: list[str] | None
) -> dict[str, object]:
    """The columns that are the same for every line."""
    from timeball.message import encode_properties

    pairs = read_properties(properties)
    return {
        "topic": topic,
        "tag": tag,
        "keys": keys,
        "properties": encode_properties(pairs) if pairs else None,
    }
