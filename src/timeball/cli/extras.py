"""The error for a missing package, which names the extra to install.

The plain package contains the dependencies of a client. The extras add others:

    broker   the broker, and the commands that read a data folder or the pending table
    spark    the pipeline
    kafka    Kafka's client
    picture  matplotlib

A command imports its dependencies when it runs, so the list of commands and every help text work in a plain
installation too.
"""

from __future__ import annotations

import sys

from timeball.model.errors import SetupError

BROKER, SPARK, PICTURE, KAFKA = "broker", "spark", "picture", "kafka"


def not_installed(error: ModuleNotFoundError, extra: str) -> SetupError:
    """Build the error that names the missing package and the extra that contains it."""
    # The advice avoids `pip install timeball`: Timeball is on no index yet, and a package of this name there is
    # another project's.
    return SetupError(
        f"{error.name} is not installed: install the extra, in a checkout of Timeball pip install '.[{extra}]', of a "
        f"wheel pip install 'FILE.whl[{extra}]'"
    )


def is_of_others(error: ModuleNotFoundError) -> bool:
    """Return whether a third-party package is missing. A missing module of Timeball or Python would be a fault."""
    name = (error.name or "timeball").partition(".")[0]
    return name != "timeball" and name not in sys.stdlib_module_names
