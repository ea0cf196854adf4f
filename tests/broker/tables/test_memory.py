"""Freed memory goes back to the system: after bulk work a process is about as small as before."""

from __future__ import annotations

import gc
import platform

import psutil
import pyarrow as pa
import pytest

from timeball.broker.tables.memory import give_back, use_system_pool


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be asked")
def test_small_pieces_that_were_freed_are_given_back() -> None:
    process = psutil.Process()
    give_back()
    # Larger than what Python's own allocator takes, smaller than what malloc would map by itself.
    pieces = [bytes(2_000) for _ in range(50_000)]
    wall = [bytes(2_000)]  # stands above them, so that malloc alone cannot shrink its heap
    full = process.memory_info().rss
    del pieces
    gc.collect()
    assert give_back()
    assert process.memory_info().rss < full - 50_000_000
    assert wall


def test_a_brokers_process_takes_arrows_memory_from_malloc() -> None:
    before = pa.default_memory_pool()
    try:
        use_system_pool()
        assert pa.default_memory_pool().backend_name == "system"
    finally:
        pa.set_memory_pool(before)
