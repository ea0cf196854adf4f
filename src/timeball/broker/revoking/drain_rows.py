"""Build the rows that move pending messages from one group of a cluster to another.

    drain row     in the log of the drained group: a CANCEL row. It ends the scheduled message there, contains the
                  message, and names the receiving group in a property (HANDED_TO)
    transfer      between the groups: only the columns of the messages (`SENT`), as an Arrow stream
    adopted row   in the log of the receiving group: a SCHEDULED row with the same due time, or now if that has passed

The drain row contains the message, so a transfer can be sent again from the log alone. The files of the pending table
may have been rewritten by then.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.delivery import names, without_timing_lists
from timeball.model import flatbuffer as fb
from timeball.model.errors import InvalidMessage
from timeball.model.message import (
    HANDED_TO,
    LOG_SCHEMA,
    PROPERTY_END,
    PROPERTY_NAME_END,
    Kind,
    build_rows,
    encode_properties,
    int64,
)

SENT = pa.schema(
    [
        LOG_SCHEMA.field(name)
        for name in (
            "topic", "queue_id", "tag", "keys", "unique_key", "body", "properties", "born_ms", "born_host", "flag",
            "sys_flag", "reconsume_times", "due_ms",
        )
    ]
)  # fmt: skip
_DRAIN_MARK = f"{HANDED_TO}{PROPERTY_NAME_END}"


def build_drain_rows(scheduled_rows: pa.RecordBatch, target_group: str, now_ms: int) -> pa.RecordBatch:
    """Build the drain rows (CANCEL, LOG_SCHEMA) of these messages (READ_SCHEMA, SCHEDULED or MOVED rows).

    `target_group`: the receiving group. `now_ms`: the store time of the drain rows.
    """
    # The timing list is useful only to this group's strategy (delivery.without_timing_lists).
    scheduled_rows = without_timing_lists(scheduled_rows)
    number, version = names(scheduled_rows)
    null_column = pa.nulls(scheduled_rows.num_rows, pa.int64())
    properties = pc.fill_null(scheduled_rows.column("properties"), "")
    # Some clients omit the separator after the last property. Without it, the mark would become part of that property.
    lacks_separator = pc.and_(pc.not_equal(properties, ""), pc.invert(pc.ends_with(properties, PROPERTY_END)))
    terminated = pc.if_else(
        lacks_separator, pc.binary_join_element_wise(properties, "", PROPERTY_END), properties
    )
    marked_properties = pc.binary_join_element_wise(
        terminated, encode_properties({HANDED_TO: target_group}), ""
    )
    changed = {
        "kind": pa.array(np.full(scheduled_rows.num_rows, Kind.CANCEL, dtype=np.int8)),
        # A CANCEL row has no queue offset, also if the message waited for a delay level.
        "queue_offset": null_column,
        "properties": marked_properties,
        "store_ms": pa.array(np.full(scheduled_rows.num_rows, now_ms, dtype=np.int64)),
        "accepted_ms": scheduled_rows.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
        "from_due_ms": null_column,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def has_drain_mark(properties: str | None) -> bool:
    """Check whether a CANCEL row with these properties handed its message over to another group."""
    return properties is not None and (
        properties.startswith(_DRAIN_MARK) or f"{PROPERTY_END}{_DRAIN_MARK}" in properties
    )


def encode_sent(drain_rows: pa.RecordBatch) -> bytes:
    """Encode the messages of drain rows for the transfer, without the mark, as an Arrow stream of `SENT`."""
    # The mark is the last property, and values cannot contain the separators.
    properties = pc.replace_substring_regex(
        drain_rows.column("properties"), f"{_DRAIN_MARK}[^{PROPERTY_END}]*{PROPERTY_END}$", ""
    )
    properties = pc.if_else(pc.equal(properties, ""), pa.scalar(None, pa.string()), properties)
    rows = pa.RecordBatch.from_arrays(
        [properties if name == "properties" else drain_rows.column(name) for name in SENT.names], schema=SENT
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SENT) as writer:
        writer.write_batch(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_sent(data: bytes) -> pa.RecordBatch:
    """Decode the rows of a transfer (schema `SENT`). Raises InvalidMessage for invalid or compressed data."""
    try:
        reader = pa.ipc.MessageReader.open_stream(data)
        if pa.ipc.read_schema(reader.read_next_message()) != SENT:
            raise InvalidMessage("a transfer has unexpected columns: use the same version on all nodes")
        message = reader.read_next_message()
        if _may_be_compressed(message.metadata):
            # Decompression could turn a few kilobytes into gigabytes.
            raise InvalidMessage("a transfer is compressed: use the same version on all nodes")
        rows = pa.ipc.read_record_batch(message, SENT)
        rows.validate(full=True)  # Arrow itself trusts the bytes that it reads
    except (pa.ArrowException, StopIteration, OSError, struct.error, LookupError) as error:
        raise InvalidMessage(f"not the rows of a transfer: {error}") from error
    if not rows.num_rows or rows.column("topic").null_count or rows.column("due_ms").null_count:
        raise InvalidMessage("a transfer has no rows, or a row without topic or due time")
    return rows


def _may_be_compressed(metadata: pa.Buffer) -> bool:
    """Check the metadata of an Arrow record batch: the flatbuffer `Message`, with a `RecordBatch` as its header.

    Raises struct.error or LookupError for invalid bytes.
    """
    header = memoryview(metadata)
    root = fb.target(header, 0)
    version, batch = (fb.field(header, root, number) for number in (fb.MESSAGE_VERSION, fb.MESSAGE_HEADER))
    # Older versions mark compression in another way, so they count as compressed.
    if version is None or batch is None or struct.unpack_from("<h", header, version)[0] < fb.VERSION_5:
        return True
    return fb.field(header, fb.target(header, batch), fb.BATCH_COMPRESSION) is not None


def build_adopted_rows(sent: pa.RecordBatch, *, now_ms: int, host: str) -> pa.RecordBatch:
    """Build the adopted rows (SCHEDULED, LOG_SCHEMA) from the rows of a transfer (`SENT`).

    `now_ms`: their store time. `host`: the node that adopts them.
    """
    return build_rows(
        sent.num_rows,
        **{name: sent.column(name) for name in SENT.names if name != "due_ms"},
        kind=int(Kind.SCHEDULED),
        store_ms=now_ms,
        store_host=host,
        # A message whose due time passed during the transfer is due now.
        due_ms=pa.array(np.maximum(int64(sent.column("due_ms")), now_ms)),
    )
