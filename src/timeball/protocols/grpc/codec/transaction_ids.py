"""The name of a transaction, as clients get it with the answer to a half message and give it back: opaque to them.

    | number of the half message, 16 hexadecimal digits | crc32 of topic and message id, 8 |

The check keeps a client from ending another message's transaction by mistake. It is no secret: who may write to a
topic may end its transactions, as in RocketMQ.
"""

from __future__ import annotations

import re
from zlib import crc32

_TEXT = re.compile(r"[0-9A-F]{24}")
SEQ_MAX = 2**63 - 1


def transaction_id(seq: int, topic: str, message_id: str) -> str:
    """The transaction whose half message is number `seq`."""
    return f"{seq:016X}{_check(topic, message_id):08X}"


def seq_of(text: str, topic: str, message_id: str) -> int | None:
    """Inverse of `transaction_id`; None when it is not the transaction of this message."""
    if not _TEXT.fullmatch(text):
        return None
    seq = int(text[:16], 16)
    return seq if seq <= SEQ_MAX and int(text[16:], 16) == _check(topic, message_id) else None


def _check(topic: str, message_id: str) -> int:
    return crc32(f"{topic} {message_id}".encode())
