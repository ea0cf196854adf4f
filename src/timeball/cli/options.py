"""The shared parts of commands: common options, the connection to a broker, and the error for a missing package.

`Settings` lists the choices of an operator. `settings_options` makes one option of each of its fields, with the field's
help text and default. A value comes from the first of these sources that has it: the option, the environment
(TIMEBALL_PORT for --port), the file named with --settings (TOML, with the same names), the default.

`spark_options` adds the options of a Spark session. `with_options` makes such decorators.

`connect` opens a client of the broker that --endpoint names, and gives advice for the most frequent failures. The
commands of the pipeline use Flight, and the others HTTP.

`not_installed` builds the error for a missing package, which names the extra to install. The extra `cli` contains the
dependencies of commands that talk to a broker. Others add to it:

    broker   the broker, and the commands that read a data folder or the pending table
    spark    the pipeline
    kafka    Kafka's client
    picture  matplotlib
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from timeball.model.config import Settings, option_name, types
from timeball.model.errors import InvalidDelay, RequestError, SetupError, Unavailable, not_installed_text
from timeball.model.time_parsing import duration_ms

if TYPE_CHECKING:
    from timeball.client import Timeball


# ---- sizes, durations and properties as texts -----------------------------------------------------------------
# A number without a unit takes the unit at the end of the option's name (`--segment-bytes`, `--retention-ms`). A
# duration of another option needs a unit. Any other text is refused, so that "10m" never silently becomes 10 of another
# unit. `timeball.model.time_parsing` parses durations with units, and times, in the same way as for a Python program.

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_TIME_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)


def parse_size_bytes(text: str) -> int:
    """Parse a size in bytes: a whole number, or a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB."""
    match = _SIZE.match(text)
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise RequestError(f"{text!r} is no size: write 268435456, 256MiB or 1GB")
    size = float(match[1]) * factor
    if size != int(size):
        raise RequestError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_duration_ms(text: str, advice: str = "write 500ms, 10s, 1h30m or 7d") -> int:
    """Parse a duration with units, such as 72h or 1h30m, into milliseconds. Only 0 needs no unit."""
    number = text.strip()
    if number.isdecimal() and number != "0":
        raise InvalidDelay(f"{number[:100]}: add a unit, as in 500ms or 10s")
    return duration_ms(text, advice)


def parse_setting_ms(text: str) -> int:
    """Parse the value of an option whose name ends in `-ms`: whole milliseconds, or a duration with units."""
    number = text.strip()
    return int(number) if number.isdecimal() else duration_ms(text, "write 500, 500ms, 10s, 1h30m or 7d")


def parse_property(text: str) -> tuple[str, str]:
    """Split NAME=VALUE into name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RequestError(f"{text!r} is no property: write NAME=VALUE")
    return name, value


def show_bytes(size_bytes: int) -> str:
    """Format a size for people: 256 MiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_ms(duration_ms: int) -> str:
    """Format a duration for people, in the largest unit that divides it: 72h. Days only from 10 days on."""
    for unit, factor in _TIME_UNITS_MS.items():
        if duration_ms and duration_ms % factor == 0 and (unit != "d" or duration_ms >= 10 * factor):
            return f"{duration_ms // factor}{unit}"
    return f"{duration_ms}ms"


def show_instant(time_ms: int) -> str:
    """Format a time as ISO 8601 in UTC, with milliseconds."""
    import numpy as np

    return f"{np.datetime64(time_ms, 'ms')}Z"


def show_wait(wait_ms: int) -> str:
    """Format a remaining time in its two largest units: 1,166 d 15 h. Below 1 min: seconds, to the millisecond."""
    if wait_ms < 60_000:
        return f"{wait_ms / 1000:.3f} s"
    minutes = wait_ms // 60_000
    days, hours = minutes // 1_440, minutes // 60 % 24
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {wait_ms // 1000 % 60} s"


# ---- settings and options of several commands -----------------------------------------------------------------

EndpointOption = Annotated[
    str,
    typer.Option("--endpoint", envvar="TIMEBALL_ENDPOINT", metavar="URI", help="The broker's HTTP address."),
]
# For the commands of the pipeline, and for commands that read columns.
FlightEndpointOption = Annotated[
    str,
    typer.Option("--endpoint", envvar="TIMEBALL_FLIGHT", metavar="URI", help="The broker's Flight address."),
]
FlightOption = Annotated[
    str,
    typer.Option("--flight", envvar="TIMEBALL_FLIGHT", metavar="URI", help="The broker's Flight address."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one document a line.")]
NoSparkOption = Annotated[
    bool,
    typer.Option(
        "--no-spark",
        envvar="TIMEBALL_NO_SPARK",
        show_envvar=False,
        help="Do the work in one process, without Java: same files and reports.",
    ),
]
CLUSTER_NAMES = [
    "cluster", "group", "etcd", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file",
]  # fmt: skip
DEFAULT_ENDPOINT, DEFAULT_FLIGHT = "http://127.0.0.1:7480", "grpc://127.0.0.1:7400"


def as_parameter(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser for Typer: its RequestError becomes a BadParameter, which names the option."""

    def parser(text: str) -> Any:
        try:
            return parse(text)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from error

    parser.__name__ = parse.__name__
    return parser


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the option's name before the text of a RequestError that the block raises."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{option} {error}") from error


def with_options(
    name: str, build: Callable[..., Any], options: Sequence[inspect.Parameter] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a decorator that gives a command `options` in place of its parameter `name`.

    The command receives the result of `build`, which is called with the values of the options by name. Without
    `options`, they are the parameters of `build`, annotated for Typer.
    """
    if options is None:
        options = list(inspect.signature(build, eval_str=True).parameters.values())

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if parameter.name == name else [parameter]

        @functools.wraps(command)
        def with_built(**arguments: Any) -> None:
            values = {option.name: arguments.pop(option.name) for option in options}
            command(**arguments, **{name: build(**values)})

        # Options without a default may follow others only in a signature of keywords.
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        # Typer reads both attributes. mypy does not know the first one of a function.
        with_built.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_built.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_built

    return decorate


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings, …)` one option for each field of Settings, and --settings.

    The help lists the advanced settings in a panel of their own.
    """
    return _with_settings(command, [field.name for field in fields(Settings)], {}, advanced_panel="Advanced")


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings, …)` the options by which a node finds its cluster, and --settings.

    An operator can run the command with the settings file and the environment of a node. The node's name is set to
    `operator`, because the process is not a node of the cluster.
    """
    return _with_settings(command, CLUSTER_NAMES, {"node": "operator"})


def _with_settings(
    command: Callable[..., None],
    names: Sequence[str],
    fixed: dict[str, Any],
    advanced_panel: str | None = None,
) -> Callable[..., None]:
    """Give a command the options of the settings in `names`. `fixed`: the values of settings without an option."""
    options = [
        _build_parameter(
            field, types()[field.name], panel=advanced_panel if field.metadata["advanced"] else None
        )
        for field in fields(Settings)
        if field.name in names
    ]
    options.append(
        inspect.Parameter("settings_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_FILE)
    )

    def build(settings_file: Path | None, **chosen: Any) -> Settings:
        return build_settings(settings_file, chosen | fixed)

    return with_options("settings", build, options)(command)


_FILE = Annotated[
    Path | None,
    typer.Option(
        "--settings", envvar="TIMEBALL_SETTINGS", metavar="FILE", help="Settings in TOML, same names."
    ),
]


class _Unit(NamedTuple):
    """The unit of a setting: the functions that parse and format its values, and its metavar in the help."""

    parse: Callable[[str], int]
    show: Callable[[int], str]
    metavar: str


def _unit_of_name(name: str) -> _Unit | None:
    """Choose the unit of a size or a duration by the setting's name. None for other settings."""
    if name.endswith("_bytes"):
        return _Unit(parse_size_bytes, show_bytes, "SIZE")
    if name.endswith("_ms") or "_ms_" in name:
        return _Unit(parse_setting_ms, show_ms, "DURATION")
    return None


def _build_parameter(field: Field[Any], value_type: Any, *, panel: str | None) -> inspect.Parameter:
    """Build the command's parameter for one field. Its value is None if the option is not given.

    `panel`: the panel of the help that lists the option. None: the first panel, "Options".
    """
    name, unit = option_name(field.name), _unit_of_name(field.name)
    attributes: dict[str, Any] = {
        "help": field.metadata["help"],
        "envvar": f"TIMEBALL_{field.name.upper()}",
        "show_envvar": False,
        "show_default": _format_default(field.default, unit),
        "rich_help_panel": panel,
    }
    declaration = f"{name}/--no-{name[2:]}" if value_type is bool else name
    if unit is not None:
        attributes |= {"parser": as_parameter(unit.parse), "metavar": unit.metavar}
    elif value_type not in (bool, int, Path):
        value_type = str
        attributes["metavar"] = "TEXT"
    annotation = Annotated[value_type | None, typer.Option(declaration, **attributes)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _format_default(default: Any, unit: _Unit | None) -> str:
    """Format the default of a setting for the help."""
    if unit is not None:
        return unit.show(default)
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:,}" if isinstance(default, int) and default >= 100_000 else str(default)


def build_settings(file: Path | None, options: dict[str, Any]) -> Settings:
    """Combine the file's settings with the chosen options, which win unless None. SetupError names the fault."""
    values = _read_file(file) if file is not None else {}
    values |= {name: value for name, value in options.items() if value is not None}
    return Settings(**values)


def _read_file(file: Path) -> dict[str, Any]:
    """Read the values of a settings file, by the setting's name. Raises SetupError, which names the file."""
    try:
        document = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"--settings {file}: {error}") from error
    return {name: _convert_setting(file, name, value) for name, value in document.items()}


def _convert_setting(file: Path, name: str, value: Any) -> Any:
    """Convert one entry of the settings file, with the same rules as the option of that name. Raises SetupError."""
    if name not in types():
        raise SetupError(f"--settings {file}: {name!r} is no setting; 'timeball serve --help' lists them")
    if isinstance(value, str) and (unit := _unit_of_name(name)) is not None:
        try:
            return unit.parse(value)
        except RequestError as error:
            raise SetupError(f"--settings {file}: {name} = {error}") from error
    expected_type = types()[name] if types()[name] in (int, bool, Path) else str
    if expected_type is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not expected_type:
        raise SetupError(f"--settings {file}: {name} = {value!r} should be of type {expected_type.__name__}")
    return value


# ---- where Spark runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparkOptions:
    """The options of a Spark session, which every command on Spark has."""

    master: str | None = None
    conf: tuple[tuple[str, str], ...] = ()

    def words(self) -> list[str]:
        """Convert the options into the words of a command line."""
        words = [] if self.master is None else ["--master", self.master]
        return words + [word for key, value in self.conf for word in ("--conf", f"{key}={value}")]


SPARK_AS_IT_IS = SparkOptions()


def build_spark_options(
    master: Annotated[
        str | None,
        typer.Option(
            "--master", envvar="TIMEBALL_MASTER", help="Spark master (local[2,2], or spark-submit's)."
        ),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark's session; may be repeated."),
    ] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option("--packages", metavar="G:A:V", help="Maven packages for Spark; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Spark's name for the application.")] = None,
) -> SparkOptions:
    """Combine the options of a session.

    RequestError for a --conf that is not NAME=VALUE, and for --packages under spark-submit, where Spark runs already.
    """
    settings = dict(pair("--conf", text) for text in conf or [])
    if packages:
        from timeball.spark.run import SUBMITTED

        if SUBMITTED in os.environ:
            raise RequestError("--packages: Spark runs already; give them to spark-submit")
        settings["spark.jars.packages"] = ",".join(
            [*packages, *filter(None, [settings.get("spark.jars.packages")])]
        )
    if name is not None:
        settings["spark.app.name"] = name
    return SparkOptions(master, tuple(settings.items()))


# Gives `command(…, spark, …)` the options of a Spark session in place of the parameter `spark`.
spark_options = with_options("spark", build_spark_options)


def pair(option: str, text: str) -> tuple[str, str]:
    """Split NAME=VALUE. RequestError, which names the option, for another form."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise RequestError(f"{option} {text}: write NAME=VALUE")
    return name, value


# ---- connecting to a broker -----------------------------------------------------------------------------------

CALL_TIMEOUT_MS = 30_000
CLOSED_TEXTS = ("Socket closed", "reset by peer", "closed before the answer")  # of errors of both protocols


@contextmanager
def connect(endpoint: str, flight: str | None = None) -> Iterator[Timeball]:
    """Open a client of `endpoint`, which raises as `advising`. `flight`: the address for columns."""
    from timeball.client import Timeball

    with advising(endpoint), Timeball(endpoint, flight=flight) as client:
        yield client


@contextmanager
def advising(endpoint: str) -> Iterator[None]:
    """Raise Unavailable with the endpoint and advice if no broker answers the calls of the block.

    If the broker seems to accept only TLS, the advice is to write https:// or grpc+tls://. Any other error of the block
    stays as it is.
    """
    try:
        yield
    except Unavailable as error:
        reason = str(error)
        secure_scheme = {"grpc": "grpc+tls", "http": "https"}.get(endpoint.partition("://")[0])
        if secure_scheme is not None and any(text in reason for text in CLOSED_TEXTS):
            # A broker that accepts only TLS closes the connection of a client without TLS.
            raise Unavailable(
                f"{reason}; if the broker has a certificate, write {secure_scheme}://"
            ) from error
        if not reason.startswith("no broker answers") or "handshake" in reason or "[SSL" in reason:
            raise
        raise Unavailable(
            f"no broker answers at {endpoint}: start one with 'timeball up', or name another with --endpoint"
        ) from error


def reach(endpoint: str) -> dict[str, Any]:
    """Read the status of a broker over Flight. Raises as `advising`.

    The commands of the pipeline begin with it, because Spark takes seconds to start.
    """
    from timeball.client.calls import Calls
    from timeball.model.wire import Nothing

    addresses = addresses_of(endpoint)
    with advising(addresses), closing(Calls(addresses, CALL_TIMEOUT_MS)) as calls:
        return calls.action("status", Nothing(), dict[str, Any])


def addresses_of(endpoint: str) -> str:
    """Remove the group from an endpoint, such as #g2 in grpc://host:port#g2. It confines the pipeline to one group."""
    return endpoint.partition("#")[0]


# ---- missing packages -----------------------------------------------------------------------------------------
# A command imports its dependencies when it runs, so the list of commands and every help text work in a plain
# installation too.

BROKER, SPARK, PICTURE, KAFKA, CELERY = "broker", "spark", "picture", "kafka", "celery"


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Run the imports of the block, which need the packages of `extra`.

    Raises SetupError, which names the extra, if a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_third_party(error):
            raise
        raise not_installed(error, extra) from error


def not_installed(error: ModuleNotFoundError, extra: str) -> SetupError:
    """Build the error that names the missing package and the extra that contains it."""
    return SetupError(not_installed_text(error.name, extra))


def is_third_party(error: ModuleNotFoundError) -> bool:
    """True if a third-party package is missing. A missing module of Timeball or Python would be a fault."""
    name = (error.name or "timeball").partition(".")[0]
    return name != "timeball" and name not in sys.stdlib_module_names
