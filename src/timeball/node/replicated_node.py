"""A node of a cluster: a replica of a group's log, and the group's broker while this replica leads.

While the replica follows, the node forwards connections to its ports to the leader. When the replica becomes the
leader, the broker is built on the replica's log and takes over the ports. When its leadership ends, the process ends,
and the next process starts as a follower: the state in a former leader's memory cannot be trusted
(docs/decisions/0003-fail-stop.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from timeball import __version__
from timeball.broker.groups.grouped import GroupedBroker
from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.coordinator import Node as ClusterNode
from timeball.cluster.coordination.etcd import coordinator_of
from timeball.cluster.follower_caches import FollowerCaches
from timeball.cluster.member import REPLICATION, Member
from timeball.cluster.operating.group_calls import GroupCalls
from timeball.cluster.operating.survey import survey
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.replica import Role, Rules
from timeball.cluster.replica_log import BATCH_BYTES, ReplicaLog
from timeball.cluster.replica_thread import ReplicaThread
from timeball.cluster.transport.connections import Connections, PeerTls, listen
from timeball.cluster.transport.data_files import DataFiles
from timeball.cluster.transport.gateway import Gateway, Http
from timeball.cluster.transport.local_http import LocalAnswers
from timeball.edges.http.foreign_pages import ForeignPages
from timeball.edges.shared.sessions import advertised
from timeball.io.clock import Clock, SystemClock
from timeball.io.files import RealFiles
from timeball.io.security import Security, load_client_tls, load_peer_tls
from timeball.io.stop_signals import stop_asked
from timeball.io.threads import in_thread
from timeball.log.disk_thread import Disk, Leading
from timeball.model.config import BROKER_NAME, Settings
from timeball.model.errors import LeaseLost, SetupError
from timeball.monitoring.replica_figures import PeerFigures, ReplicaFigures
from timeball.monitoring.replica_groups import ReplicaGroup, ReplicaReadOuts
from timeball.node.data_folder import check_folder, write_format
from timeball.node.name_service import NameService
from timeball.node.node import Node

logger = logging.getLogger(__name__)

QUORUM_TTLS = 3  # a leader without contact to a majority stops after this many lease times
HAND_OVER_S = 2.0  # longest wait for the hand-over to the next leader
LOOK_S = 0.01


class LentDisk(Disk):
    """The replica's thread in the role of the broker's disk thread. The thread outlives the broker."""

    def __init__(self, thread: ReplicaThread) -> None:
        self.post, self._submit = thread.post, thread.submit  # type: ignore[method-assign]

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in the replica's thread."""
        return self._submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing, because the replica still needs the thread."""


class ReplicatedNode:
    """The process of one replica. Belongs to the event loop."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings, self._clock = settings, clock or SystemClock()
        self.files = RealFiles(settings.data)
        self.broker_node: Node | None = None  # while this replica leads
        self.serving = asyncio.Event()
        self._ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._serve_task: asyncio.Task[None] | None = None
        self._applier = ThreadPoolExecutor(1, thread_name_prefix="applier")
        self._apply_task: asyncio.Task[None] | None = None
        self._apply_to_seq = 0
        self._caches: FollowerCaches
        self._hand_over_task: asyncio.Task[None] | None = None
        self.member: Member
        self.thread: ReplicaThread
        self.data_files: DataFiles
        self._log: ReplicaLog
        self._gateway: Gateway
        self._security: Security
        self._names: NameService
        self._coordinator: Coordinator
        self._draining: asyncio.Task[None] | None = None  # of the gateway, once this replica leads
        self._others: GroupCalls

    async def start(self) -> None:
        """Open the replica's log, join the cluster, and listen. Raises SetupError and storage errors."""
        settings = self.settings
        self._security = Security(settings)
        check_folder(self.files)
        async with AsyncExitStack() as undo:  # a start that fails unlocks the folder and frees the ports
            self.files.lock()
            undo.callback(self.files.unlock)
            write_format(self.files)
            self._log = log = await asyncio.to_thread(
                ReplicaLog, self.files, settings.node, settings.group, settings.segment_bytes
            )
            undo.callback(log.close)
            self._caches = FollowerCaches(self.files, log, settings)
            group = (
                f"{settings.cluster}/{settings.group}"  # a replica of another cluster is refused at its HELLO
            )
            rules = Rules(
                log.identity.replica, group, settings.acks == "all",
                quorum_ms=QUORUM_TTLS * settings.lease_ttl_ms, batch_bytes=BATCH_BYTES,
            )  # fmt: skip
            tls, listening = self._tls(), listen(settings.host, settings.replication_port)
            connections = Connections(group, listening, self._clock.boot_ms, tls)
            undo.callback(connections.close)
            self._coordinator = coordinator = coordinator_of(settings, self._clock)
            self.member = Member(
                coordinator, self._clock, self._registration(), settings.group, settings.lease_ttl_ms, self
            )
            self._names = NameService(settings, coordinator)
            tls_to_others = load_client_tls(settings.replication_ca, "", "") if settings.tls_cert else None
            self._others = GroupCalls(settings.group, self._names.directory, self._clock, tls_to_others)
            self._gateway = Gateway(settings.host, self._ports(), self.member.address, self._http())
            undo.push_async_callback(self._gateway.close)
            await self._gateway.start()
            await self._names.start()
            self.thread = ReplicaThread(rules, log, connections, self._clock, self.member)
            self.data_files = self.thread.file_work = DataFiles(
                self.files, log, self.thread, self._clock, committed=lambda: self._caches.files,
                retention_ms=settings.retention_ms, on_failure=self.member.fail,
            )  # fmt: skip
            undo.pop_all()
        self.data_files.start()
        self.thread.start()
        self.member.start(self.thread)

    async def run_until_signal(self) -> BaseException | None:
        """Follow or lead until SIGTERM or SIGINT, then return None. Otherwise returns why the process must restart."""
        loop, asked = asyncio.get_running_loop(), stop_asked()
        if self._security.access is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        both: list[asyncio.Future[Any]] = [asked, self._ended]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            return self._ended.result()
        await self.stop()
        return None

    def _reload(self) -> None:
        self._security.reload()
        if self.broker_node is not None:
            self.broker_node.security.reload()

    async def stop(self) -> None:
        """Hand over if this replica leads, and stop all parts in order."""
        if self._serve_task is not None:
            await asyncio.wait([self._serve_task])
        if self._hand_over_task is not None:
            await asyncio.wait([self._hand_over_task])
        elif self.broker_node is not None:
            await self._leave(self.broker_node, "")
        await self._gateway.close()
        await self._names.close()
        await self._others.close()
        await self.member.close()
        await asyncio.to_thread(self.data_files.stop)
        await asyncio.to_thread(self.thread.shutdown)
        self._applier.shutdown()
        self.files.unlock()

    # -- duties that the member brings (cluster/member.py) -----------------------------------------------------------

    def apply(self, seq: int) -> None:
        """Apply committed rows up to `seq` to the follower's caches, in the background."""
        self._apply_to_seq = seq
        if self._apply_task is None or self._apply_task.done():
            self._apply_task = asyncio.create_task(self._apply())
            self._apply_task.add_done_callback(self._applied)

    async def _apply(self) -> None:
        # Rows that are committed meanwhile are applied in the next round, so many small commits cost only one round.
        to_seq = 0
        while to_seq < self._apply_to_seq:
            to_seq = self._apply_to_seq
            await in_thread(self._applier, self._caches.apply, to_seq)

    def _applied(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    def serve(self, epoch: int) -> None:
        """Start to lead: build the broker on the replica's log, in the background."""
        logger.info("replica leads epoch=%d", epoch)
        self._serve_task = asyncio.create_task(self._serve())

    def hand_over(self, node: str) -> None:
        """Stop serving, let `node` lead, and end the process. Does nothing if this is in progress already."""
        if self.broker_node is not None and self._hand_over_task is None:
            logger.info("replica hands over node=%s", node)
            self._hand_over_task = asyncio.create_task(self._give_way(self.broker_node, node))

    def figures(self) -> ReplicaFigures:
        """Collect the replica's figures for status and metrics."""
        thread, member = self.thread, self.member
        state, offsets = thread.state, thread.clock_offsets.ms
        peers = state.lead.peers if state.lead else {}
        return ReplicaFigures(
            self.settings.group, state.rules.replica, str(state.role), member.leader(),
            epoch=state.epoch, promised=state.promised, log_seq=state.log.seq,
            committed_seq=state.committed_seq, applied_seq=state.applied_seq,
            since_ms=thread.since_ms, connections=thread.connected, version=__version__,
            peers={
                node: PeerFigures(peer.replica, peer.acked.seq, offsets.get(node))
                for node, peer in peers.items()
                if peer.acked is not None
            },
        )  # fmt: skip

    async def _survey(self) -> list[ReplicaGroup]:
        return await survey(self._coordinator)

    def end(self, error: BaseException) -> None:
        """End the process, because it no longer leads or its disk has failed."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def _serve(self) -> None:
        try:
            if self._apply_task is not None:
                await self._apply_task
            opened = await asyncio.wrap_future(self.thread.submit(self._log.opened))
            hot = await in_thread(self._applier, self._caches.finish, opened.segments.next_seq)
            # The broker needs all data files that the log names. Those missing on this disk come from other replicas.
            await asyncio.wrap_future(self.data_files.complete())
            self._gateway.stop_listening()
            self._draining = asyncio.create_task(self._gateway.drain())
            leading = Leading(LentDisk(self.thread), self.thread, self.data_files)
            node = Node(
                self._broker_settings(), self._clock, self.files, leading,
                ReplicaReadOuts(self.figures, self._survey, self._names.directory.hosts),
            )  # fmt: skip
            node.build_broker = partial(GroupedBroker, others=self._others, account=self._security.account)
            node.cluster_status = self._names.status
            await node.start(hot=(opened, hot))
            self.broker_node = node
            node.when_failed(self.end)
            self.serving.set()
        except BaseException as error:  # no caller awaits this task, so every error must end the process here
            self.end(error)

    async def _give_way(self, broker: Node, node: str) -> None:
        """Hand over as in `stop`, and end the process, so that the next one starts as a follower."""
        try:
            await self._leave(broker, node)
            if self.thread.state.role is not Role.STOPPED:
                await self.member.close()  # frees the group, so that another replica can lead without waiting
            self.end(LeaseLost(f"handed over to {node}"))
        except BaseException as error:  # no caller awaits this task, so every error must end the process here
            self.end(error)

    async def _leave(self, broker: Node, node: str) -> None:
        """Stop serving and hand over to `node`, or to any replica if `node` is ""."""
        # Sending the last answers may take a while. The next leader does not have to wait for it.
        closing = asyncio.create_task(broker.close_edges())
        await asyncio.sleep(0)  # lets the task run until the ports are closed
        await broker.finish()
        await self._hand_over(node)
        await closing

    async def _hand_over(self, node: str) -> None:
        """Let `node` lead or, if it is "", a replica that has the whole log. Waits at most HAND_OVER_S."""
        state = self.thread.state
        lead = state.lead
        if lead is None:
            return
        ready = [
            name
            for name, peer in lead.peers.items()
            if peer.acked == state.log.end and peer.replica in lead.replicas
        ]
        if not (node or ready):
            return
        self.thread.tell(on.HandOver(node or sorted(ready)[0]))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HAND_OVER_S
        while self.thread.state.role is not Role.STOPPED and loop.time() < until_s:  # noqa: ASYNC110 (another thread's state)
            await asyncio.sleep(LOOK_S)

    # -- what the settings say ---------------------------------------------------------------------------------------

    def _tls(self) -> PeerTls | None:
        settings = self.settings
        if not settings.replication_ca:
            return None
        return PeerTls(*load_peer_tls(settings.replication_ca, settings.tls_cert, settings.tls_key))

    def _http(self) -> Http | None:
        """Build the follower's handling of HTTP requests. None means that it forwards connections unread."""
        settings, security = self.settings, self._security
        pages = ForeignPages(
            settings, has_accounts=security.access is not None, cluster_hosts=self._names.directory.hosts
        )
        answers = LocalAnswers(
            self.figures, lambda headers: security.caller(headers, self._clock.wall_ms()), pages.check
        )
        if security.tls is None:
            return Http(answers)
        if not settings.replication_ca:
            return None  # without a CA, this node could not check the leader's certificate
        return Http(answers, security.tls.http, load_client_tls(settings.replication_ca, "", ""))

    def _broker_settings(self) -> Settings:
        """Return the settings of the group's broker.

        Unless the broker's name is set, it is the group's name, because RocketMQ clients see a group as a broker. The
        broker has no name server: that of this node answers for all groups, including those that other nodes lead.
        """
        settings = self.settings
        name = settings.group if settings.broker_name == BROKER_NAME else settings.broker_name
        return dataclasses.replace(settings, name_server_port=-1, broker_name=name)

    def _ports(self) -> dict[str, int]:
        settings = self.settings
        ports = {
            "flight": settings.port, "http": settings.http_port, "remoting": settings.remoting_port,
            "grpc": settings.grpc_port,
        }  # fmt: skip
        return {edge: port for edge, port in ports.items() if port > 0}

    def _registration(self) -> ClusterNode:
        settings, identity = self.settings, self._log.identity
        host, remoting_port = advertised(settings.advertise)
        host = host or settings.host
        if host in ("0.0.0.0", "::"):
            raise SetupError(
                f"--host {host}: other nodes and clients cannot dial that; name this machine by --advertise"
            )
        ports = {**self._ports(), REPLICATION: settings.replication_port}
        if remoting_port is not None:
            ports["remoting"] = remoting_port
        host = f"[{host}]" if ":" in host else host
        return ClusterNode(
            settings.node, {edge: f"{host}:{port}" for edge, port in ports.items()}, version=__version__,
            group=settings.group, replica=identity.replica, promised=identity.promised,
        )  # fmt: skip
