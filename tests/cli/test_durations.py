"""Options that take a duration: a number without a unit is refused everywhere, by name."""

import pytest
from tests.cli.in_process import run_here


@pytest.mark.parametrize(
    "words",
    [
        ["pull", "orders", "--wait", "30"],
        ["status", "--watch", "--every", "10"],
        ["cluster", "drain", "--group", "g1", "--to", "g2", "--wait", "60"],
        ["cluster", "init", "--nodes", "a,b,c", "--wait", "60"],
        ["replay", "--from", "2030-01-01T00:00:00Z", "--until", "2030-01-02T00:00:00Z", "--shift", "7"],
        ["kafka", "--in", "a", "--status-every", "10"],
        ["forecast", "--within", "5"],
        ["forecast", "--extra-over", "5"],
        ["schedule", "orders", "x", "--after", "30"],
        ["reschedule", "a", "--after", "30"],
    ],
    ids=" ".join,
)
def test_a_number_without_a_unit_is_refused(words: list[str]) -> None:
    """It was milliseconds here, and seconds to most people."""
    refused = run_here(*words)
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert refused.returncode == 2
    assert words[-2] in told
    assert f"{words[-1]}: add a unit, as in 500ms or 10s" in told
