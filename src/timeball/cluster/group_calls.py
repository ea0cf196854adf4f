"""Questions to the leaders of the other groups, over HTTP, on behalf of this node's callers.

A question is a POST to the leader's HTTP port, signed by the caller's account, so all nodes need the same access file.
It is repeated until its time limit when the connection fails, when the node does not serve yet, or when another node
leads. An earlier attempt may have been carried out: a message that it cancelled is then reported as
`already_cancelled`, as to a client that repeats a request. After any other error, the group counts as silent at once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from io import BytesIO
from urllib.parse import quote

import aiohttp
import msgspec

from timeball.broker.revoking.group_questions import ASK_S, AnyQuestion, GroupAnswer
from timeball.cluster.coordination.coordinator import Directory
from timeball.cluster.coordination.etcd import open_session, read_bounded
from timeball.cluster.transport.connections import Address
from timeball.io.clock import Clock
from timeball.model.access import Caller
from timeball.model.errors import UNDECODABLE, Unavailable

logger = logging.getLogger(__name__)

RETRY_S = 0.05
ANSWER_BYTES_MAX = 64 * 1024 * 1024
PER_GROUP_MAX = 256  # connections to one node
# HTTP statuses of a node that starts, stops, does not lead any more, or is overloaded.
NOT_SERVED = (429, 503)
LEADER_CHECK_S = 0.1  # interval at which to check that the node being asked is still the leader
PATH = "/v1/cluster/"


class _TryAgain(Exception):
    """The node cannot answer now: repeat the question, perhaps to another node."""


class _FinalError(Exception):
    """A final error: repeating the question would not help."""


class GroupCalls:
    """The other groups of this node's cluster (an OtherGroups). Belongs to the event loop."""

    def __init__(
        self, own_group: str, directory: Directory, clock: Clock, tls: ssl.SSLContext | None = None
    ) -> None:
        """Create the client. With `tls` it uses HTTPS and checks the other nodes' certificates."""
        self._own_group, self._directory, self._clock, self._tls = own_group, directory, clock, tls
        self._session: aiohttp.ClientSession | None = None
        self._silent_groups: set[str] = set()  # groups whose silence was logged

    def names(self) -> Sequence[str]:
        """List the names of the other groups. Raises Unavailable until etcd has been read once."""
        if self._own_group not in self._directory.views:
            raise Unavailable("which groups the cluster has is not known yet; ask again in a moment")
        return sorted(name for name in self._directory.views if name != self._own_group)

    def grpc_address(self, group: str) -> Address | None:
        """Find the gRPC address (for RocketMQ 5 clients) of a group's leader. None while it has no leader."""
        return self._directory.address(group, "grpc")

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        """Ask a group's leader. Returns its answer, or None if there is none within `within_s`, or only an error."""
        body, reason = msgspec.json.encode(question), "it has no leader"
        try:
            async with asyncio.timeout(within_s):
                while True:
                    address = self._directory.address(group, "http")
                    if address is not None:
                        reason = "its leader does not answer in time"
                        try:
                            answer = await self._ask_leader(address, group, body, caller)
                        except _TryAgain as error:
                            reason = str(error)
                        else:
                            self._silent_groups.discard(group)
                            return answer
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self._note_silence(group, reason)
        except _FinalError as error:
            self._note_silence(group, str(error))
        return None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _note_silence(self, group: str, reason: str) -> None:
        """Log that a group gives no answer, unless that was logged since its last answer."""
        if group not in self._silent_groups:
            self._silent_groups.add(group)
            logger.warning("group did not answer group=%s reason=%s", group, reason)

    async def _ask_leader(self, address: Address, group: str, body: bytes, caller: Caller) -> GroupAnswer:
        """Ask a node as long as it is the leader. Raises _TryAgain and _FinalError."""
        request = asyncio.ensure_future(self._post(address, group, body, caller))
        try:
            while not (await asyncio.wait((request,), timeout=LEADER_CHECK_S))[0]:
                # Give up a node that hangs once its group has another leader.
                if self._directory.address(group, "http") != address:
                    raise _TryAgain("its leader did not answer, and leads no more")
            return request.result()
        finally:
            request.cancel()

    async def _post(self, address: Address, group: str, body: bytes, caller: Caller) -> GroupAnswer:
        """Send a question to a node and decode its answer. Raises _TryAgain and _FinalError."""
        host, port = address
        host = f"[{host}]" if ":" in host else host
        url = f"{'https' if self._tls else 'http'}://{host}:{port}{PATH}{quote(group, safe='')}"
        headers = {**caller.signature(self._clock.wall_ms()), "content-type": "application/json"}
        try:
            # Pass a file object: aiohttp would write large bytes in one piece, which blocks the event loop.
            async with self._open_session().post(
                url, data=BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                data, status = await read_bounded(response, ANSWER_BYTES_MAX, _FinalError), response.status
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgain(f"no answer of its leader: {type(error).__name__}: {error}") from error
        if status in NOT_SERVED:
            raise _TryAgain(f"its leader does not serve: {data[:200]!r}")
        if status in (401, 403):
            raise _FinalError(
                f"it refuses account {caller.name!r}: the access file is to be the same on all nodes"
            )
        if status != 200:
            raise _FinalError(f"its leader answers with status {status}: {data[:200]!r}")
        try:
            return msgspec.json.decode(data, type=GroupAnswer)
        except UNDECODABLE as error:
            raise _FinalError(f"its leader's answer cannot be read: {error}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # not in __init__, because a session belongs to the running event loop
            self._session = open_session(self._tls, PER_GROUP_MAX)
        return self._session
