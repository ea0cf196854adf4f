"""Every error Timeball raises on purpose, sorted by who must act.

    TimeballError
    ├── RequestError        the caller asked for something that cannot be: change the request
    │   ├── InvalidMessage      a name, size or property that no broker of ours accepts
    │   │   └── InvalidName         of a topic or a group
    │   ├── Conflict            an idempotency key that another send has used: choose a new one; or records
    │   │                       of a source that were sent before: go on from its positions
    │   ├── InvalidDelay        an instant or delay that is negative, not a number, or too far away
    │   ├── InvalidFilter       a tag or SQL expression that cannot be read, or is too large
    │   ├── InvalidReceipt      not made by this broker for this group and topic, or its lease has ended
    │   ├── Unauthorized        no credentials, or wrong ones: send an access key of the access file
    │   ├── Forbidden           the account may not do this (its line in the access file says what it may), or no client
    │   │                       may: the topic's permission, the group's switch or a reserved name forbids it
    │   ├── NotFound            no such topic, promise or file
    │   │   └── GroupNotFound       no such consumer group
    │   └── OutOfRange          a position outside the range that is kept, which it carries
    ├── OverLimit           correct, but more than this broker takes now: wait or raise the limit
    ├── Unavailable         the broker is starting, stopping or stopped, or Spark, etcd or an object store is lost:
    │                       retry later
    │   ├── LeaseLost           this node's lease in etcd has ended: it no longer leads, and takes a new one
    │   └── NotLeader           this node does not lead the group: ask again, another one answers soon
    ├── PeerError           another node sent what is not of the replication protocol: look at its version and port
    ├── SetupError          the operator must act: port, folder, Java, a setting
    └── StorageError        the disk must be looked at; the log has stopped
        ├── Corrupt             bytes that do not match their checksum; never delivered, never dropped
        │   └── MissingFile         a data file that the log names is gone: put it back, all else goes on
        └── DiskFailed          a write or sync failed; the first one is final

`code` is for machines and never changes; the sentence is for people and says what to do.
A broken invariant of our own is an AssertionError and none of these.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TimeballError(Exception):
    """Base of all errors raised on purpose.

    `summary`: of a `send_many` that ends with this error, its SendSummary up to there: rows accepted, refused, unknown.
    """

    code: ClassVar[str] = "error"
    summary: Any = None


class RequestError(TimeballError):
    """The request cannot be granted as it stands."""

    code = "bad_request"


class InvalidMessage(RequestError):
    """A field of a message is not acceptable."""

    code = "invalid_message"


class InvalidName(InvalidMessage):
    """A topic or a group may not be called so."""

    code = "invalid_name"


class Conflict(RequestError):
    """The idempotency key has been used by a send of other messages, or a source stands elsewhere."""

    code = "conflict"


class InvalidDelay(RequestError):
    """The due instant is negative, not a number or beyond the maximum delay."""

    code = "invalid_delay"


class InvalidFilter(RequestError):
    """A filter's text cannot be read. `position` counts its characters from 1; `limit` names the bound passed."""

    code = "invalid_filter"

    def __init__(self, text: str, *, position: int | None = None, limit: str | None = None) -> None:
        super().__init__(text)
        self.position, self.limit = position, limit


class InvalidReceipt(RequestError):
    """A receipt handle names no lease of this group and topic, or one that has ended."""

    code = "invalid_receipt"


class Unauthorized(RequestError):
    """The request comes without credentials, or with wrong ones; which of the two is not said."""

    code = "unauthorized"


class Forbidden(RequestError):
    """The account may not do this, or no client may."""

    code = "forbidden"


class NotFound(RequestError):
    """The named thing does not exist here."""

    code = "not_found"


class GroupNotFound(NotFound):
    """The consumer group does not exist here."""

    code = "group_not_found"


class OutOfRange(RequestError):
    """A position lies outside the range that is kept."""

    code = "out_of_range"


class OverLimit(TimeballError):
    """A limit is reached; nothing else suffers."""

    code = "over_limit"


class Unavailable(TimeballError):
    """The broker, Spark, etcd or an object store cannot serve now."""

    code = "unavailable"


class LeaseLost(Unavailable):
    """The lease by which this node leads has ended."""

    code = "lease_lost"


class NotLeader(Unavailable):
    """This node does not lead the group, or not any more: another one answers."""

    code = "not_leader"


class PeerError(TimeballError):
    """Another node of the cluster does not keep the replication protocol; the connection to it ends."""

    code = "peer"


class SetupError(TimeballError):
    """The operator must change the set-up."""

    code = "setup"


class StorageError(TimeballError):
    """The storage failed; the log has stopped."""

    code = "storage"


class Corrupt(StorageError):
    """Stored bytes do not match their checksum or their neighbours."""

    code = "corrupt"


class MissingFile(Corrupt):
    """A data file of the pending table is gone. Its messages wait until it is put back, others do not."""

    code = "missing_file"


class DiskFailed(StorageError):
    """A write or a sync failed; it is not tried again (docs/decisions/)."""

    code = "disk_failed"


def _tree(root: type[TimeballError]) -> dict[str, type[TimeballError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_code(code: str, text: str) -> TimeballError:
    """The error with this `code`, for the far side of a wire; an unknown code becomes the base class."""
    return _tree(TimeballError).get(code, TimeballError)(text)
