"""The page that `make versus` writes agrees with the figures. tests/interop/test_versus.py runs the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.stored_message import StoredMessage
from benchmarks.versus import small_calls
from benchmarks.versus.__main__ import main
from benchmarks.versus.delays import wrong
from benchmarks.versus.delivery import Account, body_of
from benchmarks.versus.page_cache import FREE_BYTES, STEP_BYTES, PageCache
from benchmarks.versus.rounds import in_turn
from benchmarks.versus.table import BUSY, SMALL, ConsumerPeer, Figures, page
from benchmarks.versus.work import Row, Sample

from timeball.edges.remoting.codec.records import NO_HOST

SEND, BURST, ONE = Row("send 64x1", "msg/s"), Row("burst", "s", "lower"), Row("disk", "MB", "lower")


def figures(*, small: bool = False, busy: bool = False) -> Figures:
    """Return figures of two brokers that are made up."""
    result = Figures(
        {"CPU": "A CPU", "cores": "2", "disk": "vda ext4"}, "2026-11-23", 3, small, 200_000, busy, (0.2, 1.9),
        "Not measured: the network.",
    )  # fmt: skip
    for _ in range(2):
        result.name_peer("RocketMQ", "RocketMQ 5.5.0, SYNC_FLUSH")
        result.name_peer("Timeball", "Timeball 0.1.0, sync")
    for value in (900.0, 1_000.0, 5_000.0):
        result.add("RocketMQ", [SEND], [Sample(value, 1.0, 10.0, 88.44)])
    for value, failures in ((730.0, 0), (2_000.0, 2), (10.0, 1)):
        result.add("Timeball", [SEND], [Sample(value, 5.0, 10.25, 73.06, failures)])
    result.add("RocketMQ", [BURST], [Sample(3.4)])
    result.add("Timeball", [BURST, ONE], [Sample(0.62), Sample(855.0)])
    return result


def test_a_row_has_medians_a_ratio_latencies_and_cpu() -> None:
    head, rule, send, burst, one = figures().table()
    assert head.count("|") == rule.count("|") == send.count("|") == one.count("|")
    assert head.startswith("|  | RocketMQ | Timeball | Timeball / RocketMQ | p50/p99 ms, RocketMQ |")
    assert send == "| send 64x1, msg/s | 1,000 | 730 | 0.73 | 1/10 | 5/10.2 | 88.4 | 73.1 |"
    assert burst == "| burst, s | 3.40 | 0.62 | 0.18 |  |  |  |  |"
    assert one == "| disk, MB |  | 855 |  |  |  |  |  |"


def test_the_page_names_the_measurement_and_its_failures() -> None:
    text = page(figures())
    assert text.startswith("# Timeball beside RocketMQ\n")
    assert "median of 3 rounds" in " ".join(text.split()) and "200,000 scheduled messages" in text
    assert "Requests that failed: Timeball, send 64x1: 3." in text
    assert "- RocketMQ 5.5.0, SYNC_FLUSH\n- Timeball 0.1.0, sync\n" in text
    assert (
        "Measured 2026-11-23. CPU: A CPU; cores: 2; disk: vda ext4. Load average 0.2 before, 1.9 after."
        in text
    )
    assert text.endswith("Not measured: the network.\n")
    assert BUSY not in text and SMALL not in text


def test_the_page_of_a_busy_machine_or_a_small_run_has_a_note() -> None:
    assert BUSY in page(figures(busy=True)) and SMALL in page(figures(small=True))


def test_the_document_has_each_sample() -> None:
    document = json.loads(json.dumps(figures().as_dict()))
    send, burst, one = document["rows"]
    assert [sample["value"] for sample in send["samples"]["RocketMQ"]] == [900, 1_000, 5_000]
    assert send["ratios"] == {"RocketMQ": 0.73}
    assert send["medians"]["Timeball"]["failures"] == 3
    assert burst["better"] == "lower"
    assert one["medians"]["RocketMQ"] is None and one["ratios"] == {"RocketMQ": None}


def stored(due_ms: int, store_ms: int) -> StoredMessage:
    """Return a stored message with these times."""
    body = f"{due_ms}....".encode()
    return StoredMessage(0, "t", 0, 0, body, {}, 0, 0, 0, NO_HOST, store_ms, NO_HOST, 0, 0)


def test_a_scheduled_message_that_is_early_missing_or_doubled_is_noticed() -> None:
    due_ms = 1_790_000_000_000
    good = [stored(due_ms + number, due_ms + number) for number in range(5)]
    assert wrong(good, 5) == 0
    assert wrong([*good, stored(due_ms, due_ms - 1)], 6) == 1
    assert wrong(good[1:], 5) == 1
    assert wrong([*good, good[0]], 5) == 1


def test_rows_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--rows", "send,sned"])
    assert caught.value.code == 2
    assert "no rows named sned: there are send," in capsys.readouterr().err


def test_memory_is_filled_until_little_is_free(tmp_path: Path) -> None:
    free_bytes = iter([2 * FREE_BYTES, 2 * FREE_BYTES, FREE_BYTES, FREE_BYTES, 2 * FREE_BYTES, 0])
    cache = PageCache(tmp_path, lambda: next(free_bytes))
    assert [cache.fill() for _ in range(3)] == [2 * STEP_BYTES, 0, STEP_BYTES]
    assert (tmp_path / "page-cache").stat().st_blocks == 0, "no byte of it is on the disk"
    cache.close()


def test_the_table_of_deliveries_shows_durability_and_failures() -> None:
    result, steady = figures(), Row("steady 2,000/s", "msg/s")
    redis = ConsumerPeer("Redis", settings="Redis, always", durable=True)
    nats = ConsumerPeer("NATS", settings="NATS, 2 minutes", durable=False)
    for value in (1_900.0, 2_000.0, 2_100.0):
        result.at_consumer.add(redis, steady, Sample(value, p50_ms=2.0, p99_ms=12.0, cpu_us=94.04))
    result.at_consumer.add(nats, steady, Sample(math.nan, failures=3))
    _, _, first, second = result.at_consumer.table()
    assert first == "| steady 2,000/s | Redis | 2,000 msg/s | 2/12 | 94 |"
    assert second == "|  | NATS (**not durable**) | not reached |  |  |"
    text = page(result)
    assert "## At the consumer" in text and "- Redis, always\n- NATS, 2 minutes\n" in text
    assert "Messages that failed: NATS, steady 2,000/s: 3." in text
    assert result.as_dict()["at_consumer"]["rows"][0]["name"] == "steady 2,000/s"  # type: ignore[index, call-overload]


def test_a_run_of_one_table_keeps_the_other_table_of_the_page() -> None:
    both, queue_only, consumer_only = figures(), figures(busy=True), figures()
    steady, redis = Row("steady 2,000/s", "msg/s"), ConsumerPeer("Redis", "Redis, always", True)
    both.at_consumer.add(redis, steady, Sample(2_000.0))
    consumer_only.at_consumer.add(redis, steady, Sample(1_000.0))
    consumer_only.rows.clear()
    in_queue, at_consumer = page(both).split("\n## At the consumer\n")
    assert page(queue_only, page(both)).endswith("\n## At the consumer\n" + at_consumer)
    assert BUSY in page(queue_only, page(both))
    after = page(consumer_only, page(both))
    assert after.startswith(in_queue) and "1,000 msg/s" in after and "2,000 msg/s" not in after
    assert page(both, page(queue_only)) == page(both)


@pytest.mark.parametrize(
    ("numbers", "seen_ms", "failures"),
    [
        ([0, 1, 2], [10, 11, 12], 0),
        ([0, 1], [10, 11], 1),
        ([0, 1, 1, 2], [10, 11, 11, 12], 1),
        ([0, 1, 2], [9, 11, 12], 1),
    ],
)
def test_an_early_a_missing_and_a_doubled_message_are_failures(
    numbers: list[int], seen_ms: list[int], failures: int
) -> None:
    due_ms = np.array([10 + number for number in numbers])
    assert Account(np.array(numbers), due_ms, np.array(seen_ms)).failures(3) == failures


def test_a_body_names_the_message_and_its_due_time() -> None:
    assert body_of(7, 1_800_000_000_000).startswith(b"7 1800000000000 ") and len(body_of(7, 1)) == 128


def test_the_order_of_the_brokers_is_swapped_in_each_round() -> None:
    assert [in_turn("ab", number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_run_of_deliveries_alone_has_a_table_a_page_and_a_document() -> None:
    result = Figures(
        {"CPU": "A CPU"}, "2026-11-29", 1, False, 0, False, (0.2, 1.9), "Not measured: the network."
    )
    peer = ConsumerPeer("Timeball, HTTP", "Timeball 0.1.0, sync", True)
    for name in ("Timeball, HTTP", "Timeball, Python client"):
        result.at_consumer.add(
            ConsumerPeer(name, peer.settings, True), Row("burst", "s", "lower"), Sample(math.nan)
        )
    assert result.table() == []
    assert page(result).count("- Timeball 0.1.0, sync") == 1
    assert "NaN" not in json.dumps(result.as_dict())


@pytest.mark.parametrize(
    ("client", "answer"),
    [
        ("redis", b":1\r\n"),
        ("beanstalkd", b"INSERTED 17\r\n"),
        ("nats", b'MSG _INBOX.small.0 1 29\r\n{"stream":"delivery","seq":7}\r\n'),
        ("http", b'HTTP/1.1 201 Created\r\nContent-Length: 12\r\n\r\n{"id": "17"}'),
    ],
)
def test_an_answer_is_taken_when_it_is_complete(client: str, answer: bytes) -> None:
    wire, data = small_calls.WIRES[client], bytearray()
    for byte in answer[:-1]:
        data.append(byte)
        assert wire.answer(data) is None
    data += answer[-1:] + answer[:1]
    taken = wire.answer(data)
    assert taken is not None and wire.token(7, 1_800_000_000_000, taken) and data == answer[:1]


@pytest.mark.parametrize(
    ("client", "answer"),
    [
        ("redis", b"-ERR no\r\n"),
        ("beanstalkd", b"JOB_TOO_BIG\r\n"),
        ("nats", b'MSG _INBOX.small.0 1 22\r\n{"error":{"code":503}}\r\n'),
        ("http", b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}"),
    ],
)
def test_a_refused_message_is_noticed(client: str, answer: bytes) -> None:
    wire = small_calls.WIRES[client]
    taken = wire.answer(bytearray(answer))
    assert (
        taken is not None and wire.token(7, 1_800_000_000_000, taken) is None and not wire.is_cancelled(taken)
    )
