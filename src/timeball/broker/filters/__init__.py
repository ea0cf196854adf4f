"""Filters select the messages of a topic that a consumer wants. `compile_filter` compiles a subscription's text.

A filter decides in two steps. `candidates` uses only the queue index (20 bytes per message), so it excludes messages
without reading them. It may let messages through that do not match, but it never excludes a message that matches.
`exact` gets the rows of the remaining messages and decides. A message that `exact` refuses is neither delivered nor
counted. So two tags with the same hash ("Aa" and "BB") are distinguished here, and not by the client as in RocketMQ.

Both steps work on whole batches. The evaluation of SQL is compiled if the build had a C compiler (sql_program.pyx);
sql_conditions.py is its reference. A filter is immutable, has no references to the broker, and may be used in any
thread. Its text comes from clients, so its size is limited (limits.FILTER_…), and it is never passed to eval.
"""

from timeball.broker.filters.compiler import SQL92, TAG, compile_filter, normalized_text
from timeball.broker.filters.tags import EVERYTHING, Filter, java_hash, tag_hash, tag_mask

__all__ = [
    "EVERYTHING",
    "SQL92",
    "TAG",
    "Filter",
    "compile_filter",
    "java_hash",
    "normalized_text",
    "tag_hash",
    "tag_mask",
]
