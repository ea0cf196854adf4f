"""The replication protocol with simulated faults (`simulation.py`), checked by `simulated_checks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.simulated_checks import Fault
from tests.cluster.simulation import ELECTS_BY_OLD_SET, FAULTS, Simulation, restored_to_old_set, run, shrunk
from tests.rounds import rounds

STEPS = 600
ROOT = Path(__file__).parents[2]

# Seeds in which each fault must be found at least once. How often it is found is in docs/cluster-protocol.md.
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


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_of_before_a_change_of_the_set_loses_nothing(seed: int) -> None:
    restored_to_old_set(seed)


@pytest.mark.parametrize("seed", range(10))
def test_an_election_by_an_old_set_is_noticed(seed: int) -> None:
    with pytest.raises(Fault, match=r"I5|I6"):
        restored_to_old_set(seed, ELECTS_BY_OLD_SET)


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
        except Fault as error:
            # Rows that are lost, doubled, or committed against a rule. A run that does not converge proves nothing.
            if "convergence" not in str(error):
                return
    pytest.fail(f"{fault} was not found in {SEEDS[fault]} seeds")


def test_a_seed_is_the_same_run_each_time() -> None:
    """Each event and effect is the same, also in a process in which sets have another order."""
    command = [
        sys.executable,
        "-m",
        "tests.cluster.simulation",
        "--seed",
        "3",
        "--steps",
        str(STEPS),
        "--trace",
    ]
    first, second = (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": order}
        ).stdout
        for order in "12"
    )
    assert first == second and first.count(b"Commit(") > 5


def test_a_failing_seed_is_shrunk() -> None:
    """Without promises of a majority, few disturbances suffice to lose committed rows."""
    first, shrunk_run = Simulation(1, "no_seal"), Simulation(1, "no_seal")
    with pytest.raises(Fault, match=r"^I5: "):
        first.run(STEPS)
    smallest = shrunk(1, STEPS, "no_seal")
    assert 0 < len(smallest) <= 5 < len(first.disturbances)
    with pytest.raises(Fault, match=r"^I5: "):
        shrunk_run.run(STEPS, set(first.disturbances).difference(smallest))
    assert shrunk_run.disturbances == smallest


def test_a_failing_seed_is_one_command() -> None:
    command = [sys.executable, "-m", "tests.cluster.simulation", "--seed", "0", "--steps", "600"]
    broken = subprocess.run(
        [*command, "--fault", "acknowledges_alone"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert broken.returncode == 1 and broken.stdout.startswith("seed 0: I4: "), broken.stdout
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
