"""Inspection of a data folder without a broker, and without changing a byte.

Receives: the files of a data folder, which a broker may be writing at the same time.
Keeps: no state.
Hands on: the contents as objects and plain dictionaries, and damage by file and position.

    folder.py   segments, frames, torn tail, damage
    report.py   the selected rows, frames or a summary, and whether the caches beside the log agree with it
"""
