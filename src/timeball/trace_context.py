"""Trace context in a message's properties: W3C's `traceparent` and `tracestate`, with the names that they have in HTTP.

A message carries the context of the span in which it was sent, and never another: its release, its receipt and its
acknowledgement are children of that, also after a restart, since properties are in the log. Nothing here needs
OpenTelemetry: a broker and a client without it pass a context on.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from timeball.message import PROPERTY_NAME_END, SEND_NAMES, SendBatch, SendRow, encode_properties

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
STATE_CHARACTERS_MAX = 512  # W3C: what a vendor must pass on
# A message with more in its properties stays as it is: a context must never be why a send is refused. In characters,
# each of which may be four bytes of the 32,767 that properties may have.
PROPERTIES_CHARACTERS_MAX = 7_000

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\x20-\x7e]+")
_BEGIN = TRACEPARENT + PROPERTY_NAME_END
_HAS_CONTEXT = "(^|\x02)traceparent\x01"
_OF_CONTEXT = re.compile("(?:^|(?<=\x02))(?:traceparent|tracestate)\x01[^\x02]*(?:\x02|$)")
_PROPERTIES = SEND_NAMES.index("properties")


def of_headers(headers: Mapping[str, str]) -> str:
    """Return the context of a request (lower-case names) as properties; "" when there is none, or not as W3C has it."""
    parent = headers.get(TRACEPARENT)
    if parent is None or not _PARENT.fullmatch(parent):
        return ""
    context, state = {TRACEPARENT: parent}, headers.get(TRACESTATE, "")
    if len(state) <= STATE_CHARACTERS_MAX and _STATE.fullmatch(state):
        context[TRACESTATE] = state
    return encode_properties(context)


def has_context(properties: str | None) -> bool:
    """Return whether there is a context among these properties, sound or not."""
    return properties is not None and (properties.startswith(_BEGIN) or f"\x02{_BEGIN}" in properties)


def have_context(properties: pa.Array) -> pa.Array:
    """Return the same for a column; false for a null."""
    return pc.match_substring_regex(properties, _HAS_CONTEXT).fill_null(False)


def with_contexts(batch: SendBatch, contexts: Sequence[str | None]) -> SendBatch:
    """Return messages with these contexts, each a text of properties; one with a context of its own keeps it."""
    if not any(contexts):
        return batch
    if isinstance(batch, list):
        return [_with_context(row, context) for row, context in zip(batch, contexts, strict=True)]
    at = batch.schema.get_field_index("properties")
    if at < 0:
        return batch.append_column("properties", pa.array(contexts, pa.string()))
    properties = batch.column(at)
    if properties.type != pa.string():
        return batch  # admission casts it, or refuses it by name
    # A null that is joined to a text gives null, which is what a row without a context keeps in place of.
    joined = pc.binary_join_element_wise(pa.array(contexts, pa.string()), properties.fill_null(""), "")
    stays = pc.or_(
        have_context(properties),
        pc.greater(pc.binary_length(properties).fill_null(0), PROPERTIES_CHARACTERS_MAX),
    )
    changed = pc.coalesce(pc.if_else(stays, pa.scalar(None, pa.string()), joined), properties)
    return batch.set_column(at, batch.schema.field(at), changed)


def without_context(properties: str | None) -> str | None:
    """Return properties without a context; None when nothing else is there.

    Two sends are the same send though they were made in different spans.
    """
    return _OF_CONTEXT.sub("", properties) or None if has_context(properties) and properties else properties


def _with_context(row: SendRow, context: str | None) -> SendRow:
    properties = row[_PROPERTIES] or ""
    if not context or has_context(properties) or len(properties) > PROPERTIES_CHARACTERS_MAX:
        return row
    return (*row[:_PROPERTIES], context + properties, *row[_PROPERTIES + 1 :])
