"""Tables byte by byte as fastjson writes them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.remoting.codec import tables


def test_a_table_stands_inside_json_as_fastjson_has_it() -> None:
    queue = {"brokerName": "b0", "queueId": 0, "topic": "t"}
    table = tables.by_object([(queue, {"maxOffset": 7}), ({**queue, "queueId": 1}, {"maxOffset": 8})])
    assert msgspec.json.encode({"tps": 0.0, "offsetTable": table}) == (
        b'{"tps":0.0,"offsetTable":{'
        b'{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7},'
        b'{"brokerName":"b0","queueId":1,"topic":"t"}:{"maxOffset":8}}}'
    )


def test_an_empty_table_is_an_empty_object() -> None:
    assert msgspec.json.encode({"offsetTable": tables.by_object([])}) == b'{"offsetTable":{}}'


def read(body: bytes) -> list[tuple[object, int]]:
    return list(tables.entries_by_object(body, "table"))


def test_a_table_that_was_written_is_read_again() -> None:
    queues = [({"brokerName": "b0", "queueId": n, "topic": "t"}, n * 7 - 1) for n in range(3)]
    body = msgspec.json.encode(
        {"other": tables.by_object([({"x": 1}, 2)]), "table": tables.by_object(queues)}
    )
    assert read(body) == queues
    assert read(body.replace(b":", b" : ").replace(b",", b" ,\n ")) == queues
    assert read(b'{"table":{}}') == read(b'{"other":{}}') == read(b"") == []


@given(st.binary(max_size=40))
def test_what_is_no_table_ends_it(junk: bytes) -> None:
    for key, value in read(b'{"table":{{"q":1}:5,' + junk):
        assert isinstance(key, dict) and isinstance(value, int)
    assert read(b'{"table":{{"q":1}:5,{\xff}:6}}') == [({"q": 1}, 5)]
    assert read(b'{"table":{{"q":1}:5,{"q":2}:"x"}}') == [({"q": 1}, 5)]


def test_a_version_has_rocketmqs_names() -> None:
    assert tables.data_version(3, 1_700) == {"stateVersion": 0, "timestamp": 1_700, "counter": 3}
