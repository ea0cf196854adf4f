"""Options read without Typer's validators, because Pydantic takes as long to import as numpy and Arrow together.

Typer reads every parameter with a Pydantic model, even one that was not given. Texts, whole numbers, paths and
parameters with a parser of Timeball need no model. All other parameters, and each value that is refused, are left to
Typer, which names the fault.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
