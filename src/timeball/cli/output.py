"""The output of commands: results go to stdout, progress and notes to stderr.

With --json, stdout has only JSON documents, one per line, so that a pipe can rely on it. Progress bars appear on a
terminal only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

# Rich is imported on its first use: a broker does not print with it, and starts sooner without the import.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@functools.cache
def out() -> Console:
    """Get the console for results, on stdout."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


@functools.cache
def err() -> Console:
    """Get the console for progress and notes, on stderr."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(document: object) -> None:
    """Print one line of JSON on stdout, flushed at once even when stdout is a pipe."""
    sys.stdout.write(msgspec.json.encode(document, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """Print one line of text on stdout, flushed at once even when stdout is a pipe."""
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
    """Print one line for the person at the terminal, on stderr. It is never part of a result."""
    err().print(text, markup=False)


def progress_bar(*, quiet: bool = False) -> Progress:
    """Create a progress display on stderr, silent when stderr is no terminal or `quiet` is set."""
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
    """Draw a bar chart, one line per entry: label, bar, count.

    The longest bar has `width` characters. A count above 0 has at least one.
    """
    if not counts:
        return []
    largest = max(counts.values())
    label_width = max(map(len, counts))
    number_width = max(len(f"{count:,}") for count in counts.values())
    lines = []
    for label, count in counts.items():
        length = max(1, round(width * count / largest)) if count else 0
        lines.append(f"{label:<{label_width}}  {'█' * length:<{width}}  {count:>{number_width},}")
    return lines
