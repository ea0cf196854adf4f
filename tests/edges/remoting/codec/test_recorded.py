"""The frames of stock clients, which tests/interop/record.py recorded in tests/golden/remoting/.

Each frame is decoded, however the stream is split, and encoding the command gives the same command again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from timeball.edges.remoting.codec.codes import RequestCode
from timeball.edges.remoting.codec.frame import BINARY, JSON, Frame, Splitter, decode, encode

GOLDEN = Path(__file__).resolve().parents[3] / "golden/remoting"
RECORDED = sorted(path.name for path in GOLDEN.glob("*.bin"))

PRODUCES = {RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.HEART_BEAT}
CONSUMES = {
    RequestCode.PULL_MESSAGE,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.UPDATE_CONSUMER_OFFSET,
}
JAVA = {
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.QUERY_MESSAGE,
    RequestCode.VIEW_MESSAGE_BY_ID,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.END_TRANSACTION,
    RequestCode.CHECK_CLIENT_CONFIG,
}
# File: requests that only some clients send. PRODUCES and CONSUMES are in each file, too.
CODES = {
    "cpp-0.4.4.bin": {RequestCode.SEND_MESSAGE, RequestCode.LOCK_BATCH_MQ},
    "ali-ons-3.12.0.bin": {RequestCode.SEND_MESSAGE_V2},
    "java-4.9.8.bin": JAVA,
    "java-5.3.3.bin": JAVA | {RequestCode.LITE_PULL_MESSAGE, RequestCode.RECALL_MESSAGE},
    "java-5.3.3-binary.bin": JAVA | {RequestCode.LITE_PULL_MESSAGE, RequestCode.RECALL_MESSAGE},
}


def frames(name: str) -> list[Frame]:
    """Return the recorded frames of a client."""
    return Splitter().feed((GOLDEN / name).read_bytes())


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_frame_is_the_same_command_when_encoded_again(name: str) -> None:
    for frame in frames(name):
        command = decode(frame)
        [again] = Splitter().feed(encode(command))
        assert decode(again) == command
        assert again.body == frame.body


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith("-binary.bin")])
def test_a_recorded_binary_frame_is_the_same_bytes_when_encoded_again(name: str) -> None:
    binary = [frame for frame in frames(name) if frame.serialisation == BINARY]
    assert len(binary) > 10
    for frame in binary:
        [again] = Splitter().feed(encode(decode(frame)))
        assert again == frame


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_split_anywhere_gives_the_same_frames(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    whole = frames(name)
    for step in (1, 7, 1460):
        splitter = Splitter()
        result = [frame for at in range(0, len(data), step) for frame in splitter.feed(data[at : at + step])]
        assert result == whole
        assert splitter.held_bytes == 0


@pytest.mark.parametrize("name", RECORDED)
def test_each_file_contains_the_requests_of_its_client(name: str) -> None:
    """With an empty file the tests above would pass."""
    codes = {decode(frame).code for frame in frames(name)}
    assert codes >= CODES[name] | PRODUCES | CONSUMES
    assert codes <= set(RequestCode), "a code without a name"


def test_every_client_was_recorded_and_files_are_small() -> None:
    assert set(RECORDED) == set(CODES)
    assert all((GOLDEN / name).stat().st_size < 100_000 for name in RECORDED)


def test_a_frame_that_is_not_the_same_is_noticed() -> None:
    [frame] = [f for f in frames("cpp-0.4.4.bin") if decode(f).code == RequestCode.SEND_MESSAGE][:1]
    command = decode(frame)
    assert frame.serialisation == JSON
    assert decode(Frame(JSON, frame.header.replace(b'"topic"', b'"tropic"'), frame.body)) != command
