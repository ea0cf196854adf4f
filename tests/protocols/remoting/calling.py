"""Requests to a room of the edge without a socket: the broker behind it is real, the connection is not connected."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from timeball.broker.service import Broker
from timeball.protocols.remoting.calls import Call, Handlers, Refused
from timeball.protocols.remoting.clients import Clients
from timeball.protocols.remoting.codec.frame import Command
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.site import Site

VERSION = 409


def site_of(broker: Broker) -> Site:
    return Site(
        broker=broker,
        clients=Clients(),
        broker_name="timeball",
        cluster_name="DefaultCluster",
        advertise="10.0.0.1:10911",
        remoting_port=10911,
    )


def connection() -> Connection:
    return Connection(lambda *_: None, set(), asyncio.get_running_loop())


async def ask(
    handlers: Handlers, code: int, *, version: int = VERSION, body: bytes = b"", **ext: object
) -> Any:
    """(code, remark) of the answer, as dispatch would give it for a refusal; None when there is none."""
    command = Command(
        code=code, version=version, body=body, ext={name: str(v) for name, v in ext.items() if v is not None}
    )
    try:
        reply = handlers[code](Call(connection(), command))
        if inspect.isawaitable(reply):
            reply = await reply
    except Refused as error:
        return error.response_code, str(error)
    return None if reply is None else (reply.code, reply.remark)
