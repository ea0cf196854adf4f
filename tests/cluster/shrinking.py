"""Shrink a list of items with which a run fails: delta debugging, as in Zeller's and Hildebrandt's ddmin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of `items`, in their order, that fails and that passes when any one of its items is left out.

    `items` must fail.
    """
    part, parts = list(items), 2
    while part:
        size = -(-len(part) // parts)
        for begin in range(0, len(part), size):
            smaller = part[:begin] + part[begin + size :]
            if fails(smaller):
                part, parts = smaller, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(part))
    return part
