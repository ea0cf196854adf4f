#!/usr/bin/env bash
# Version: pyspark 4.2.0, Java 17.
# Guess: text that casts to a timestamp still does with a zone behind it: '2027-05-01 09:00' is read, so '2027-05-01 09:00Z' is read too.
# Seen: a time of day without seconds is read, but not with a zone. '09:00Z', '09:00 UTC' and '09:00+01:00' are null with try_cast. With ':00' all are read.
# For scheduled messages: 2027-05-01T09:00Z is valid ISO 8601, and isoformat(timespec="minutes") writes it. Insert the seconds before the cast.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyspark==4.2.0

cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/log" <<'PYTHON' || { tail -n 5 "$folder/log" >&2; exit 1; }
import sys

from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.sql.session.timeZone", "UTC")
    .getOrCreate()
)
zones = ("", "Z", " UTC", "+01:00")
texts = [f"2027-05-01 {time}{zone}" for time in ("09:00", "09:00:00") for zone in zones]
columns = [f"try_cast('{text}' as timestamp) is not null" for text in texts]
is_read = list(spark.sql(f"select {', '.join(columns)}").first())
for text, read in zip(texts, is_read, strict=True):
    print(f"{text}: {'a timestamp' if read else 'null'}")
spark.stop()
if is_read != [True, False, False, False, True, True, True, True]:
    sys.exit("the behaviour has changed")
PYTHON
