"""Opens the tracing of the optional extra `otel`, or explains how to install it."""

from __future__ import annotations

from timeball.broker.accepting.tracing import Tracing
from timeball.io.clock import Clock
from timeball.model.errors import SetupError


def open_traces(clock: Clock, version: str) -> Tracing:
    """Create the tracing that makes and exports spans. Raises SetupError without the extra."""
    try:
        from timeball.monitoring.traces import Traces
    except ModuleNotFoundError as error:
        raise SetupError(
            f"--traces: no {error.name}; install the extra, in a checkout of Timeball pip install '.[otel]', of "
            "a wheel pip install 'FILE.whl[otel]'"
        ) from error
    return Traces(clock, version)
