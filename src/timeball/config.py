"""One frozen record of settings: a field is a command-line option is a key of the settings file.

`Settings` refuses what cannot work when it is built, so that nothing further in has to check again.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from timeball import limits
from timeball.errors import SetupError

Durability = Literal["sync", "async"]
Schedule = Literal["hour_log", "timer_wheel", "level_cascade"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
RecallAnswers = Literal["definite", "rocketmq"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MIB = 1024 * 1024
TIMER_WHEEL_MS_MAX = 30 * limits.DAY_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may choose. Units stand last in each name."""

    # where
    data: Path = Path("timeball-data")
    host: str = "127.0.0.1"
    port: int = 7400

    # who may come in (docs/security.md)
    access_file: str = ""  # accounts and what each may do; empty: everybody may do everything
    tls_cert: str = ""  # PEM, with the chain; with a key, all ports speak TLS and nothing else
    tls_key: str = ""
    allow_plaintext: bool = False  # on an address that is not this machine's alone

    # RocketMQ clients
    name_server_port: int = 9876  # RocketMQ's own ports; -1: do not listen
    remoting_port: int = 10911
    grpc_port: int = 8081  # RocketMQ's proxy listens there
    broker_name: str = "timeball"
    cluster_name: str = "DefaultCluster"
    advertise: str = ""  # host[:port] that RocketMQ clients dial; empty: the address they came in by

    recall_answers: RecallAnswers = "definite"  # or as a stock broker does (docs/cancel.md)

    # the log
    durability: Durability = (
        "sync"  # "async" acknowledges before the disk has it: it may lose the last second
    )
    segment_bytes: int = 256 * MIB
    retention_ms: int = 72 * limits.HOUR_MS  # RocketMQ's fileReservedTime
    checkpoint_interval_ms: int = 10_000

    # topics
    queues_per_topic: int = 8  # RocketMQ's defaultTopicQueueNums
    auto_create_topics: bool = True
    check_message_types: bool = True  # RocketMQ's enableTopicMessageTypeCheck, for clients that say a type

    # waiting
    delay_ms_max: int = limits.DELAY_MS_MAX
    delay_levels: str = (  # RocketMQ's messageDelayLevel: level n is the nth item
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    )
    schedule: Schedule = "hour_log"  # who keeps promises for an instant (docs/designs.md)
    timer_precision_ms: int = 1_000  # RocketMQ's timerPrecisionMs: a slot's width; nothing is late by it
    timer_wheel_ms: int = 3 * limits.DAY_MS  # how far the ring reaches; what is due later rolls
    timer_congest_num_each_slot: int = 0  # refuse more promises than this for one slot; 0: never
    timing_zone: str = "UTC"  # of a TIMING property that names none
    gather_ahead_ms: int = 10_000  # bodies due within this time are in memory
    gather_bytes: int = 512 * MIB  # and never more than about this much of them
    dispatch_grace_ms: int = (
        2_000  # what a dispatcher has not brought so long after its instant, the broker loads
    )

    # moving what waits; the pipeline does it when it runs, the broker itself otherwise
    compact_rows: int = 1_000_000  # compact when the tail holds this many promises
    compact_interval_ms: int = 60_000  # or when this time has passed and there is anything worth moving
    compact_rows_min: int = 10_000  # "worth moving": fewer rows wait for the next round
    compact_self: bool = True

    # what is logged, on stderr
    log_level: LogLevel = "warning"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work, naming the option."""
        if not 0 <= self.port <= 65_535:
            raise SetupError(f"--port {self.port}: a port lies between 0 and 65535")
        for option, port in (
            ("--name-server-port", self.name_server_port),
            ("--remoting-port", self.remoting_port),
            ("--grpc-port", self.grpc_port),
        ):
            if not -1 <= port <= 65_535:
                raise SetupError(f"{option} {port}: a port lies between 0 and 65535; -1 is none")
        for option, name in (("--broker-name", self.broker_name), ("--cluster-name", self.cluster_name)):
            if not limits.NAME.fullmatch(name) or len(name) > limits.TOPIC_BYTES_MAX:
                raise SetupError(f"{option} {name!r}: 1 to 127 of the characters % | a-z A-Z 0-9 _ -")
        self._check_security()
        if self.recall_answers not in get_args(RecallAnswers):
            raise SetupError(f"--recall-answers {self.recall_answers}: it is 'definite' or 'rocketmq'")
        if self.durability not in ("sync", "async"):
            raise SetupError(f"--durability {self.durability}: it is 'sync' or 'async'")
        if self.log_level not in get_args(LogLevel):
            raise SetupError(f"--log-level {self.log_level}: one of {', '.join(get_args(LogLevel))}")
        if self.log_format not in get_args(LogFormat):
            raise SetupError(f"--log-format {self.log_format}: it is 'text' or 'json'")
        if not 1 * MIB <= self.segment_bytes <= 2048 * MIB:
            raise SetupError(f"--segment-bytes {self.segment_bytes}: between 1 MiB and 2 GiB")
        if not 1 <= self.queues_per_topic <= limits.QUEUES_PER_TOPIC_MAX:
            raise SetupError(
                f"--queues-per-topic {self.queues_per_topic}: between 1 and {limits.QUEUES_PER_TOPIC_MAX}"
            )
        if not 0 < self.delay_ms_max <= limits.DELAY_MS_MAX:
            raise SetupError(
                f"--delay-ms-max {self.delay_ms_max}: between 1 and {limits.DELAY_MS_MAX} (ten years)"
            )
        self._check_waiting()
        if self.gather_ahead_ms < 1_000:
            raise SetupError(f"--gather-ahead-ms {self.gather_ahead_ms}: at least 1000")
        if not 0 <= self.dispatch_grace_ms <= limits.HOUR_MS:
            raise SetupError(f"--dispatch-grace-ms {self.dispatch_grace_ms}: between 0 and {limits.HOUR_MS}")

    def _check_security(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            there, missing = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise SetupError(f"{there} is of no use without {missing}: name both files, or none")
        if not (self.tls_cert or self.allow_plaintext or is_loopback(self.host)):
            raise SetupError(
                f"--host {self.host}: others could reach the broker there, and read what it is sent. Give it a "
                "certificate (--tls-cert, --tls-key), or say --allow-plaintext if the network is one you trust"
            )

    def _check_waiting(self) -> None:
        if self.schedule not in SCHEDULES:
            # Said because somebody will try it.
            levels = "delay levels are always there, beside it"
            raise SetupError(f"--schedule {self.schedule}: one of {', '.join(SCHEDULES)}; {levels}")
        if not 1 <= self.timer_precision_ms <= limits.SECOND_MS:
            raise SetupError(
                f"--timer-precision-ms {self.timer_precision_ms}: between 1 and {limits.SECOND_MS}"
            )
        least_ms = limits.MINUTE_MS
        if not least_ms <= self.timer_wheel_ms <= TIMER_WHEEL_MS_MAX:
            raise SetupError(
                f"--timer-wheel-ms {self.timer_wheel_ms}: between {least_ms} and {TIMER_WHEEL_MS_MAX} (30 days)"
            )
        if self.timer_congest_num_each_slot < 0:
            raise SetupError(f"--timer-congest-num-each-slot {self.timer_congest_num_each_slot}: 0 is none")
        try:
            ZoneInfo(self.timing_zone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise SetupError(
                f"--timing-zone {self.timing_zone!r}: no IANA time zone, such as Europe/Berlin"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. No name but "localhost" counts: who knows what it is tomorrow."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
