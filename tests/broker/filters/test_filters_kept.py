"""Cached filters: the same text gives the same filter, and the cache is limited by the size of the texts."""

from __future__ import annotations

import tracemalloc

import pytest

from timeball.broker.filters import compiler
from timeball.broker.filters.compiler import OVERHEAD_CHARACTERS, FilterCache
from timeball.model.errors import InvalidFilter


def test_a_filter_is_compiled_once() -> None:
    filters = FilterCache()
    found = filters.get("a || b", "TAG", bit_mask=False)
    assert filters.get("a || b", "TAG", bit_mask=False) is found
    assert filters.get("a || b", "TAG", bit_mask=True) is not found
    assert filters.get("a", "TAG", bit_mask=False) is not found


def test_invalid_filters_are_not_cached() -> None:
    filters = FilterCache()
    for _ in range(2):
        with pytest.raises(InvalidFilter):
            filters.get("a >", "SQL92", bit_mask=False)
    assert filters.characters == 0


def test_ever_new_texts_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CHARACTERS_MAX", 3_000)
    filters = FilterCache()
    most = 0
    for n in range(100):
        filters.get(f"a = {n}" + " " * 500, "SQL92", bit_mask=False)
        most = max(most, filters.characters)
    assert 3_000 <= most <= 3_000 + 600 + OVERHEAD_CHARACTERS
    assert len(filters._filters) <= 6


def test_the_bound_is_of_what_filters_take_and_not_only_of_their_texts() -> None:
    filters = FilterCache()
    tracemalloc.start()
    try:
        for n in range(10):
            filters.get(" or ".join(f"a{n} = {n * 7 + i}" for i in range(100)), "SQL92", bit_mask=False)
        of_a_character = tracemalloc.get_traced_memory()[0] / filters.characters
    finally:
        tracemalloc.stop()
    assert 1 < of_a_character * compiler.CHARACTERS_MAX < 24 * 1024 * 1024
