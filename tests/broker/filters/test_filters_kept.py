"""Cached filters: the same text gives the same filter, and the cache is limited by the size of the texts."""

from __future__ import annotations

import tracemalloc

import pytest

from timeball.broker.filters import compiler
from timeball.broker.filters.compiler import OVERHEAD_CHARACTERS, FilterCache
from timeball.model.errors import InvalidFilter


def test_a_filter_is_compiled_once() -> None:
    filters = FilterCache()
    first = filters.get("a || b", "TAG", bit_mask=False)
    assert filters.get("a || b", "TAG", bit_mask=False) is first
    assert filters.get("a || b", "TAG", bit_mask=True) is not first
    assert filters.get("a", "TAG", bit_mask=False) is not first


def test_invalid_filters_are_not_cached() -> None:
    filters = FilterCache()
    for _ in range(2):
        with pytest.raises(InvalidFilter):
            filters.get("a >", "SQL92", bit_mask=False)
    assert filters.characters == 0


def test_the_cache_stays_near_its_limit_if_each_text_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CHARACTERS_MAX", 3_000)
    filters = FilterCache()
    characters_max = 0
    for number in range(100):
        filters.get(f"a = {number}" + " " * 500, "SQL92", bit_mask=False)
        characters_max = max(characters_max, filters.characters)
    assert 3_000 <= characters_max <= 3_000 + 600 + OVERHEAD_CHARACTERS
    assert len(filters._filters) <= 6


def test_a_full_cache_takes_less_than_24_mib() -> None:
    """The limit counts the characters of texts, and a filter takes more memory than its text."""
    filters = FilterCache()
    tracemalloc.start()
    try:
        for n in range(10):
            filters.get(" or ".join(f"a{n} = {n * 7 + i}" for i in range(100)), "SQL92", bit_mask=False)
        bytes_per_character = tracemalloc.get_traced_memory()[0] / filters.characters
    finally:
        tracemalloc.stop()
    assert 1 < bytes_per_character * compiler.CHARACTERS_MAX < 24 * 1024 * 1024
