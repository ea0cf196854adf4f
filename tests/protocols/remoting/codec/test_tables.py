"""Tables byte by byte as fastjson writes them."""

from __future__ import annotations

import msgspec

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


def test_a_version_has_rocketmqs_names() -> None:
    assert tables.data_version(3, 1_700) == {"stateVersion": 0, "timestamp": 1_700, "counter": 3}
