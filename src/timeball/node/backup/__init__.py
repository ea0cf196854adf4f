"""Backup and restore: the log up to a row, and the data files that it names, as one consistent copy.

Receives: a data folder, which a broker may be writing at the same time.
Keeps: no state; the manifest of a backup lists its files (manifest.py).
Hands on: files in a separate folder, or in an empty data folder.
"""
