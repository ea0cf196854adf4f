"""Gates: never more inside than allowed, and a pass counts once."""

import pytest

from timeball.errors import OverLimit
from timeball.protocols.flight.gate import Gate


def test_a_gate_refuses_at_its_limit_and_says_so() -> None:
    gate = Gate("calls", 2)
    first, _ = gate.enter(), gate.enter()
    with pytest.raises(OverLimit, match="2 calls are open"):
        gate.enter()
    first.give_back()
    gate.enter()
    assert gate.inside == 2


def test_a_pass_given_back_twice_counts_once() -> None:
    gate = Gate("calls", 2)
    gate.enter()
    with gate.enter() as entry:
        entry.give_back()
    assert gate.inside == 1


def test_an_error_inside_gives_the_pass_back() -> None:
    gate = Gate("calls", 1)
    with pytest.raises(ValueError, match="inside"), gate.enter():
        raise ValueError("inside")
    assert gate.inside == 0
