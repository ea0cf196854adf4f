"""The command line: one file per command or per family of commands, assembled by `main.py`.

Input: the arguments of an operator or a script. Output: calls of the client, the node, the pipeline or the dump. No
logic of the broker is here: each command is a thin layer over a function that a program can import as well. Exit codes
and their sentences are decided in `output.py` only.

The docstring of a command is its help text. Typer keeps its line breaks, so the lines below the summary have at most 76
characters.
"""
