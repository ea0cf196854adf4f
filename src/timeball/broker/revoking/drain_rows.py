"""Build the rows that move pending messages from one group of a cluster to another.

    handed    in the log of the giving group: a CANCEL row, which ends the scheduled message there and contains the
    message sent      only the columns of the message, as an Arrow stream adopted   in the log of the receiving group: a
    SCHEDULED row with the same due time

The CANCEL row contains the message, so the log of the giving group is enough to send a transfer again. The files of the
pending table may be rewritten meanwhile.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.delivery import names, without_lists
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
_MARK = f"{HANDED_TO}{PROPERTY_NAME_END}"


def handed_rows(scheduled_rows: pa.RecordBatch, heir: str, now_ms: int) -> pa.RecordBatch:
    """Build LOG_SCHEMA rows that end READ_SCHEMA messages here and contain their messages for the group `heir`."""
    # The list belongs to the strategy of this group.
    scheduled_rows = without_lists(scheduled_rows)
    number, version = names(scheduled_rows)
    nothing = pa.nulls(scheduled_rows.num_rows, pa.int64())
    said = pc.fill_null(scheduled_rows.column("properties"), "")
    # Some clients omit the separator after the last property. Without it, the mark would become part of that property.
    is_open = pc.and_(pc.not_equal(said, ""), pc.invert(pc.ends_with(said, PROPERTY_END)))
    ended = pc.if_else(is_open, pc.binary_join_element_wise(said, "", PROPERTY_END), said)
    marked = pc.binary_join_element_wise(ended, encode_properties({HANDED_TO: heir}), "")
    changed = {
        "kind": pa.array(np.full(scheduled_rows.num_rows, Kind.CANCEL, dtype=np.int8)),
        # A CANCEL row has no queue offset, also if the message waited for a delay level.
        "queue_offset": nothing,
        "properties": marked,
        "store_ms": pa.array(np.full(scheduled_rows.num_rows, now_ms, dtype=np.int64)),
        "accepted_ms": scheduled_rows.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
        "from_due_ms": nothing,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, scheduled_rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def is_handed(properties: str | None) -> bool:
    """Check whether the properties of a CANCEL row mark its message as handed over."""
    return properties is not None and (properties.startswith(_MARK) or f"{PROPERTY_END}{_MARK}" in properties)


def encode_sent(handed: pa.RecordBatch) -> bytes:
    """Encode the messages of handed rows for the transfer."""
    # The mark is the last property, and values cannot contain the separators.
    said = pc.replace_substring_regex(
        handed.column("properties"), f"{_MARK}[^{PROPERTY_END}]*{PROPERTY_END}$", ""
    )
    said = pc.if_else(pc.equal(said, ""), pa.scalar(None, pa.string()), said)
    rows = pa.RecordBatch.from_arrays(
        [said if name == "properties" else handed.column(name) for name in SENT.names], schema=SENT
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SENT) as writer:
        writer.write_batch(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_sent(data: bytes) -> pa.RecordBatch:
    """Decode the rows of a transfer, in the schema `SENT`. Raises InvalidMessage for all other data."""
    try:
        reader = pa.ipc.MessageReader.open_stream(data)
        if pa.ipc.read_schema(reader.read_next_message()) != SENT:
            raise InvalidMessage("the columns of a transfer are others: use the same version on all nodes")
        message = reader.read_next_message()
        if _may_be_compressed(message.metadata):
            # Decompression could turn a few kilobytes into gigabytes.
            raise InvalidMessage("a transfer is compressed: use the same version on all nodes")
        rows = pa.ipc.read_record_batch(message, SENT)
        rows.validate(full=True)  # Arrow itself trusts the bytes that it reads
    except (pa.ArrowException, StopIteration, OSError, struct.error, LookupError) as error:
        raise InvalidMessage(f"not the rows of a transfer: {error}") from error
    if not rows.num_rows or rows.column("topic").null_count or rows.column("due_ms").null_count:
        raise InvalidMessage("a transfer without rows, or with one that lacks its topic or instant")
    return rows


def _may_be_compressed(metadata: pa.Buffer) -> bool:
    header = memoryview(metadata)
    root = fb.target(header, 0)
    version, inner = (fb.field(header, root, number) for number in (fb.MESSAGE_VERSION, fb.MESSAGE_HEADER))
    # Older versions mark compression in another way, so they count as compressed.
    if version is None or inner is None or struct.unpack_from("<h", header, version)[0] < fb.VERSION_5:
        return True
    return fb.field(header, fb.target(header, inner), fb.BATCH_COMPRESSION) is not None


def adopted_rows(sent: pa.RecordBatch, *, now_ms: int, host: str) -> pa.RecordBatch:
    """Build LOG_SCHEMA scheduled messages from the rows of a transfer."""
    return build_rows(
        sent.num_rows,
        **{name: sent.column(name) for name in SENT.names if name != "due_ms"},
        kind=int(Kind.SCHEDULED),
        store_ms=now_ms,
        store_host=host,
        # A message whose due time passed during the transfer is due now.
        due_ms=pa.array(np.maximum(int64(sent.column("due_ms")), now_ms)),
    )
