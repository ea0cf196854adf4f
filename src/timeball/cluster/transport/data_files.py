"""Replication of the pending table's data files: replicas receive a file before a row of the log names it.

A separate thread reads, writes and syncs the files. So a commit waits for at most one piece of a file, which the
replica's thread sends or receives between two polls. The receiver sets the pace: it requests one file at a time, and
the next piece (WANT) once it has written the last one.

    leader     announces each new file (FILE without a piece), and counts HAVE; a row may name the file once enough
               replicas have it
    replica    requests announced files, and then the missing files that committed rows name; it removes files that
               have left the table, and segments that the leader may have deleted
    new leader requests its missing files before its broker is built (`complete`), and ends if none of them arrives for
               GIVE_UP_MS, so that another replica can lead

A replica confirms a file only after its checksum was right and its name is on the disk (`IncomingFile`).
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import google_crc32c
import pyarrow as pa

from timeball.cluster.protocol.leading import has_quorum
from timeball.cluster.protocol.messages import Complete, File, Have, Message, Want
from timeball.cluster.protocol.replica import Replica, Role, node_of
from timeball.io.clock import Clock
from timeball.io.files import Files, full_disk_as_over_limit
from timeball.model import limits
from timeball.model.errors import (
    LEADS_NO_MORE,
    MissingFile,
    NotFound,
    NotLeader,
    OverLimit,
    PeerError,
    TimeballError,
)
from timeball.table import live_files
from timeball.table.attachment import PATH, FileEntry
from timeball.table.layout import FOLDER

logger = logging.getLogger(__name__)

WORK_EVERY_MS = 50  # interval of the thread's periodic work
REMOVE_EVERY_MS = 1_000  # interval of the search for files to remove
ANSWER_MS = 3_000  # a request is given up when no piece arrives for this long
RETRY_MS = 1_000  # pause before a file is requested again after a failure
GIVE_UP_MS = 30_000  # a new leader waits for its missing files until no piece has arrived for this long
# A file that no row names may belong to a future attach. Files left by failed jobs are removed after this time.
UNNAMED_MS = limits.DAY_MS


class Link(Protocol):
    """The replica's thread, as far as this module uses it."""

    state: Replica

    def send_soon(self, node: str, message: Message, *, answers: bool) -> None:
        """Send a message from the replica's thread, which owns the connections (ReplicaThread.send_soon)."""

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call in the replica's thread."""


class CommittedFiles(NamedTuple):
    """The data files that the committed rows below `seq` name."""

    seq: int = 0  # 0: no rows were applied yet, so the live files are not known
    entries: Mapping[str, FileEntry] = {}  # by path
    log_from_seq: int = 0  # the log below this row may be deleted


class KeptLog(Protocol):
    """The replica's log, as far as this module uses it."""

    def delete_segments_before(self, before_seq: int) -> None:
        """Delete the segments whose rows are all below `before_seq`. Belongs to the replica's thread."""


class AnnouncedFile(NamedTuple):
    """A file that a leader has announced."""

    node: str
    size_bytes: int


class FileRequest:
    """The file that this replica is requesting, piece by piece."""

    def __init__(self, node: str, path: str, size_bytes: int, now_ms: int) -> None:
        self.node, self.path, self.size_bytes = node, path, size_bytes
        self.last_piece_ms = now_ms  # boot clock at the last piece, or at the request
        self.incoming: IncomingFile | None = None


class DataFiles:
    """The thread of a replica's data files. Any thread may call the public methods, which return at once."""

    def __init__(
        self,
        files: Files,
        log: KeptLog,
        link: Link,
        clock: Clock,
        *,
        committed: Callable[[], CommittedFiles],
        retention_ms: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Create the thread without starting it.

        `committed` returns the files that the rows applied so far name. It is called in the new thread.
        """
        self._files, self._log, self._link, self._clock = files, log, link, clock
        # A file that has left the table stays readable for the retention time, at most a day, for readers of an older
        # version of the table. A single broker does the same (broker/maintenance.py).
        self._keep_readable_ms = min(retention_ms, limits.DAY_MS)
        self._on_failure, self._committed = on_failure, committed
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends the thread
        self._live_files = live_files.LiveFiles(files)
        self._live = CommittedFiles()  # as `committed` returned them last
        self._outgoing = OutgoingFiles(files, self._live_files)
        self._missing: dict[str, int] = {}  # live files that are not on this disk: path -> size in bytes
        self._announced: dict[str, AnnouncedFile] = {}  # by path
        self._request: FileRequest | None = None
        self._retry_at_ms: dict[str, int] = {}  # path -> when it may be requested again
        self._removable: dict[str, int] = {}  # path -> when it may be removed, unless it is live by then
        self._shipments: list[Shipment] = []
        self._completion: Future[None] | None = None
        self._progress_ms = 0  # when a new leader began to wait for files, or received the last piece
        self._is_leading = False  # True: this replica leads, so the broker maintains the table
        # Boot clock at the last periodic work, and at the last removal.
        self._worked_ms = self._removed_ms = 0
        self._removed_before_seq = 0  # segments before this row were removed
        self._thread = threading.Thread(target=self._run, name="data files", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Unfinished shipments fail."""
        self._calls.put(None)
        self._thread.join()

    @property
    def missing(self) -> int:
        """The number of files that this replica lacks, as far as known."""
        return len(self._missing)

    @property
    def problem(self) -> str:
        """Describe the files that a new leader lacks. "" if it lacks none, or is none."""
        missing = sorted(self._missing.copy())  # in one step: the thread changes the dict
        if self._completion is None or not missing:
            return ""
        return (
            f"cannot lead without its missing data files ({len(missing)}, such as {FOLDER}/{missing[0]}): start a "
            "replica that has them, or put them back from a copy"
        )

    # -- from other threads ------------------------------------------------------------------------------------------

    def ship(self, paths: Sequence[str]) -> Future[None]:
        """Send data files to the other replicas (see FileReplication in log/disk_thread.py)."""
        future: Future[None] = Future()
        self._calls.put(partial(self._ship, list(paths), future))
        return future

    def complete(self) -> Future[None]:
        """Fetch the files that a new leader lacks. The future is done when it has the files of all committed rows.

        Its error is MissingFile if no other replica sends a file.
        """
        future: Future[None] = Future()
        self._calls.put(partial(self._begin_leading, future))
        return future

    def received(self, node: str, message: Message) -> None:
        """Queue a message about a data file (see FileWork)."""
        # Look the replica up now: when the queued call runs, the node may have another disk.
        lead = self._link.state.lead
        replica = lead.peers[node].replica if lead and node in lead.peers else ""
        self._calls.put(partial(self._handle_message, node, replica, message))

    def closed(self, node: str) -> None:
        """Queue the end of a connection (see FileWork)."""
        self._calls.put(partial(self._handle_disconnect, node))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run until `stop` is called, then end the present request and the unfinished shipments."""
        try:
            self.begin()
            while self.run_once(WORK_EVERY_MS / 1_000):
                pass
        except BaseException as error:  # every exception, because no caller waits for this thread
            self._on_failure(error)
        finally:
            self._drop_request()
            for shipment in self._shipments:
                shipment.fail(NotLeader("this node stops; ask again, another one answers soon"))

    def begin(self) -> None:
        """List the files on this disk. Called once, before the first run_once."""
        now_ms = self._clock.boot_ms()
        self._removable.update(dict.fromkeys(remove_incomplete(self._files), now_ms + UNNAMED_MS))

    def run_once(self, timeout_s: float) -> bool:
        """Run one call, if one arrives in time, and the periodic work. Returns False once `stop` was called."""
        try:
            call = self._calls.get(timeout=timeout_s) if timeout_s else self._calls.get_nowait()
        except Empty:
            pass
        else:
            if call is None:
                return False
            call()
        self._do_periodic_work()
        return True

    def _do_periodic_work(self) -> None:
        """Every WORK_EVERY_MS: announce files, count the replicas that have them, and work as a follower."""
        now_ms = self._clock.boot_ms()
        if now_ms - self._worked_ms < WORK_EVERY_MS:
            return
        self._worked_ms, state = now_ms, self._link.state
        for shipment in self._shipments:
            self._announce(shipment, state)
            shipment.recount(state)
        self._shipments = [shipment for shipment in self._shipments if not shipment.done.done()]
        if not self._is_leading:
            self._follow(state, now_ms)

    def _follow(self, state: Replica, now_ms: int) -> None:
        """As a follower: update the live files, fetch missing ones, and remove those that have left the table."""
        self._update_live_files(now_ms)
        request = self._request
        if request is not None and now_ms - request.last_piece_ms > ANSWER_MS:
            self._postpone(request, "no answer")
        self._request_next()
        if self._live.seq and not self._missing:
            self._report_complete(state)
        elif self._missing and self._completion is not None and now_ms - self._progress_ms > GIVE_UP_MS:
            self._completion.set_exception(MissingFile(f"this replica {self.problem}"))
            self._completion = None
        if self._live.seq and now_ms - self._removed_ms >= REMOVE_EVERY_MS:
            self._removed_ms = now_ms
            self._remove(now_ms)

    def _update_live_files(self, now_ms: int) -> None:
        """Compare the files of the applied rows with those before: find missing ones, and mark removed ones."""
        previous, self._live = self._live.entries, self._committed()
        entries = self._live.entries
        if entries is not previous:
            self._live_files.live = entries
            for path in entries.keys() - previous.keys():
                if not self._has(path, entries[path].size_bytes):
                    self._missing[path] = entries[path].size_bytes
            for path in previous.keys() - entries.keys():
                self._missing.pop(path, None)
                self._removable[path] = now_ms + self._keep_readable_ms
        # Delete the segments that the leader may have deleted: the next start of this replica reads the snapshot.
        if self._live.log_from_seq > self._removed_before_seq:
            self._removed_before_seq = self._live.log_from_seq
            self._link.post(partial(self._log.delete_segments_before, self._removed_before_seq))

    def _report_complete(self, state: Replica) -> None:
        """Complete the future of a new leader, or tell the leader that this learner has all files."""
        if self._completion is not None and state.lead and self._live.seq >= state.committed_seq:
            self._is_leading = True
            self._completion.set_result(None)
        elif state.role is Role.LEARNER and state.source and state.source.matched:
            self._send(state.source.node, Complete(state.promised, self._live.seq))

    def _remove(self, now_ms: int) -> None:
        """Remove the files whose time has come, except those that the table has again or a leader announces."""
        due = [path for path, due_ms in self._removable.items() if due_ms <= now_ms]
        for path in due:
            del self._removable[path]
            if path not in self._live.entries and path not in self._announced:
                live_files.remove(self._files, path)

    # -- leading -----------------------------------------------------------------------------------------------------

    def _begin_leading(self, future: Future[None]) -> None:
        """Drop the announcements of the previous leader, and begin to wait for the missing files."""
        self._announced.clear()
        self._drop_request()
        self._completion, self._progress_ms = future, self._clock.boot_ms()

    def _ship(self, paths: list[str], future: Future[None]) -> None:
        """Begin a shipment of these files, or fail the future if one of them cannot be read."""
        try:
            # This also computes the checksums, which takes long the first time.
            sizes = {path: self._outgoing.describe(path)[0] for path in paths}
        except TimeballError as error:
            future.set_exception(error)
            return
        self._shipments.append(Shipment(sizes, future))
        self._worked_ms = 0  # announce the files at the next run_once

    def _announce(self, shipment: Shipment, state: Replica) -> None:
        """Announce the files of a shipment to the connected nodes that do not know of them yet."""
        for node in shipment.take_nodes_to_inform(state):
            for path in shipment.sizes:
                size_bytes, crc32c = self._outgoing.describe(path)
                self._send(node, File(state.promised, 0, size_bytes, path, crc32c, b""))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle_message(self, node: str, replica: str, message: Message) -> None:
        """Handle a message from a node.

        `replica`: node and incarnation behind the connection, "" unless this replica leads.
        """
        match message:
            case Have():
                for shipment in self._shipments:
                    shipment.add_holder(self._link.state, replica, message.path, message.size_bytes)
            case Want() | File() if PATH.fullmatch(message.path) is None:
                logger.error("not the path of a data file, ignored node=%s path=%r", node, message.path)
            case Want():
                self._send(node, self._outgoing.piece(message))
            case File() if message.size_bytes and not message.chunk:
                self._handle_announcement(node, message)
            case File():
                self._receive(node, message)

    def _handle_disconnect(self, node: str) -> None:
        """Forget the announcements, the confirmations and the request of a node whose connection has ended."""
        for shipment in self._shipments:
            shipment.drop_node(node)
        self._announced = {
            path: announced for path, announced in self._announced.items() if announced.node != node
        }
        if self._request is not None and self._request.node == node:
            self._drop_request()

    def _send(self, node: str, message: Message) -> None:
        # A leader sends on the connection that it opened. A follower answers on the connection of the leader.
        self._link.send_soon(node, message, answers=self._link.state.lead is None)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _handle_announcement(self, node: str, file: File) -> None:
        """Confirm an announced file that is on this disk, or request it."""
        self._removable[file.path] = self._clock.boot_ms() + UNNAMED_MS
        if self._has(file.path, file.size_bytes):
            self._send(node, Have(self._link.state.promised, file.size_bytes, file.path))
            return
        self._announced[file.path] = AnnouncedFile(node, file.size_bytes)
        self._request_next()

    def _request_next(self) -> None:
        """Request the next file, unless one is being received."""
        if self._request is not None:
            return
        now_ms, state = self._clock.boot_ms(), self._link.state
        request = self._choose_request(state, now_ms)
        if request is None:
            return
        self._request = request
        self._send(request.node, Want(state.promised, 0, request.path))

    def _choose_request(self, state: Replica, now_ms: int) -> FileRequest | None:
        """Choose the next file: announced files first, then missing files of committed rows. None if there is none."""
        for path, announced in self._announced.items():
            if self._retry_at_ms.get(path, 0) <= now_ms:
                return FileRequest(announced.node, path, announced.size_bytes, now_ms)
        node = self._choose_sender(state, now_ms)
        for path, size_bytes in self._missing.items() if node else ():
            if self._retry_at_ms.get(path, 0) <= now_ms:
                return FileRequest(node, path, size_bytes, now_ms)
        return None

    def _choose_sender(self, state: Replica, now_ms: int) -> str:
        """Choose the node from which to request a missing file, "" if none can be asked.

        A follower asks the leader. A new leader asks the other replicas in turn, each for RETRY_MS.
        """
        if state.lead is None:
            return state.source.node if state.source and state.source.matched else ""
        nodes = sorted(node for node, peer in state.lead.peers.items() if peer.acked is not None)
        return nodes[now_ms // RETRY_MS % len(nodes)] if nodes else ""

    def _has(self, path: str, size_bytes: int) -> bool:
        """Check whether a file is on this disk with this size, and restore its name if only a hard link is left."""
        return self._live_files.restore_file(path) and self._files.size(f"{FOLDER}/{path}") == size_bytes

    def _receive(self, node: str, file: File) -> None:
        """Handle a piece of the requested file: write it, and request the next piece or the next file."""
        request = self._request
        if request is None or (request.node, request.path) != (node, file.path):
            return  # a late piece of an earlier request
        if not file.size_bytes:
            self._postpone(request, "the other replica does not have it")
            return
        try:
            is_whole = self._add_piece(request, file)
        except (PeerError, OverLimit) as error:
            self._postpone(request, str(error))
            return
        if not is_whole:
            assert request.incoming is not None
            self._send(node, Want(self._link.state.promised, request.incoming.received_bytes, request.path))
            return
        self._request = None
        self._missing.pop(request.path, None)
        self._retry_at_ms.pop(request.path, None)
        if self._announced.pop(request.path, None) is not None:
            self._send(node, Have(self._link.state.promised, file.size_bytes, file.path))
        logger.info("data file received path=%s size_bytes=%d node=%s", file.path, file.size_bytes, node)
        self._request_next()

    def _add_piece(self, request: FileRequest, file: File) -> bool:
        """Write a piece, the first one into a new file. Returns True once the file is complete and durable.

        Raises PeerError for a wrong piece, OverLimit on a full disk.
        """
        if request.size_bytes != file.size_bytes:
            raise PeerError(
                f"{file.path} has {file.size_bytes} bytes there, {request.size_bytes} are expected"
            )
        if request.incoming is None:
            request.incoming = IncomingFile(self._files, file.path, file.size_bytes, file.crc32c)
        request.last_piece_ms = self._progress_ms = self._clock.boot_ms()
        return request.incoming.add(file.position, file.crc32c, file.chunk)

    def _postpone(self, request: FileRequest, reason: str) -> None:
        """Stop requesting the file, for RETRY_MS at least."""
        logger.warning("data file not received path=%s node=%s reason=%s", request.path, request.node, reason)
        self._retry_at_ms[request.path] = self._clock.boot_ms() + RETRY_MS
        self._drop_request()

    def _drop_request(self) -> None:
        """Stop receiving the present file, and remove its pieces."""
        if self._request is not None and self._request.incoming is not None:
            self._request.incoming.drop()
        self._request = None


# ---- a data file that arrives from another replica, piece by piece -------------------------------------------
# The pieces are written to a file with a temporary name. It is renamed when it is complete, its checksum is right, and
# it is synced. So a file with its final name is always whole. An incomplete file keeps its temporary name and is
# removed at the next start.

SUFFIX = ".incoming"
# Sync in steps of this size: one sync of hundreds of megabytes would delay the log's syncs on the same disk.
SYNC_BYTES = 8 << 20


class IncomingFile:
    """One file being received. The methods block. Belongs to one thread."""

    def __init__(self, files: Files, path: str, size_bytes: int, crc32c: int) -> None:
        """Create the temporary file. `path` is relative to the table."""
        self.path, self.size_bytes, self.crc32c = path, size_bytes, crc32c
        self._files, self._name = files, f"{FOLDER}/{path}"
        self._folder, _, file_name = self._name.rpartition("/")
        # Delta Lake tools ignore files whose name begins with '_'.
        self._temporary_name = f"{self._folder}/_{file_name}{SUFFIX}"
        files.make_dir(self._folder)
        self._file = files.create(self._temporary_name)
        self.received_bytes = self._synced_bytes = 0
        self._crc = 0

    def add(self, position: int, crc32c: int, chunk: bytes) -> bool:
        """Write a piece. Returns True once the file is complete and durable.

        Raises PeerError for a wrong piece, OverLimit on a full disk.
        """
        end = position + len(chunk)
        if (position, crc32c) != (self.received_bytes, self.crc32c) or not chunk or end > self.size_bytes:
            raise PeerError(
                f"{self.path}: a piece of {len(chunk)} bytes at {position}; expected one at {self.received_bytes}"
            )
        self._file.write_at(position, chunk)
        self._crc, self.received_bytes = google_crc32c.extend(self._crc, chunk), end
        if end < self.size_bytes:
            if end - self._synced_bytes >= SYNC_BYTES:
                self._sync()
                self._synced_bytes = end
            return False
        if self._crc != self.crc32c:
            raise PeerError(f"{self.path}: CRC-32C {self._crc:#010x}, expected {self.crc32c:#010x}")
        self._sync()
        self._file.close()
        self._files.rename(self._temporary_name, self._name)
        self._files.sync_dir(self._folder)
        return True

    def _sync(self) -> None:
        with full_disk_as_over_limit(f"receiving {self.path}"):
            self._file.sync()

    def drop(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self._files.remove(self._temporary_name)


def remove_incomplete(files: Files) -> list[str]:
    """Remove incomplete files of an earlier run. Returns the paths of all data files.

    The folders are synced before the return, because the names given by a killed process may be only in the page
    cache.
    """
    paths: list[str] = []
    for bucket in files.list_dir(FOLDER):
        if not bucket.startswith("bucket="):
            continue
        for name in files.list_dir(f"{FOLDER}/{bucket}"):
            if name.endswith(SUFFIX):
                files.remove(f"{FOLDER}/{bucket}/{name}")
            else:
                paths.append(f"{bucket}/{name}")
        files.sync_dir(f"{FOLDER}/{bucket}")
    return paths


# ---- data files to be sent: pieces of mapped files, and the checksum of each whole file ----------------------

PIECE_BYTES = 256 << 10  # a commit may wait for one piece to be sent, which takes 2 ms at 1 Gbit/s
MAPPED_MAX = 16  # files that stay mapped
CHECKSUMS_MAX = 2 * limits.ATTACH_FILES_MAX  # checksums that are kept: enough for two of the largest attaches
CRC_STEP_BYTES = 1 << 20

T = TypeVar("T")


class OutgoingFiles:
    """Reads the files of one replica. The methods block. Belongs to one thread."""

    def __init__(self, files: Files, live: live_files.LiveFiles) -> None:
        self._files, self._live_files = files, live
        self._mapped: dict[str, pa.Buffer] = {}
        self._checksums: dict[str, tuple[int, int]] = {}  # path -> size, CRC-32C

    def describe(self, path: str) -> tuple[int, int]:
        """Find the size of a file and the CRC-32C of its content. Raises NotFound."""
        if path not in self._checksums:
            content, crc = self._map(path), 0
            # Compute in steps, so that other threads run in between.
            for begin in range(0, content.size, CRC_STEP_BYTES):
                crc = google_crc32c.extend(crc, bytes(content[begin : begin + CRC_STEP_BYTES]))
            self._checksums[path] = content.size, crc
            _trim(self._checksums, CHECKSUMS_MAX)
        return self._checksums[path]

    def piece(self, want: Want) -> File:
        """Read the piece that was requested. The size is 0 when the file is not on this disk."""
        try:
            size_bytes, crc32c = self.describe(want.path)
            content = self._map(want.path)
        except NotFound:
            return File(want.epoch, want.position, 0, want.path, 0, b"")
        chunk = bytes(content[want.position : want.position + PIECE_BYTES])
        return File(want.epoch, want.position, size_bytes, want.path, crc32c, chunk)

    def _map(self, path: str) -> pa.Buffer:
        """Map a file, or get its mapping. Raises NotFound."""
        if path not in self._mapped:
            self._live_files.restore_file(path)
            self._mapped[path] = self._files.map_readonly(f"{FOLDER}/{path}")
            _trim(self._mapped, MAPPED_MAX)
        return self._mapped[path]


def _trim(entries: dict[str, T], count_max: int) -> None:
    """Remove the oldest entries until at most `count_max` are left."""
    while len(entries) > count_max:
        del entries[next(iter(entries))]


# ---- shipments: the nodes that were informed, and the replicas that have each file ---------------------------
# A replica counts for a file only as long as the connection on which it has confirmed the file. The next connection may
# come from another disk, to which the files are announced again. That disk is another replica (another incarnation),
# and a late confirmation of the old one does not count for it.


class Shipment:
    """The files of one attach. Belongs to one thread, but any thread may wait for `done`."""

    def __init__(self, sizes: dict[str, int], done: Future[None]) -> None:
        """Begin with sizes in bytes by path. `done` is set when enough replicas have all files."""
        self.sizes, self.done = sizes, done
        self._announced_to: set[str] = set()  # nodes
        self._holders: dict[str, set[str]] = defaultdict(set)  # path -> replicas
        self._unfinished = set(sizes)  # files that too few replicas have so far

    def take_nodes_to_inform(self, state: Replica) -> list[str]:
        """List the connected nodes to which the files were not announced yet, and mark them as informed."""
        peers = state.lead.peers if state.lead else {}
        nodes = [
            node for node, peer in peers.items() if peer.acked is not None and node not in self._announced_to
        ]
        self._announced_to.update(nodes)
        return nodes

    def add_holder(self, state: Replica, replica: str, path: str, size_bytes: int) -> None:
        """Record that a replica (node and incarnation) has a file, if the size is right."""
        if self.sizes.get(path) != size_bytes:
            return
        self._holders[path].add(replica)
        if state.lead and has_quorum(state, self._holders[path]):
            self._unfinished.discard(path)
        self._end_if_done()

    def drop_node(self, node: str) -> None:
        """Stop counting a node whose connection has ended. It is informed again when it is back."""
        self._announced_to.discard(node)
        for replicas in self._holders.values():
            replicas -= {replica for replica in replicas if node_of(replica) == node}
        self._unfinished = set(self.sizes)  # `recount` removes the files that enough replicas have

    def recount(self, state: Replica) -> None:
        """Count again, because the set of replicas may have changed. Fail if this node does not lead any more."""
        if state.role is not Role.LEADER or state.lead is None:
            self.fail(NotLeader(LEADS_NO_MORE))
            return
        self._unfinished = {path for path in self._unfinished if not has_quorum(state, self._holders[path])}
        self._end_if_done()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def _end_if_done(self) -> None:
        if not self._unfinished and not self.done.done():
            self.done.set_result(None)
