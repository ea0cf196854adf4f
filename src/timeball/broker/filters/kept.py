"""Filters that have been compiled: consumers ask with the same few texts, and each pull would read its text again.

A cache of a pure function. What a filter takes in memory is some thirty times its text, so the texts are what is
bounded: whoever asks with ever new ones costs the others a compilation, and no memory.
"""

from __future__ import annotations

from timeball.broker.filters.compiling import compile_filter
from timeball.broker.filters.filter import Filter

CHARACTERS_MAX = (
    256 * 1024
)  # of all texts kept: some 8 MB of filters, in each of the three rooms that keep some
OVERHEAD_CHARACTERS = 64  # of a filter whose text is short


class FiltersKept:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._filters: dict[tuple[str, str, bool], Filter] = {}
        self.characters = 0

    def get(self, text: str, expression_type: str, *, bit_mask: bool) -> Filter:
        """The filter, as `compile_filter` makes it; raises InvalidFilter."""
        key = (text, expression_type, bit_mask)
        found = self._filters.get(key)
        if found is None:
            found = compile_filter(text, expression_type, bit_mask=bit_mask)
            if self.characters >= CHARACTERS_MAX:
                self._filters.clear()
                self.characters = 0
            self._filters[key] = found
            self.characters += len(text) + OVERHEAD_CHARACTERS
        return found
