"""A call's outcome as RocketMQ's Status: its code, and a sentence that says what to do (error_codes.py)."""

from __future__ import annotations

from timeball.protocols.error_codes import Refused, codes_of, sentence, shorten
from timeball.protocols.grpc._generated.definition_pb2 import Code, Status


def ok() -> Status:
    """Done as asked."""
    return Status(code=Code.OK, message=Code.Name(Code.OK))


def status(code: Code, text: str) -> Status:
    """A status with a sentence of bounded length."""
    return Status(code=code, message=shorten(text))


def status_of(error: BaseException) -> Status:
    """The status for what a handler has raised."""
    if isinstance(error, Refused):
        name = Code.Name(error.protocol_code)
    else:
        name = codes_of(error).grpc
    return Status(code=name, message=sentence(error))
