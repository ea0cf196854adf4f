"""Timeball: a broker that keeps a message until its instant, and then delivers it exactly once into its queue.

    from timeball import Timeball

    with Timeball("grpc://127.0.0.1:7400") as ball:
        ball.send("orders", b"close order 17 if unpaid", after="30m")

The rooms, in the order a message meets them:

    message clock errors limits   the vocabulary; imports nothing of ours
    files config                  the disk and the settings, as arguments
    log                           decisions -> bytes that stay
    table                         promises at rest: the pending table's layout and catalogue
    inspect                       a data folder, looked at without a broker
    schedule                      bytes that wait -> due at T
    broker                        requests -> decisions
    protocols                     bytes <-> requests
    pipeline                      the log, as tables (Spark)
    client                        what a Python program imports
    node                          composition root
    cli                           one file a command
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from timeball.errors import (
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
)

if TYPE_CHECKING:  # for readers and type checkers; a program gets these from `__getattr__`
    from timeball.client.async_timeball import AsyncMessage, AsyncTimeball
    from timeball.client.messages import Message
    from timeball.client.sender import AcceptedRows, ExistingRows, Receipt, RefusedRows, SendSummary
    from timeball.client.timeball import Timeball
    from timeball.client.worker import Dead, Retry, Worker
    from timeball.wire import (
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
        Verdict,
    )

__all__ = [
    "AcceptedRows",
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
    "Verdict",
    "Worker",
    "__version__",
]

__version__ = "0.1.0"

# Name -> its module, imported when a program asks for it: Arrow alone costs a command half of its start.
_PLACES = {
    "AcceptedRows": "timeball.client.sender",
    "AsyncMessage": "timeball.client.async_timeball",
    "AsyncTimeball": "timeball.client.async_timeball",
    "Attached": "timeball.wire",
    "Content": "timeball.wire",
    "Dead": "timeball.client.worker",
    "DeadLetterPage": "timeball.wire",
    "DeadLetterRow": "timeball.wire",
    "ExistingRows": "timeball.client.sender",
    "GroupPlace": "timeball.wire",
    "GroupState": "timeball.wire",
    "Message": "timeball.client.messages",
    "MessagePlace": "timeball.wire",
    "QueueRange": "timeball.wire",
    "Receipt": "timeball.client.sender",
    "RefusedRows": "timeball.client.sender",
    "Resolved": "timeball.wire",
    "Retry": "timeball.client.worker",
    "SendSummary": "timeball.client.sender",
    "Timeball": "timeball.client.timeball",
    "TopicState": "timeball.wire",
    "Verdict": "timeball.wire",
    "Worker": "timeball.client.worker",
}


def __getattr__(name: str) -> Any:
    """Import what a program asks for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
