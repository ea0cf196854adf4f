#!/usr/bin/env bash
# Version: deltalake 1.6.6, pyarrow 26.0.1.
# Guess: history(1) of a table that is loaded at an older version is the commit of this version, because history is the newest first.
# Seen: the list begins with the newest commit of the log, and is as much longer. Of version 1 of 4 it has the commits of versions 3, 2 and 1, numbered 1, 0 and -1.
# For scheduled messages: a report "as of yesterday evening" takes the time of a version from its commit. Take the last entry, not the first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet deltalake==1.6.6 pyarrow==26.0.1

cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

for value in range(4):
    write_deltalake("table", pa.table({"x": [value]}), mode="append")
newest_first = [commit["timestamp"] for commit in DeltaTable("table").history()]
found = DeltaTable("table", version=1).history(1)
for commit in found:
    made = 3 - newest_first.index(commit["timestamp"])
    print(f"history(1) of version 1: numbered {commit['version']}, made as version {made}")
if [commit["timestamp"] for commit in found] != newest_first[:3]:
    sys.exit("the behaviour has changed")
PYTHON
