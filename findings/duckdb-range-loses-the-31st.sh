#!/usr/bin/env bash
# Version: duckdb 2.0.0.
# Guess: range(start, end, step) gives start + n * step, so months from 31 January end at the last day of each month, and a day without 02:30 does not change
#   the days after it.
# Seen: each value is the one before plus the step. The 31st becomes the 28th for good, and 02:30 becomes 03:30 for good after clocks went forward. start + n * step
#   written out keeps both.
# For scheduled messages: a series made with range drifts after its first short month or clock change.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet duckdb==2.0.0

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import duckdb

connection = duckdb.connect()
connection.execute("set timezone = 'America/New_York'")


def column(query):
    return [value for (value,) in connection.execute(query).fetchall()]


def series(start, end, unit, count, form):
    stepwise = f"select strftime(range, '{form}') from range({start}, {end}, interval 1 {unit})"
    multiples = f"select strftime({start} + n * interval 1 {unit}, '{form}') from range({count}) as numbers(n)"
    seen = column(stepwise), column(multiples)
    for name, values in zip((f"range by {unit}", f"start + n {unit}s"), seen, strict=True):
        print(f"{name}: {' '.join(values)}")
    return seen


months = series("timestamp '2027-01-31 09:00'", "timestamp '2027-06-01'", "month", 5, "%d")
days = series("timestamptz '2026-03-07 02:30'", "timestamptz '2026-03-11 00:00'", "day", 4, "%H:%M")
if months != (["31", "28", "28", "28", "28"], ["31", "28", "31", "30", "31"]):
    sys.exit("the behaviour of months has changed")
if days != (["02:30", "03:30", "03:30", "03:30"], ["02:30", "03:30", "02:30", "02:30"]):
    sys.exit("the behaviour of days has changed")
PYTHON
