"""The Store on etcd, and the requests to etcd's members and to the leaders of other groups.

`EtcdStore` uses transactions and leases through the JSON gateway, and one watch that only serves as a hint. A watch
begins at the present revision, and callers find earlier changes by reading. So the watch needs no revision to resume
from, and a compaction of etcd cannot break it. An etcd member that is cut off from the others keeps its watches open
without reporting anything. So a watch counts as dead if a read has returned a revision that the watch has not reported
during a whole wait. It is then opened at another member.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp

from timeball import __version__
from timeball.cluster.coordination import etcd_codec as codec
from timeball.cluster.coordination.coordinator import Coordinator
from timeball.cluster.coordination.etcd_codec import AuthenticationOff, BadAnswer, Misdirected, TokenRefused
from timeball.cluster.coordination.store import Comparison, Operation, Outcome
from timeball.io.clock import Clock
from timeball.io.files import read_secret
from timeball.io.security import OTHERS, load_client_tls
from timeball.model.config import Settings
from timeball.model.errors import LeaseLost, SetupError, Unavailable

WATCH_PAUSE_S = 0.2  # before a watch is opened again

logger = logging.getLogger(__name__)


class EtcdStore:
    """A Store. Belongs to the event loop."""

    def __init__(self, access: EtcdAccess, *, ttl_ms: int) -> None:
        """`ttl_ms`: of the leases that the callers hold. A call takes at most this long."""
        # Attempts are short, because a request that hangs while etcd elects its own leader goes on hanging after the
        # election. A lease is renewed after a quarter of its TTL, so four attempts fit in before its holder stops.
        self._members = Members(access, attempt_s=ttl_ms / 8_000, deadline_s=ttl_ms / 1_000)
        self._watch_task: asyncio.Task[None] | None = None
        self._prefix = ""
        self._watched_member = ""  # the member at which the watch is open
        self._changed = asyncio.Condition()
        # As the watch has reported it last, or a transaction after a loss of data.
        self._reported_revision = 0
        self._read_revision = 0  # newest revision of a key among those that transactions have read

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return self._members.requests

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out `then` if all of `when` hold, else `otherwise`. Raises LeaseLost for a Put with an ended lease."""
        body = codec.txn_body(when, then, otherwise)
        known_revision = max(self._reported_revision, self._read_revision)
        outcome = await self._members.ask(
            codec.TXN, body, lambda answer: codec.read_txn(answer, then, otherwise)
        )
        if outcome.revision < known_revision:
            # A transaction sees all revisions that were known when it was sent. So etcd has lost its data or was
            # restored from a copy, and a wait for a later revision than the old ones would last, or not wait at all.
            self._reported_revision, self._read_revision = min(self._reported_revision, outcome.revision), 0
        for key_values in outcome.reads:
            self._read_revision = max(
                [self._read_revision, *(key_value.revision for key_value in key_values)]
            )
        return outcome

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Request a new lease. Returns its id and the granted TTL in seconds."""
        # If the answer is lost, a repeated request leaves an unused lease, which ends by itself.
        return await self._members.ask(codec.GRANT, codec.lease_body(0, ttl_s=ttl_s), codec.read_grant)

    async def renew(self, lease_id: int) -> int:
        """Renew a lease. Returns the granted TTL in seconds. Raises LeaseLost."""
        body = codec.lease_body(lease_id)
        return await self._members.ask(
            codec.KEEPALIVE, body, lambda answer: codec.read_renewal(answer, lease_id)
        )

    async def revoke(self, lease_id: int) -> None:
        """End a lease, if it has not ended yet, and delete its keys."""
        try:
            await self._members.ask(codec.REVOKE, codec.lease_body(lease_id), lambda answer: None)
        except LeaseLost:
            pass

    async def time_to_live(self, lease_id: int) -> int | None:
        """Read how many seconds of a lease are left. None when it has ended."""
        return await self._members.ask(
            codec.TIME_TO_LIVE, codec.lease_body(lease_id), codec.read_time_to_live
        )

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        """Wait until a key with this prefix may have changed after a revision, or until the timeout.

        The first call opens the watch.
        """
        assert self._prefix in ("", prefix), "a store watches one prefix"
        self._prefix = prefix
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch())
        elif self._watch_task.done():
            self._watch_task.result()  # raises: the task only ends by an error in this program
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._reported_revision > after)
        except TimeoutError:
            if self._reported_revision < self._read_revision and self._watched_member:
                self._members.leave(self._watched_member)
                await self._end_watch()  # the next wait opens a new one

    async def close(self) -> None:
        """Close the watch and the connections."""
        await self._end_watch()
        await self._members.close()

    async def _watch(self) -> None:
        """Watch the prefix for ever, at the next member after each failure."""
        is_failure_logged = False
        while True:
            endpoint = self._watched_member = self._members.preferred
            try:
                revisions = self._members.follow(
                    endpoint, codec.WATCH, codec.watch_body(self._prefix), codec.read_watch
                )
                async with aclosing(revisions):
                    async for revision in revisions:
                        is_failure_logged = False
                        async with self._changed:
                            # The first line of a watch may have a lower revision than the watch before it reported:
                            # etcd has lost data, or this member lags behind.
                            self._reported_revision = revision
                            self._changed.notify_all()
            except (BadAnswer, SetupError) as error:
                if not is_failure_logged:
                    logger.info("watch ended endpoint=%s reason=%s", endpoint, error)
                is_failure_logged = True
            self._members.leave(endpoint)
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _end_watch(self) -> None:
        """Cancel the watch, and wait until its task has ended."""
        task, self._watch_task = self._watch_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


# ---- the coordinator that the settings describe, for nodes and for commands ----------------------------------


def create_coordinator(settings: Settings, clock: Clock) -> Coordinator:
    """Create the coordinator for --cluster, --node and --etcd. Raises SetupError."""
    endpoints = [endpoint.strip() for endpoint in settings.etcd.split(",") if endpoint.strip()]
    tls = None
    if any(endpoint.startswith("https") for endpoint in endpoints):
        tls = load_client_tls(settings.etcd_ca, settings.etcd_cert, settings.etcd_key)
    password = ""
    if settings.etcd_user:
        secret = read_secret(settings.etcd_password_file, "--etcd-password-file", forbidden_mode=OTHERS)
        password = secret.decode().strip()
    access = EtcdAccess(endpoints, tls, settings.etcd_user, password)
    store = EtcdStore(access, ttl_ms=settings.lease_ttl_ms)
    return Coordinator(store, clock, cluster=settings.cluster, node=settings.node)


# ---- requests to etcd's members ------------------------------------------------------------------------------
# All requests go to one member as long as it answers, over persistent connections. After a member that refuses, hangs
# or gives an invalid answer, the next one is tried. While etcd elects a leader of its own, no member answers, and all
# are tried in turn until the deadline. So a request may be carried out twice, or after its caller has given up. This is
# safe, because the callers' transactions compare revisions, and the second one fails.

T = TypeVar("T")

ANSWER_BYTES_MAX = 4 * 1024 * 1024  # all nodes, or all records, of a hundred groups take 50 KB
ROUND_S = 0.05  # minimum duration of a round through all members, because refusals arrive at once
# Time for an authentication: the password hash is slow by design, 0.1 s of CPU. It takes at most half of a call's time
# limit, so that after a member that hangs the next one has the other half.
AUTHENTICATION_S = 2.0


class Closed(BadAnswer):
    """The member has closed the connection without an answer."""


@dataclass(frozen=True)
class EtcdAccess:
    """The endpoints and credentials for etcd. `tls` is used for endpoints that begin with https."""

    endpoints: Sequence[str]
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)


class Members:
    """The members of one etcd cluster. Belongs to the event loop.

    If a user is configured, a token is requested at first, and again whenever a member refuses it. Some releases of
    etcd refuse by closing the connection without an answer (etcd issues 15256 and 20332). So a request whose connection
    is closed twice counts as refused, too.

    `attempt_s` is the time limit for one member's answer, `deadline_s` that of a whole call.
    """

    def __init__(self, access: EtcdAccess, *, attempt_s: float, deadline_s: float) -> None:
        self._access = access
        self._endpoints = [_check_endpoint(endpoint) for endpoint in access.endpoints]
        if not self._endpoints:
            raise SetupError("etcd: no endpoint given")
        self._attempt_s, self._deadline_s = attempt_s, deadline_s
        self._preferred = 0
        self._token: str | None = None if access.user else ""
        self._authenticating = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self.requests = 0  # number of requests sent, including those without an answer

    async def ask(self, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """Ask the members in turn until one answers, and decode the answer with `read`.

        Raises the error in the answer, Unavailable or SetupError.
        """
        failures: dict[str, BadAnswer] = {}
        endpoint = self.preferred
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                while True:
                    next_round_s = loop.time() + ROUND_S
                    for _ in self._endpoints:
                        endpoint = self.preferred
                        try:
                            return await self._ask_member(endpoint, path, body, read)
                        except BadAnswer as failure:
                            failures[endpoint] = failure
                            self.leave(endpoint)
                            # If both time limits end in one turn of the loop, aiohttp takes the cancellation for its
                            # own, and there is no further one.
                            if deadline.expired():
                                raise TimeoutError from failure
                    # No pause after members that hung: the round has taken longer than ROUND_S.
                    await asyncio.sleep(next_round_s - loop.time())
        except TimeoutError:
            self.leave(endpoint)  # it may hang: the next call must not spend its time there
            raise _no_answer(failures, len(self._endpoints), self._deadline_s) from None

    @property
    def preferred(self) -> str:
        """The endpoint of the member that is tried first."""
        return self._endpoints[self._preferred]

    def leave(self, endpoint: str) -> None:
        """Prefer the next member from now on, unless another call has changed the preferred one already."""
        if endpoint == self.preferred:
            self._preferred = (self._preferred + 1) % len(self._endpoints)

    async def follow(
        self, endpoint: str, path: str, body: bytes, read: Callable[[bytes], T]
    ) -> AsyncGenerator[T]:
        """Yield `read(line)` for each line of a stream. Raises errors as `ask` does, and BadAnswer at its end."""
        headers = await self._headers(endpoint)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._attempt_s)
        self.requests += 1
        try:
            # etcd sends the response header together with the first line, which confirms the watch.
            async with asyncio.timeout(self._attempt_s):
                response = await self._open_session().post(
                    endpoint + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
                )
            async with response:
                if response.status != 200:
                    raise codec.read_error(
                        await read_bounded(response, ANSWER_BYTES_MAX, BadAnswer), response.status
                    )
                async for line in _lines(response):
                    yield read(line)
        except TokenRefused as refused:
            self._forget_token(headers)
            raise BadAnswer(str(refused)) from refused
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise _as_bad_answer(error) from error
        raise BadAnswer("the stream has ended")

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _forget_token(self, headers: dict[str, str]) -> None:
        """Request a new token before the next request, if these headers have the present token."""
        # Do nothing if another call has received a new token meanwhile.
        if self._access.user and self._token == headers.get("authorization", ""):
            self._token = None

    async def _ask_member(self, endpoint: str, path: str, body: bytes, read: Callable[[bytes], T]) -> T:
        """Ask one member, with a new token if it refuses the present one. Returns the answer decoded with `read`.

        Raises BadAnswer (ask another member), SetupError, and the error in the answer.
        """
        for attempt in range(3):
            headers = await self._headers(endpoint)
            try:
                return read(await self._post(endpoint, path, body, headers, self._attempt_s))
            except Closed as closed:
                # The first time the member may have restarted since the connection was opened. The second time the
                # member may refuse the token.
                if attempt == 2 or (attempt == 1 and not self._access.user):
                    raise closed
                if attempt == 1:
                    self._forget_token(headers)
            except TokenRefused as refused:
                if not self._access.user:
                    raise SetupError(f"etcd wants a user ({refused}): give one (docs/etcd.md)") from refused
                self._forget_token(headers)
        raise BadAnswer("a new token is refused")

    async def _headers(self, endpoint: str) -> dict[str, str]:
        """Build the headers with the token, after requesting one if there is none. Raises BadAnswer, SetupError."""
        if self._token is None:
            async with self._authenticating:
                if self._token is None:  # else another call has received a token while this one waited
                    if endpoint != self.preferred:
                        raise BadAnswer("another call has waited for its answer in vain")
                    self._token = await self._authenticate(endpoint)
        return {"authorization": self._token} if self._token else {}

    async def _authenticate(self, endpoint: str) -> str:
        """Request a token from a member. Returns "" if etcd uses no authentication. Raises BadAnswer, SetupError."""
        body = codec.authentication_body(self._access.user, self._access.password)
        timeout_s = min(max(self._attempt_s, AUTHENTICATION_S), self._deadline_s / 2)
        try:
            answer = await self._post(endpoint, codec.AUTHENTICATE, body, {}, timeout_s)
        except AuthenticationOff:
            return ""
        return codec.read_token(answer)

    async def _post(
        self, endpoint: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> bytes:
        """Send a request to a member. Returns the body of an answer with status 200.

        Raises BadAnswer if there is no answer within `timeout_s`, and the exception of `codec.read_error` for another
        status.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.requests += 1
        try:
            async with self._open_session().post(
                endpoint + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await read_bounded(response, ANSWER_BYTES_MAX, BadAnswer)
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise _as_bad_answer(error) from error
        if response.status == 200:
            return answer
        raise codec.read_error(answer, response.status)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # not in __init__, because a session belongs to the running event loop
            self._session = open_session(self._access.tls)
        return self._session


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a streamed answer, without their line ends. Raises BadAnswer for a line that is too long."""
    line = b""
    async for chunk in response.content.iter_any():
        line += chunk
        while (end := line.find(b"\n")) >= 0:
            yield line[:end]
            line = line[end + 1 :]
        if len(line) > ANSWER_BYTES_MAX:
            raise BadAnswer(f"a line of more than {ANSWER_BYTES_MAX} bytes")


def _as_bad_answer(error: aiohttp.ClientError | OSError) -> BadAnswer:
    """Convert an error of the connection to a BadAnswer, of a subclass where the caller must act differently."""
    if isinstance(error, TimeoutError):
        return BadAnswer("no answer in time")
    if isinstance(error, aiohttp.ClientSSLError):
        return Misdirected(f"TLS: {error}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Closed("closed without an answer, as some releases do when they want a user")
    return BadAnswer(f"{type(error).__name__}: {error}")


def _no_answer(failures: dict[str, BadAnswer], members: int, deadline_s: float) -> Unavailable | SetupError:
    """Build the error after the deadline of a call. `failures`: the last error of each endpoint that failed.

    It is a SetupError if none of the endpoints is a member of etcd that can be trusted, else Unavailable.
    """
    reasons = "; ".join(f"{endpoint}: {failure}" for endpoint, failure in failures.items())
    if len(failures) == members and all(isinstance(failure, Misdirected) for failure in failures.values()):
        return SetupError(f"etcd: {reasons}. Check the endpoints and certificates (docs/etcd.md)")
    return Unavailable(f"etcd has not answered in {deadline_s:g} s: {reasons or 'no answer in time'}")


def _check_endpoint(endpoint: str) -> str:
    """Return the endpoint without a slash at its end. Raises SetupError unless it is http(s)://host:port."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest.rstrip("/") or "@" in rest or "/" in rest.rstrip("/"):
        raise SetupError(f"etcd: endpoint {endpoint!r} should be as https://etcd1.example:2379")
    return endpoint.rstrip("/")


# ---- HTTP sessions for etcd and the leaders of other groups, and reading of answers with a limit -------------


def open_session(tls: ssl.SSLContext | None, per_host_max: int = 0) -> aiohttp.ClientSession:
    """Open a session on the running event loop, for JSON requests that each set their own time limit.

    `tls`: None checks certificates with the system's authorities. `per_host_max`: connections to one host, 0 for no
    bound. There is no bound for all hosts together, because connections to a host that hangs must not block those to
    others.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls or True, limit=0, limit_per_host=per_host_max),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"user-agent": f"timeball/{__version__}", "content-type": "application/json"},
        skip_auto_headers=["accept-encoding"],
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


async def read_bounded(
    response: aiohttp.ClientResponse, bytes_max: int, refuse: Callable[[str], Exception]
) -> bytes:
    """Read the body of an answer. If it is longer than `bytes_max`, raise the exception that `refuse` creates."""
    chunks, remaining_bytes = list[bytes](), bytes_max
    async for chunk in response.content.iter_any():
        remaining_bytes -= len(chunk)
        if remaining_bytes < 0:
            response.close()
            raise refuse(f"an answer of more than {bytes_max} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
