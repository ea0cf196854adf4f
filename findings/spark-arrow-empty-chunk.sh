#!/usr/bin/env bash
# Version: pyspark 4.2.0, pyarrow 26.0.1, Java 17.
# Guess: createDataFrame of a pyarrow Table has all its rows, however the table is divided into chunks.
# Seen: an empty chunk between two others ends the rows: of chunks with 3, 0 and 3 rows, 3 rows remain. No error is raised. After combine_chunks() all remain.
#   pyarrow makes such tables when it joins tables of which one is empty, which is usual when a result is gathered in parts.
# For scheduled messages: an audit that gathers messages in parts finds some missing that are there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyspark==4.2.0 pyarrow==26.0.1

cd "$folder"
export PYSPARK_PYTHON="$folder/venv/bin/python"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' || { tail -n 5 "$folder/log" >&2; exit 1; }
import sys

import pyarrow as pa
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .getOrCreate()
)
three = pa.table({"n": pa.array([1, 2, 3], pa.int64())})
joined = pa.concat_tables([three, three.schema.empty_table(), three])
seen = {
    "rows of the table": joined.num_rows,
    "rows of its frame": spark.createDataFrame(joined).count(),
    "rows of the frame of its combined chunks": spark.createDataFrame(joined.combine_chunks()).count(),
}
for name, rows in seen.items():
    print(f"{name}: {rows}")
spark.stop()
if list(seen.values()) != [6, 3, 6]:
    sys.exit("the behaviour has changed")
PYTHON
