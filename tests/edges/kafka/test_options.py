"""The options of a bridge: their limits, and the properties of Kafka's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timeball.edges.kafka.options import BridgeOptions, read_properties
from timeball.model.errors import SetupError


def options(**changes: Any) -> BridgeOptions:
    """Return options with these changes."""
    given = {
        "bootstrap": "127.0.0.1:9092", "own": "in", "out": "out", "dead": "in.dead", "name": "in.v1",
        "position_topic": "timeball.in.position", "undeliverable": Path("in.undeliverable.jsonl"), **changes,
    }  # fmt: skip
    return BridgeOptions(**given)


def test_the_topic_in_timeball_has_no_dots() -> None:
    assert options().topic == "kafka-in_v1"


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"name": "a b"}, "--name a b: 1 to 100"),
        ({"start": "17"}, "--from 17: earliest or latest"),
        ({"out": "in"}, "--out in: the topic of --in"),
        ({"out": "timeball.in.position"}, "--out timeball.in.position: the topic of --position-topic"),
        ({"own": "t" * 201}, "--in t+: at most 200 characters"),
        ({"dead": "in"}, "--dead in: a topic of its own"),
        ({"dead": "timeball.in.position"}, "--dead"),
        ({"client": {"acks": "0", "group.id": "g"}}, "--kafka-config: acks, group.id cannot be chosen"),
    ],
)
def test_a_wrong_option_is_named_in_the_error(changes: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(SetupError, match=expected_text):
        options(**changes)


def test_properties_of_a_file_become_client_properties() -> None:
    file_properties = read_properties(
        "# TLS\nsecurity.protocol = SSL\n\nssl.ca.location=/etc/ca=1.pem\n", "client"
    )
    properties = options(client=file_properties).client_properties(group_id="g")
    assert properties["security.protocol"] == "SSL" and properties["ssl.ca.location"] == "/etc/ca=1.pem"
    assert properties["group.id"] == "g" and properties["bootstrap.servers"] == "127.0.0.1:9092"
    with pytest.raises(SetupError, match="--kafka-config client: line 2 is not name=value"):
        read_properties("\nnothing\n", "client")
