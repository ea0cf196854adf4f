"""Whole brokers with simulated faults (`broker_simulation.py`), checked by tests/crash/checker.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.broker_simulation import FAULTS, Fault, run
from tests.rounds import rounds

SEEDS = rounds(8, 50)
CONTROL_SEEDS = 20  # seeds among which each fault must be found at least once


def test_one_seed_breaks_nothing() -> None:
    simulation = run(1)
    assert len(simulation.epochs) > 1 and simulation.deaths and simulation.acknowledged


@pytest.mark.slow
@pytest.mark.siege
def test_many_seeds_break_nothing() -> None:
    epochs = deaths = acknowledged = 0
    for seed in range(1_000, 1_000 + SEEDS):
        simulation = run(seed)
        epochs, deaths = epochs + len(simulation.epochs), deaths + simulation.deaths
        acknowledged += len(simulation.acknowledged)
    assert epochs > 2 * SEEDS and deaths > 2 * SEEDS and acknowledged > 20 * SEEDS, (
        "the faults left too little time for progress"
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_group_is_noticed(fault: str) -> None:
    for seed in range(CONTROL_SEEDS):
        try:
            run(seed, fault=fault)
        except Fault as violation:
            # A violation must be lost or changed messages. A run without convergence proves nothing.
            if "no convergence" not in str(violation):
                return
    pytest.fail(f"{fault} was not found in {CONTROL_SEEDS} seeds")


@pytest.mark.slow
def test_a_seed_can_be_run_by_one_command() -> None:
    command = [sys.executable, "-m", "tests.cluster.broker_simulation", "--seed", "1", "--steps", "20"]
    root = Path(__file__).parents[2]
    run_once = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run_once.returncode == 0 and "0 seeds with a fault" in run_once.stdout, run_once.stdout
