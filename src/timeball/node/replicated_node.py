"""A node of a cluster: a replica of a group's log, and the group's broker while this replica leads.

While the replica follows, the node forwards connections to its ports to the leader. When the replica becomes the
leader, the broker is built on the replica's log and takes over the ports. When its leadership ends, this node ends, and
another one starts from the same files as a follower: the state in a former leader's memory cannot be trusted
(docs/decisions/0136-a-leader-follows-in-the-same-process.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from timeball import __version__
from timeball.broker.groups.grouped import GroupedBroker
from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.coordinator import Node as ClusterNode
from timeball.cluster.coordination.etcd import create_coordinator
from timeball.cluster.group_calls import GroupCalls
from timeball.cluster.member import REPLICATION, FollowerCaches, Member
from timeball.cluster.operations import survey
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.replica import Role, Rules
from timeball.cluster.replica_log import BATCH_BYTES, ReplicaLog
from timeball.cluster.replica_thread import ReplicaThread
from timeball.cluster.transport.connections import Connections, PeerTls, listen
from timeball.cluster.transport.data_files import DataFiles
from timeball.cluster.transport.gateway import Gateway, Http, LocalAnswers
from timeball.edges.http.requests import ForeignPageCheck
from timeball.edges.shared.sessions import advertised
from timeball.io.clock import Clock, SystemClock
from timeball.io.files import RealFiles
from timeball.io.security import Security, load_client_tls, load_peer_tls
from timeball.io.threads import in_thread, watch_stop_signals
from timeball.log.disk_thread import Disk, Leading
from timeball.model.config import BROKER_NAME, Settings
from timeball.model.errors import LeaseLost, NotLeader, SetupError
from timeball.monitoring.figures import PeerFigures, ReplicaFigures, ReplicaGroup, ReplicaReaders
from timeball.node.data_folder import check_folder, write_format
from timeball.node.name_service import NameService
from timeball.node.node import SWITCH_INTERVAL_S, Node

logger = logging.getLogger(__name__)

QUORUM_TTLS = 3  # a leader without contact to a majority stops after this many lease times
ABANDON_S = 2.0  # longest time to end the work of a former leader; after it, its process is replaced
LAST_COMMITS_S = 5.0  # how long a stopping leader waits for the other replicas to store a commit
HAND_OVER_S = 2.0  # longest wait for the hand-over to the next leader
POLL_S = 0.01  # interval at which the hand-over is checked
STALLED_POLL_S = (
    0.02  # interval at which a replica's thread that does not run, and the broker's ports, are checked
)


class LentDisk(Disk):
    """The replica's thread, lent to the broker as its disk thread. The thread outlives the broker."""

    def __init__(self, thread: ReplicaThread) -> None:
        self.post, self._submit = thread.post, thread.submit  # type: ignore[method-assign]

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in the replica's thread."""
        return self._submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ignore the broker's request to shut down, because the replica still needs the thread."""


class ReplicatedNode:
    """The process of one replica. Belongs to the event loop."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings, self._clock = settings, clock or SystemClock()
        self.files = RealFiles(settings.data)
        self.broker_node: Node | None = None  # while this replica leads
        self.serving = asyncio.Event()  # set when the broker of this leader accepts clients
        # The reason why the process must end. Its result is set once.
        self._ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._lead_task: asyncio.Task[None] | None = None
        self._applier = ThreadPoolExecutor(1, thread_name_prefix="applier")
        self._apply_task: asyncio.Task[None] | None = None
        self._apply_to_seq = 0  # committed rows below this are applied to the caches
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
        self._drain_task: asyncio.Task[None] | None = (
            None  # ends the gateway's connections once this replica leads
        )
        self._group_calls: GroupCalls
        self._step_down_task: asyncio.Task[None] | None = None
        self._problem = ""  # the reason why this replica has stepped down, while its thread does not run

    async def start(self) -> None:
        """Open the replica's log, join the cluster, and listen. Raises SetupError and storage errors."""
        # A follower writes the log in one thread and applies it in another. By default, each system call of the first
        # would wait up to 5 ms for the second.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings = self.settings
        self._security = Security(settings)
        check_folder(self.files)
        async with AsyncExitStack() as undo:  # unlocks the folder and frees the ports if the start fails
            self.files.lock()
            undo.callback(self.files.unlock)
            write_format(self.files)
            self._log = log = await asyncio.to_thread(
                ReplicaLog, self.files, settings.node, settings.group, settings.segment_bytes
            )
            undo.callback(log.close)
            self._caches = FollowerCaches(self.files, log, settings)
            # With the cluster's name, so that a replica of another cluster is refused at its HELLO.
            full_group = f"{settings.cluster}/{settings.group}"
            rules = Rules(
                log.identity.replica, full_group, settings.acks == "all",
                quorum_ms=QUORUM_TTLS * settings.lease_ttl_ms, batch_bytes=BATCH_BYTES,
                quick_etcd_ms=settings.lease_ttl_ms // 8,
            )  # fmt: skip
            tls, listener = self._tls(), listen(settings.host, settings.replication_port)
            connections = Connections(full_group, listener, self._clock.boot_ms, tls)
            undo.callback(connections.close)
            self._coordinator = coordinator = create_coordinator(settings, self._clock)
            self.member = Member(
                coordinator, self._clock, self._registration(), settings.group, settings.lease_ttl_ms, self
            )
            self._names = NameService(settings, coordinator)
            tls_to_others = (
                load_client_tls(settings.replication_ca, "", "", purpose="replication")
                if settings.tls_cert
                else None
            )
            self._group_calls = GroupCalls(settings.group, self._names.directory, self._clock, tls_to_others)
            self._gateway = self._create_gateway()
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
        """Follow or lead until SIGTERM or SIGINT. Returns None then, or else the error that ends the process."""
        loop, stop_signal = asyncio.get_running_loop(), watch_stop_signals()
        if self._security.access is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        end_events: list[asyncio.Future[Any]] = [stop_signal, self._ended]
        await asyncio.wait(end_events, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            return self._ended.result()
        await self.stop()
        return None

    def _reload(self) -> None:
        """Read the access file again, for this node and for the broker that it runs."""
        self._security.reload()
        if self.broker_node is not None:
            self.broker_node.security.reload()

    async def stop(self) -> None:
        """Hand over if this replica leads, and stop all parts in order.

        If the replica's thread does not run, only the registration in the coordinator ends, and the process must end.
        """
        if self._step_down_task is not None:
            # Nothing can be written, and the thread cannot be waited for.
            self._step_down_task.cancel()
            return await self.member.close()
        if self._lead_task is not None:
            await asyncio.wait([self._lead_task])
        if self._hand_over_task is not None:
            await asyncio.wait([self._hand_over_task])
        elif self.broker_node is not None:
            try:
                await self._stop_leading(self.broker_node, "")
            except LeaseLost as error:
                # The replica's thread waits for these commits, so a stop of the thread would wait, too.
                logger.warning("stopped out of order reason=%s", error)
                return await self.member.close()
        await self._end_parts()

    async def _end_parts(self) -> None:
        """End all parts of the node but the broker, and unlock the folder."""
        await self._gateway.close()
        await self._names.close()
        await self._group_calls.close()
        await self.member.close()
        if self._apply_task is not None:
            await asyncio.wait([self._apply_task])
        await asyncio.to_thread(self.data_files.stop)
        await asyncio.to_thread(self.thread.shutdown)
        self._applier.shutdown()
        self.files.unlock()

    async def abandon(self, error: BaseException) -> bool:
        """End all work without writing, so that another node of this process can use the files.

        `error`: the reason why the node ends. Returns False if this is not possible, or takes longer than ABANDON_S:
        then the caller must replace the process.
        """
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            # Until the next node listens to these signals, they end the process.
            loop.remove_signal_handler(signal_number)
        is_building = self._lead_task is not None and not self._lead_task.done()
        if is_building or not isinstance(error, LeaseLost | NotLeader):
            return False
        try:
            async with asyncio.timeout(ABANDON_S):
                if self.broker_node is not None:
                    await self.broker_node.abandon()
                await self._end_parts()
        except Exception as failure:  # of any kind: a new process makes an orderly end unnecessary
            logger.warning("work not ended in order reason=%s", repr(failure))
            return False
        return True

    # -- called by the member (cluster/member.py) --------------------------------------------------------------------

    def apply(self, seq: int) -> None:
        """Apply committed rows below `seq` to the follower's caches, in the background."""
        self._apply_to_seq = seq
        if self._apply_task is None or self._apply_task.done():
            self._apply_task = asyncio.create_task(self._apply())
            self._apply_task.add_done_callback(self._check_applied)

    async def _apply(self) -> None:
        """Apply committed rows until no more are committed."""
        # Rows that are committed during a round are applied in the next, so many small commits cost only one round.
        to_seq = 0
        while to_seq < self._apply_to_seq:
            to_seq = self._apply_to_seq
            await in_thread(self._applier, self._caches.apply, to_seq)

    def _check_applied(self, task: asyncio.Task[None]) -> None:
        """End the process if the rows could not be applied."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    def serve(self, epoch: int) -> None:
        """Start to lead: build the broker on the replica's log, in the background."""
        logger.info("replica leads epoch=%d", epoch)
        self._lead_task = asyncio.create_task(self._lead())

    def hand_over(self, node: str) -> None:
        """Stop serving, let `node` lead, and end the process. Has no effect if a hand-over is in progress."""
        if self.broker_node is not None and self._hand_over_task is None:
            logger.info("replica hands over node=%s", node)
            self._hand_over_task = asyncio.create_task(self._give_way(self.broker_node, node))

    def step_down(self, reason: str) -> None:
        """Stop serving, and forward clients to the next leader until the replica's thread runs again."""
        logger.warning("replica steps down reason=%s", reason)
        self._problem = reason
        self._step_down_task = asyncio.create_task(self._step_down(self.thread.polled_ms))

    def leader_changed(self) -> None:
        """Close the forwarded connections to a node that leads no more."""
        self._gateway.leader_changed()

    def figures(self) -> ReplicaFigures:
        """Collect the replica's figures for status and metrics."""
        thread, member = self.thread, self.member
        state, offsets = thread.state, thread.clock_offsets.ms
        peers = state.lead.peers if state.lead else {}
        return ReplicaFigures(
            self.settings.group, state.rules.replica,
            str(Role.STOPPED if self._problem else state.role), member.leader(),
            epoch=state.epoch, promised=state.promised,
            generation=state.members.generation, members=state.members.replicas, log_seq=state.log.seq,
            committed_seq=state.committed_seq, applied_seq=state.applied_seq,
            since_ms=thread.since_ms, connections=thread.connected, version=__version__,
            problem=self._problem or thread.problem or self.data_files.problem,
            peers={
                node: PeerFigures(peer.replica, peer.acked.seq, offsets.get(node))
                for node, peer in peers.items()
                if peer.acked is not None
            },
        )  # fmt: skip

    async def _survey(self) -> list[ReplicaGroup]:
        return await survey(self._coordinator)

    def end(self, error: BaseException) -> None:
        """Let `run_until_signal` return `error`, so that this node ends. Only the first error counts."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def _lead(self) -> None:
        """Build the broker on the replica's log, and let it take over the ports. Any error ends the node."""
        try:
            if self._apply_task is not None:
                await self._apply_task
            opened = await asyncio.wrap_future(self.thread.submit(self._log.opened))
            hot = await in_thread(self._applier, self._caches.finish, opened.segments.next_seq)
            # The broker needs all data files that the log names. Missing files are fetched from other replicas.
            await asyncio.wrap_future(self.data_files.complete())
            self._gateway.stop_listening()
            self._drain_task = asyncio.create_task(self._gateway.drain())
            leading = Leading(LentDisk(self.thread), self.thread, self.data_files, self.member.confirm_lead)
            node = Node(
                self._broker_settings(), self._clock, self.files, leading,
                ReplicaReaders(self.figures, self._survey, self._names.directory.hosts),
            )  # fmt: skip
            node.build_broker = partial(
                GroupedBroker, others=self._group_calls, account=self._security.account
            )
            node.cluster_status = self._names.status
            await node.start(hot=(opened, hot))
            self.broker_node = node
            node.when_failed(self.end)
            self.serving.set()
        except asyncio.CancelledError:
            raise  # a step-down has cancelled this task, and then the node must not end before its disk answers
        except BaseException as error:  # no caller awaits this task, so every error must end the node here
            self.end(error)

    async def _step_down(self, polled_ms: int) -> None:
        """Close the broker's connections, forward new ones, and end the node once the replica's thread runs again.

        The thread runs again when `thread.polled_ms` is no longer `polled_ms`. The broker cannot be stopped in order,
        because that writes to the disk. Its clients do not know whether their last requests were accepted: the log may
        have them when the disk answers again.
        """
        try:
            if self._lead_task is not None:
                self._lead_task.cancel()  # it waits for the thread before it listens
            if self.broker_node is not None:
                self.broker_node.abort_edges()
            while self.thread.polled_ms == polled_ms:
                if not self._gateway.is_listening:
                    await self._listen_as_follower()
                await asyncio.sleep(STALLED_POLL_S)
            self.end(LeaseLost(f"this node has stepped down: {self._problem}"))
        except Exception as error:  # no caller awaits this task, so every error must end the node here
            self.end(error)

    async def _listen_as_follower(self) -> None:
        """Listen on this node's ports again, if the broker's edges have freed them."""
        gateway = self._create_gateway()
        with suppress(SetupError):
            await gateway.start()
            self._gateway = gateway

    async def _give_way(self, broker: Node, node: str) -> None:
        """Hand over to `node` as in `stop`, and end this node. The next one on these files starts as a follower."""
        try:
            await self._stop_leading(broker, node)
            if self.thread.state.role is not Role.STOPPED:
                await self.member.close()  # frees the group, so that another replica can lead without waiting
            self.broker_node = None  # it has finished
            self.end(LeaseLost(f"handed over to {node}"))
        except BaseException as error:  # no caller awaits this task, so every error must end the node here
            self.end(error)

    async def _stop_leading(self, broker: Node, node: str) -> None:
        """Stop serving and hand over to `node`, or to any replica if `node` is "".

        Raises LeaseLost if the last commits do not end: too few of the other replicas answer, or the disk hangs.
        """
        # Sending the last answers may take a while, and the next leader need not wait for it.
        closing_edges = asyncio.create_task(broker.close_edges())
        await asyncio.sleep(0)  # lets the task run until the ports are closed
        finishing = asyncio.create_task(broker.finish())
        await self._watch_last_commits(broker, finishing)
        await finishing
        await self._hand_over(node)
        await closing_edges

    async def _watch_last_commits(self, broker: Node, finishing: asyncio.Task[None]) -> None:
        """Wait until `finishing` ends.

        Raises LeaseLost if rows are not durable yet and no commit has ended for LAST_COMMITS_S.
        """
        loop, writer = asyncio.get_running_loop(), broker.broker.log.writer
        committed, since_s = self.thread.committed, loop.time()
        while not finishing.done():
            await asyncio.wait([finishing], timeout=LAST_COMMITS_S / 10)
            if self.thread.committed != committed or not writer.is_writing:
                committed, since_s = self.thread.committed, loop.time()
            elif loop.time() - since_s > LAST_COMMITS_S:
                raise LeaseLost(
                    f"no commit has ended for {LAST_COMMITS_S:.0f} s: too few replicas answer, or a disk hangs"
                )

    async def _hand_over(self, node: str) -> None:
        """Let `node` lead or, if it is "", a replica that has the whole log. Waits at most HAND_OVER_S for the end.

        Does nothing if this replica does not lead any more, or if no other replica has the whole log.
        """
        state = self.thread.state
        lead = state.lead
        if lead is None:
            return
        up_to_date = [
            name
            for name, peer in lead.peers.items()
            if peer.acked == state.log.end and peer.replica in lead.replicas
        ]
        if not (node or up_to_date):
            return
        self.thread.tell(on.HandOver(node or sorted(up_to_date)[0]))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HAND_OVER_S
        while self.thread.state.role is not Role.STOPPED and loop.time() < deadline_s:  # noqa: ASYNC110 (another thread's state)
            await asyncio.sleep(POLL_S)

    # -- values derived from the settings ----------------------------------------------------------------------------

    def _tls(self) -> PeerTls | None:
        """Load the certificates for connections between replicas. None without `replication_ca`. Raises SetupError."""
        settings = self.settings
        if not settings.replication_ca:
            return None
        return PeerTls(*load_peer_tls(settings.replication_ca, settings.tls_cert, settings.tls_key))

    def _create_gateway(self) -> Gateway:
        """Create the gateway that forwards the connections of this node's ports to the leader."""
        return Gateway(self.settings.host, self._ports(), self.member.address, self._follower_http())

    def _follower_http(self) -> Http | None:
        """Build the handler of HTTP requests to a follower. None means that it forwards connections unread."""
        settings, security = self.settings, self._security
        pages = ForeignPageCheck(
            settings, has_accounts=security.access is not None, cluster_hosts=self._names.directory.hosts
        )
        answers = LocalAnswers(
            self.figures, lambda headers: security.caller(headers, self._clock.wall_ms()), pages.check
        )
        if security.tls is None:
            return Http(answers)
        if not settings.replication_ca:
            return None  # without a CA, this node could not check the leader's certificate
        return Http(
            answers,
            security.tls.http,
            load_client_tls(settings.replication_ca, "", "", purpose="replication"),
        )

    def _broker_settings(self) -> Settings:
        """Derive the settings of the group's broker.

        The default of the broker's name is the group's name, because RocketMQ clients see a group as a broker. The
        broker has no name server of its own, because the node's name server answers for all groups of the cluster.
        """
        settings = self.settings
        name = settings.group if settings.broker_name == BROKER_NAME else settings.broker_name
        return dataclasses.replace(settings, name_server_port=-1, broker_name=name)

    def _ports(self) -> dict[str, int]:
        """List the ports of the edges that are switched on, by edge."""
        settings = self.settings
        ports = {
            "flight": settings.port, "http": settings.http_port, "remoting": settings.remoting_port,
            "grpc": settings.grpc_port,
        }  # fmt: skip
        return {edge: port for edge, port in ports.items() if port > 0}

    def _registration(self) -> ClusterNode:
        """Build this node's entry in the coordinator, with the addresses that others dial. Raises SetupError."""
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
