#!/usr/bin/env bash
# Version: pyarrow 26.0.1.
# Guess: a kernel for a list of strings takes any list of strings; whether its entries may be null is a matter of the schema.
# Seen: binary_join refuses a list whose entries are declared not null. list_flatten, list_element and list_value_length
#   take it, and binary_join takes the same list after a cast to nullable entries.
# For message properties: Spark declares the entries of split() and array() as not null, so keys made there cannot be joined.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.compute as pc

required = pa.array([["order-1", "order-2"]], pa.list_(pa.field("item", pa.string(), nullable=False)))
try:
    joined = pc.binary_join(required, " ").to_pylist()
except pa.ArrowNotImplementedError as error:
    joined = type(error).__name__
cast = pc.binary_join(required.cast(pa.list_(pa.string())), " ").to_pylist()
others = pc.list_element(required, 1).to_pylist(), pc.list_value_length(required).to_pylist()
print(f"binary_join of {required.type}: {joined}")
print(f"after a cast to nullable entries: {cast}; list_element and list_value_length of the former: {others}")
if (joined, cast, others) != ("ArrowNotImplementedError", ["order-1 order-2"], (["order-2"], [2])):
    sys.exit("the behaviour has changed")
PYTHON
