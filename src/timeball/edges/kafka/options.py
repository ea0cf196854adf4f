"""The settings of a bridge: its topics, Kafka's brokers, and the properties of Kafka's client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from timeball.model.errors import SetupError

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# A record's id contains topic, partition and offset, and has at most 255 bytes in Timeball.
TOPIC_CHARACTERS_MAX = 200
# Exactly-once delivery depends on these properties, so a properties file may not set them.
FIXED = frozenset(
    {
        "acks", "allow.auto.create.topics", "auto.offset.reset", "bootstrap.servers", "enable.auto.commit",
        "enable.idempotence", "enable.partition.eof", "group.id", "isolation.level", "partitioner",
        "transactional.id",
    }
)  # fmt: skip


Value = str | int | float | bool  # the value of a property of Kafka's client


@dataclass(frozen=True)
class BridgeOptions:
    """The settings of one bridge.

    `own` is the topic that it reads. `client` has properties of Kafka's client, for TLS and accounts. `undeliverable`
    is the file for records that Kafka accepts neither unchanged nor as dead letters.
    """

    bootstrap: str
    own: str
    out: str | None
    dead: str
    name: str
    position_topic: str
    undeliverable: Path
    start: str = "earliest"
    client: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise SetupError(f"--name {self.name}: 1 to 100 letters, digits, dots, dashes and underscores")
        if len(self.own) > TOPIC_CHARACTERS_MAX:
            raise SetupError(f"--in {self.own}: at most {TOPIC_CHARACTERS_MAX} characters")
        if self.start not in ("earliest", "latest"):
            raise SetupError(f"--from {self.start}: earliest or latest")
        if self.out == self.own:
            raise SetupError(f"--out {self.out}: the topic of --in; records would go round for ever")
        if self.out == self.position_topic:
            raise SetupError(
                f"--out {self.out}: the topic of --position-topic; it is for the bridge's position alone"
            )
        if self.dead in (self.own, self.position_topic):
            raise SetupError(f"--dead {self.dead}: a topic of its own, not that of --in or --position-topic")
        if wrong := sorted(FIXED & self.client.keys()):
            raise SetupError(f"--kafka-config: {', '.join(wrong)} cannot be chosen: exactly once rests on it")

    @property
    def topic(self) -> str:
        """The topic in Timeball of this bridge's pending messages. Topics there contain no dots."""
        return "kafka-" + self.name.replace(".", "_")

    def client_properties(self, **more: Value) -> dict[str, Value]:
        """Build properties for a Kafka client. The names in `more` have underscores instead of dots."""
        own = {name.replace("_", "."): value for name, value in more.items()}
        return {
            "bootstrap.servers": self.bootstrap,
            "allow.auto.create.topics": False,
            # A broker that restarts is back within seconds, and the client's default is ten.
            "reconnect.backoff.max.ms": 1_000,
            **self.client,
            **own,
        }


def read_properties(text: str, file: str) -> dict[str, str]:
    """Parse a properties file: a line `name=value` each, and comments that begin with `#`. Raises SetupError."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, mark, value = line.partition("=")
        if not mark or not name.strip():
            raise SetupError(f"--kafka-config {file}: line {number} is not name=value")
        found[name.strip()] = value.strip()
    return found
