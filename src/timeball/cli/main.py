"""The command `timeball`: all commands in one app, and the boundary where errors become exit codes.

Each command imports its dependencies when it runs, so that `timeball send` does not wait for the modules of Spark or
Parquet. No code below this boundary prints an error or ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from timeball.cli import log_lines
from timeball.cli.exit_codes import explain
from timeball.cli.output import print_note

EPILOG = (
    "Exit codes: 0 done, 1 a check did not hold, 2 usage, 3 broker out of reach, "
    "4 set-up, 5 storage. TIMEBALL_DEBUG=1 shows stack traces."
)

# Section of the help -> its commands. A command is in the module of its name, or in the one that `PLACES` names. A
# module with a group of commands has an `app`.
PARTS = {
    "Run a broker": ["up", "serve", "name-server", "cluster", "pipeline", "kafka", "backup", "restore"],
    "Messages": ["send", "schedule", "get", "cancel", "reschedule", "pull", "bulk", "campaign", "replay"],
    "Look and check": [
        "topics",
        "groups",
        "dead-letters",
        "pending",
        "sql",
        "forecast",
        "status",
        "audit",
        "dump",
        "bench",
    ],
}
PLACES = {
    "dead-letters": "dead_letters",
    "name-server": "name_server",
    "restore": "backup",
    "schedule": "send",
    "reschedule": "cancel",
}
COMMANDS = {name: part for part, names in PARTS.items() for name in names}


class Commands(TyperGroup):
    """The commands by name. A command's module is imported when it runs. The list in the help imports all of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: Any = dict.fromkeys(COMMANDS)  # names only, for the list and for "Did you mean …?"
        self.commands = names

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command's name."""
        plain_parameters(self, ctx)  # here and not in __init__: Typer adds its own options later
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command. None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"timeball.cli.{PLACES.get(cmd_name, cmd_name)}")
        alone, part = typer.Typer(callback=_no_options, rich_markup_mode="rich"), COMMANDS[cmd_name]
        if hasattr(module, "app"):
            alone.add_typer(module.app, name=cmd_name, rich_help_panel=part)
        else:
            alone.command(cmd_name, rich_help_panel=part)(getattr(module, cmd_name.replace("-", "_")))
        return plain_parameters(get_group(alone).commands[cmd_name], ctx)


def _no_options() -> None:
    """Serve as the callback of a Typer app that has no options: without one, Typer makes no group of one command."""


app = typer.Typer(
    cls=Commands,
    help="Timeball keeps a message until its instant, and then delivers it exactly once into its queue.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from timeball import __version__

        typer.echo(f"timeball {__version__}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code (see exit_codes.py)."""
    log_lines.configure("warning", "text")  # serve, up and pipeline run reconfigure it by options
    try:
        app(args=arguments, prog_name="timeball")
    except Exception as error:  # the last handler: every error becomes a sentence and a code
        if os.environ.get("TIMEBALL_DEBUG") == "1":
            raise
        sentence, code = explain(error)
        print_note(f"timeball: {sentence}")
        sys.exit(code)
    sys.exit(0)


# Options read without Typer's validators, because Pydantic takes as long to import as numpy and Arrow together.
#
# Typer reads every parameter with a Pydantic model, even one that was not given. Texts, whole numbers, paths and
# parameters with a parser of Timeball need no model. All other parameters, and each value that is refused, are left to
# Typer, which names the fault.


class PlainParameter:
    """Reads one parameter of a command, in place of the reader that Typer builds for it (`typer.core`)."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text. None stays None. Other values, and texts that are refused, go to Typer's reader."""
        if value is None:
            return None
        # A parser may raise any error. Typer calls the parser again, and names the option in its message.
        with contextlib.suppress(Exception):
            if isinstance(value, str):
                return self._read(value)
        param._runtime_param = None  # so that Typer builds its own reader, and keeps it
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def plain_parameters(command: Any, ctx: Any) -> Any:
    """Give the parameters of a command and its subcommands plain readers where possible, and return the command."""
    for parameter in command.get_params(ctx) if ctx is not None else ():
        # These attributes are internal to Typer. In a version without them, Typer's own readers stay.
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is None or getattr(parameter, "_runtime_param", "") is not None:
            continue
        read = _reader(descriptor.annotation, descriptor.parameter_info)
        if read is not None and parameter.nargs == 1 and not parameter.multiple:
            parameter._runtime_param = PlainParameter(read)
    for inner in getattr(command, "commands", {}).values():
        if inner is not None:
            plain_parameters(inner, ctx)
    return command


def _reader(kind: Any, about: Any) -> Callable[[str], Any] | None:
    if about.parser is not None:
        parser: Callable[[str], Any] = about.parser
        return parser
    if about.min is not None or about.max is not None or about.exists or about.resolve_path or about.writable:
        return None
    readers: dict[Any, Callable[[str], Any]] = {str: str, int: _whole, Path: _path, bool: _flag}
    return readers.get(kind)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("a sign, or no number")
    return int(text)


def _flag(text: str) -> bool:
    raise ValueError("from the environment: Typer knows all the words for yes and no")


def _path(text: str) -> Path:
    if os.path.exists(text) and not os.access(text, os.R_OK):
        raise ValueError("not readable")
    return Path(text)
