#!/usr/bin/env bash
# Version: pyspark 4.2.0, pyarrow 26.0.1, Java 17.
# Guess: a filter that Spark pushes into a Python data source belongs to one scan, so other queries of the same frame read all rows.
# Seen: a frame keeps the filter that was planned last. After frame.where(...), frame.count() counts only the filtered rows.
#   In a union of the frame with its filtered self, both sides are filtered. A new load() reads all rows. No error is raised.
# For scheduled messages: a source that takes filters gives wrong counts to an audit or a self-join.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyspark==4.2.0 pyarrow==26.0.1

cd "$folder"
export PYSPARK_PYTHON="$folder/venv/bin/python"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' || { tail -n 5 "$folder/log" >&2; exit 1; }
import sys

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, LessThan


class Reader(DataSourceReader):
    def __init__(self):
        self.end = 10

    def pushFilters(self, filters):
        for each in filters:
            if isinstance(each, LessThan) and each.attribute == ("n",):
                self.end = min(self.end, each.value)
            else:
                yield each

    def read(self, partition):
        for n in range(self.end):
            yield (n,)


class Numbers(DataSource):
    @classmethod
    def name(cls):
        return "numbers"

    def schema(self):
        return "n int"

    def reader(self, schema):
        return Reader()


spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.sql.python.filterPushdown.enabled", "true")
    .getOrCreate()
)
spark.dataSource.register(Numbers)
numbers = spark.read.format("numbers").load()
expected = [10, 3, 3, 10, 6, 6]
seen = {
    "all rows": numbers.count(),
    "rows below 3": numbers.where("n < 3").count(),
    "all rows, asked again": numbers.count(),
    "all rows of a new frame": spark.read.format("numbers").load().count(),
    "rows below 3 and all rows, in one union": numbers.where("n < 3").unionAll(numbers).count(),
    "all rows and rows below 3, in one union": numbers.unionAll(numbers.where("n < 3")).count(),
}
for name, rows in seen.items():
    print(f"{name}: {rows}")
spark.stop()
if list(seen.values()) != expected:
    sys.exit("the behaviour has changed")
PYTHON
