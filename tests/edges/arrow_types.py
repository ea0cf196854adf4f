"""Every type of pyarrow, and a function that makes a valid column of it."""

from __future__ import annotations

import pyarrow as pa

ROWS = 2
TYPES: dict[str, pa.DataType] = {
    str(data_type): data_type
    for data_type in (
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
# An extension type is sent as its storage type.
STORED = {
    name: getattr(data_type, "storage_type", data_type)
    for name, data_type in TYPES.items()
    if isinstance(data_type, pa.BaseExtensionType)
}


def column(data_type: pa.DataType) -> pa.Array:
    """Make a column of this type with ROWS nulls, which every type allows."""
    if pa.types.is_union(data_type):
        types, values = pa.array([0] * ROWS, pa.int8()), [pa.nulls(ROWS, pa.string())]
        if data_type.mode == "sparse":
            return pa.UnionArray.from_sparse(types, values)
        return pa.UnionArray.from_dense(types, pa.array(range(ROWS), pa.int32()), values)
    if pa.types.is_run_end_encoded(data_type):
        return pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), pa.nulls(1, pa.string()))
    return pa.nulls(ROWS, data_type)
