"""The extra that brings OpenTelemetry."""

from __future__ import annotations

import sys

import pytest

from timeball.io.clock import SystemClock
from timeball.model.errors import SetupError
from timeball.monitoring.tracing_extra import open_traces


def test_without_the_extra_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "timeball.monitoring.traces", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SetupError, match=r"--traces: .*\[otel\]"):
        open_traces(SystemClock(), "1")
