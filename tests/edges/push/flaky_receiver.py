"""A receiver that fails and hangs, and may be killed at any time: a separate process that records its requests.

    python -m tests.edges.push.flaky_receiver PORT RECORD SECRET FAILS HANGS

Each line of the record is `time outcome attempt id`. The outcome `granted` is written before the answer, so a request
whose answer is lost counts as granted. The id and the attempt decide whether a request fails or hangs, also after a
restart.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from base64 import b64decode
from hashlib import blake2b

from standardwebhooks.webhooks import Webhook, WebhookVerificationError


class FlakyReceiver:
    """Speaks as much HTTP/1.1 as the broker needs."""

    def __init__(self, record: str, secret: str, fails: float, hangs: float) -> None:
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._webhook, self._fails, self._hangs = Webhook(secret), fails, hangs
        assert b64decode(secret.removeprefix("whsec_"))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until it ends."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                pairs = (line.partition(": ") for line in head.split("\r\n")[1:] if line)
                headers = {name.lower(): value for name, _, value in pairs}
                body = await reader.readexactly(int(headers["content-length"]))
                writer.write(await self._answer(headers, body, reader))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, headers: dict[str, str], body: bytes, reader: asyncio.StreamReader) -> bytes:
        """Record an attempt, and return its answer.

        A hash of the message id and the attempt decides: success, failure, or failure after the broker has given up.
        """
        message_id, attempt = headers["webhook-id"], headers["timeball-attempt"]
        try:
            self._webhook.verify(body, headers, json_parse=False)
        except WebhookVerificationError:
            self._note("forged", message_id, attempt)
            return b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
        chance = int.from_bytes(blake2b(f"{message_id} {attempt}".encode(), digest_size=4).digest()) / 2**32
        if chance < self._hangs:
            self._note("hung", message_id, attempt)
            await reader.read()  # until the broker has given up
        if chance < self._hangs + self._fails:
            self._note("failed", message_id, attempt)
            return b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
        self._note("granted", message_id, attempt)
        return b"HTTP/1.1 204 No Content\r\n\r\n"

    def _note(self, what: str, message_id: str, attempt: str) -> None:
        """Append a line to the record in one write: the time, the outcome, the attempt and the message id."""
        os.write(self._record, f"{time.time():.3f} {what} {attempt} {message_id}\n".encode())


async def main(port: int, record: str, secret: str, fails: float, hangs: float) -> None:
    receiver = FlakyReceiver(record, secret, fails, hangs)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", port, backlog=1_024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5])))
