"""Freed memory goes back to the system: after bulk work a process is about as small as before."""

from __future__ import annotations

import gc
import platform

import psutil
import pyarrow as pa
import pytest

from timeball.broker.tables.memory import give_back, use_system_pool


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be asked")
def test_freed_memory_is_returned_to_the_system() -> None:
    process = psutil.Process()
    give_back()
    # Too large for Python's own allocator, and too small for malloc to map each by itself.
    pieces = [bytes(2_000) for _ in range(50_000)]
    last_piece = [bytes(2_000)]  # after the others in memory, so that malloc alone cannot shrink its heap
    full_bytes = process.memory_info().rss
    del pieces
    gc.collect()
    assert give_back()
    assert process.memory_info().rss < full_bytes - 50_000_000
    assert last_piece


def test_use_system_pool_makes_arrow_allocate_with_malloc() -> None:
    before = pa.default_memory_pool()
    try:
        use_system_pool()
        assert pa.default_memory_pool().backend_name == "system"
    finally:
        pa.set_memory_pool(before)
