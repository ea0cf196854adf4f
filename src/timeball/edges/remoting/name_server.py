"""A name server for all groups of a cluster: it asks the leader of each group and joins the answers.

RocketMQ's clients ask it for the route of a topic: the queues of the topic in each group, and the address of each
group's leader. To clients, a group is a broker with the group's name. While a group has no leader, its last known
queues stay in the route, without an address. Producers then leave these queues out, and consumers ask again.

Every other request is for a broker and goes to the first group that has a leader.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from timeball.edges.remoting.calls import Call
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BadHeader, Command, Frame, decode
from timeball.edges.remoting.connection import CALLS_MAX, Connection, Room
from timeball.edges.remoting.dispatch import failure
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import Listening
from timeball.model.errors import SetupError, Unavailable

logger = logging.getLogger(__name__)

BACKLOG = 1_024
ASK_S = 3.0  # seconds for a leader's answer. RocketMQ's clients wait as long for theirs
REMEMBERED_MAX = 20_000  # answers, for groups that have no leader for a while
MASTER_ID = "0"
TOPIC_LISTS = (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, RequestCode.GET_TOPICS_BY_CLUSTER)

Address = tuple[str, int]


class GroupPlace(NamedTuple):
    """A group, and the address of its leader's broker (None while it has no leader)."""

    name: str
    leader: Address | None


class NameServer:
    """Listens on one port. Belongs to the event loop."""

    def __init__(
        self,
        groups: Callable[[], Iterable[GroupPlace]],
        *,
        tls: ssl.SSLContext | None = None,
        tls_to_brokers: ssl.SSLContext | None = None,
    ) -> None:
        self._groups, self._tls, self._tls_to_brokers = groups, tls, tls_to_brokers
        self._server: Listening | None = None
        self._opened: set[Connection] = set()
        self._room = Room()
        self._brokers: dict[Address, Connection] = {}
        self._remembered: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises SetupError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await first_byte.listen(
                lambda: Connection(self._receive, self._opened, loop, self._room, edge="name_server"),
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
        for connection in [*self._opened, *self._brokers.values()]:
            connection.abort()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, frames: list[Frame]) -> None:
        for frame in frames:
            try:
                command = decode(frame)
            except BadHeader as error:
                connection.send(failure(Call(connection, error.request), error))
                continue
            call = Call(connection, command)
            if connection.calls >= CALLS_MAX:
                connection.send(
                    call.answer(ResponseCode.SYSTEM_BUSY, f"{CALLS_MAX} requests wait for their answers")
                )
                continue
            task = asyncio.ensure_future(self._answer(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call) -> None:
        call.connection.calls += 1
        try:
            reply = await self._reply(call)
        except Exception as error:  # of any kind, as in dispatch.py: the client gets an answer
            reply = failure(call, error)
        finally:
            call.connection.calls -= 1
        if not call.command.is_one_way:
            call.connection.send(reply)

    async def _reply(self, call: Call) -> Command:
        code = call.command.code
        if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return await self._route(call)
        if code == RequestCode.GET_BROKER_CLUSTER_INFO:
            answers = [body for _, body in self._bodies(await self._ask_all(call))]
            return call.answer_json(_joined_clusters(answers))
        if code in TOPIC_LISTS:
            lists = [body.get("topicList", []) for _, body in self._bodies(await self._ask_all(call))]
            return call.answer_json({"topicList": sorted({name for names in lists for name in names})})
        leaders = [group.leader for group in self._groups() if group.leader is not None]
        if not leaders:
            raise Unavailable("no group of the cluster has a leader now; ask again in a moment")
        return _as_answer(call, await self._ask(leaders[0], call.command))

    async def _route(self, call: Call) -> Command:
        """Return the queues and the leaders of all groups that have the topic."""
        topic, answers = call.command.ext.get("topic", ""), await self._ask_all(call)
        queues, brokers, order, refusal = [], [], [], None
        for group, answer in answers.items():
            key = (group.name, topic)
            if answer is not None and answer.code != ResponseCode.SUCCESS:
                refusal = answer
                continue
            body = self._remembered.get(key) if answer is None else _body(answer)
            if body is None:
                continue
            if answer is not None:
                self._remember(key, body)
            queues += body.get("queueDatas", [])
            order += [body["orderTopicConf"]] if "orderTopicConf" in body else []
            for broker in body.get("brokerDatas", []):
                address = broker["brokerAddrs"] if answer is not None and group.leader else {}
                brokers.append({**broker, "brokerAddrs": address})
        if not queues:
            if refusal is None:
                raise Unavailable("no group of the cluster has a leader now; ask again in a moment")
            return _as_answer(call, refusal)
        route = {"queueDatas": queues, "brokerDatas": brokers, "filterServerTable": {}}
        return call.answer_json(route | ({"orderTopicConf": ";".join(order)} if order else {}))

    def _remember(self, key: tuple[str, str], body: dict[str, Any]) -> None:
        self._remembered[key] = body
        self._remembered.move_to_end(key)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    @staticmethod
    def _bodies(answers: dict[GroupPlace, Command | None]) -> list[tuple[GroupPlace, dict[str, Any]]]:
        found = [
            (group, _body(answer))
            for group, answer in answers.items()
            if answer is not None and answer.code == ResponseCode.SUCCESS
        ]
        if not found:
            raise Unavailable("no group of the cluster has a leader now; ask again in a moment")
        return found

    # -- the leaders -------------------------------------------------------------------------------------------------

    async def _ask_all(self, call: Call) -> dict[GroupPlace, Command | None]:
        """Ask all leaders at once. The answer of a group is None if it has no leader, or its leader does not answer."""
        groups = sorted(self._groups(), key=lambda group: group.name)

        async def asked(group: GroupPlace) -> Command | None:
            if group.leader is None:
                return None
            try:
                return await self._ask(group.leader, call.command)
            except Unavailable as error:
                logger.warning("leader did not answer group=%s reason=%s", group.name, error)
                return None

        answers = await asyncio.gather(*(asked(group) for group in groups))
        return dict(zip(groups, answers, strict=True))

    async def _ask(self, address: Address, command: Command) -> Command:
        """Send the request to one broker and return its answer. Raises Unavailable."""
        connection = await self._connect(address)
        # Without the flags of the client: the leader must answer even a one-way request, or `request` would time out.
        request = msgspec.structs.replace(command, flag=0)
        return await connection.request(request, ASK_S)

    async def _connect(self, address: Address) -> Connection:
        connection = self._brokers.get(address)
        if connection is not None and connection.is_open:
            return connection
        loop = asyncio.get_running_loop()
        tls = self._tls_to_brokers
        try:
            async with asyncio.timeout(ASK_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(_take_answers, set(), loop), *address, ssl=tls,
                    server_hostname=address[0] if tls else None,
                )  # fmt: skip
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"no broker answers at {address[0]}:{address[1]}: {error}") from error
        self._brokers[address] = connection
        return connection


def _take_answers(connection: Connection, frames: list[Frame]) -> None:
    for frame in frames:
        command = decode(frame)
        if command.is_response:
            connection.answered(command)


def _body(answer: Command) -> dict[str, Any]:
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Unavailable(f"a broker's answer cannot be read: {error}") from error


def _as_answer(call: Call, found: Command) -> Command:
    """Return a broker's answer as the answer to this client's request."""
    return call.answer(found.code, found.remark, ext=found.ext, body=found.body)


def _joined_clusters(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    brokers: dict[str, Any] = {}
    clusters: dict[str, set[str]] = {}
    for body in bodies:
        brokers |= body.get("brokerAddrTable", {})
        for cluster, names in body.get("clusterAddrTable", {}).items():
            clusters.setdefault(cluster, set()).update(names)
    return {
        "brokerAddrTable": brokers,
        "clusterAddrTable": {cluster: sorted(names) for cluster, names in clusters.items()},
    }
