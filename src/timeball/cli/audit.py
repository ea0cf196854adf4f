"""`timeball audit`: do the books balance, to the message?

A batch job on Spark reads the ledger, the pending table and the log, and compares what was accepted with
what was released, cancelled, expired and is still waiting.
"""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption


def audit(
    master: Annotated[
        str, typer.Option("--master", envvar="TIMEBALL_MASTER", help="Spark master.")
    ] = "local[2]",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Check that accepted = released + cancelled + expired + pending, to the message.

    Exit code 1 says that it does not balance; the report names the promises concerned.

    \b
    Examples:
      timeball audit
      timeball audit --json | jq .balanced
      timeball audit --master spark://head:7077 --endpoint grpc://broker:7400
    """
