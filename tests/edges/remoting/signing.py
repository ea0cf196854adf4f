"""A wire that signs requests as RocketMQ's ACL hook does. It does not use the code of the broker's check."""

from __future__ import annotations

import base64
import hashlib
import hmac

from tests.accounts import SECRETS
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.codec.codes import CommandFlag
from timeball.edges.remoting.codec.frame import JSON, Splitter, decode, encode


class SignedWire(Wire):
    """Signs everything that is sent, except answers."""

    access_key = "shop"
    secret = ""

    @classmethod
    def of(
        cls, node: RunningNode, access_key: str, secret: str | None = None, serialisation: int = JSON
    ) -> SignedWire:
        """Connect as an account, by default with its secret."""
        wire = cls.to(node, serialisation)
        assert isinstance(wire, SignedWire)
        wire.access_key, wire.secret = access_key, SECRETS.get(access_key, "") if secret is None else secret
        return wire

    def send_bytes(self, data: bytes) -> None:
        (frame,) = Splitter().feed(data)
        command = decode(frame)
        if not command.flag & CommandFlag.RESPONSE and self.access_key:
            command.ext["AccessKey"] = self.access_key
            text = "".join(command.ext[name] for name in sorted(command.ext))
            digest = hmac.new(self.secret.encode(), text.encode() + command.body, hashlib.sha1).digest()
            command.ext["Signature"] = base64.b64encode(digest).decode()
        super().send_bytes(encode(command))
