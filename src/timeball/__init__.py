"""Timeball: a broker that keeps a message until its due time, and then delivers it exactly once into its queue.

    from timeball import Timeball

    with Timeball("http://127.0.0.1:7480") as ball:
        ball.send("orders", b"close order 17 if unpaid", after="30m")

The packages, lower layers first. Each imports only packages above it in this list:

    model       messages and rows, errors, limits, settings; it imports nothing else of Timeball
    io          the clock, files and certificates; other code gets them as arguments
    client      the library for Python programs
    log         makes decisions durable: the commit log
    table       layout and catalogue of the pending table, which stores scheduled messages
    schedule    finds the scheduled messages that are due
    broker      makes decisions from requests
    monitoring  metrics, spans, and states for systemd
    edges       convert bytes to requests, and answers to bytes
    cluster     one log on three machines
    spark       the log as tables (Spark, DuckDB)
    dashboard   static files for a browser
    node        the composition root
    testing     a broker for tests of applications, with a clock that the test moves
    cli         one file per command
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from timeball.model.errors import (
    AlreadyPending,
    Conflict,
    Corrupt,
    DiskFailed,
    Forbidden,
    GroupNotFound,
    InvalidDelay,
    InvalidFilter,
    InvalidMessage,
    InvalidName,
    InvalidReceipt,
    MissingFile,
    NotFound,
    NotLeader,
    OutOfRange,
    OverLimit,
    RequestError,
    SetupError,
    StorageError,
    TimeballError,
    Unauthorized,
    Unavailable,
    not_installed_text,
)

if TYPE_CHECKING:  # for readers and type checkers; at run time `__getattr__` supplies these names
    from timeball.client.async_timeball import AsyncMessage, AsyncTimeball
    from timeball.client.messages import Message
    from timeball.client.receipts import AcceptedRows, ExistingRows, Receipt, RefusedRows, SendSummary
    from timeball.client.timeball import Timeball
    from timeball.client.worker import Dead, Retry, Worker
    from timeball.model.answers import (
        Attached,
        Content,
        DeadLetterPage,
        DeadLetterRow,
        GroupPlace,
        GroupState,
        MessagePlace,
        QueueRange,
        Resolved,
        TopicState,
        UniqueMessage,
        Verdict,
    )

__all__ = [
    "AcceptedRows",
    "AlreadyPending",
    "AsyncMessage",
    "AsyncTimeball",
    "Attached",
    "Conflict",
    "Content",
    "Corrupt",
    "Dead",
    "DeadLetterPage",
    "DeadLetterRow",
    "DiskFailed",
    "ExistingRows",
    "Forbidden",
    "GroupNotFound",
    "GroupPlace",
    "GroupState",
    "InvalidDelay",
    "InvalidFilter",
    "InvalidMessage",
    "InvalidName",
    "InvalidReceipt",
    "Message",
    "MessagePlace",
    "MissingFile",
    "NotFound",
    "NotLeader",
    "OutOfRange",
    "OverLimit",
    "QueueRange",
    "Receipt",
    "RefusedRows",
    "RequestError",
    "Resolved",
    "Retry",
    "SendSummary",
    "SetupError",
    "StorageError",
    "Timeball",
    "TimeballError",
    "TopicState",
    "Unauthorized",
    "Unavailable",
    "UniqueMessage",
    "Verdict",
    "Worker",
    "__version__",
]

__version__ = "0.1.0"

# Name -> its module, imported on first use: the import of Arrow alone would be half of a command's start time.
_PLACES = {
    "AcceptedRows": "timeball.client.receipts",
    "AsyncMessage": "timeball.client.async_timeball",
    "AsyncTimeball": "timeball.client.async_timeball",
    "Attached": "timeball.model.answers",
    "Content": "timeball.model.answers",
    "Dead": "timeball.client.worker",
    "DeadLetterPage": "timeball.model.answers",
    "DeadLetterRow": "timeball.model.answers",
    "ExistingRows": "timeball.client.receipts",
    "GroupPlace": "timeball.model.answers",
    "GroupState": "timeball.model.answers",
    "Message": "timeball.client.messages",
    "MessagePlace": "timeball.model.answers",
    "UniqueMessage": "timeball.model.answers",
    "QueueRange": "timeball.model.answers",
    "Receipt": "timeball.client.receipts",
    "RefusedRows": "timeball.client.receipts",
    "Resolved": "timeball.model.answers",
    "Retry": "timeball.client.worker",
    "SendSummary": "timeball.client.receipts",
    "Timeball": "timeball.client.timeball",
    "TopicState": "timeball.model.answers",
    "Verdict": "timeball.model.answers",
    "Worker": "timeball.client.worker",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if f"{__name__}.{name}" in _EXTRAS:  # `from timeball import testing`: with the error of a missing package
        return import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


# The packages of the distribution `timeball-broker` (deploy/distributions.py), and the extra that brings each.
_EXTRAS = {
    "timeball.broker": "broker",
    "timeball.cli": "cli",
    "timeball.cluster": "broker",
    "timeball.dashboard": "broker",
    "timeball.edges": "broker",
    "timeball.log": "broker",
    "timeball.monitoring": "broker",
    "timeball.node": "broker",
    "timeball.schedule": "broker",
    "timeball.spark": "spark",
    "timeball.table": "broker",
    "timeball.testing": "broker",
}


class _MissingPackages:
    """The last finder of imports. It names the extra for a package of Timeball that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None, /) -> None:
        """Raise ModuleNotFoundError for a package of `timeball-broker`."""
        if name in _EXTRAS:
            raise ModuleNotFoundError(not_installed_text(name, _EXTRAS[name]), name=name)


sys.meta_path.append(_MissingPackages)
