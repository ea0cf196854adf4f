"""Filters: which messages of a topic a consumer wants. `compile_filter` makes one from a subscription's text.

A filter decides in two steps. `candidates` sees only the queue index, 20 bytes per message, and excludes messages
without reading them. It may let some messages through that do not match, but never excludes one that does. `exact` sees
the remaining rows and decides. A message that `exact` refuses is neither delivered nor counted. So two tags with the
same hash ("Aa" and "BB") are distinguished here, and not by the client as in RocketMQ.

Both steps work on whole columns. A filter is immutable, has no references to the broker, and may be used in any thread.
Its text comes from clients, so its size is bounded (limits.FILTER_…), and it is never passed to eval.
"""

from timeball.broker.filters.compiler import SQL92, TAG, compile_filter, told
from timeball.broker.filters.tags import EVERYTHING, Filter, java_hash, tag_hash, tag_mask

__all__ = [
    "EVERYTHING",
    "SQL92",
    "TAG",
    "Filter",
    "compile_filter",
    "java_hash",
    "tag_hash",
    "tag_mask",
    "told",
]
