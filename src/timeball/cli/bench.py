"""`timeball bench`: run the benchmarks of a checkout.

The benchmarks are in `benchmarks/`, beside the package and not in it. They measure this code on your machine, so an
installed broker has no use for them. This command only finds and runs them.
"""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import timeball
from timeball.cli.options import JsonOption
from timeball.cli.output import print_json, print_line
from timeball.model.errors import RequestError, SetupError


class Size(StrEnum):
    """The amount of load: `small` only shows that a benchmark runs."""

    SMALL = "small"
    FULL = "full"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Benchmarks; all that take minutes if none."),
    ] = None,
    size: Annotated[
        Size, typer.Option("--size", help="'small' is for tests: its figures mean nothing.")
    ] = Size.FULL,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="ROW",
            help="Also print the server's CPU time by stage of the row of this name, as 'send JSON 8x512'.",
        ),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run benchmarks against a real broker in a temporary folder, and compare the results with the design's targets.

    \b
    Examples:
      timeball bench --list
      timeball bench append punctual
      timeball bench --json > figures.jsonl
      timeball bench burst --size small
      timeball bench remoting --profile "send JSON 8x512"
      timeball bench soak                 # an hour
    """
    found = _load()
    if listing:
        for name, module in found.items():
            about = (module.__doc__ or "").strip().splitlines()[0]
            if as_json:
                print_json({"name": name, "about": about})
            else:
                print_line(f"{name:10} {about}")
        return
    unknown = sorted(set(names or ()) - found.keys())
    if unknown:
        raise RequestError(f"no benchmark named {', '.join(unknown)}: there are {', '.join(found)}")
    chosen = names or [name for name in found if not getattr(found[name], "ONLY_BY_NAME", False)]
    with importlib.import_module("benchmarks.harness").profiling(profile) as rows:
        for name in chosen:
            _print(found[name].run(small=size is Size.SMALL), _not_measured(found[name]), as_json)
    if profile is not None and profile not in rows:
        raise RequestError(f"--profile: no row is named {profile!r}: there are {', '.join(rows)}")


def _print(report: Any, left_out: str, as_json: bool) -> None:
    if as_json:
        print_json({**report.as_dict(), "not_measured": left_out})
        return
    for line in report.lines():
        print_line(line)
    print_line(f"  not measured: {left_out}\n")


def _not_measured(module: Any) -> str:
    """Find the limits of a benchmark's figures in the docstring of its module, as one line.

    They are printed below the figures, which would claim too much without them.
    """
    _, _, said = (module.__doc__ or "").partition("Not measured: ")
    return " ".join(said.split("\n\n")[0].split())


def _load() -> dict[str, Any]:
    """Import the benchmark modules, by name. SetupError outside of a checkout."""
    checkout = Path(timeball.__file__).resolve().parents[2]
    if not (checkout / "benchmarks" / "harness.py").is_file():
        raise SetupError(
            "the benchmarks are not part of the installed package: run this from a checkout of Timeball"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    names: list[str] = importlib.import_module("benchmarks").NAMES
    return {name: importlib.import_module(f"benchmarks.{name}") for name in names}
