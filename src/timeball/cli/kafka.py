"""`timeball kafka`: run the bridge between a Kafka cluster and a broker in the foreground."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from timeball.cli import log_lines
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    KAFKA,
    EndpointOption,
    JsonOption,
    is_of_others,
    naming,
    not_installed,
)
from timeball.cli.output import print_json, print_line
from timeball.cli.units import parse_duration_ms
from timeball.model.config import LogFormat, LogLevel
from timeball.model.errors import SetupError

if TYPE_CHECKING:
    from timeball.edges.kafka.bridge import Bridge
    from timeball.edges.kafka.options import BridgeOptions


# The longest time that the intake thread keeps the delivery thread from running. Python's default, 5 ms, is half the
# length of a transaction.
SWITCH_S = 0.001


def _topic(name: str, text: str) -> Any:
    return typer.Option(name, metavar="TOPIC", help=text)


_BROKERS = typer.Option(
    "--bootstrap", envvar="TIMEBALL_KAFKA_BOOTSTRAP", metavar="HOST:PORT,…", help="Kafka's brokers."
)
_NAME = typer.Option("--name", metavar="NAME", help="By which it knows what it has done; by default IN.")
_FILE = typer.Option(
    "--undeliverable",
    metavar="FILE",
    help="For records that Kafka refuses; by default NAME.undeliverable.jsonl.",
)
_START = typer.Option("--from", metavar="earliest|latest", help="Where a bridge of a new name begins.")
_CONFIG = typer.Option(
    "--kafka-config", metavar="FILE", help="Properties of librdkafka, name=value: TLS, accounts."
)
_EVERY = typer.Option("--status-every", metavar="DURATION", help="Between status lines.")
_LEVEL = typer.Option("--log-level", envvar="TIMEBALL_LOG_LEVEL", help="info, warning or error.")
_FORMAT = typer.Option("--log-format", envvar="TIMEBALL_LOG_FORMAT", help="json: one document a line.")


def kafka(
    own: Annotated[str, _topic("--in", "Kafka topic of records that say when.")],
    out: Annotated[str | None, _topic("--out", "Where they go, unless header deliver-to says.")] = None,
    bootstrap: Annotated[str, _BROKERS] = "127.0.0.1:9092",
    dead: Annotated[str | None, _topic("--dead", "For what cannot be taken; by default IN.dead.")] = None,
    name: Annotated[str | None, _NAME] = None,
    position_topic: Annotated[
        str | None, _topic("--position-topic", "Of its position; by default timeball.NAME.position.")
    ] = None,
    undeliverable: Annotated[Path | None, _FILE] = None,
    start: Annotated[str, _START] = "earliest",
    config: Annotated[Path | None, _CONFIG] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    every: Annotated[str, _EVERY] = "10s",
    log_level: Annotated[LogLevel, _LEVEL] = "warning",
    log_format: Annotated[LogFormat, _FORMAT] = "text",
    as_json: JsonOption = False,
) -> None:
    """Delay records of Kafka: take them from one topic, and put them into another at their due times.

    A record's header at (RFC 3339 or milliseconds) or after (30m, PT30M) sets
    its due time. Key, value, headers and partition stay as they are. Each
    record is delivered once to consumers that read committed records, even if
    processes are killed in between. A record with the header cancel cancels the
    pending records with its key.

    \b
    Examples:
      timeball kafka --in orders.delayed --out orders
      timeball kafka --in delayed --bootstrap k1:9093,k2:9093 --kafka-config client.properties
      timeball kafka --in orders.delayed --out orders --json | jq .late_ms
    """
    log_lines.configure(log_level, log_format)
    with naming("--status-every"):
        every_s = parse_duration_ms(every) / 1000
    name = name or own
    where = {
        "bootstrap": bootstrap, "own": own, "out": out, "dead": dead or f"{own}.dead", "name": name,
        "position_topic": position_topic or f"timeball.{name}.position", "start": start,
        "undeliverable": undeliverable or Path(f"{name}.undeliverable.jsonl"),
    }  # fmt: skip
    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()
    bridge = _bridge(where, config, endpoint)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    telling = threading.Thread(target=_tell, args=(bridge, stop, every_s, as_json), name="status")
    telling.start()
    try:
        bridge.run(stop, lambda: _ready(bridge.options, as_json))
    finally:
        stop.set()
        telling.join()


def _bridge(where: dict[str, Any], config: Path | None, endpoint: str) -> Bridge:
    try:
        from timeball.broker.tables.memory import collect_cycles_rarely
        from timeball.edges.kafka.bridge import Bridge
        from timeball.edges.kafka.options import BridgeOptions, read_properties
        from timeball.io.clock import SystemClock
    except ModuleNotFoundError as error:
        if not is_of_others(error):
            raise
        raise not_installed(error, KAFKA) from error
    client = {} if config is None else read_properties(_text(config), str(config))
    collect_cycles_rarely()  # records allocate and free containers, which would start collections often
    return Bridge(BridgeOptions(**where, client=client), endpoint, SystemClock())


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--kafka-config {file}: {error}") from error


def _ready(options: BridgeOptions, as_json: bool) -> None:
    if as_json:
        where = {"in": options.own, "out": options.out, "dead": options.dead, "topic": options.topic}
        print_json({"event": "ready", "name": options.name, **where})
    else:
        print_line(
            f"{options.own} -> {options.out or 'the topic of each record'}, dead letters -> {options.dead}"
        )


def _tell(bridge: Bridge, stop: threading.Event, every_s: float, as_json: bool) -> None:
    """Print a status line every `every_s` seconds, and one at the end."""
    is_over = False
    while not is_over:
        is_over = stop.wait(every_s)
        counts = msgspec.to_builtins(bridge.counts)
        bridge.counts.late_ms = 0  # the largest lateness since the last status line
        if as_json:
            print_json({"event": "status", **counts})
        else:
            print_line("  ".join(f"{name} {number:,}" for name, number in counts.items()))
