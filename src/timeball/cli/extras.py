"""What to install when a command needs a package that is not there.

The plain package has what a client needs. `timeball[broker]` brings the broker's packages, and those of the commands
that read a data folder or the pending table; `timeball[spark]` the pipeline's; `timeball[kafka]` Kafka's client;
`timeball[picture]` matplotlib. A command imports what it needs when it runs, so that the list and the help of all work
in a plain installation too.
"""

from __future__ import annotations

import sys

from timeball.errors import SetupError

BROKER, SPARK, PICTURE, KAFKA = "broker", "spark", "picture", "kafka"


def not_installed(error: ModuleNotFoundError, extra: str) -> SetupError:
    """Return the error that names the package and the extra which brings it."""
    # Not by its name: the package is on no index yet, and what answers to the name there is another's.
    return SetupError(
        f"{error.name} is not installed: install the extra, in a checkout of Timeball pip install '.[{extra}]', of a "
        f"wheel pip install 'FILE.whl[{extra}]'"
    )


def is_of_others(error: ModuleNotFoundError) -> bool:
    """Return whether a package is missing; a module of ours or of Python's own would be a fault."""
    name = (error.name or "timeball").partition(".")[0]
    return name != "timeball" and name not in sys.stdlib_module_names
