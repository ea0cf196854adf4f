"""Where commands write: results on stdout, everything else on stderr.

With --json a command prints one JSON document a line on stdout and nothing else, so that a pipe can trust it;
progress and notes go to stderr, and progress bars only to a terminal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

# Imported when a command prints by it: a broker does not, and starts sooner without.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@functools.cache
def out() -> Console:
    """Return the console of results."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


@functools.cache
def err() -> Console:
    """Return the console of all else."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(document: object) -> None:
    """One line of JSON on stdout, there at once even when stdout is a pipe."""
    sys.stdout.write(msgspec.json.encode(document, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """One line of text on stdout, there at once even when stdout is a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: as one document with --json, else line by line for people."""
    if as_json:
        print_json(document)
        return
    for line in lines:
        print_line(line)


def print_note(text: str) -> None:
    """One line for the person at the terminal: never part of a result."""
    err().print(text, markup=False)


def progress_bar(*, quiet: bool = False) -> Progress:
    """A progress display on stderr; silent when stderr is no terminal or the caller asks for silence."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err(),
        disable=quiet or not err().is_terminal,
        transient=True,
    )


def bars(counts: Mapping[str, int], width: int = 40) -> list[str]:
    """Lines of a bar chart: label, bar, count. The longest bar is `width` wide; a count above 0 shows."""
    if not counts:
        return []
    most = max(counts.values())
    label_width = max(map(len, counts))
    number_width = max(len(f"{count:,}") for count in counts.values())
    lines = []
    for label, count in counts.items():
        length = max(1, round(width * count / most)) if count else 0
        lines.append(f"{label:<{label_width}}  {'█' * length:<{width}}  {count:>{number_width},}")
    return lines
