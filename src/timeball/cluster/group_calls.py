"""Asks the leaders of the other groups over HTTP, as the callers for whom this node asks.

A question is a POST to the leader's HTTP port, with a signature by the caller's account: the access file is to be the
same on all nodes. When the connection fails, the node does not serve yet or another one leads, the question is asked
again until its time is over. It may have been carried out before: then what was cancelled is `already_cancelled`, as
it is for a client that asks again. A leader that answers with anything else than an answer is silent at once.
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

from timeball.access import Caller
from timeball.broker.revoking.group_questions import ASK_S, AnyQuestion, GroupAnswer
from timeball.clock import Clock
from timeball.cluster.connections import Address
from timeball.cluster.directory import Directory
from timeball.cluster.http_session import open_session, read_bounded
from timeball.errors import Unavailable

logger = logging.getLogger(__name__)

AGAIN_S = 0.05
ANSWER_BYTES_MAX = 64 * 1024 * 1024
PER_GROUP_MAX = 256  # connections to one node
NOT_SERVED = (429, 503)  # it starts, stops, leads no more, or has too much to do
LOOK_S = 0.1  # between two looks whether another node leads than the one that is asked
PATH = "/v1/cluster/"


class _NotNow(Exception):
    """No answer now: ask again, perhaps another node."""


class _NoAnswer(Exception):
    """An answer that is none: asked again it would be the same."""


class GroupCalls:
    """The other groups of this node's cluster (an OtherGroups). Belongs to the event loop."""

    def __init__(
        self, own: str, directory: Directory, clock: Clock, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls`: how the other nodes' certificates are checked, if they speak TLS."""
        self._own, self._directory, self._clock, self._tls = own, directory, clock, tls
        self._session: aiohttp.ClientSession | None = None
        self._silent: set[str] = set()  # groups whose silence the log has

    def names(self) -> Sequence[str]:
        """Return the names of the other groups; raise Unavailable before etcd was read once."""
        if self._own not in self._directory.views:
            raise Unavailable("which groups the cluster has is not known yet; ask again in a moment")
        return sorted(name for name in self._directory.views if name != self._own)

    def grpc_address(self, group: str) -> Address | None:
        """Return where RocketMQ 5's clients reach a group's leader; None while it has none."""
        return self._directory.address(group, "grpc")

    async def ask(
        self, group: str, question: AnyQuestion, caller: Caller, within_s: float = ASK_S
    ) -> GroupAnswer | None:
        """Return a group's answer; None when it is silent."""
        body, reason = msgspec.json.encode(question), "it has no leader"
        try:
            async with asyncio.timeout(within_s):
                while True:
                    address = self._directory.address(group, "http")
                    if address is not None:
                        reason = "its leader does not answer in time"
                        try:
                            answer = await self._ask_leader(address, group, body, caller)
                        except _NotNow as error:
                            reason = str(error)
                        else:
                            self._silent.discard(group)
                            return answer
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            self._note_silence(group, reason)
        except _NoAnswer as error:
            self._note_silence(group, str(error))
        return None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _note_silence(self, group: str, reason: str) -> None:
        if group not in self._silent:  # once, and not for each request that meets it
            self._silent.add(group)
            logger.warning("group did not answer group=%s reason=%s", group, reason)

    async def _ask_leader(self, address: Address, group: str, body: bytes, caller: Caller) -> GroupAnswer:
        """Ask a node for as long as it is the leader."""
        asked = asyncio.ensure_future(self._post(address, group, body, caller))
        try:
            while not (await asyncio.wait((asked,), timeout=LOOK_S))[0]:
                # One that hangs is given up when its group has another leader.
                if self._directory.address(group, "http") != address:
                    raise _NotNow("its leader did not answer, and leads no more")
            return asked.result()
        finally:
            asked.cancel()

    async def _post(self, address: Address, group: str, body: bytes, caller: Caller) -> GroupAnswer:
        host, port = address
        host = f"[{host}]" if ":" in host else host
        url = f"{'https' if self._tls else 'http'}://{host}:{port}{PATH}{quote(group, safe='')}"
        headers = {**caller.signature(self._clock.wall_ms()), "content-type": "application/json"}
        try:
            # Not the bytes themselves: a large body would be written in one piece, while the loop waits.
            async with self._opened().post(
                url, data=BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                data, status = await read_bounded(response, ANSWER_BYTES_MAX, _NoAnswer), response.status
        except (aiohttp.ClientError, OSError) as error:
            raise _NotNow(f"no answer of its leader: {type(error).__name__}: {error}") from error
        if status in NOT_SERVED:
            raise _NotNow(f"its leader does not serve: {data[:200]!r}")
        if status in (401, 403):
            raise _NoAnswer(
                f"it refuses account {caller.name!r}: the access file is to be the same on all nodes"
            )
        if status != 200:
            raise _NoAnswer(f"its leader answers with status {status}: {data[:200]!r}")
        try:
            return msgspec.json.decode(data, type=GroupAnswer)
        except msgspec.DecodeError as error:
            raise _NoAnswer(f"its leader's answer cannot be read: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:  # here, since it belongs to the loop that runs
            self._session = open_session(self._tls, PER_GROUP_MAX)
        return self._session
