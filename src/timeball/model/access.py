"""Access control: accounts from a file, authentication of requests, and the permission check before any action.

    access file -> Access -- authenticate(headers) or verify(content, signature) --> Caller -- check(verb, …)

Edges authenticate the caller and pass it on. broker/policy.py calls `check`, and no edge does.

A right that is not granted is refused. The file uses RocketMQ's words (DENY, PUB, SUB, PUB|SUB, ANY):

    request                          verb       needs
    send                             SEND       PUB on the topic
    recall, cancel, reschedule       CANCEL     PUB on the topic
    receive, pull, acknowledge       RECEIVE    SUB on the topic and SUB on the group
    look (ends of queues, status)    LOOK       an account; of a topic PUB or SUB on it, of a group SUB on it
    everything else                  ADMIN      admin = true

`%RETRY%g` and `%DLQ%g` have the rights of the group g only. `"*"` stands for all names that the table does not list,
but never for the broker's own topics: messages of all accounts pass through them.

A signature covers a date but not the request, and a bearer token contains the secret: only TLS protects them from
eavesdroppers. Invariant: no secret leaves this module, in no error and in no repr. Secrets are compared in constant
time.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Literal

import msgspec

from timeball.model.errors import Forbidden, SetupError, Unauthorized
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX

# RocketMQ's Python client sends local time as UTC. No time zone is further away than this.
DATE_DRIFT_MS_MAX = 15 * 60 * 60 * 1000
FILE_BYTES_MAX = 4 * 1024 * 1024
EVERY = "*"
# Prefixes of RocketMQ's own topics, for delayed messages, half messages and traces of all topics.
OWN_TOPICS = ("SCHEDULE_TOPIC_", "RMQ_SYS_", "rmq_sys_", "TRANS_CHECK_")

ASK = "this broker asks for an access key and its secret (docs/security.md)"
_WRONG = "there is no account with this access key and this secret"
_NO_SECRET = b"nobody's secret: a stranger's name shall take as long as a known one"

_SIGNED = re.compile(
    r"Credential=(?P<key>[^,/\s]*)(?:/[^,]*)?, *SignedHeaders=x-mq-date-time, *Signature=(?P<hex>[0-9A-Fa-f]{40})"
)
_DATE = re.compile(r"([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z")

Right = Literal["DENY", "PUB", "SUB", "PUB|SUB", "SUB|PUB", "ANY"]
PUB, SUB = 1, 2
_BOTH = PUB | SUB
_BITS: dict[str, int] = {"DENY": 0, "PUB": PUB, "SUB": SUB, "PUB|SUB": _BOTH, "SUB|PUB": _BOTH, "ANY": _BOTH}
_WORDS = {PUB: "PUB", SUB: "SUB", _BOTH: "PUB or SUB"}

# \Z instead of $, which would accept a trailing newline.
Name = Annotated[str, msgspec.Meta(pattern=r"^(\*|[%|a-zA-Z0-9_-]{1,255})\Z")]


class Verb(Enum):
    """The right that a request needs. The value completes the sentence "may not …"."""

    SEND = "send to"
    CANCEL = "take back messages of"
    RECEIVE = "receive from"
    LOOK = "look at"
    ADMIN = "administer the broker"


# The right that a verb needs on its topic. Of two rights, one is enough.
_RIGHTS = {Verb.SEND: PUB, Verb.CANCEL: PUB, Verb.RECEIVE: SUB, Verb.LOOK: _BOTH}


class Account(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One account, in the form of the access file."""

    access_key: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.@-]{1,128}\Z")]
    # Limited to texts that a header can carry: ASCII, without blanks at the ends.
    secret_key: Annotated[str, msgspec.Meta(min_length=8, max_length=256, pattern=r"^[!-~][ -~]*[!-~]\Z")]
    admin: bool = False
    topics: dict[Name, Right] = {}
    groups: dict[Name, Right] = {}

    def __repr__(self) -> str:
        return f"Account(access_key={self.access_key!r}, secret_key=…, admin={self.admin})"


class _AccessFile(msgspec.Struct, forbid_unknown_fields=True):
    accounts: list[Account]


Accounts = Mapping[str, Account]


def parse(data: bytes, place: str) -> Accounts:
    """Parse an access file. Returns its accounts by access key. `place` is the file's path.

    Raises SetupError, which never contains a secret.
    """
    if len(data) > FILE_BYTES_MAX:
        raise SetupError(f"--access-file {place}: {len(data)} bytes; at most {FILE_BYTES_MAX}")
    try:
        found = msgspec.toml.decode(data, type=_AccessFile)
    # ValueError is also raised for text that is not UTF-8.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # Without the cause, which may contain the line with the secret.
        raise SetupError(f"--access-file {place}: {error}") from None
    accounts: dict[str, Account] = {}
    for account in found.accounts:
        if account.access_key in accounts:
            raise SetupError(f"--access-file {place}: access_key {account.access_key!r} is there twice")
        if of_group := [name for name in account.topics if name.startswith((RETRY_PREFIX, DLQ_PREFIX))]:
            raise SetupError(
                f"--access-file {place}: topics of {account.access_key!r}: {of_group[0]!r} follows its group; "
                "grant that in groups"
            )
        accounts[account.access_key] = account
    return accounts


class Caller:
    """The caller of a request. This base class is a caller without an access file, who may do everything."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The access key, or "" when there is no access control."""
        return ""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden unless the caller may do this, Unauthorized when its account was removed."""

    def check_somewhere(self, verb: Verb) -> None:
        """Raise Forbidden when `check` would refuse this verb on every topic, Unauthorized as `check` does."""

    def signature(self, now_ms: int) -> dict[str, str]:
        """Make the headers that authenticate the caller to another node of the cluster."""
        return {}

    def may(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> bool:
        """Check whether `check` allows this."""
        try:
            self.check(verb, topic=topic, group=group)
        except (Forbidden, Unauthorized):
            return False
        return True


ANONYMOUS = Caller()


class Principal(Caller):
    """An account that makes a request. Its rights are always those of the current access file."""

    __slots__ = ("_access", "_account")

    def __init__(self, access: Access, account: Account) -> None:
        self._access, self._account = access, account

    def __repr__(self) -> str:
        return f"Principal({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Principal) and other._account is self._account

    def __hash__(self) -> int:
        return id(self._account)

    @property
    def name(self) -> str:
        """The access key."""
        return self._account.access_key

    def signature(self, now_ms: int) -> dict[str, str]:
        """Make the headers of a request that the account signs now. The secret stays here."""
        date = datetime.fromtimestamp(now_ms // 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        signed = hmac.digest(self._account.secret_key.encode(), date.encode(), "sha1").hex()
        text = f"MQv2-HMAC-SHA1 Credential={self.name}, SignedHeaders=x-mq-date-time, Signature={signed}"
        return {"authorization": text, "x-mq-date-time": date}

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden unless the account may do this, Unauthorized when it was removed or its secret changed."""
        account = self._access.current(self._account)
        if account.admin or (verb is Verb.LOOK and topic is None and group is None):
            return
        if verb is Verb.ADMIN or (topic is None and group is None):
            raise Forbidden(f"account {self.name!r} may not {Verb.ADMIN.value}: admin = true would let it")
        right = _RIGHTS[verb]
        if topic is not None and not _may_topic(account, topic, right):
            raise Forbidden(
                f"account {self.name!r} may not {verb.value} topic {topic[:128]!r}: {_needs(topic, right)}"
            )
        if group is not None and not _rights(account.groups, group) & SUB:
            raise Forbidden(
                f"account {self.name!r} may not use group {group[:128]!r}: SUB on the group would let it"
            )

    def check_somewhere(self, verb: Verb) -> None:
        """Raise Forbidden when the account may do this on no topic, Unauthorized as `check` does."""
        account = self._access.current(self._account)
        right = _RIGHTS[verb]
        if account.admin or any(_BITS[given] & right for given in account.topics.values()):
            return
        # The retry topic of a group has the rights of the group.
        if not any(_BITS[given] & SUB for given in account.groups.values()):
            raise Forbidden(
                f"account {self.name!r} may not {verb.value} any topic: {_WORDS[right]} on a topic would let it"
            )


class Access:
    """The accounts in force. Any thread may use it. `replace` changes all accounts at once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        # Requests without credentials or with wrong ones. Approximate, because threads add to it without a lock.
        self.refused = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def __repr__(self) -> str:
        return f"Access({len(self._accounts)} accounts)"

    def replace(self, accounts: Accounts) -> None:
        """Use these accounts from now on. The next request of a removed account is refused."""
        self._accounts = accounts

    def authenticate(self, headers: Mapping[str, str], now_ms: int) -> Principal:
        """Find the caller from the headers "authorization" and "x-mq-date-time" (lower case). Raises Unauthorized.

        The formats are "MQv2-HMAC-SHA1 Credential=<access key>, SignedHeaders=x-mq-date-time, Signature=<hex>", and,
        for programs that cannot sign, "Bearer <access key>:<secret key>".
        """
        scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer":
            key, _, secret = rest.strip().partition(":")
            account = self._accounts.get(key)
            kept = _NO_SECRET if account is None else account.secret_key.encode()
            return self._let_in(account, hmac.compare_digest(kept, _bytes(secret)))
        if scheme.lower() != "mqv2-hmac-sha1":
            raise self.refusal(ASK)
        signed = _SIGNED.fullmatch(rest.strip())
        if signed is None:
            raise self.refusal(f"{ASK}; the authorization header has no access key and signature")
        date = headers.get("x-mq-date-time", "")
        if (wrong := _wrong_date(date, now_ms)) is not None:
            raise self.refusal(wrong)
        return self.verify(signed["key"], _bytes(date), bytes.fromhex(signed["hex"]))

    def verify(self, access_key: str, content: bytes, signature: bytes) -> Principal:
        """Find the account whose HMAC-SHA1 signature of `content` this is. Raises Unauthorized."""
        account = self._accounts.get(access_key)
        secret = _NO_SECRET if account is None else account.secret_key.encode()
        return self._let_in(account, hmac.compare_digest(hmac.digest(secret, content, "sha1"), signature))

    def named(self, access_key: str) -> Principal:
        """Find the account of a request that was authenticated before. Raises Unauthorized if it was removed."""
        account = self._accounts.get(access_key)
        if account is None:
            raise self.refusal(f"account {access_key[:64]!r} is not in the access file any more")
        return Principal(self, account)

    def current(self, account: Account) -> Account:
        """Get the current version of an account. Raises Unauthorized if it was removed or its secret changed."""
        found = self._accounts.get(account.access_key)
        if found is None or found.secret_key != account.secret_key:
            raise self.refusal(_WRONG)
        return found

    def refusal(self, text: str) -> Unauthorized:
        """Build the error for a request with an unknown sender, and count it for the broker's status."""
        self.refused += 1
        return Unauthorized(text)

    def _let_in(self, account: Account | None, proven: bool) -> Principal:
        if account is None or not proven:
            raise self.refusal(_WRONG)
        return Principal(self, account)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _wrong_date(text: str, now_ms: int) -> str | None:
    """Find the fault of a signature's date, or None when it has none."""
    found = _DATE.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        at_ms = int(datetime(*map(int, found.groups()), tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc,arg-type]
    except ValueError:
        return "the header x-mq-date-time is no date such as 20300131T090000Z"
    if abs(now_ms - at_ms) > DATE_DRIFT_MS_MAX:
        return "the header x-mq-date-time is more than 15 h from the broker's clock"
    return None


def _rights(table: Mapping[str, Right], name: str) -> int:
    return _BITS[table.get(name) or table.get(EVERY, "DENY")]


def _may_topic(account: Account, topic: str, right: int) -> bool:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if topic.startswith(prefix):
            return _may_of_group(account, topic.removeprefix(prefix))
    if topic.startswith(OWN_TOPICS) and topic not in account.topics:
        return False
    return bool(_rights(account.topics, topic) & right)


def _may_of_group(account: Account, rest: str) -> bool:
    """Check whether the account may use `%RETRY%<rest>`, where `rest` is a group, or a group and a topic after it.

    The end of the group's name cannot be determined. So an entry of the file for exactly this name decides. Otherwise
    at least one way to split the text must be allowed, and no way may contain a name that the file refuses.
    """
    if rest in account.groups:
        return bool(_rights(account.groups, rest) & SUB)
    allowed = bool(_rights(account.groups, rest) & SUB)
    for group, topic in _splits(rest):
        of_group, of_topic = _rights(account.groups, group) & SUB, _rights(account.topics, topic) & SUB
        if (group in account.groups and not of_group) or (topic in account.topics and not of_topic):
            return False
        allowed = allowed or bool(of_group and of_topic)
    return allowed


def _splits(text: str) -> Iterator[tuple[str, str]]:
    """Yield every split of the text at a "_", which joins group and topic in RocketMQ, or the "+" of later versions."""
    for at, sign in enumerate(text):
        if sign in "_+":
            yield text[:at], text[at + 1 :]


def _needs(topic: str, right: int) -> str:
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return "SUB on its group would let it"
    return f"{_WORDS[right]} on the topic would let it"
