"""A topic as an operator configures it: who may use how many of its queues, and what kind of messages it is for.

The words and numbers are RocketMQ's. A topic may show fewer queues than it has: a queue is never taken away,
so what lies in it can still be read once it is shown again. `attributes` are set one by one, `+name=value`, and
taken away, `-name`; a name or value that Timeball knows nothing of, or cannot keep its word on, is refused.
"""

from __future__ import annotations

import msgspec

from timeball import limits
from timeball.errors import OutOfRange, RequestError

READ, WRITE, INHERIT = 4, 2, 1  # RocketMQ's PermName

# RocketMQ's TopicAttributes, with the values that mean something here.
ATTRIBUTES: dict[str, frozenset[str]] = {
    "message.type": frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"}),
    "queue.type": frozenset({"SimpleCQ"}),
    "cleanup.policy": frozenset({"DELETE"}),
}


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operator chose; None for a number of queues is "all there are"."""

    read_queues: int | None = None
    write_queues: int | None = None
    perm: int = READ | WRITE
    order: bool = False
    sys_flag: int = 0
    attributes: dict[str, str] = {}


def check(config: TopicConfig) -> None:
    """Raise OutOfRange or RequestError when a topic cannot be like this."""
    for name, queues in (("readQueueNums", config.read_queues), ("writeQueueNums", config.write_queues)):
        if queues is not None and not 0 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"{name} {queues}: between 0 and {limits.QUEUES_PER_TOPIC_MAX}")
    if max(config.read_queues or 0, config.write_queues or 0) == 0 and config.read_queues is not None:
        raise OutOfRange("readQueueNums and writeQueueNums are 0: one of them at least is 1")
    if not 0 <= config.perm <= READ | WRITE | INHERIT:
        raise RequestError(f"perm {config.perm}: 2 is write, 4 is read, 6 is both")
    if not 0 <= config.sys_flag <= 3:
        raise RequestError(f"topicSysFlag {config.sys_flag}: between 0 and 3")


def at_least(config: TopicConfig, queues: int) -> TopicConfig:
    """The same with so many queues shown, or more where more are."""
    return msgspec.structs.replace(
        config,
        read_queues=None if config.read_queues is None else max(queues, config.read_queues),
        write_queues=None if config.write_queues is None else max(queues, config.write_queues),
    )


def altered(current: dict[str, str], changes: str) -> dict[str, str]:
    """Attributes after changes such as "+message.type=DELAY,-queue.type"; raises RequestError."""
    result = dict(current)
    for change in filter(None, (part.strip() for part in changes.split(","))):
        sign, (name, equals, value) = change[0], change[1:].partition("=")
        known = ATTRIBUTES.get(name)
        if sign not in "+-" or (sign == "+") != bool(equals):
            raise RequestError(f"attribute {change[:80]!r}: +name=value sets one, -name takes it away")
        if known is None:
            raise RequestError(f"unsupported attribute {name[:80]!r}: there are {', '.join(ATTRIBUTES)}")
        if sign == "-":
            result.pop(name, None)
        elif value in known:
            result[name] = value
        else:
            raise RequestError(f"attribute {name}={value[:80]!r}: it is one of {', '.join(sorted(known))}")
    return result
