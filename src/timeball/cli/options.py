"""Options that several commands share, and the settings as options.

`Settings` is the list of what an operator may choose; `settings_options` makes one option of each of its
fields, so that the command line cannot fall behind it. A value is taken from, in this order: the option, the
environment (TIMEBALL_PORT for --port), the file named with --settings (TOML, the same names), the default.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from timeball.cli.quantities import parse_duration_ms, parse_size_bytes, show_bytes, show_ms
from timeball.config import Settings
from timeball.errors import RequestError, SetupError

EndpointOption = Annotated[
    str,
    typer.Option("--endpoint", envvar="TIMEBALL_ENDPOINT", metavar="URI", help="Where the broker listens."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one document a line.")]
DEFAULT_ENDPOINT = "grpc://127.0.0.1:7400"

HELP = {
    "data": "Folder that holds the log and what waits.",
    "host": "Address to listen on.",
    "port": "Port to listen on; 0 lets the system choose.",
    "access_file": "Accounts and what each may do (TOML, not readable by others); empty: no access control.",
    "tls_cert": "Certificate with its chain, PEM; all ports speak TLS then.",
    "tls_key": "Its key, PEM, without a password.",
    "allow_plaintext": "Listen without TLS on an address that others can reach.",
    "name_server_port": "Port for RocketMQ clients' look-ups; 0 lets the system choose, -1 is none.",
    "remoting_port": "Port for RocketMQ clients; 0 lets the system choose, -1 is none.",
    "grpc_port": "Port for RocketMQ 5's gRPC clients; 0 lets the system choose, -1 is none.",
    "broker_name": "The broker's name for RocketMQ clients.",
    "cluster_name": "The cluster's name for RocketMQ clients.",
    "advertise": "host[:port] that RocketMQ clients dial; empty: the address they came in by.",
    "recall_answers": "'definite': success means it will not be delivered; 'rocketmq': as a stock broker answers.",
    "durability": "'sync' acknowledges what the disk has; 'async' may lose the last second in a power cut.",
    "segment_bytes": "Size of one file of the log.",
    "retention_ms": "How long the log keeps what was delivered.",
    "checkpoint_interval_ms": "How often the schedule is saved; a restart reads the log from there.",
    "queues_per_topic": "Queues of a topic made on first use.",
    "auto_create_topics": "Make a topic when the first message for it arrives.",
    "check_message_types": "Topics with a message.type refuse other types from gRPC clients, as RocketMQ's do.",
    "delay_ms_max": "The longest delay accepted.",
    "delay_levels": "What RocketMQ's delay levels stand for: level n is the nth item; units s, m, h, d.",
    "schedule": "Who keeps promises for an instant: hour_log, timer_wheel or level_cascade.",
    "timer_precision_ms": "Width of a slot of the timer wheel; nothing is late by it.",
    "timer_wheel_ms": "How far the timer wheel reaches; what is due later is rolled.",
    "timer_congest_num_each_slot": "Refuse more promises than this for one slot of the wheel; 0: never.",
    "timing_zone": "Time zone of a TIMING property that names none.",
    "gather_ahead_ms": "Bodies due within this time are held in memory.",
    "gather_bytes": "And never more than about this much of them.",
    "dispatch_grace_ms": "What Spark's dispatch has not brought so long after its instant, the broker loads.",
    "compact_rows": "Move promises to the pending table when this many wait in the log's tail.",
    "compact_interval_ms": "Or when this time has passed and enough wait.",
    "compact_rows_min": "Fewer than this are left for the next round.",
    "compact_self": "The broker compacts by itself while no pipeline does.",
    "log_level": "Least level of the lines on stderr: debug, info, warning or error.",
    "log_format": "Of these lines: text, or json for one document a line.",
}


def as_parameter(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose refusal names the option it was given to."""

    def parser(text: str) -> Any:
        try:
            return parse(text)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from error

    parser.__name__ = parse.__name__
    return parser


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings, …)` one option for each field of Settings, and --settings."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    hints = typing.get_type_hints(Settings)
    made = [_option(field, hints[field.name]) for field in fields(Settings)]
    file = inspect.Parameter("settings_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_FILE)

    @functools.wraps(command)
    def with_settings(**given: Any) -> None:
        chosen = {field.name: given.pop(field.name) for field in fields(Settings)}
        command(build_settings(given.pop("settings_file"), chosen), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_settings.__signature__ = inspect.Signature([*made, file, *parameters])  # type: ignore[attr-defined]
    with_settings.__annotations__ = {p.name: p.annotation for p in [*made, file, *parameters]}
    return with_settings


_FILE = Annotated[
    Path | None,
    typer.Option(
        "--settings", envvar="TIMEBALL_SETTINGS", metavar="FILE", help="Settings in TOML, same names."
    ),
]


def _option(field: Field[Any], hint: Any) -> inspect.Parameter:
    """One field as an optional parameter: None means that nobody said anything."""
    about: dict[str, Any] = {
        "help": HELP[field.name],
        "envvar": f"TIMEBALL_{field.name.upper()}",
        "show_envvar": False,
    }
    about["show_default"] = _show(field.name, field.default)
    name = "--" + field.name.replace("_", "-")
    declared = [name]
    if hint is bool:
        declared = [f"{name}/--no-{name[2:]}"]
    else:
        if field.name.endswith("_bytes"):
            about |= {"parser": as_parameter(parse_size_bytes), "metavar": "SIZE"}
        elif field.name.endswith("_ms") or "_ms_" in field.name:
            about |= {"parser": as_parameter(parse_duration_ms), "metavar": "DURATION"}
        elif hint is not int and hint is not Path:
            hint = str
            about["metavar"] = "TEXT"
    annotation = Annotated[hint | None, typer.Option(*declared, **about)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _show(name: str, default: Any) -> str:
    if default is MISSING:
        return ""
    if name.endswith("_bytes"):
        return show_bytes(default)
    if name.endswith("_ms") or "_ms_" in name:
        return show_ms(default)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:,}" if isinstance(default, int) and default >= 100_000 else str(default)


def build_settings(file: Path | None, chosen: dict[str, Any]) -> Settings:
    """Settings from the file, then from what was chosen (None: not chosen); SetupError names what is wrong."""
    values = _read(file) if file is not None else {}
    values |= {name: value for name, value in chosen.items() if value is not None}
    return Settings(**values)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"--settings {file}: {error}") from error
    hints = typing.get_type_hints(Settings)
    return {name: _value(file, name, value, hints) for name, value in found.items()}


def _value(file: Path, name: str, value: Any, hints: dict[str, Any]) -> Any:
    """One entry of the settings file, read as the option of that name would be."""
    if name not in hints:
        raise SetupError(f"--settings {file}: {name!r} is no setting; 'timeball serve --help' lists them")
    try:
        if isinstance(value, str) and name.endswith("_bytes"):
            return parse_size_bytes(value)
        if isinstance(value, str) and (name.endswith("_ms") or "_ms_" in name):
            return parse_duration_ms(value)
    except RequestError as error:
        raise SetupError(f"--settings {file}: {name} = {error}") from error
    wanted = hints[name] if hints[name] in (int, bool, Path) else str
    if wanted is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not wanted:
        raise SetupError(f"--settings {file}: {name} = {value!r} should be of type {wanted.__name__}")
    return value
