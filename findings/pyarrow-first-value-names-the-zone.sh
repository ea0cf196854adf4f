#!/usr/bin/env bash
# Version: pyarrow 26.0.1.
# Guess: an array of datetimes of which some have a time zone and some have none is refused, as Python refuses to compare them.
# Seen: it is taken, and the first value decides whether the array has a zone. If it has none, 09:00-05:00 becomes 14:00 and loses its zone. If it is 09:00-05:00, a
#   09:00 without a zone is read as UTC and becomes 04:00-05:00.
# For scheduled messages: one datetime without a zone moves by hours and nothing is reported. Check the values before they become an array.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1

"$folder/venv/bin/python" - <<'PYTHON'
import sys
from datetime import datetime, timedelta, timezone

import pyarrow as pa

local = datetime(2026, 1, 1, 9)
zoned = local.replace(tzinfo=timezone(timedelta(hours=-5)))
seen = {}
for name, values in (("without a zone first", [local, zoned]), ("with a zone first", [zoned, local])):
    array = pa.array(values)
    seen[name] = (array.type.tz, [value.strftime("%H:%M") for value in array.to_pylist()])
    print(f"{name}: {array.type}, {' '.join(seen[name][1])}")
if list(seen.values()) != [(None, ["09:00", "14:00"]), ("-05:00", ["09:00", "04:00"])]:
    sys.exit("the behaviour has changed")
PYTHON
