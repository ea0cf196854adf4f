"""Access control: accounts from a file, authentication of requests, and the permission check before any action.

    access file -> Access -- authenticate(headers) or verify(content, signature) --> Caller -- check(verb, …)

Edges authenticate the caller and pass it on. broker/policy.py calls `check`, and no edge does.

A request is refused unless the file grants its right. The file uses RocketMQ's words (DENY, PUB, SUB, PUB|SUB, ANY):

    request                          verb       required right
    send                             SEND       PUB on the topic
    recall, cancel, reschedule       CANCEL     PUB on the topic
    receive, pull, acknowledge       RECEIVE    SUB on the topic and SUB on the group
    look (ends of queues, status)    LOOK       any account; for a topic PUB or SUB on it, for a group SUB on it
    everything else                  ADMIN      admin = true

`%RETRY%g` and `%DLQ%g` have the rights of the group g only. `"*"` stands for all names that the file does not list. It
never covers the broker's own topics, because messages of all accounts pass through them.

A signature covers a date but not the request, and a bearer token contains the secret: only TLS protects them from
eavesdroppers. Invariant: no error and no repr contains a secret. Secrets are compared in constant time.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Literal

import msgspec

from timeball.model.errors import UNDECODABLE, Forbidden, SetupError, Unauthorized
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX
from timeball.model.send_options import EXPIRED_PREFIX

# RocketMQ's Python client sends local time as UTC. No time zone is further away than this.
DATE_DRIFT_MS_MAX = 15 * 60 * 60 * 1000
FILE_BYTES_MAX = 4 * 1024 * 1024
ALL_NAMES = "*"
# Prefixes of RocketMQ's internal topics, which carry delayed messages, half messages and traces of all topics.
BROKER_TOPIC_PREFIXES = ("SCHEDULE_TOPIC_", "RMQ_SYS_", "rmq_sys_", "TRANS_CHECK_")

ASK = "this broker asks for an access key and its secret (docs/security.md)"
_WRONG = "there is no account with this access key and this secret"
# Compared when the account is unknown, so that the check takes as long as for a known account.
_DUMMY_SECRET = b"compared for unknown names, so that they take as long as known ones"

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


# The right that a verb needs on its topic. _BOTH means that one of the two is enough.
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


def parse(data: bytes, path: str) -> Accounts:
    """Parse an access file into its accounts by access key. `path` is only for error texts.

    Raises SetupError, which never contains a secret.
    """
    if len(data) > FILE_BYTES_MAX:
        raise SetupError(f"--access-file {path}: {len(data)} bytes; at most {FILE_BYTES_MAX}")
    try:
        access_file = msgspec.toml.decode(data, type=_AccessFile)
    # The decoder raises ValueError for text that is not UTF-8.
    except UNDECODABLE as error:
        # `from None`, because the cause may contain the line with the secret.
        raise SetupError(f"--access-file {path}: {error}") from None
    accounts: dict[str, Account] = {}
    for account in access_file.accounts:
        if account.access_key in accounts:
            raise SetupError(f"--access-file {path}: access_key {account.access_key!r} is there twice")
        if group_topics := [name for name in account.topics if name.startswith((RETRY_PREFIX, DLQ_PREFIX))]:
            raise SetupError(
                f"--access-file {path}: topics of {account.access_key!r}: {group_topics[0]!r} follows its group; "
                "grant that in groups"
            )
        accounts[account.access_key] = account
    return accounts


class Caller:
    """The caller of a request. This base class is used when there is no access file, and may do everything."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The access key, or "" when there is no access control."""
        return ""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden unless the caller has the right for `verb`, Unauthorized if its account was removed."""

    def check_on_any_topic(self, verb: Verb) -> None:
        """Raise Forbidden if `check` would refuse this verb on every topic, Unauthorized as `check` does."""

    def signature(self, now_ms: int) -> dict[str, str]:
        """Make the headers that authenticate the caller to another node of the cluster."""
        return {}

    def may(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> bool:
        """Check whether `check` accepts these arguments."""
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
        """Make the headers of a request that is signed now by this account. They do not contain the secret."""
        date = datetime.fromtimestamp(now_ms // 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        signature = hmac.digest(self._account.secret_key.encode(), date.encode(), "sha1").hex()
        credentials = (
            f"MQv2-HMAC-SHA1 Credential={self.name}, SignedHeaders=x-mq-date-time, Signature={signature}"
        )
        return {"authorization": credentials, "x-mq-date-time": date}

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        """Raise Forbidden unless the account has the right for `verb` on the topic and the group.

        Raises Unauthorized if the account was removed or its secret changed.
        """
        account = self._access.current(self._account)
        if account.admin or (verb is Verb.LOOK and topic is None and group is None):
            return
        if verb is Verb.ADMIN or (topic is None and group is None):
            raise Forbidden(f"account {self.name!r} may not {Verb.ADMIN.value}: admin = true would let it")
        right = _RIGHTS[verb]
        if topic is not None and not _may_use_topic(account, topic, right):
            raise Forbidden(
                f"account {self.name!r} may not {verb.value} topic {topic[:128]!r}: {_missing_right(topic, right)}"
            )
        if group is not None and not _rights(account.groups, group) & SUB:
            raise Forbidden(
                f"account {self.name!r} may not use group {group[:128]!r}: SUB on the group would let it"
            )

    def check_on_any_topic(self, verb: Verb) -> None:
        """Raise Forbidden if no topic grants the account the right for `verb`, Unauthorized as `check` does."""
        account = self._access.current(self._account)
        right = _RIGHTS[verb]
        if account.admin or any(_BITS[granted] & right for granted in account.topics.values()):
            return
        # SUB on a group is enough, because its retry topic has the rights of the group.
        if not any(_BITS[granted] & SUB for granted in account.groups.values()):
            raise Forbidden(
                f"account {self.name!r} may not {verb.value} any topic: {_WORDS[right]} on a topic would let it"
            )


class Access:
    """The accounts in force. Any thread may use it. `replace` changes all accounts at once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        # Number of requests with missing or wrong credentials. Approximate, because threads add to it without a lock.
        self.refused = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def __repr__(self) -> str:
        return f"Access({len(self._accounts)} accounts)"

    def replace(self, accounts: Accounts) -> None:
        """Replace all accounts. The next request of a removed account is refused."""
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
            expected = _DUMMY_SECRET if account is None else account.secret_key.encode()
            return self._principal(account, hmac.compare_digest(expected, _bytes(secret)))
        if scheme.lower() != "mqv2-hmac-sha1":
            raise self.refusal(ASK)
        match = _SIGNED.fullmatch(rest.strip())
        if match is None:
            raise self.refusal(f"{ASK}; the authorization header has no access key and signature")
        date = headers.get("x-mq-date-time", "")
        if (fault := _date_fault(date, now_ms)) is not None:
            raise self.refusal(fault)
        return self.verify(match["key"], _bytes(date), bytes.fromhex(match["hex"]))

    def verify(self, access_key: str, content: bytes, signature: bytes) -> Principal:
        """Check an HMAC-SHA1 signature of `content` made with an account's secret. Raises Unauthorized."""
        account = self._accounts.get(access_key)
        secret = _DUMMY_SECRET if account is None else account.secret_key.encode()
        return self._principal(account, hmac.compare_digest(hmac.digest(secret, content, "sha1"), signature))

    def named(self, access_key: str) -> Principal:
        """Build the caller of a request that was authenticated earlier.

        Raises Unauthorized if the account was removed.
        """
        account = self._accounts.get(access_key)
        if account is None:
            raise self.refusal(f"account {access_key[:64]!r} is not in the access file any more")
        return Principal(self, account)

    def current(self, account: Account) -> Account:
        """Get the current version of an account. Raises Unauthorized if it was removed or its secret changed."""
        current = self._accounts.get(account.access_key)
        if current is None or current.secret_key != account.secret_key:
            raise self.refusal(_WRONG)
        return current

    def refusal(self, text: str) -> Unauthorized:
        """Build the error for a request whose credentials are not accepted, and count it for the broker's status."""
        self.refused += 1
        return Unauthorized(text)

    def _principal(self, account: Account | None, is_proven: bool) -> Principal:
        """Build the caller of an account whose secret is proven. Raises Unauthorized for no account or proof."""
        if account is None or not is_proven:
            raise self.refusal(_WRONG)
        return Principal(self, account)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _date_fault(text: str, now_ms: int) -> str | None:
    """Describe the fault of a signature's date, or return None for a valid date near `now_ms`."""
    match = _DATE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        at_ms = int(datetime(*map(int, match.groups()), tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc,arg-type]
    except ValueError:
        return "the header x-mq-date-time is no date such as 20300131T090000Z"
    if abs(now_ms - at_ms) > DATE_DRIFT_MS_MAX:
        return "the header x-mq-date-time is more than 15 h from the broker's clock"
    return None


def _rights(table: Mapping[str, Right], name: str) -> int:
    """Find the rights on a topic or group, as bits: of its own entry, else of the entry for all names, else none."""
    return _BITS[table.get(name) or table.get(ALL_NAMES, "DENY")]


def _may_use_topic(account: Account, topic: str, right: int) -> bool:
    """Check whether the account has a right on a topic.

    A group's retry and dead-letter topics need SUB on the group. A topic with a prefix of the broker needs an entry of
    its own.
    """
    topic = topic.removeprefix(EXPIRED_PREFIX)  # expired messages were sent to this topic
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if topic.startswith(prefix):
            return _may_use_group_topic(account, topic.removeprefix(prefix))
    if topic.startswith(BROKER_TOPIC_PREFIXES) and topic not in account.topics:
        return False
    return bool(_rights(account.topics, topic) & right)


def _may_use_group_topic(account: Account, suffix: str) -> bool:
    """Check whether the account may use `%RETRY%<suffix>`. The suffix is `<group>` or `<group>_<topic>`.

    Group names may contain "_", so the end of the group's name is unknown. If the access file lists the whole suffix as
    a group, that entry decides. Otherwise at least one way to split the suffix must be allowed, and no way may contain
    a name that the file refuses.
    """
    if suffix in account.groups:
        return bool(_rights(account.groups, suffix) & SUB)
    is_allowed = bool(_rights(account.groups, suffix) & SUB)
    for group, topic in _group_topic_splits(suffix):
        topic = topic.removeprefix(EXPIRED_PREFIX)  # as in `_may_use_topic`
        group_right, topic_right = _rights(account.groups, group) & SUB, _rights(account.topics, topic) & SUB
        if (group in account.groups and not group_right) or (topic in account.topics and not topic_right):
            return False
        is_allowed = is_allowed or bool(group_right and topic_right)
    return is_allowed


def _group_topic_splits(text: str) -> Iterator[tuple[str, str]]:
    """Yield (group, topic) for every "_" or "+" in the text.

    RocketMQ joins group and topic by "_", later versions by "+".
    """
    for index, character in enumerate(text):
        if character in "_+":
            yield text[:index], text[index + 1 :]


def _missing_right(topic: str, right: int) -> str:
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return "SUB on its group would let it"
    return f"{_WORDS[right]} on the topic would let it"
