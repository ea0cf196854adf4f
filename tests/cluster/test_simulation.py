"""The replication protocol with simulated faults (`simulation.py`), checked by `simulated_checks.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.simulated_checks import Fault
from tests.cluster.simulation import FAULTS, run
from tests.rounds import rounds

STEPS = 600

# Seeds in which each fault must be found at least once; how often it is found stands in docs/cluster-protocol.md.
SEEDS = {
    "no_sync": 200,
    "wiped_replica_votes": 100,
    "no_seal": 100,
    "acknowledges_alone": 5,
    "serves_before_epoch": 20,
    "promises_not_durable": 50,
    "promises_twice": 200,
}


@pytest.mark.parametrize("seeds", [250, pytest.param(1_000, marks=pytest.mark.slow)])
def test_no_seed_breaks_anything(seeds: int) -> None:
    epochs = rows = 0
    for seed in range(seeds):
        simulation = run(seed, STEPS)
        epochs, rows = epochs + simulation.epochs, rows + len(simulation.checks.acknowledged)
    assert epochs > seeds and rows > 8 * seeds, "the faults have left it no time to lead"


@pytest.mark.parametrize("seeds", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_coordinator_restored_from_an_old_copy_breaks_nothing(seeds: int) -> None:
    for seed in range(seeds):
        run(seed, STEPS, restores=True)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("thousand", range(10))
def test_thousands_of_seeds_break_nothing(thousand: int) -> None:
    for seed in range(1_000 * thousand, 1_000 * thousand + rounds(100, 1_000)):
        run(100_000 + seed, 2 * STEPS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_noticed(fault: str) -> None:
    for seed in range(SEEDS[fault]):
        try:
            run(seed, STEPS, fault)
        except Fault as found:
            # Rows that are lost, doubled, or committed by a rule that is not kept; that it comes to no end is no proof.
            if "convergence" not in str(found):
                return
    pytest.fail(f"{fault} was not found in {SEEDS[fault]} seeds")


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = run(7, STEPS), run(7, STEPS)
    assert first.checks.acknowledged == second.checks.acknowledged != []
    assert [e.frame for e in first.checks.committed] == [e.frame for e in second.checks.committed]


def test_a_failing_seed_is_one_command() -> None:
    command = [sys.executable, "-m", "tests.cluster.simulation", "--seed", "0", "--steps", "600"]
    root = Path(__file__).parents[2]
    broken = subprocess.run(
        [*command, "--fault", "acknowledges_alone"], cwd=root, capture_output=True, text=True, check=False
    )
    assert broken.returncode == 1 and broken.stdout.startswith("seed 0: I4: "), broken.stdout
    assert subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0
