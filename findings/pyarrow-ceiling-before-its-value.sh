#!/usr/bin/env bash
# Version: pyarrow 26.0.1.
# Guess: ceil_temporal of a timestamp whose next full hour cannot be represented raises ArrowInvalid, as a cast or a checked addition does.
# Seen: it wraps: the ceiling of the last hour of [ns] in 2262 is in 1677. floor_temporal of the first one wraps into 2262.
# For scheduled messages: the largest timestamp often stands for "never". Rounded up, it is due at once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import pyarrow as pa
import pyarrow.compute as pc

SECOND_NS = 1_000_000_000
never = pa.array([2**63 - 1], pa.timestamp("ns"))
try:
    pc.add_checked(never.cast(pa.int64()), SECOND_NS)
    addition = "taken"
except pa.ArrowInvalid:
    addition = "ArrowInvalid"
up = pc.ceil_temporal(never, unit="hour")
down = pc.floor_temporal(pa.array([-(2**63) + 1], pa.timestamp("ns")), unit="hour")
years = pc.year(never)[0].as_py(), pc.year(up)[0].as_py(), pc.year(down)[0].as_py()
print(f"a checked addition: {addition}")
print(f"a timestamp of {years[0]}, rounded up to its hour: {years[1]}; the first one, rounded down: {years[2]}")
if (addition, *years) != ("ArrowInvalid", 2262, 1677, 2262):
    sys.exit("the behaviour has changed")
PYTHON
