"""Options read without Typer's validators, whose library takes as long to import as numpy and Arrow together.

Typer reads every parameter by a model of Pydantic, also one that was not given. Texts, whole numbers, paths and what
has a parser of ours need none. All else, and each value that is refused, is left to Typer, which names the fault.
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
        """Return the value of a text, or of a default; None when there is neither."""
        if value is None:
            return None
        # Of any kind, as a parser may raise: Typer asks it again, and names the option.
        with contextlib.suppress(Exception):
            if isinstance(value, str):
                return self._read(value)
        param._runtime_param = None  # Typer builds its own, which stays
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def plain_parameters(command: Any, ctx: Any) -> Any:
    """Return the command, whose parameters are read without Typer's validators where they can be."""
    for parameter in command.get_params(ctx) if ctx is not None else ():
        # Attributes of Typer's own: a version that has none of them reads as it does.
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
