"""A backup: the log up to a row and the data files that it names, as one consistent copy; and its restore.

Receives: a data folder, also one that a broker is writing.
Keeps: nothing; a backup's manifest names its files (manifest.py).
Hands on: files in a folder of its own, or in an empty data folder.
"""
