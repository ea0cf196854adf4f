"""Caches for functions of rules, with a bound for the memory of long rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

from timeball.model import limits

P = ParamSpec("P")
T = TypeVar("T")


def kept(function: Callable[Concatenate[str, P], T]) -> Callable[Concatenate[str, P], T]:
    """Cache the results of a function whose first argument is the text of a rule."""
    short, long = lru_cache(limits.RULES_KEPT)(function), lru_cache(limits.LONG_RULES_KEPT)(function)

    @wraps(function)
    def call(text: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # A result keeps the text, and a parsed rule with a thousand dates takes 200 KB.
        results = short if len(text) <= limits.LONG_RULE_CHARACTERS else long
        return results(text, *args, **kwargs)  # type: ignore[arg-type]  # they are hashable

    return call
