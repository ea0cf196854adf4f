"""Trace context in message properties: W3C's `traceparent` and `tracestate`, under the same names as in HTTP.

A message carries the context of the span in which it was sent. The context never changes. The spans of release, receive
and acknowledgement are children of that span, even after a restart, because properties are in the log. This module does
not need OpenTelemetry, so brokers and clients without it pass contexts on.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.message import PROPERTY_NAME_END, SEND_NAMES, SendBatch, SendRow, encode_properties

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
STATE_CHARACTERS_MAX = 512  # W3C: a vendor must pass on at least this many characters
# A message with longer properties stays unchanged, because an added context must never cause the refusal of a send.
# Properties may have 32,767 bytes, and each character may have four bytes.
PROPERTIES_CHARACTERS_MAX = 7_000

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\x20-\x7e]+")
_BEGIN = TRACEPARENT + PROPERTY_NAME_END
_HAS_CONTEXT = "(^|\x02)traceparent\x01"
_OF_CONTEXT = re.compile("(?:^|(?<=\x02))(?:traceparent|tracestate)\x01[^\x02]*(?:\x02|$)")
_PROPERTIES = SEND_NAMES.index("properties")


def context_from_headers(headers: Mapping[str, str]) -> str:
    """Convert the context in a request's headers (lower-case names) to properties. "" without a valid one."""
    parent = headers.get(TRACEPARENT)
    if parent is None or not _PARENT.fullmatch(parent):
        return ""
    context, state = {TRACEPARENT: parent}, headers.get(TRACESTATE, "")
    if len(state) <= STATE_CHARACTERS_MAX and _STATE.fullmatch(state):
        context[TRACESTATE] = state
    return encode_properties(context)


def has_context(properties: str | None) -> bool:
    """Check whether properties contain a context, valid or not."""
    return properties is not None and (properties.startswith(_BEGIN) or f"\x02{_BEGIN}" in properties)


def has_context_mask(properties: pa.Array) -> pa.Array:
    """Compute `has_context` for a column. Nulls give False."""
    return pc.match_substring_regex(properties, _HAS_CONTEXT).fill_null(False)


def with_contexts(batch: SendBatch, contexts: Sequence[str | None]) -> SendBatch:
    """Add a context (a text of properties, or None) to each message. A message that has a context keeps it."""
    if not any(contexts):
        return batch
    if isinstance(batch, list):
        return [_with_context(row, context) for row, context in zip(batch, contexts, strict=True)]
    index = batch.schema.get_field_index("properties")
    if index < 0:
        return batch.append_column("properties", pa.array(contexts, pa.string()))
    properties = batch.column(index)
    if properties.type != pa.string():
        return batch  # admission casts the column, or refuses it by name
    # Joining a null context gives null. `coalesce` below replaces null by the old properties.
    joined = pc.binary_join_element_wise(pa.array(contexts, pa.string()), properties.fill_null(""), "")
    is_unchanged = pc.or_(
        has_context_mask(properties),
        pc.greater(pc.binary_length(properties).fill_null(0), PROPERTIES_CHARACTERS_MAX),
    )
    changed = pc.coalesce(pc.if_else(is_unchanged, pa.scalar(None, pa.string()), joined), properties)
    return batch.set_column(index, batch.schema.field(index), changed)


def without_context(properties: str | None) -> str | None:
    """Remove the context from properties. Returns None if no other property is left.

    Used to recognise a repeated send, which may have another span than the first send.
    """
    return _OF_CONTEXT.sub("", properties) or None if has_context(properties) and properties else properties


def _with_context(row: SendRow, context: str | None) -> SendRow:
    properties = row[_PROPERTIES] or ""
    if not context or has_context(properties) or len(properties) > PROPERTIES_CHARACTERS_MAX:
        return row
    return (*row[:_PROPERTIES], context + properties, *row[_PROPERTIES + 1 :])
