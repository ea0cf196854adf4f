"""`python -m timeball`: the same as the command `timeball`, for environments where the command is not on the path."""

from timeball.cli.start import main

main()
