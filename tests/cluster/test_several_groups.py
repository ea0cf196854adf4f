"""Two groups of a cluster as real processes: any node finds, cancels and moves messages of the other group."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, running_groups
from tests.edges.grpc.wire import Wire as GrpcWire
from tests.edges.grpc.wire import d, s
from tests.edges.remoting.wire import Wire

from timeball import NotFound, Timeball, Unavailable
from timeball.broker.revoking.cancel import encode_handle
from timeball.edges.grpc.handlers.telemetry import endpoints
from timeball.edges.remoting.codec.codes import RequestCode

Groups = dict[str, Cluster]


pytestmark = pytest.mark.xdist_group("etcd")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Yield two groups of one node each, which know each other."""
    need_etcd()
    # A lease that outlives the test's stops: the group that hangs has a leader, and no other takes its place.
    options = {"lease-ttl-ms": "60s"}
    with running_groups(tmp_path_factory.mktemp("groups"), {"g1": "a", "g2": "b"}, **options) as running:
        for cluster in running.values():
            cluster.leader()
        for cluster in running.values():
            with client(cluster) as ball:
                cluster.wait("the node knows both groups", lambda ball=ball: knows_all(ball))
        yield running


def client(cluster: Cluster) -> Timeball:
    """Return a client of a group's only node."""
    (node,) = cluster.nodes.values()
    return node.client(timeout_ms=BOUND_S * 1_000)


def knows_all(ball: Timeball) -> bool:
    """Check whether the node knows the leaders of both groups, and reaches the other one."""
    try:
        return ball.cancel("nothing").verdict == "not_found"
    except Unavailable:  # the node has not read the list of groups yet
        return False


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """Stop a group's only process with SIGSTOP, and continue it at the end."""
    (node,) = cluster.nodes.values()
    node.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        node.kill(signal.SIGCONT)


def over_http(
    cluster: Cluster, method: str, message_id: str, body: object = None
) -> tuple[int, dict[str, object]]:
    """Send a request about one message to a group's only node. Returns the status and the body."""
    (node,) = cluster.nodes.values()
    request = urllib.request.Request(
        f"http://127.0.0.1:{node.ports['http-port']}/v1/messages/{message_id}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_key_is_cancelled_in_every_group_through_any_node(groups: Groups) -> None:
    with client(groups["g1"]) as one, client(groups["g2"]) as two:
        for ball in (one, two):
            ball.send("orders", "x", keys="order-1", after="1h")
        two.send("orders", "x", keys="order-2", after="1h")
        assert [verdict.verdict for verdict in one.cancel(key="order-1")] == ["cancelled", "cancelled"]
        assert [verdict.verdict for verdict in two.cancel(key="order-1")] == 2 * ["already_cancelled"]
        assert [verdict.verdict for verdict in one.cancel(key="order-2")] == ["cancelled"]
        assert [verdict.verdict for verdict in one.cancel(key="order-3")] == ["not_found"]


def test_a_message_is_read_rescheduled_and_cancelled_by_its_id_through_the_other_group(
    groups: Groups,
) -> None:
    with client(groups["g1"]) as one, client(groups["g2"]) as two:
        sent = one.send("orders", "x", after="1h")
        message = two.get(sent.id)
        assert (message.state, message.due_ms) == ("waiting", sent.due_ms)
        assert two.reschedule(sent.id, after="2h").verdict == "rescheduled"
        assert one.get(sent.id).due_ms != sent.due_ms
        status, answer = over_http(groups["g2"], "DELETE", sent.id)
        assert (status, answer["verdict"]) == (200, "cancelled")
        assert [verdict.verdict for verdict in two.cancel(ids=[sent.id, "nothing"])] == [
            "already_cancelled",
            "not_found",
        ]


def test_a_message_is_recalled_by_its_handle_through_the_other_group(groups: Groups) -> None:
    (node,) = groups["g1"].nodes.values()
    with client(groups["g2"]) as two, Wire(node.ports["remoting-port"]) as wire:
        sent = two.send("orders", "x", after="1h")
        handle = encode_handle("orders", "g2", sent.due_ms or 0, sent.id)
        for _ in range(2):  # a repeated recall succeeds, too
            answer = wire.ask_ok(RequestCode.RECALL_MESSAGE, topic="orders", recallHandle=handle)
            assert answer.ext["msgId"] == sent.id
        assert two.cancel(sent.id).verdict == "already_cancelled"


def test_a_route_over_grpc_names_the_queues_of_both_groups(groups: Groups) -> None:
    ports = {name: next(iter(cluster.nodes.values())).ports["grpc-port"] for name, cluster in groups.items()}
    for cluster in groups.values():
        with client(cluster) as ball:
            ball.create_topic("routed", 1)
    for asked_group, port in ports.items():
        endpoint = endpoints("127.0.0.1", port)
        request = s.QueryRouteRequest(topic=d.Resource(name="routed"), endpoints=endpoint)
        with GrpcWire(port) as wire:
            queues = wire.ask_ok("QueryRoute", request).message_queues
        ports_of_route = {queue.broker.name: queue.broker.endpoints.addresses[0].port for queue in queues}
        assert ports_of_route == ports, f"in the answer of {asked_group}"


def test_a_group_that_hangs_makes_the_verdict_unavailable_and_never_not_found(groups: Groups) -> None:
    with client(groups["g1"]) as one, client(groups["g2"]) as two:
        in_two, in_one = (
            two.send("orders", "x", keys="order-4", after="1h"),
            one.send("orders", "x", after="1h"),
        )
        with (
            stopped(groups["g2"]),
            ThreadPoolExecutor() as pool,
        ):  # at the same time: each waits for g2's timeout
            client_calls = [
                pool.submit(call)
                for call in (
                    lambda: one.cancel(key="order-4"),
                    lambda: [one.reschedule(in_two.id, after="2h")],
                    lambda: one.cancel(ids=[in_one.id]),
                )
            ]
            http_calls = [
                pool.submit(over_http, groups["g1"], method, in_two.id) for method in ("DELETE", "GET")
            ]
            verdicts = [[verdict.verdict for verdict in call.result()] for call in client_calls]
            assert verdicts == [["unavailable"], ["unavailable"], ["unavailable", "cancelled"]]
            for http_call in http_calls:
                status, answer = http_call.result()
                assert (status, answer["code"]) == (503, "unavailable")
            assert one.get(in_one.id).state == "cancelled", "a message of the group that answers is found"
        groups["g2"].wait("g2 answers again", lambda: knows_all(one))
        assert one.cancel(in_one.id).verdict == "already_cancelled"
        with pytest.raises(NotFound):
            one.get("nothing")
        # The continued process may have carried out the requests that it got while it was stopped.
        assert {verdict.verdict for verdict in one.cancel(key="order-4")} <= {
            "cancelled",
            "already_cancelled",
        }
        assert two.get(in_two.id).state == "cancelled"
