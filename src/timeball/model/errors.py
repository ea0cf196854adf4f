"""All errors that Timeball raises on purpose, grouped by who must act.

    TimeballError
    ├── RequestError        the request is not possible as it is: change the request
    │   ├── InvalidMessage      a name, size or property that no broker accepts
    │   │   └── InvalidName         of a topic or a group
    │   ├── Conflict            an idempotency key that another send has used: choose a new one; or records
    │   │   │                   of a source that were sent before: continue from its positions
    │   │   └── AlreadyPending      a message with this unique key is pending: keep it or replace it
    │   ├── InvalidDelay        a due time or delay that is negative, not a number, or too far away
    │   ├── InvalidFilter       a tag or SQL expression that cannot be parsed, or is too large
    │   ├── InvalidReceipt      not made by this broker for this group and topic, or its lease has ended
    │   ├── Unauthorized        no credentials, or wrong ones: send an access key of the access file
    │   ├── Forbidden           the account may not do this (its entry in the access file lists its rights), or no
    │   │                       client may: the topic's permission, a disabled group or a reserved name forbids it
    │   ├── NotFound            no such topic, scheduled message or file
    │   │   └── GroupNotFound       no such consumer group
    │   └── OutOfRange          a position outside the kept range; the error states the range
    ├── OverLimit           correct, but more than this broker accepts now: wait or raise the limit
    ├── Unavailable         the broker is starting, stopping or stopped, or Spark, etcd or an object store is lost:
    │                       retry later
    │   ├── LeaseLost           this node's lease in etcd has ended: it no longer leads, and takes a new one
    │   └── NotLeader           this node does not lead the group: retry, another one answers soon
    ├── PeerError           another node violated the replication protocol: check its version and port
    ├── SetupError          the operator must act: port, folder, Java, a setting
    └── StorageError        the disk must be checked; the log has stopped
        ├── Corrupt             bytes that do not match their checksum; never delivered, never dropped
        │   └── MissingFile         a data file that the log names is missing: restore it, all else goes on
        └── DiskFailed          a write or sync failed; the first failure is final

`code` is for programs and never changes. The message is for people and tells them what to do. A broken invariant of
Timeball itself raises AssertionError instead.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

# Errors of msgspec's decoders for bytes from outside: no JSON, another type, not UTF-8, or nested too deeply.
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
LEADS_NO_MORE = "this node leads no more; ask again, another one answers soon"  # of a NotLeader


class TimeballError(Exception):
    """Base of all errors raised on purpose.

    `summary` is the SendSummary of the rows so far, if a `send_many` ends with this error. Otherwise it is None.
    """

    code: ClassVar[str] = "error"
    summary: Any = None


class RequestError(TimeballError):
    """The request cannot succeed unchanged."""

    code = "bad_request"


class InvalidMessage(RequestError):
    """A field of a message is not acceptable."""

    code = "invalid_message"


class InvalidName(InvalidMessage):
    """The name of a topic or a group is not acceptable."""

    code = "invalid_name"


class Conflict(RequestError):
    """The idempotency key was used by a send of other messages, or a source is at another position."""

    code = "conflict"


class AlreadyPending(Conflict):
    """A message with the unique key of a send is pending, and the send does not replace it.

    `id`, `seq` and `due_ms` are those of the pending message.
    """

    code = "already_pending"

    def __init__(self, text: str, *, id: str = "", seq: int = 0, due_ms: int = 0) -> None:
        super().__init__(text)
        self.id, self.seq, self.due_ms = id, seq, due_ms


class InvalidDelay(RequestError):
    """The due time is negative, not a number or beyond the maximum delay."""

    code = "invalid_delay"


class InvalidFilter(RequestError):
    """A filter cannot be parsed. `position` is a character, counted from 1. `limit` names the exceeded bound."""

    code = "invalid_filter"

    def __init__(self, text: str, *, position: int | None = None, limit: str | None = None) -> None:
        super().__init__(text)
        self.position, self.limit = position, limit


class InvalidReceipt(RequestError):
    """A receipt handle is not for a lease of this group and topic, or the lease has ended."""

    code = "invalid_receipt"


class Unauthorized(RequestError):
    """The request has no credentials, or wrong ones. The error does not reveal which of the two."""

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
    """A position is outside the kept range."""

    code = "out_of_range"


class OverLimit(TimeballError):
    """A limit is reached. Other requests are not affected."""

    code = "over_limit"


class Unavailable(TimeballError):
    """The broker, Spark, etcd or an object store cannot serve at present."""

    code = "unavailable"


class LeaseLost(Unavailable):
    """The lease by which this node leads has ended."""

    code = "lease_lost"


class NotLeader(Unavailable):
    """This node does not lead the group, or no longer does: another node answers."""

    code = "not_leader"


class PeerError(TimeballError):
    """Another node of the cluster violates the replication protocol. The connection to it ends."""

    code = "peer"


class SetupError(TimeballError):
    """The operator must change the set-up."""

    code = "setup"


class StorageError(TimeballError):
    """The storage failed. The log has stopped."""

    code = "storage"


class Corrupt(StorageError):
    """Stored bytes do not match their checksum or their neighbours."""

    code = "corrupt"


class MissingFile(Corrupt):
    """A data file of the pending table is missing. Its messages wait until it is restored. Others are delivered."""

    code = "missing_file"


class DiskFailed(StorageError):
    """A write or a sync failed. It is not retried (docs/decisions/)."""

    code = "disk_failed"


def not_installed_text(name: str | None, extra: str) -> str:
    """Say that a module is not installed, and how to install the extra that contains it.

    The advice avoids `pip install timeball`: Timeball is on no index yet, and a package of this name there is another
    project's.
    """
    return (
        f"{name} is not installed: install the extra, in a checkout of Timeball pip install '.[{extra}]', of a release "
        f"pip install 'TIMEBALL.whl[{extra}]' TIMEBALL_BROKER.whl"
    )


def _classes_by_code(root: type[TimeballError]) -> dict[str, type[TimeballError]]:
    """Collect a class of errors and its subclasses by their codes."""
    classes = {root.code: root}
    for child in root.__subclasses__():
        # `| classes`: the class that defines a code wins over its subclasses without a code of their own.
        classes = _classes_by_code(child) | classes
    return classes


def from_code(code: str, text: str) -> TimeballError:
    """Rebuild an error received from another process. An unknown code gives a plain TimeballError."""
    return _classes_by_code(TimeballError).get(code, TimeballError)(text)
