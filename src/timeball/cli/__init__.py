"""The command line: one file a command, `main.py` puts them together.

Receives: what an operator or a script types. Hands on: calls of the client, the node, the pipeline, the dump.
It holds no logic of the broker; every command is a thin way to something a program can import as well. Exit
codes, and the sentences that go with them, are decided in `exit_codes.py` and nowhere else.
"""
