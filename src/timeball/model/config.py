"""The settings of a broker, as one frozen record.

Each field is a command line option, an environment variable and a key of the settings file. A field defines all of
these in one place: type, default, help text, bounds. A field whose name contains `_bytes` or `_ms` is a size or a
duration, and users write it with a unit (`64MiB`, `72h`). `Settings` refuses values that cannot work when it is
built, so other code does not have to check them again.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

from timeball.model import limits
from timeball.model.addresses import Allowed, host_names
from timeball.model.errors import SetupError

Durability = Literal["sync", "async"]
StrategyName = Literal["hour_log", "timer_wheel", "level_cascade"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
Acks = Literal["majority", "all"]
ClockName = Literal["system", "manual"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MIB = 1024 * 1024
BROKER_NAME = "timeball"
DELAY_PROPERTIES = ("TIMING", "__STARTDELIVERTIME")
TIMER_WHEEL_MS_MAX = 30 * limits.DAY_MS
PORT_MAX = 65_535


def _of(
    default: Any, text: str, low: int | None = None, high: int | None = None, *, advanced: bool = False
) -> Any:
    """Define a setting: its default, its help text, and its smallest and largest allowed value.

    `advanced`: a newcomer does not need it, so `--help` lists it after the others.
    """
    return field(default=default, metadata={"help": text, "low": low, "high": high, "advanced": advanced})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a broker or a cluster node. The constructor raises SetupError for values that cannot work."""

    # folder and address
    data: Path = _of(Path("timeball-data"), "Data folder: the log and the pending messages.")
    host: str = _of("127.0.0.1", "Address to listen on.")
    port: int = _of(7400, "Port to listen on; 0 lets the system choose.", 0, PORT_MAX)

    # access control and TLS (docs/security.md)
    access_file: str = _of(
        "",
        "File with the accounts and their rights (TOML, not readable by others); empty: no access control.",
    )
    tls_cert: str = _of("", "Certificate with its chain, PEM; with it all ports use TLS.")
    tls_key: str = _of("", "Private key of --tls-cert, PEM, without a password.")
    allow_plaintext: bool = _of(False, "Listen without TLS on an address that others can reach.")

    http_port: int = _of(7480, "Port for HTTP clients; 0 lets the system choose, -1 is none.", -1, PORT_MAX)

    http_hosts: str = _of(  # docs/security.md
        "",
        "Host names, separated by commas, that HTTP clients of a broker without accounts may use, besides localhost, "
        "IP addresses, --host and --advertise.",
        advanced=True,
    )

    push_allow: str = _of(
        "",
        "Host names and networks, separated by commas, outside of the public internet that a push may reach.",
        advanced=True,
    )

    # RocketMQ clients: the defaults are RocketMQ's own ports, for gRPC those of its proxy
    name_server_port: int = _of(
        9876, "Port for RocketMQ clients' look-ups; 0 lets the system choose, -1 is none.", -1, PORT_MAX
    )
    remoting_port: int = _of(
        10911, "Port for RocketMQ clients; 0 lets the system choose, -1 is none.", -1, PORT_MAX
    )
    grpc_port: int = _of(
        8081, "Port for RocketMQ 5's gRPC clients; 0 lets the system choose, -1 is none.", -1, PORT_MAX
    )
    broker_name: str = _of(
        BROKER_NAME, "The broker's name for RocketMQ clients; in a cluster the group's.", advanced=True
    )
    cluster_name: str = _of("DefaultCluster", "The cluster's name for RocketMQ clients.", advanced=True)
    advertise: str = _of(
        "", "host[:port] that RocketMQ clients connect to; empty: the address that they used."
    )

    # the log
    durability: Durability = _of(
        "sync", "'sync': acknowledge messages on disk; 'async': a power cut may lose the last second."
    )
    segment_bytes: int = _of(256 * MIB, "Size of one file of the log.", 1 * MIB, 2048 * MIB, advanced=True)
    retention_ms: int = _of(  # RocketMQ's fileReservedTime
        72 * limits.HOUR_MS, "How long the log keeps delivered messages."
    )
    unread_retention_ms: int = _of(
        7 * limits.DAY_MS,
        "How long the log keeps messages that a consumer group with offsets has not read, if longer than "
        "--retention-ms.",
        0,
        advanced=True,
    )
    dead_letter_retention_ms: int = _of(
        30 * limits.DAY_MS,
        "How long dead letters are kept, if longer than --retention-ms; 0: until they are resolved.",
        0,
        advanced=True,
    )
    kept_bytes: int = _of(
        16 * 1024 * MIB,
        "Disk space for unread messages and dead letters beyond the retention; the oldest go first.",
        0,
        advanced=True,
    )
    checkpoint_interval_ms: int = _of(
        10_000,
        "How often the schedule is saved; a restart reads the log from the last save on.",
        advanced=True,
    )
    ack_save_ms: int = _of(
        50,
        "Acknowledgements and leases are durable after this time; 0: before the answer.",
        0,
        1_000,
        advanced=True,
    )
    idempotency_ms: int = _of(
        limits.DAY_MS, "How long the broker recognises a repeated send by its idempotency key.",
        limits.SECOND_MS, 30 * limits.DAY_MS, advanced=True,
    )  # fmt: skip

    # clusters (docs/cluster.md): not used without --cluster
    cluster: str = _of("", "Cluster that this node belongs to; empty: a single broker.")
    node: str = _of("", "This node's name, unique in the cluster.")
    group: str = _of(
        "g1", "Group whose log this node keeps; several groups, separated by commas: a process for each."
    )
    etcd: str = _of("", "Addresses of etcd's members, separated by commas, as http://host:2379.")
    etcd_ca: str = _of("", "CA certificates that verify etcd's, PEM; empty: the system's.", advanced=True)
    etcd_cert: str = _of("", "Client certificate for etcd, PEM.", advanced=True)
    etcd_key: str = _of("", "Private key of --etcd-cert, PEM, without a password.", advanced=True)
    etcd_user: str = _of("", "User name for etcd; the password is in --etcd-password-file.", advanced=True)
    etcd_password_file: str = _of(
        "", "File with the password of --etcd-user, not readable by others.", advanced=True
    )
    replication_port: int = _of(7410, "Port for the other nodes of the cluster.", 1, PORT_MAX)
    replication_ca: str = _of(
        "",
        "CA certificates that verify the other nodes', PEM; for TLS between nodes, with --tls-cert and --tls-key.",
        advanced=True,
    )
    acks: Acks = _of(
        "majority",
        "Replicas that must store a commit before it is acknowledged: majority or all.",
        advanced=True,
    )
    lease_ttl_ms: int = _of(
        1_000,
        "Time without contact after which a leader is replaced; at least 1 s.",
        limits.SECOND_MS,
        limits.MINUTE_MS,
        advanced=True,
    )

    # topics
    queues_per_topic: int = _of(  # RocketMQ's defaultTopicQueueNums
        8, "Number of queues of a topic created on first use.", 1, limits.QUEUES_PER_TOPIC_MAX, advanced=True
    )
    auto_create_topics: bool = _of(True, "Create a topic when its first message arrives.", advanced=True)
    check_message_types: bool = _of(  # RocketMQ's enableTopicMessageTypeCheck
        True,
        "Topics with a message.type refuse other types from gRPC clients, as RocketMQ's do.",
        advanced=True,
    )

    # scheduled messages
    delay_ms_max: int = _of(
        limits.DELAY_MS_MAX, "The longest delay accepted.", 1, limits.DELAY_MS_MAX, advanced=True
    )
    delay_levels: str = _of(  # RocketMQ's messageDelayLevel
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        "Delays of RocketMQ's delay levels: level n is the nth item; units s, m, h, d.",
        advanced=True,
    )
    strategy: StrategyName = _of(  # docs/designs.md
        "hour_log", "How scheduled messages are stored: hour_log, timer_wheel or level_cascade."
    )
    timer_precision_ms: int = _of(  # RocketMQ's timerPrecisionMs
        1_000,
        "Width of a slot of the timer wheel; it makes no message late.",
        1,
        limits.SECOND_MS,
        advanced=True,
    )
    timer_wheel_ms: int = _of(
        3 * limits.DAY_MS, "Time span of the timer wheel; messages that are due later are rolled.",
        limits.MINUTE_MS, TIMER_WHEEL_MS_MAX, advanced=True,
    )  # fmt: skip
    timer_congest_num_each_slot: int = _of(
        0,
        "Largest number of scheduled messages in a slot of the wheel; more are refused. 0: no limit.",
        0,
        advanced=True,
    )
    delay_properties: str = _of(
        "",
        "User properties of RocketMQ clients that delay a message, separated by commas: TIMING, __STARTDELIVERTIME.",
        advanced=True,
    )

    # compaction of pending messages: the pipeline does it while it runs, otherwise the broker itself
    compact_rows: int = _of(
        1_000_000,
        "Move scheduled messages to the pending table when the log's tail has this many; 0: the broker never does, nor "
        "does it merge files, but a pipeline still may.",
        0,
        advanced=True,
    )
    compact_interval_ms: int = _of(
        60_000,
        "Also move them when this time has passed and the tail has a hundredth of --compact-rows.",
        advanced=True,
    )
    table: str = _of(  # docs/pipeline/places.md
        "",
        "URI of the pending table in an object store, as s3://bucket/path; empty: the data folder.",
        advanced=True,
    )
    table_cache_bytes: int = _of(
        4096 * MIB,
        "Approximate size of the local cache of a table in an object store.",
        1 * MIB,
        advanced=True,
    )

    clock: ClockName = _of(  # docs/testing.md
        "system",
        "'manual': time stands still until POST /v1/clock/advance, for tests of applications; 'system': the machine's.",
        advanced=True,
    )

    # traces for OpenTelemetry (docs/tracing.md)
    traces: bool = _of(
        False,
        "Export spans of messages by OTLP/HTTP, as configured by OTEL_EXPORTER_OTLP_ENDPOINT and the other OTEL_* "
        "variables.",
        advanced=True,
    )

    # log lines on stderr
    log_level: LogLevel = _of(
        "warning", "Lowest level of the log lines on stderr: debug, info, warning or error."
    )
    log_format: LogFormat = _of(
        "text", "Format of the log lines: text, or json for one document per line.", advanced=True
    )

    def __post_init__(self) -> None:
        """Check values and combinations. Raises SetupError, which names the option."""
        hints = types()
        for setting in fields(self):
            value, option = getattr(self, setting.name), option_name(setting.name)
            choices = get_args(hints[setting.name])
            if choices and value not in choices:
                text = f"{option} {value}: one of {', '.join(choices)}"
                # Operators who know RocketMQ may expect its delay levels among the strategies.
                levels = "; delay levels are always there, beside it" if setting.name == "strategy" else ""
                raise SetupError(text + levels)
            low, high = setting.metadata["low"], setting.metadata["high"]
            if (low is not None and value < low) or (high is not None and value > high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                raise SetupError(f"{option} {value}: {bounds}")
        for name in ("broker_name", "cluster_name"):
            value = getattr(self, name)
            if not limits.NAME.fullmatch(value) or len(value) > limits.TOPIC_BYTES_MAX:
                allowed = "1 to 127 of the characters % | a-z A-Z 0-9 _ -"
                raise SetupError(f"{option_name(name)} {value!r}: {allowed}")
        self._check_security()
        self._check_table()
        self._check_cluster()
        Allowed.parse(self.push_allow)
        host_names(self.http_hosts)
        if unknown := sorted(self.delay_names - set(DELAY_PROPERTIES)):
            known = " and ".join(DELAY_PROPERTIES)
            raise SetupError(f"--delay-properties {self.delay_properties}: {unknown[0]!r} is none of {known}")

    @property
    def delay_names(self) -> frozenset[str]:
        """The names of the user properties that delay a message."""
        return frozenset(name.strip() for name in self.delay_properties.split(",") if name.strip())

    @property
    def compact_early_rows(self) -> int:
        """The smallest number of scheduled messages that a compaction moves once `compact_interval_ms` has passed."""
        return max(self.compact_rows // 100, 1)

    def _check_security(self) -> None:
        """Raise SetupError for a certificate or key alone, and for plain text on a host that others can reach."""
        if bool(self.tls_cert) != bool(self.tls_key):
            present, missing = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise SetupError(f"{present} is of no use without {missing}: name both files, or none")
        if not (self.tls_cert or self.allow_plaintext or is_loopback(self.host)):
            raise SetupError(
                f"--host {self.host}: others can reach the broker there and read its messages. Set a certificate "
                "(--tls-cert, --tls-key), or --allow-plaintext for a network that you trust"
            )

    def _check_table(self) -> None:
        """Raise SetupError for --table together with --cluster."""
        if self.table and self.cluster:
            raise SetupError(
                "--table is of no use with --cluster: each replica of a group keeps the pending table in its folder"
            )

    def _check_cluster(self) -> None:
        """Raise SetupError for a setting that a cluster needs and does not have, or that it does not allow."""
        if not self.cluster:
            return
        if self.clock == "manual":
            raise SetupError("--clock manual: a cluster follows the clocks of its machines")
        for name in ("node", "etcd"):
            if not getattr(self, name):
                raise SetupError(f"--cluster {self.cluster} needs {option_name(name)}")
        if not (self.replication_ca or self.allow_plaintext or is_loopback(self.host)):
            raise SetupError(
                f"--host {self.host}: others can read and change the messages between the nodes. Set certificates "
                "(--replication-ca, --tls-cert, --tls-key), or --allow-plaintext for a network that you trust"
            )
        for name in ("port", "http_port", "name_server_port", "remoting_port", "grpc_port"):
            if getattr(self, name) == 0:
                raise SetupError(
                    f"{option_name(name)} 0: a node of a cluster is found by its address, so name the port"
                )


@functools.cache
def types() -> Mapping[str, Any]:
    """Read the types of the fields of Settings, by field name."""
    return typing.get_type_hints(Settings)


def option_name(name: str) -> str:
    """Convert a field's name to its option: segment_bytes -> --segment-bytes."""
    return "--" + name.replace("_", "-")


def is_loopback(host: str) -> bool:
    """Check whether only this machine can reach the address.

    The only name that counts is "localhost", because other names may be changed to point elsewhere.
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
