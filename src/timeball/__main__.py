"""The command `timeball`, also as `python -m timeball`. Names the extra to install if the command line is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timeball.model.errors import not_installed_text

NEEDED = ("timeball.cli", "typer", "rich", "pyarrow", "numpy")  # of the extra `cli`
SETUP = 4  # the exit code of errors of the set-up (cli/output.py, which needs these packages)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of the process.

    Ends the process with exit code 4 if the extra `cli` is not installed.
    """
    try:
        from timeball.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        print(f"timeball: {not_installed_text(error.name, 'cli')}", file=sys.stderr)
        raise SystemExit(SETUP) from None
    run(arguments)


if __name__ == "__main__":
    main()
