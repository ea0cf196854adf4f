"""`timeball bench`: run the benchmarks of a checkout.

The benchmarks are in the folder `benchmarks/` of a checkout, and not in the package: an installed broker does not need
them. They measure this code on your machine.
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
        typer.Argument(metavar="[NAME]...", help="Benchmarks; by default all that take minutes."),
    ] = None,
    size: Annotated[
        Size, typer.Option("--size", help="'small' is for tests: its figures mean nothing.")
    ] = Size.FULL,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="ROW",
            help="Name of a row of the result, as 'send JSON 8x512': also print the server's CPU time by stage for it.",
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
    benchmarks = _import_benchmarks()
    if listing:
        for name, module in benchmarks.items():
            about = (module.__doc__ or "").strip().splitlines()[0]
            if as_json:
                print_json({"name": name, "about": about})
            else:
                print_line(f"{name:10} {about}")
        return
    unknown = sorted(set(names or ()) - benchmarks.keys())
    if unknown:
        raise RequestError(f"no benchmark named {', '.join(unknown)}: there are {', '.join(benchmarks)}")
    chosen = names or [name for name in benchmarks if not getattr(benchmarks[name], "ONLY_BY_NAME", False)]
    with importlib.import_module("benchmarks.harness").profiling(profile) as measured_rows:
        for name in chosen:
            _print(benchmarks[name].run(small=size is Size.SMALL), _limits(benchmarks[name]), as_json)
    if profile is not None and profile not in measured_rows:
        raise RequestError(f"--profile: no row is named {profile!r}: there are {', '.join(measured_rows)}")


def _print(report: Any, limits: str, as_json: bool) -> None:
    """Print the report of a benchmark, and the `limits` of its figures below them."""
    if as_json:
        print_json({**report.as_dict(), "not_measured": limits})
        return
    for line in report.lines():
        print_line(line)
    print_line(f"  not measured: {limits}\n")


def _limits(module: Any) -> str:
    """Read the paragraph "Not measured" from the docstring of a benchmark's module, as one line.

    It is printed below the figures and states their limits.
    """
    _, _, limits = (module.__doc__ or "").partition("Not measured: ")
    return " ".join(limits.split("\n\n")[0].split())


def _import_benchmarks() -> dict[str, Any]:
    """Import the benchmark modules, by name. SetupError outside of a checkout."""
    checkout = Path(timeball.__file__).resolve().parents[2]  # without src/timeball/__init__.py
    if not (checkout / "benchmarks" / "harness.py").is_file():
        raise SetupError(
            "the benchmarks are not part of the installed package: run this from a checkout of Timeball"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    names: list[str] = importlib.import_module("benchmarks").NAMES
    return {name: importlib.import_module(f"benchmarks.{name}") for name in names}
