"""Filters: which messages of a topic a consumer wants. `compile_filter` makes one from a subscription's text.

A filter looks twice. `candidates` sees the queue index only, 20 bytes a message, and throws out what cannot match
without opening it; it may let through too much and never too little. `exact` sees the rows that were left and
decides. What `exact` refuses is neither delivered nor counted, so two tags with one hash ("Aa" and "BB")
are told apart here and not, as in RocketMQ, by the client.

Both work on whole columns. A filter is immutable, holds nothing of the broker's, and may be used by any thread. Its
text comes from outside: it is bounded (limits.FILTER_…) and read by hand, without regular expressions or eval.
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
