"""Look-ups at a leader that was stopped while another one was elected: it must not answer from its memory.

The first tests run whole brokers in a simulation, in which only the woken leader's event loop runs: its replica's
thread has noticed nothing yet. The last tests stop real processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.bounds import BOUND_S
from tests.cluster.besieged import served
from tests.cluster.broker_simulation import Client, Simulation
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, NodeProcess, client_of, running_cluster
from tests.cluster.simulated_machine import TTL_MS, Machine
from tests.rounds import rounds

from timeball.broker.service import Broker
from timeball.cluster.protocol.leading import may_keep_leading
from timeball.cluster.protocol.replica import Role
from timeball.log.disk_thread import lead_alone
from timeball.model.answers import PageRequest
from timeball.model.errors import NotLeader

STEP_MS, STEPS_MAX = 20, 500
FAR_MS = 60_000
HOLD_MS = 600  # less than `Rules.hold_ms`
LookUp = Callable[[Broker, str], Awaitable[Any]]


async def find(broker: Broker, key: str) -> list[str]:
    """Return the states of the messages with this key."""
    return [place.state for place in await broker.find(key)]


async def find_by_key(broker: Broker, key: str) -> list[str | None]:
    """Return the key if a look-up by keys finds it among the listed messages."""
    page = await broker.listing.page(PageRequest(10, key="every"))
    return [message.unique_key for message in page.messages if message.unique_key == key]


async def read_page(broker: Broker, key: str) -> list[str | None]:
    """Return the key if the first page of the listing has it."""
    page = await broker.listing.page(PageRequest(10))
    return [message.unique_key for message in page.messages if message.unique_key == key]


async def cancel(broker: Broker, key: str) -> list[str]:
    """Cancel a message. Returns the verdicts."""
    return [verdict.verdict for verdict in await broker.cancel(ids=[key])]


@pytest.fixture
def group() -> Iterator[Simulation]:
    """Yield a simulated group whose machines make no faults."""
    simulation = Simulation(1)
    for machine in simulation.machines:
        machine.is_calm = True
    try:
        simulation._begin()
        yield simulation
    finally:
        for machine in simulation.machines:
            if machine.is_up:
                machine.die()


def broker_of(machine: Machine) -> Broker:
    """Return the broker of a machine that leads."""
    assert machine.node is not None
    return machine.node.broker


def pass_time_until(group: Simulation, condition: Callable[[], Any], description: str) -> Any:
    """Let time pass for all machines until the condition is true. Returns its value."""
    for _ in range(STEPS_MAX):
        if value := condition():
            return value
        group.pass_time(STEP_MS)
    raise AssertionError(f"not true in time: {description}")


def leader_of(group: Simulation, *, but: Machine | None = None) -> Machine:
    """Let time pass until a machine other than `but` leads, and return it."""
    leader: Machine = pass_time_until(
        group, lambda: next((machine for machine in group.leaders() if machine is not but), None), "a leader"
    )
    return leader


def run_request(group: Simulation, machine: Machine, work: Awaitable[Any]) -> Any:
    """Let time pass for all machines until a request on one of them has ended. Returns its result."""
    task = machine.loop.create_task(_awaited(work))
    pass_time_until(group, task.done, "an answer")
    return task.result()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def send(group: Simulation, machine: Machine) -> str:
    """Schedule a message at the broker of a machine. Returns its id."""
    client = Client(group, machine, machine.node)  # type: ignore[arg-type]
    (key,) = run_request(group, machine, client.send("x", [FAR_MS]))
    return str(key)


def wake(machine: Machine, work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Continue a stopped process with a request. For a while only its event loop runs, not its replica's thread."""
    machine.is_paused = False
    task = machine.loop.create_task(_awaited(work))
    for _ in range(50):
        machine.clock.advance(1)
        machine.loop.turn()
    return task


def error_of(machine: Machine, task: asyncio.Task[Any]) -> BaseException | None:
    """Let the whole process of a machine run until a request has ended. Returns its error."""
    for _ in range(STEPS_MAX):
        if task.done():
            return task.exception()
        machine.clock.advance(5)
        machine.turn()
    raise AssertionError("the request does not end")


def replace_stopped(group: Simulation, leader: Machine) -> Machine:
    """Stop a leader, and wait until another one serves."""
    leader.is_paused = True
    return leader_of(group, but=leader)


def cut_off_etcd(group: Simulation, leader: Machine) -> None:
    """Cut all machines off from etcd. The leader then leads without a lease, because all others answer."""
    for machine in group.machines:
        machine.is_without_store = True
    ends_ms = leader.clock.boot + TTL_MS + 100
    pass_time_until(group, lambda: leader.clock.boot > ends_ms, "the end of the lease")
    assert leader.role is Role.LEADER and leader.member._lease_keeper.lease is None


@pytest.mark.parametrize("look_up", [find, find_by_key, read_page, cancel])
@pytest.mark.parametrize("without_etcd", [False, True], ids=["with a lease", "without etcd"])
def test_a_woken_leader_answers_no_look_up_after_another_one_was_elected(
    group: Simulation, look_up: LookUp, without_etcd: bool
) -> None:
    leader = leader_of(group)
    old = send(group, leader)
    if without_etcd:
        cut_off_etcd(group, leader)
        for machine in group.machines:
            machine.is_without_store = machine is leader
        for _ in range(HOLD_MS // STEP_MS):
            group.pass_time(STEP_MS)  # the others have leases again, and hear the leader
    successor = replace_stopped(group, leader)
    new = send(group, successor)
    assert run_request(group, successor, cancel(broker_of(successor), old)) == ["cancelled"]
    assert run_request(group, successor, find(broker_of(successor), new)) == ["waiting"]
    thread = leader.thread
    assert thread is not None and leader.role is Role.LEADER, "it has not noticed the other leader"
    if without_etcd:
        assert may_keep_leading(thread.state, leader.clock.boot), (
            "by its clock, all others have answered lately"
        )
    task = wake(leader, look_up(broker_of(leader), new))
    assert not task.done() or isinstance(task.exception(), NotLeader), task
    assert isinstance(error_of(leader, task), NotLeader)


def test_an_old_answer_without_the_fence_is_noticed(group: Simulation) -> None:
    leader = leader_of(group)
    broker = broker_of(leader)
    broker.look_ups.confirm_lead = lead_alone
    new = send(group, replace_stopped(group, leader))
    task = wake(leader, find(broker, new))
    assert task.done() and task.result() == []


def test_a_leader_with_its_lease_answers_at_once(group: Simulation) -> None:
    leader = leader_of(group)
    key = send(group, leader)
    pass_time_until(group, leader.member._holds_group, "the holder's key is known")
    task = wake(leader, find(broker_of(leader), key))
    assert task.result() == ["waiting"], "its thread did not run"


def test_a_leader_without_etcd_answers_once_the_others_have_answered_it(group: Simulation) -> None:
    leader = leader_of(group)
    key = send(group, leader)
    cut_off_etcd(group, leader)
    task = wake(leader, find(broker_of(leader), key))
    assert not task.done(), "it asks the others first"
    pass_time_until(group, task.done, "an answer")
    assert task.result() == ["waiting"] and leader.role is Role.LEADER
    for machine in group.machines:
        machine.is_without_store = False
    pass_time_until(group, leader.member._holds_group, "its new lease holds the group")
    assert wake(leader, find(broker_of(leader), key)).result() == ["waiting"]


def test_a_new_lease_that_does_not_hold_the_group_does_not_confirm_the_lead(group: Simulation) -> None:
    leader = leader_of(group)
    replace_stopped(group, leader)
    wake(leader, asyncio.sleep(0))
    leader.loop.run_until_complete(leader.member._lease_keeper.renew_or_grant())
    assert leader.role is Role.LEADER and leader.member._lease_keeper.lease is not None
    assert not leader.member._holds_group()


def test_a_leader_that_hands_over_does_not_rely_on_its_lease(group: Simulation) -> None:
    leader = leader_of(group)
    pass_time_until(group, leader.member._holds_group, "the holder's key is known")
    thread = leader.thread
    assert thread is not None and thread.state.lead is not None
    other = next(machine.name for machine in group.machines if machine is not leader)
    thread.state = replace(thread.state, lead=replace(thread.state.lead, hand_over_node=other))
    assert not leader.member._holds_group()


# ---- real processes ---------------------------------------------------------------------------------------------

CONNECTIONS, ANSWER_S = 4, 3.0
WAKES = rounds(2, 10)


def ask_while_stopped(cluster: Cluster, leader: NodeProcess, number: int) -> list[int]:
    """Stop the leader, send a message to the next one, and ask the woken leader for it. Returns the HTTP statuses."""
    message, epoch, statuses = f"m{number}", served(leader), list[int]()
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(HTTPConnection(leader.host, leader.ports["http-port"], ANSWER_S)))
            for _ in range(CONNECTIONS)
        ]
        for connection in connections:
            connection.request("GET", f"/v1/messages/{message}")
            assert status_of(connection) == 404, "the message is not there yet"
        leader.kill(signal.SIGSTOP)
        with client_of([cluster.leader(epoch)], timeout_ms=BOUND_S * 1_000) as ball:
            ball.send("orders", b"x", message_id=message, after="1h")
        for connection in connections:
            connection.request(
                "GET", f"/v1/messages/{message}"
            )  # the connection to the stopped process stays
        leader.kill(signal.SIGCONT)
        for connection in connections:
            with suppress(OSError, HTTPException):  # it ends its connections, or does not answer
                statuses.append(status_of(connection))
    return statuses


def status_of(connection: HTTPConnection) -> int:
    """Read an answer. Returns its status."""
    answer = connection.getresponse()
    answer.read()
    return answer.status


def wake_leaders(folder: Path, wakes: int, unfenced: str = "") -> list[int]:
    """Stop and wake so many leaders of a cluster. Returns the HTTP statuses of their answers."""
    need_etcd()
    statuses, epoch = list[int](), 0
    with running_cluster(folder, unfenced=unfenced, **{"lease-ttl-ms": "1s"}) as cluster:
        with cluster.leader().client(timeout_ms=BOUND_S * 1_000) as ball:
            ball.create_topic("orders", 1)
        for number in range(wakes):
            leader = cluster.leader(epoch)
            epoch, events = served(leader), len(leader.events())
            statuses += ask_while_stopped(cluster, leader, number)
            if not unfenced:
                cluster.wait(
                    "it follows again", lambda node=leader, before=events: len(node.events()) > before
                )
    print(f"answers of woken leaders: {statuses}")
    return statuses


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_woken_process_answers_no_look_up_from_its_old_memory(tmp_path: Path) -> None:
    assert 404 not in wake_leaders(tmp_path, WAKES)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_woken_process_that_knows_no_other_leader_answers_no_look_up(tmp_path: Path) -> None:
    """It never notices the other leader, so the check before each look-up is its only fence."""
    assert wake_leaders(tmp_path, 1, "all") == []


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_process_whose_look_ups_lack_the_fence_is_noticed(tmp_path: Path) -> None:
    assert wake_leaders(tmp_path, 1, "look-ups") == [404] * CONNECTIONS
