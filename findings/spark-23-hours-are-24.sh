#!/usr/bin/env bash
# Version: pyspark 4.2.0, Java 17.
# Guess: timestamp + interval 24 hours is 86,400 s later, because only days, months and years follow the calendar.
# Seen: the literal counts full 24 hours as a calendar day. On the day that clocks go forward in New York, + interval 23 hours and + interval 24 hours give the same instant.
#   + interval 23 hours + interval 1 hour and timestampadd(HOUR, 24, ...) are 86,400 s later.
# For scheduled messages: a delay of 24 hours that is computed in SQL can be an hour early or late. Use timestampadd, or add milliseconds.
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
    .config("spark.sql.session.timeZone", "America/New_York")
    .getOrCreate()
)
noon = "timestamp'2026-03-07 12:00:00'"
expected_s = {
    f"{noon} + interval 23 hours": 82_800,
    f"{noon} + interval 24 hours": 82_800,
    f"{noon} + interval 25 hours": 86_400,
    f"{noon} + interval 23 hours + interval 1 hour": 86_400,
    f"timestampadd(HOUR, 24, {noon})": 86_400,
}
columns = [f"unix_seconds({expression}) - unix_seconds({noon})" for expression in expected_s]
seen_s = list(spark.sql(f"select {', '.join(columns)}").first())
for expression, seconds in zip(expected_s, seen_s, strict=True):
    print(f"{expression}: {seconds} s later")
spark.stop()
if seen_s != list(expected_s.values()):
    sys.exit("the behaviour has changed")
PYTHON
