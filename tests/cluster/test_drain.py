"""A drain between two groups as real processes, both of which are killed during it, again and again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, NodeProcess, running_groups
from tests.edges.remoting.wire import Wire

from timeball import Timeball, Unavailable
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.model.errors import TimeballError
from timeball.spark.endpoint import Endpoint

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd")]
Groups = dict[str, Cluster]
MESSAGES, BODY = 1_500, "x" * 32_768  # a transfer has 4 MiB at most: a dozen of them
KILLS = 3  # of each group
CHUNK = 500


@contextmanager
def two_groups(folder: Path, module: str = "timeball") -> Iterator[Groups]:
    """Groups g1 and g2 of one node each. `module` runs g1, the receiver."""
    need_etcd()
    with running_groups(folder, {"g1": "a", "g2": "b"}, **{"lease-ttl-ms": "1s"}) as groups:
        for cluster in groups.values():
            cluster.leader()
        if module != "timeball":
            receiver = node_of(groups, "g1")
            receiver.kill()
            receiver.module = module
            receiver.start()
        for name in groups:
            groups[name].wait("it knows both groups", lambda name=name: knows_both(groups, name))
        yield groups


def node_of(groups: Groups, name: str) -> NodeProcess:
    """Return the only node of a group."""
    (node,) = groups[name].nodes.values()
    return node


def client(groups: Groups, name: str) -> Timeball:
    return node_of(groups, name).client(timeout_ms=BOUND_S * 1_000)


def knows_both(groups: Groups, name: str) -> bool:
    """Check whether a group can ask the other one: otherwise a cancel has no definite verdict."""
    try:
        with client(groups, name) as ball:
            return ball.cancel("nothing").verdict == "not_found"
    except TimeballError:
        return False


def send(groups: Groups, count: int, body: str) -> list[str]:
    """Schedule messages in g2. Returns their ids."""
    ids = [f"m{number:05d}" for number in range(count)]
    with client(groups, "g2") as ball:
        ball.create_topic("orders", 2)
        rows = [{"body": body, "unique_key": message_id, "after": "3600s"} for message_id in ids]
        ball.send_many(rows, topic="orders", batch_rows=100)
    return ids


def start_drain(groups: Groups) -> subprocess.Popen[str]:
    """Start `timeball cluster drain` from g2 to g1."""
    endpoint = ",".join(node_of(groups, name).endpoint.removeprefix("grpc://") for name in ("g1", "g2"))
    command = [sys.executable, "-m", "timeball", "cluster", "drain", "--group", "g2", "--to", "g1", "--json"]
    return subprocess.Popen(
        [*command, "--endpoint", f"grpc://{endpoint}", "--wait", f"{BOUND_S}s"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_drain(drain: subprocess.Popen[str]) -> dict[str, object]:
    """Wait until the command succeeds. Returns the document that it prints."""
    output, errors = drain.communicate(timeout=2 * BOUND_S)
    assert drain.returncode == 0, errors
    return dict(json.loads(output))


def cancel(groups: Groups, name: str, ids: list[str]) -> dict[str, str]:
    """Cancel through one group's node until each has a definite verdict, whichever processes are killed meanwhile."""
    definite: dict[str, str] = {}
    deadline = time.monotonic() + BOUND_S
    while len(definite) < len(ids):
        assert time.monotonic() < deadline, definite
        try:
            with client(groups, name) as ball:
                answers = ball.cancel(ids=[message_id for message_id in ids if message_id not in definite])
        except Unavailable:
            time.sleep(0.05)
            continue
        verdicts = {answer.subject: set[str]() for answer in answers}
        for answer in answers:
            verdicts[answer.subject].add(answer.verdict)
        assert not any("not_found" in names or "handed" in names for names in verdicts.values()), verdicts
        definite |= {
            subject: names.pop() for subject, names in verdicts.items() if "unavailable" not in names
        }
    return definite


def released(groups: Groups, ids: list[str]) -> Counter[str]:
    """Make all pending messages due now. Returns how often each is in a queue of any group."""
    with client(groups, "g2") as ball:
        for begin in range(0, len(ids), CHUNK):
            ball.reschedule(ids=ids[begin : begin + CHUNK], after="0s")
    for name in groups:
        with client(groups, name) as ball:
            groups[name].wait("nothing waits", lambda ball=ball: not ball.status()["waiting_messages"])
    counts = Counter[str]()
    for name in groups:
        with Endpoint(f"{node_of(groups, name).endpoint}#{name}") as group:
            for queue, offsets in group.queues("orders").items():
                for rows in group.read_queue("orders", queue, *offsets):
                    counts.update(rows.column("unique_key").to_pylist())
    return counts


def test_each_message_is_released_once_although_both_groups_are_killed_during_a_drain(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        ids = send(groups, MESSAGES, BODY)
        cancelled = cancel(groups, "g1", ids[:5])
        drain = start_drain(groups)
        for kill in range(2 * KILLS):
            # Reading the progress takes about as long as a transfer, so the kills hit any part of a transfer.
            victim = node_of(groups, ("g2", "g1")[kill % 2])
            moved = wait_moved(groups, kill * MESSAGES // (2 * KILLS + 1))
            victim.kill()
            victim.start()
            if moved < MESSAGES - 100:
                cancelled |= cancel(
                    groups, ("g1", "g2")[kill % 2], ids[-20 * (kill + 1) : len(ids) - 20 * kill]
                )
        result = end_drain(drain)
        assert (result["is_done"], result["moving"], result["waiting"], result["problem"]) == (True, 0, 0, "")
        with client(groups, "g1") as ball:
            cancelled |= cancel(groups, "g2", ids[10:15])
            assert ball.get(ids[20]).state == "waiting"
        assert set(cancelled.values()) <= {"cancelled", "already_cancelled"}
        with Wire(node_of(groups, "g2").ports["remoting-port"]) as wire:
            route = json.loads(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders").body)
            assert [queue["perm"] for queue in route["queueDatas"]] == [4], "it lost its permission to write"
        assert released(groups, ids) == Counter(set(ids) - set(cancelled))


def wait_moved(groups: Groups, rows: int) -> int:
    """Wait until the receiver has at least `rows` messages. Returns how many it has."""
    moved = 0

    def has_moved() -> bool:
        nonlocal moved
        try:
            with client(groups, "g2") as ball:
                moved = MESSAGES - int(ball.status()["waiting_messages"])  # type: ignore[call-overload]
        except TimeballError:
            return False
        return moved >= rows

    groups["g2"].wait(f"{rows} have moved", has_moved)
    return moved


def test_a_drain_target_that_adopts_messages_twice_is_noticed(tmp_path: Path) -> None:
    with two_groups(tmp_path, "tests.cluster.forgetful") as groups:
        ids = send(groups, 10, "x")
        end_drain(start_drain(groups))
        assert released(groups, ids) == Counter(dict.fromkeys(ids, 2))
