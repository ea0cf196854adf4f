"""Arrow schemas as Spark schemas.

Spark compares an Arrow batch with the declared schema by type, exactly: it refuses a dictionary, a `string_view` or a
field declared not null at run time. So there are six types, and every field may be null.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from timeball.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.pipeline.log_events import EVENT_SCHEMA
from timeball.pipeline.source.options import ReadOptions, check_columns

RANGE_SCHEMA = pa.schema([("from_seq", pa.int64()), ("to_seq", pa.int64())])
SCHEMAS = {"log": READ_SCHEMA, "queue": READ_SCHEMA, "pending": TABLE_SCHEMA, "ranges": RANGE_SCHEMA}

_TYPES: dict[pa.DataType, DataType] = {
    pa.int8(): ByteType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
}


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema that reads batches of this Arrow schema."""
    return StructType([StructField(field.name, _TYPES[field.type], True) for field in schema])


def arrow_schema(options: ReadOptions) -> pa.Schema:
    """Return what a read with these options yields; SetupError names a column that is not there."""
    if options.read == "ledger":
        check_columns(options, EVENT_SCHEMA.names)
        return pick(EVENT_SCHEMA, options.columns)
    return pick(SCHEMAS[options.read], options.columns)


def pick(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Reduce `schema` to `columns`, in their order; all of it for None."""
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])
