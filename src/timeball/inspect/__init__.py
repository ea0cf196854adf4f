"""A data folder, looked at without a broker and without changing a byte.

Receives: the files of a data folder; a broker may be writing them meanwhile.
Keeps: nothing.
Hands on: its contents, as objects and plain dictionaries; damage, by file and position.

    folder.py   segments, frames, torn tail, damage
    report.py   which of these are wanted, as rows, frames or a summary
    verify.py   whether the caches beside the log agree with it
"""
