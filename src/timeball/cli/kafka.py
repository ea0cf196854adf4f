"""`timeball kafka`: run the bridge between a Kafka cluster and a broker in the foreground."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from timeball.cli import output
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    DEFAULT_FLIGHT,
    KAFKA,
    EndpointOption,
    FlightOption,
    JsonOption,
    naming,
    needs,
    parse_duration_ms,
)
from timeball.cli.output import print_json, print_line
from timeball.io.cycle_collection import CYCLES
from timeball.model.config import LogFormat, LogLevel
from timeball.model.errors import SetupError

if TYPE_CHECKING:
    from timeball.edges.kafka.bridge import Bridge
    from timeball.edges.kafka.options import BridgeOptions


# The longest time that the intake thread keeps the delivery thread from running. Python's default, 5 ms, is half the
# length of a transaction.
SWITCH_S = 0.001


def _topic_option(option: str, help_text: str) -> Any:
    return typer.Option(option, metavar="TOPIC", help=help_text)


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
    in_topic: Annotated[str, _topic_option("--in", "Kafka topic of records that say when.")],
    out_topic: Annotated[
        str | None, _topic_option("--out", "Where they go, unless header deliver-to says.")
    ] = None,
    bootstrap: Annotated[str, _BROKERS] = "127.0.0.1:9092",
    dead_topic: Annotated[
        str | None, _topic_option("--dead", "For what cannot be taken; by default IN.dead.")
    ] = None,
    name: Annotated[str | None, _NAME] = None,
    position_topic: Annotated[
        str | None, _topic_option("--position-topic", "Of its position; by default timeball.NAME.position.")
    ] = None,
    undeliverable: Annotated[Path | None, _FILE] = None,
    start: Annotated[str, _START] = "earliest",
    config: Annotated[Path | None, _CONFIG] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    flight: FlightOption = DEFAULT_FLIGHT,
    status_every: Annotated[str, _EVERY] = "10s",
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
    output.configure_logging(log_level, log_format)
    with naming("--status-every"):
        status_every_s = parse_duration_ms(status_every) / 1000
    name = name or in_topic
    options = {
        "bootstrap": bootstrap, "own": in_topic, "out": out_topic, "dead": dead_topic or f"{in_topic}.dead",
        "name": name, "position_topic": position_topic or f"timeball.{name}.position", "start": start,
        "undeliverable": undeliverable or Path(f"{name}.undeliverable.jsonl"),
    }  # fmt: skip
    sys.setswitchinterval(SWITCH_S)
    stop = threading.Event()
    bridge = _build_bridge(options, config, endpoint, flight)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    status_thread = threading.Thread(
        target=_print_statuses, args=(bridge, stop, status_every_s, as_json), name="status"
    )
    status_thread.start()
    try:
        bridge.run(stop, lambda: _print_ready(bridge.options, as_json))
    finally:
        stop.set()
        status_thread.join()


def _build_bridge(options: dict[str, Any], config: Path | None, endpoint: str, flight: str) -> Bridge:
    """Build the bridge, with the properties in the file `config` for Kafka's client.

    Raises SetupError for a missing package, an unreadable file and invalid options.
    """
    with needs(KAFKA):
        from timeball.edges.kafka.bridge import Bridge
        from timeball.edges.kafka.options import BridgeOptions, read_properties
        from timeball.io.clock import SystemClock
    client = {} if config is None else read_properties(_read_config(config), str(config))
    CYCLES.start()  # records allocate and free containers, which would start collections often
    return Bridge(BridgeOptions(**options, client=client), endpoint, flight, SystemClock())


def _read_config(file: Path) -> str:
    """Read the text of the file of --kafka-config. Raises SetupError."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--kafka-config {file}: {error}") from error


def _print_ready(options: BridgeOptions, as_json: bool) -> None:
    """Print the topics of the bridge, once it runs."""
    if as_json:
        topics = {"in": options.own, "out": options.out, "dead": options.dead, "topic": options.topic}
        print_json({"event": "ready", "name": options.name, **topics})
    else:
        print_line(
            f"{options.own} -> {options.out or 'the topic of each record'}, dead letters -> {options.dead}"
        )


def _print_statuses(bridge: Bridge, stop: threading.Event, interval_s: float, as_json: bool) -> None:
    """Print a status line every `interval_s` seconds until `stop` is set, and one at the end. Runs in a thread."""
    is_last = False
    while not is_last:
        is_last = stop.wait(interval_s)
        CYCLES.collect_if_due(None)  # in this thread, because it runs at regular intervals
        counts = msgspec.to_builtins(bridge.counts)
        bridge.counts.late_ms = 0  # the largest lateness since the last status line
        if as_json:
            print_json({"event": "status", **counts})
        else:
            print_line("  ".join(f"{name} {number:,}" for name, number in counts.items()))
