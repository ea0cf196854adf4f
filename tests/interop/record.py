"""Record the frames that each stock client sends: one file for each client in tests/golden/remoting/.

    .venv/bin/python -m tests.interop.record [CLIENT...]     (from the root; all clients without a name)

A file has one or two frames of each kind that the client sends (a kind: the request code and the names of its fields),
unchanged except for the machine's own addresses, which are replaced by others of the same length. A recording
is repeated when a client's version changes, and the old file stays: its client is still in use.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
from tests.interop.conversation import ALI_ONS, CPP, JAVA4, JAVA5, JAVA5_BINARY, Conversation
from tests.interop.drivers import Driver, driving
from tests.interop.recorder import Recorder, recording
from tests.interop.stock_broker import StockBroker, stock_broker
from tests.interop.stock_clients import COMMANDS

from timeball.edges.remoting.codec.frame import BINARY, Frame, Splitter, decode

GOLDEN = Path(__file__).resolve().parents[1] / "golden/remoting"
FILES = {
    CPP: "cpp-0.4.4",
    ALI_ONS: "ali-ons-3.12.0",
    JAVA4: "java-4.9.8",
    JAVA5: "java-5.3.3",
    JAVA5_BINARY: "java-5.3.3-binary",
}
OF_A_KIND = 2
REPLACEMENTS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "2001:db8::1"}


def record(which: str) -> bytes:
    """Run a client against a broker behind a recorder, and return the bytes of its golden file."""
    with tempfile.TemporaryDirectory() as folder, recording() as recorder:
        with stock_broker(Path(folder) / "data", "--advertise", recorder.address) as broker:
            recorder.forward_to = broker.remoting
            with driving(COMMANDS[which](), recorder.address, Path(folder) / "home") as client:
                make_all_requests(which, client, broker)
            return golden(recorder)


def make_all_requests(which: str, client: Driver, broker: StockBroker) -> None:
    """Let the client make each kind of its requests, with a few messages."""
    java = which in (JAVA4, JAVA5, JAVA5_BINARY)
    talk = Conversation(client, broker, "recorded", queues=2)
    consumer = talk.listen(fail=1, expression="A || B")
    talk.send("plain", tag="A")
    talk.send("with a key", tag="B", keys="order-17", properties={"colour": "red"})
    talk.send("ä" * 5_000, tag="A")
    talk.send("level", tag="A", level=1)
    talk.send("timer", tag="A", timer="TIMER_DELAY_MS", timer_value=1_000)
    if which != ALI_ONS:
        messages = [{"topic": talk.topic, "body": f"batch {n}", "tag": "A"} for n in range(3)]
        talk.call("send_batch", messages=messages)
        ordered = talk.listen(orderly=True, group="recorded-orderly")
        client.wait_deliveries(ordered, 8)
        talk.stop(ordered)
    client.wait_deliveries(consumer, 5, done=True)
    broadcast = talk.listen(broadcast=True, group="recorded-broadcast")
    # The C++ client receives only messages that are sent after its start.
    while not client.deliveries(broadcast):
        talk.send("to all", tag="A", level=1)
        client.wait_deliveries(consumer, len(client.deliveries(consumer)) + 1)
    if which == CPP:
        client.call("pull", group="recorded-pull", topic=talk.topic, expression="*")
    if which == ALI_ONS:
        talk.send("aliyun", tag="A", timer="__STARTDELIVERTIME", timer_value=broker.now_ms() + 500)
    if java:
        make_java_requests(which, talk)
    talk.stop(consumer)


def make_java_requests(which: str, talk: Conversation) -> None:
    """Let a Java client make the requests that only Java clients have."""
    client, topic = talk.client, talk.topic
    client.wait_deliveries(talk.listen(sql="colour = 'red'", expression=None, group="recorded-sql"), 1)
    client.wait_deliveries(talk.listen(kind="lite_consumer", group="recorded-lite"), 5)
    client.call(
        "pull", group="recorded-pull", topic=topic, broker="timeball", queue_id=0, offset=0, expression="*"
    )
    talk.call("query_key", topic=topic, key="order-17")
    talk.call("offsets", topic=topic, at_ms=0)
    sent = talk.send("viewed")
    talk.call("view", topic=topic, message_id=sent["offset_id"])
    if which != JAVA4:
        handle = talk.send("recalled", timer="TIMER_DELAY_SEC", timer_value=60)["recall_handle"]
        talk.call("recall", topic=topic, handle=handle)
    transactions = Conversation(client, talk.broker, "transactions", transactions=True)
    for local in ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"):
        properties = {"local": local, "check": "COMMIT_MESSAGE", "CHECK_IMMUNITY_TIME_IN_SECONDS": 1}
        transactions.call("send_transaction", topic=topic, body=local, properties=properties)
    client.wait_checks(1)


# ---- the golden file ---------------------------------------------------------------------------------------------


def golden(recorder: Recorder) -> bytes:
    """Return the first frames of each kind in order, without the names of this machine."""
    counts: Counter[object] = Counter()
    frames: list[bytes] = []
    for frame in (frame for stream in recorder.streams() for frame in Splitter().feed(stream)):
        command = decode(frame)
        kind = (command.code, command.flag, frozenset(command.ext))
        counts[kind] += 1
        if counts[kind] <= OF_A_KIND:
            frames.append(encode_frame(without_names(frame)))
    return b"".join(frames)


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame as a client sends them."""
    word = frame.serialisation << 24 | len(frame.header)
    lengths = (4 + len(frame.header) + len(frame.body)).to_bytes(4, "big") + word.to_bytes(4, "big")
    return lengths + frame.header + frame.body


def without_names(frame: Frame) -> Frame:
    """Return a frame in which the names of this machine are replaced."""
    header, body = frame.header, frame.body
    for name, other in machine_names():
        assert len(name) == len(other) or frame.serialisation != BINARY, "a binary header contains lengths"
        header, body = header.replace(name, other), body.replace(name, other)
    return Frame(frame.serialisation, header, body)


def machine_names() -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the addresses of this machine, each with its replacement. Addresses are text, and hex digits
    as in message ids.
    """
    name = socket.gethostname().encode()
    if len(name) > 4:  # a shorter name may be a part of other words
        yield name, b"h" * len(name)
    for interface_address in (a for addresses in psutil.net_if_addrs().values() for a in addresses):
        text, family = interface_address.address.partition("%")[0], interface_address.family
        if family in REPLACEMENTS and not ip_address(text).is_loopback:
            yield text.encode(), re.sub(r"[\da-f]", "1", text).encode()
            own, other = ip_address(text).packed.hex(), ip_address(REPLACEMENTS[family]).packed.hex()
            yield own.encode(), other.encode()
            yield own.upper().encode(), other.upper().encode()


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for which in sys.argv[1:] or FILES:
        data = record(which)
        (GOLDEN / f"{FILES[which]}.bin").write_bytes(data)
        print(f"{FILES[which]}: {len(Splitter().feed(data))} frames, {len(data)} bytes")


if __name__ == "__main__":
    main()
