"""Tests of timeball.broker.accepting.tracing. What the spans contain is tested in tests/monitoring/test_traces.py."""

from __future__ import annotations

from timeball.broker.accepting.tracing import traced


def test_without_tracing_a_send_costs_no_further_call() -> None:
    def accept(sends: object) -> object:
        return sends

    assert traced(accept, None) is accept  # type: ignore[arg-type, comparison-overlap]
