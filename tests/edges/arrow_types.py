"""One harmless column of every type that pyarrow has."""

from __future__ import annotations

import pyarrow as pa

ROWS = 2
TYPES: dict[str, pa.DataType] = {
    str(one): one
    for one in (
        pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
        pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.time32("ms"),
        pa.time64("us"), pa.timestamp("ms"), pa.timestamp("ms", "UTC"), pa.duration("ms"),
        pa.month_day_nano_interval(), pa.decimal32(5, 2), pa.decimal64(5, 2), pa.decimal128(5, 2),
        pa.decimal256(5, 2), pa.string(), pa.binary(), pa.large_string(), pa.large_binary(), pa.binary(3),
        pa.string_view(), pa.binary_view(), pa.list_(pa.string()), pa.large_list(pa.string()),
        pa.list_(pa.string(), 2), pa.list_view(pa.string()), pa.large_list_view(pa.string()),
        pa.struct([("a", pa.string())]), pa.map_(pa.string(), pa.string()),
        pa.dictionary(pa.int8(), pa.string()), pa.run_end_encoded(pa.int32(), pa.string()),
        pa.dense_union([pa.field("a", pa.string())]), pa.sparse_union([pa.field("a", pa.string())]),
        pa.bool8(), pa.uuid(), pa.json_(), pa.opaque(pa.string(), "a", "b"),
        pa.fixed_shape_tensor(pa.int32(), [2]),
    )
}  # fmt: skip
# Extension types come as what they are stored as.
STORED = {
    name: getattr(one, "storage_type", one)
    for name, one in TYPES.items()
    if isinstance(one, pa.BaseExtensionType)
}


def column(kind: pa.DataType) -> pa.Array:
    """Return a column of this type without a value, as every type can have."""
    if pa.types.is_union(kind):
        types, values = pa.array([0] * ROWS, pa.int8()), [pa.nulls(ROWS, pa.string())]
        if kind.mode == "sparse":
            return pa.UnionArray.from_sparse(types, values)
        return pa.UnionArray.from_dense(types, pa.array(range(ROWS), pa.int32()), values)
    if pa.types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), pa.nulls(1, pa.string()))
    return pa.nulls(ROWS, kind)
