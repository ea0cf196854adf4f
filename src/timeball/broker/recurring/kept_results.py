"""Caches for functions of a rule's text, with a limit for the memory of long rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, wraps
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from timeball.model import limits

P = ParamSpec("P")
T = TypeVar("T")


def cached(
    *, long_results: int = limits.LONG_RULES_KEPT
) -> Callable[[Callable[Concatenate[str, P], T]], Callable[Concatenate[str, P], T]]:
    """Decorate a function whose first argument is the text of a rule, to cache its results. Any thread may call it.

    Errors are not cached. The results that were used last stay in memory: RULES_KEPT of short rules, and `long_results`
    of rules with more than LONG_RULE_CHARACTERS. The default is for results of 200 KB, as parsed rules with a thousand
    dates have.
    """

    def decorate(function: Callable[Concatenate[str, P], T]) -> Callable[Concatenate[str, P], T]:
        """Wrap a function with a cache of its own."""
        call_short, long_entries = lru_cache(limits.RULES_KEPT)(function), dict[object, list[T]]()
        lock = Lock()  # another thread must not change `long_entries` while its first key is looked up

        @wraps(function)
        def call(text: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
            """Return a cached result, or call the function and cache its result."""
            if len(text) <= limits.LONG_RULE_CHARACTERS:
                return call_short(text, *args, **kwargs)  # type: ignore[arg-type]  # all arguments are hashable
            # By a digest, so that a small result does not keep the text of its rule.
            key = hashlib.blake2b(text.encode(), digest_size=16).digest(), args, tuple(kwargs.items())
            with lock:
                results = long_entries.pop(key, None)
            if results is None:
                results = [function(text, *args, **kwargs)]
            with lock:
                long_entries[key] = results  # at the end, so that it is removed last
                if len(long_entries) > long_results:
                    del long_entries[next(iter(long_entries))]
            return results[0]

        return call

    return decorate
