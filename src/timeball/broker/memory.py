"""Give memory back to the system after work in bulk.

A compaction and the keys of its files go through hundreds of megabytes, all freed in the end, but kept by the
allocators for a next time that is a minute away: Arrow's pool by design, glibc's malloc because small pieces of
Parquet metadata lie between. Unasked, a broker that has compacted holds some 60 MB for nothing, and it looks as if
each promise cost them. Where there is no glibc only Arrow's pool gives back.
"""

from __future__ import annotations

import ctypes
import gc

import pyarrow as pa

_ARENA_MAX = -8  # glibc's M_ARENA_MAX
ARENAS = 2
CYCLES_EVERY = 10_000  # new containers; Python asks 700


def use_system_pool() -> None:
    """Let Arrow take memory from malloc, in this process: its own pool keeps what each thread has freed for itself.

    Measured with 5 million promises compacted: 2 bytes of memory a promise instead of 17; in exchange a million
    messages due in one millisecond are on disk after 1.2 s instead of 0.7 s. For processes that are a broker.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    # malloc, too, keeps what a thread has freed for that thread, and each send stream is one: measured with 60 streams
    # of 4 MiB batches, 757 MiB at the peak, and 614 with two arenas for all.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, ARENAS)


def collect_cycles_rarely() -> None:
    """Let Python's collector of cycles leave alone what is there by now, and look less often, in this process.

    Reference counts free what a request leaves behind, and each send makes some containers. With a threshold of 50,000
    a broker took 6 to 21 % less CPU at 8 x 512 sends in flight; a fifth of that, so that what a cycle does hold waits
    less long.
    """
    gc.freeze()
    gc.set_threshold(CYCLES_EVERY, *gc.get_threshold()[1:])


def give_back() -> bool:
    """Return free memory to the system; true when malloc's part could be. Takes milliseconds: not for the loop."""
    # Arrow's pool first, so that malloc has more to return.
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
