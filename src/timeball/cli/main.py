"""The command `timeball`: all commands in one app, and the boundary where errors become exit codes.

Each command imports its dependencies when it runs, so that `timeball send` does not wait for the modules of Spark or
Parquet. No code below this boundary prints an error or ends the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from timeball.cli import log_lines
from timeball.cli.exit_codes import explain
from timeball.cli.output import print_note
from timeball.cli.parameters import plain_parameters

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
