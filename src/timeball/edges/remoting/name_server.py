"""A name server for all groups of a cluster: it asks the leader of each group and joins their answers.

RocketMQ's clients ask a name server for the route of a topic: the topic's queues in each group, and the address of each
group's leader. To clients, a group is a broker with the group's name. While a group has no leader, its last known
queues stay in the route without an address. Producers then skip these queues, and consumers ask again.

Requests that are not for a name server go to the first group that has a leader.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from timeball.edges.remoting.calls import Call, answer_failure
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BadHeader, Command, Frame, decode
from timeball.edges.remoting.connection import CALLS_MAX, Connection, MemoryLimits
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import Listening
from timeball.model.errors import UNDECODABLE, SetupError, Unavailable

logger = logging.getLogger(__name__)

BACKLOG = 1_024
LEADER_TIMEOUT_S = 3.0  # for a leader's answer. RocketMQ's clients wait as long for the name server's answer
REMEMBERED_MAX = 20_000  # routes of one topic in one group, for times without a leader
MASTER_ID = "0"
TOPIC_LISTS = (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, RequestCode.GET_TOPICS_BY_CLUSTER)

Address = tuple[str, int]


class GroupLeader(NamedTuple):
    """A group of the cluster, and the address of its leader (None while it has no leader)."""

    name: str
    leader: Address | None


class NameServer:
    """Answers route requests of RocketMQ's clients on one port. Belongs to the event loop.

    `groups` returns the groups of the cluster and their current leaders.
    """

    def __init__(
        self,
        groups: Callable[[], Iterable[GroupLeader]],
        *,
        tls: ssl.SSLContext | None = None,
        tls_to_brokers: ssl.SSLContext | None = None,
    ) -> None:
        self._groups, self._tls, self._tls_to_brokers = groups, tls, tls_to_brokers
        self._server: Listening | None = None
        self._client_connections: set[Connection] = set()
        self._memory_limits = MemoryLimits()
        self._leader_connections: dict[Address, Connection] = {}
        self._last_routes: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises SetupError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await first_byte.listen(
                lambda: Connection(
                    self._receive, self._client_connections, loop, self._memory_limits, edge="name_server"
                ),
                host, port, BACKLOG, self._tls, edge="name_server",
            )  # fmt: skip
        except OSError as error:
            raise SetupError(
                f"--name-server-port {port}: {error.strerror or error}; choose another port"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, cancel pending requests and close the connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in [*self._client_connections, *self._leader_connections.values()]:
            connection.abort()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, frames: list[Frame]) -> None:
        """Start a task for each request. Requests beyond CALLS_MAX are refused."""
        for frame in frames:
            try:
                command = decode(frame)
            except BadHeader as error:
                connection.send(answer_failure(Call(connection, error.request), error))
                continue
            call = Call(connection, command)
            if connection.calls >= CALLS_MAX:
                connection.send(call.answer(ResponseCode.SYSTEM_BUSY, f"{CALLS_MAX} requests are pending"))
                continue
            task = asyncio.ensure_future(self._send_answer(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_answer(self, call: Call) -> None:
        """Answer one request. An error becomes an error answer."""
        call.connection.calls += 1
        try:
            reply = await self._create_answer(call)
        except Exception as error:  # any exception, as in calls.py: the client gets an error answer
            reply = answer_failure(call, error)
        finally:
            call.connection.calls -= 1
        if not call.command.is_one_way:
            call.connection.send(reply)

    async def _create_answer(self, call: Call) -> Command:
        """Join the answers of all leaders to a name-server request, or forward another request to one leader.

        Raises Unavailable.
        """
        code = call.command.code
        if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return await self._route(call)
        if code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return call.answer_json(_join_clusters(_successful_bodies(await self._ask_all(call))))
        if code in TOPIC_LISTS:
            bodies = _successful_bodies(await self._ask_all(call))
            topics = {name for body in bodies for name in body.get("topicList", [])}
            return call.answer_json({"topicList": sorted(topics)})
        leaders = [group.leader for group in self._groups() if group.leader is not None]
        if not leaders:
            raise _no_leader()
        return _copy_answer(call, await self._ask_leader(leaders[0], call.command))

    async def _route(self, call: Call) -> Command:
        """Join the topic's queues and the leaders of all groups that have the topic.

        For a group whose leader does not answer, the last known route counts, without an address. If no group has the
        topic, the refusal of one of them is the answer. Raises Unavailable if no leader answers.
        """
        topic, answers = call.command.ext.get("topic", ""), await self._ask_all(call)
        queues, brokers, order, error_answer = [], [], [], None
        for group, answer in answers.items():
            key = (group.name, topic)
            if answer is not None and answer.code != ResponseCode.SUCCESS:
                error_answer = answer
                continue
            body = self._last_routes.get(key) if answer is None else _decode_body(answer)
            if body is None:
                continue
            if answer is not None:
                self._remember_route(key, body)
            queues += body.get("queueDatas", [])
            order += [body["orderTopicConf"]] if "orderTopicConf" in body else []
            for broker in body.get("brokerDatas", []):
                addresses = broker["brokerAddrs"] if answer is not None and group.leader else {}
                brokers.append({**broker, "brokerAddrs": addresses})
        if not queues:
            if error_answer is None:
                raise _no_leader()
            return _copy_answer(call, error_answer)
        route = {"queueDatas": queues, "brokerDatas": brokers, "filterServerTable": {}}
        return call.answer_json(route | ({"orderTopicConf": ";".join(order)} if order else {}))

    def _remember_route(self, key: tuple[str, str], body: dict[str, Any]) -> None:
        """Store the route of a topic in a group, and forget the oldest route if there are too many."""
        self._last_routes[key] = body
        self._last_routes.move_to_end(key)
        if len(self._last_routes) > REMEMBERED_MAX:
            self._last_routes.popitem(last=False)

    # -- connections to the leaders ----------------------------------------------------------------------------------

    async def _ask_all(self, call: Call) -> dict[GroupLeader, Command | None]:
        """Send a request to the leaders of all groups at once, and return their answers by group.

        None: the group has no leader, or its leader does not answer.
        """
        groups = sorted(self._groups(), key=lambda group: group.name)

        async def ask_group(group: GroupLeader) -> Command | None:
            """Ask the leader of one group."""
            if group.leader is None:
                return None
            try:
                return await self._ask_leader(group.leader, call.command)
            except Unavailable as error:
                logger.warning("leader did not answer group=%s reason=%s", group.name, error)
                return None

        answers = await asyncio.gather(*(ask_group(group) for group in groups))
        return dict(zip(groups, answers, strict=True))

    async def _ask_leader(self, address: Address, command: Command) -> Command:
        """Forward a request to one leader and return its answer. Raises Unavailable."""
        connection = await self._connect(address)
        # Without the client's flags: the leader must answer even a one-way request, or `request` would time out.
        request = msgspec.structs.replace(command, flag=0)
        return await connection.request(request, LEADER_TIMEOUT_S)

    async def _connect(self, address: Address) -> Connection:
        """Return the open connection to a leader, or create one. Raises Unavailable."""
        connection = self._leader_connections.get(address)
        if connection is not None and connection.is_open:
            return connection
        loop = asyncio.get_running_loop()
        tls = self._tls_to_brokers
        try:
            async with asyncio.timeout(LEADER_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(_receive_answers, set(), loop), *address, ssl=tls,
                    server_hostname=address[0] if tls else None,
                )  # fmt: skip
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"no broker answers at {address[0]}:{address[1]}: {error}") from error
        self._leader_connections[address] = connection
        return connection


def _receive_answers(connection: Connection, frames: list[Frame]) -> None:
    """Pass the answers of a leader to the requests that wait for them. Other commands of the leader are ignored."""
    for frame in frames:
        command = decode(frame)
        if command.is_response:
            connection.receive_answer(command)


def _no_leader() -> Unavailable:
    return Unavailable("no group of the cluster has a leader now; ask again in a moment")


def _successful_bodies(answers: dict[GroupLeader, Command | None]) -> list[dict[str, Any]]:
    """Decode the successful answers. Raises Unavailable if there is none."""
    bodies = [
        _decode_body(answer)
        for answer in answers.values()
        if answer is not None and answer.code == ResponseCode.SUCCESS
    ]
    if not bodies:
        raise _no_leader()
    return bodies


def _decode_body(answer: Command) -> dict[str, Any]:
    """Decode the JSON body of a broker's answer. Raises Unavailable if it is invalid."""
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise Unavailable(f"a broker's answer cannot be read: {error}") from error


def _copy_answer(call: Call, broker_answer: Command) -> Command:
    """Convert a broker's answer to an answer to this client's request."""
    return call.answer(
        broker_answer.code, broker_answer.remark, ext=broker_answer.ext, body=broker_answer.body
    )


def _join_clusters(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge RocketMQ's ClusterInfo tables of several brokers into one."""
    brokers: dict[str, Any] = {}
    names_by_cluster: dict[str, set[str]] = {}
    for body in bodies:
        brokers |= body.get("brokerAddrTable", {})
        for cluster, names in body.get("clusterAddrTable", {}).items():
            names_by_cluster.setdefault(cluster, set()).update(names)
    return {
        "brokerAddrTable": brokers,
        "clusterAddrTable": {cluster: sorted(names) for cluster, names in names_by_cluster.items()},
    }
