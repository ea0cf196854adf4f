#!/usr/bin/env bash
# Version: deltalake 1.6.6 (delta-rs), pyarrow 26.0.1.
# Guess: of two OPTIMIZE runs that began at the same table version, the second fails with CommitFailedError, because both remove the same files.
#   Two DELETEs from one version fail that way.
# Seen: the second OPTIMIZE commits. Each row is then in the table twice. An application transaction in the commit properties of
#   both does not change this.
# For scheduled messages: a table of pending messages must have one program that compacts it, or messages are sent twice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet deltalake==1.6.6 pyarrow==26.0.1

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os
import sys

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError


def from_one_version(name, first, second):
    uri = f"{sys.argv[1]}/{name}"
    for start in (0, 10, 20):
        write_deltalake(uri, pa.table({"id": list(range(start, start + 10))}), mode="append")
    one, other = DeltaTable(uri), DeltaTable(uri)
    first(one)
    try:
        second(other)
        verdict = "committed"
    except CommitFailedError:
        verdict = "CommitFailedError"
    ids = DeltaTable(uri).to_pyarrow_table()["id"].to_pylist()
    seen = (verdict, len(ids), len(set(ids)))
    print(f"{name}: the second {verdict}, {seen[1]} rows, {seen[2]} different ids")
    return seen


def optimize_marked(table):
    marks = [Transaction("optimize", table.version())]
    table.optimize.compact(commit_properties=CommitProperties(app_transactions=marks))


optimizes = from_one_version("two-optimizes", lambda t: t.optimize.compact(), lambda t: t.optimize.compact())
marked = from_one_version("two-marked-optimizes", optimize_marked, optimize_marked)
deletes = from_one_version("two-deletes", lambda t: t.delete("id = 1"), lambda t: t.delete("id = 2"))
if optimizes != ("committed", 60, 30) or marked != optimizes or deletes != ("CommitFailedError", 29, 29):
    sys.exit("the behaviour has changed")
sys.stdout.flush()
os._exit(0)  # on a busy machine, the threads of the libraries may end the interpreter's exit with an abort
PYTHON
