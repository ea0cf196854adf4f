"""The command `timeball`: all commands in one app, and the boundary where errors become exit codes.

Each command imports its dependencies when it runs, so that `timeball send` does not wait for the modules of Spark or
Parquet. For the same reason, most options are read without Typer's validators. No code below this boundary prints an
error or ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from timeball.cli import output
from timeball.cli.output import explain, print_note

EPILOG = (
    "Exit codes: 0 done, 1 a check failed, 2 usage, 3 broker not reached, "
    "4 set-up, 5 storage. TIMEBALL_DEBUG=1 shows stack traces."
)

# Section of the help -> its commands. A command is defined in the module of the same name, unless `MODULES` names
# another one. A group of subcommands is a variable, such as `campaign_app`.
SECTIONS = {
    "Run a broker": ["up", "serve", "name-server", "cluster", "pipeline", "kafka", "backup", "restore"],
    "Messages": [
        "send",
        "schedule",
        "schedules",
        "zones",
        "get",
        "cancel",
        "reschedule",
        "selections",
        "pull",
        "bulk",
        "campaign",
        "replay",
        "import",
    ],
    "Look and check": [
        "topics",
        "groups",
        "dead-letters",
        "pending",
        "table",
        "sql",
        "forecast",
        "status",
        "audit",
        "dump",
        "bench",
    ],
}
MODULES = {
    "name-server": "serve",
    "pending": "sql",
    "campaign": "bulk",
    "audit": "pipeline",
    "import": "imports",
    "zones": "schedules",
    **dict.fromkeys(("topics", "groups", "dead-letters"), "status"),
    **dict.fromkeys(("backup", "restore", "dump"), "data_folder"),
    **dict.fromkeys(("send", "schedule", "get", "cancel", "reschedule", "pull"), "messages"),
}
COMMANDS = {name: section for section, names in SECTIONS.items() for name in names}  # command -> its section


class Commands(TyperGroup):
    """The commands by name. A command's module is imported when it runs, and all modules for `timeball --help`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: Any = dict.fromkeys(COMMANDS)  # the keys alone: for the list in the help and "Did you mean …?"
        self.commands = names

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command's name."""
        plain_parameters(self, ctx)  # here and not in __init__: Typer adds its own options later
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command. None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"timeball.cli.{MODULES.get(cmd_name, cmd_name)}")
        section = COMMANDS[cmd_name]
        app_of_command = typer.Typer(callback=_empty_callback, rich_markup_mode="rich")
        function_name = cmd_name.replace("-", "_")
        if subcommands := getattr(module, f"{function_name}_app", None):
            app_of_command.add_typer(subcommands, name=cmd_name, rich_help_panel=section)
        else:
            app_of_command.command(cmd_name, rich_help_panel=section)(getattr(module, function_name))
        return plain_parameters(get_group(app_of_command).commands[cmd_name], ctx)


def _empty_callback() -> None:
    """Do nothing. An app with one command needs a callback: without it, Typer makes no group of the app."""


app = typer.Typer(
    cls=Commands,
    help="Timeball keeps a message until its due time, and then puts it into its queue exactly once.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    """Print the version and end the program, if the option --version is set."""
    if is_set:
        from timeball import __version__

        typer.echo(f"timeball {__version__}")
        raise typer.Exit()


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Read the options of `timeball` itself. Typer calls this before the command."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code (see output.py)."""
    faulthandler.enable(2)  # a crash outside Python leaves a stack trace, and not only a signal
    output.configure_logging("warning", "text")  # serve, up and pipeline run reconfigure it by options
    try:
        app(args=arguments, prog_name="timeball")
    except Exception as error:  # the last handler: every error becomes a sentence and a code
        if os.environ.get("TIMEBALL_DEBUG") == "1":
            raise
        sentence, code = explain(error)
        print_note(f"timeball: {sentence}")
        sys.exit(code)
    sys.exit(0)


# ---- read options without Typer's validators ------------------------------------------------------------------
# Typer reads every parameter with a Pydantic model, even if the user did not give it. Pydantic takes as long to import
# as numpy and Arrow together. Texts, whole numbers, paths and parameters with one of Timeball's parsers need no model.
# Typer reads all other parameters. It also reads each value that a reader here refuses, because its error names the
# option.


class PlainParameter:
    """Reads one parameter of a command, in place of the reader that Typer builds for it (`typer.core`)."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text. None stays None. Typer reads other values, and texts that this reader refuses."""
        if value is None:
            return None
        # A parser may raise any error. Typer calls the parser again, and names the option in its message.
        with contextlib.suppress(Exception):
            if isinstance(value, str):
                return self._read(value)
        param._runtime_param = None  # so that Typer builds its own reader, and keeps it
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def plain_parameters(command: Any, ctx: Any) -> Any:
    """Set plain readers for the parameters of a command and its subcommands where possible. Returns the command.

    Does nothing if `ctx`, Click's context, is None.
    """
    for parameter in command.get_params(ctx) if ctx is not None else ():
        # These attributes are internal to Typer. In a version without them, Typer's own readers stay. So does a reader
        # that was set before.
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is None or getattr(parameter, "_runtime_param", "") is not None:
            continue
        read = _plain_reader(descriptor.annotation, descriptor.parameter_info)
        if read is not None and parameter.nargs == 1 and not parameter.multiple:
            parameter._runtime_param = PlainParameter(read)
    for subcommand in getattr(command, "commands", {}).values():
        if subcommand is not None:
            plain_parameters(subcommand, ctx)
    return command


def _plain_reader(annotation: Any, info: Any) -> Callable[[str], Any] | None:
    """Choose the reader of a parameter by Typer's description of it. None if Typer must read it."""
    if info.parser is not None:
        parser: Callable[[str], Any] = info.parser
        return parser
    # Only Typer checks the bounds of numbers and the state of files.
    if info.min is not None or info.max is not None or info.exists or info.resolve_path or info.writable:
        return None
    readers: dict[Any, Callable[[str], Any]] = {
        str: str,
        int: _parse_int,
        Path: _parse_path,
        bool: _refuse_flag,
    }
    return readers.get(annotation)


def _parse_int(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError("not a number, or a number with a sign")
    return int(text)


def _refuse_flag(text: str) -> bool:
    raise ValueError("a text from the environment: Typer reads all the words for yes and no")


def _parse_path(text: str) -> Path:
    if os.path.exists(text) and not os.access(text, os.R_OK):
        raise ValueError("not readable")
    return Path(text)
