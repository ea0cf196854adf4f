"""Hostile requests cost the broker little memory and punctuality. The control is a server without limits.

The broker and each attack are separate processes. The broker has an access file. A steady stream of other clients
continues meanwhile (tests/attacks/beside.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.beside import AttackedBroker, Peak, attacked_broker, steady_stream
from tests.cli.processes import environment, running
from tests.edges.flight.attackers import ATTACKS

ATTACKERS = Path(__file__).with_name("attackers.py")
ROOT = Path(__file__).resolve().parents[3]
PEAK_MIB_MAX = 600
CARELESS = """
import pyarrow.flight as flight
class Server(flight.FlightServerBase):
    def do_action(self, context, action):
        raise flight.FlightUnauthenticatedError("who are you?")
server = Server("grpc://127.0.0.1:0")
print('{"event": "ready", "endpoint": "grpc://127.0.0.1:%d"}' % server.port, flush=True)
server.serve()
"""


def attack(endpoint: str, name: str, credentials: str = "") -> list[str]:
    """Run an attack to its end. Return how its calls ended."""
    done = subprocess.run(
        [sys.executable, str(ATTACKERS), endpoint, name, credentials],
        env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedBroker]:
    with attacked_broker(tmp_path_factory.mktemp("attacked")) as attacked:
        yield attacked


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("credentials", ["", "root:root secret 3"], ids=["stranger", "known"])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_raises_the_peak_memory_of_the_broker_only_within_its_limit(
    broker: AttackedBroker, name: str, credentials: str, record_property: Any
) -> None:
    with steady_stream(broker) as figures:
        outcomes = attack(broker.endpoint, name, credentials)
    measured = f"{name}, {'known' if credentials else 'stranger'}: {figures}"
    record_property("measured", measured)
    print(f"{measured}; {sorted(set(outcomes))}")
    figures.check(peak_mib_max=PEAK_MIB_MAX)


@pytest.mark.slow
def test_the_peak_memory_of_a_server_without_limits_exceeds_the_limit() -> None:
    """The control: one attack on pyarrow's own server."""
    with running(command=[sys.executable, "-c", CARELESS]) as server:
        endpoint = server.wait_line(event="ready")["endpoint"]
        with Peak(server.pid) as before:
            pass
        with Peak(server.pid) as peak:
            attack(endpoint, "an action of 1 GiB")
    assert before.mib < PEAK_MIB_MAX < peak.mib
