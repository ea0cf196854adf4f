#!/usr/bin/env bash
# Version: duckdb 2.0.0, tzdata 2026.6 for Python's zoneinfo.
# Guess: date_trunc('hour', t) is t or earlier, and a local time that occurs twice is the first occurrence, as in Python and Java.
# Seen: DuckDB takes the second occurrence. date_trunc goes through local time: on the day that clocks go back in New York, the hour of 05:30 UTC is 06:00 UTC, half an
#   hour after the instant. The first and the second pass fall into one group. time_bucket truncates correctly.
# For scheduled messages: count due messages per hour in UTC or with time_bucket.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet duckdb==2.0.0 tzdata==2026.6

PYTHONTZPATH="" "$folder/venv/bin/python" - <<'PYTHON'
import sys
from datetime import datetime
from zoneinfo import ZoneInfo

import duckdb

PASS_MS = 3_600_000
first_ms = int(datetime(2026, 11, 1, 1, 30, tzinfo=ZoneInfo("America/New_York")).timestamp() * 1000)
connection = duckdb.connect()
connection.execute("set timezone = 'America/New_York'")


def ask(expression, *values):
    return connection.execute(f"select {expression}", values).fetchone()[0]


instant = "make_timestamptz(?::bigint * 1000)"
seen = {
    "01:30 read as local time, after zoneinfo's": ask("epoch_ms(timestamptz '2026-11-01 01:30') - ?", first_ms),
    "date_trunc('hour') of the first 01:30": ask(f"epoch_ms(date_trunc('hour', {instant})) - ?", first_ms, first_ms),
    "date_trunc('hour') of the second 01:30": ask(
        f"epoch_ms(date_trunc('hour', {instant})) - ?", first_ms + PASS_MS, first_ms + PASS_MS
    ),
    "time_bucket(1 hour) of the first 01:30": ask(
        f"epoch_ms(time_bucket(interval 1 hour, {instant})) - ?", first_ms, first_ms
    ),
}
for name, ms in seen.items():
    print(f"{name}: {ms / 60_000:+.0f} min")
if list(seen.values()) != [PASS_MS, PASS_MS // 2, -PASS_MS // 2, -PASS_MS // 2]:
    sys.exit("the behaviour has changed")
PYTHON
