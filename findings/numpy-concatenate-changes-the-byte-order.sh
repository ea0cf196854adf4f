#!/usr/bin/env bash
# Version: numpy 2.4.6.
# Guess: concatenate of arrays of one type returns this type, so the bytes of its result are those of its parts.
# Seen: a big-endian type becomes the machine's byte order, also in records, and also if there is only one part. With dtype= it stays.
# For scheduled messages: the bytes of such an array go into a file or to compiled code, which then reads other numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np

RECORD = np.dtype([("seq", ">i8"), ("size", ">i4")])
records = np.zeros(2, RECORD)
records["seq"] = 1, 2
copied, joined = records.copy(), np.concatenate([records])
typed = np.concatenate([records], dtype=RECORD)
first = [int.from_bytes(each.tobytes()[:8], "big") for each in (records, copied, joined, typed)]
print(f"the first 8 bytes, as a big-endian number: {first[0]}, of a copy {first[1]}, concatenated {first[2]}, with dtype= {first[3]}")
if sys.byteorder != "little" or first != [1, 1, 1 << 56, 1]:
    sys.exit("the behaviour has changed")
PYTHON
