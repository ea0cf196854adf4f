"""The processes: a broker, a replica of a group, a name server. Each is composed here from the other packages.

The tools that read a data folder without a broker (backup.py, inspect_folder.py) are here too.
"""
