"""Sends that share a commit: each gets its own answer, and only the sends that break a rule are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.edges.remoting.handlers.test_sends import rows, send, sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.broker.accepting import ingress
from timeball.broker.accepting.admission import as_columns
from timeball.broker.accepting.appender import Accepted
from timeball.broker.registry.topics import READ, TopicConfig
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.codec.records import BatchRecord, encode_batch
from timeball.edges.remoting.handlers import sends as module
from timeball.model.access import Caller
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.model.message import SEND_NAMES, SendBatch, encode_properties

# A batch with one message that has no unique key. The compiled codec leaves it to the reference, so it ends a run.
ONE_IN_A_BATCH = encode_batch([BatchRecord(0, b"x", "")])


def replace_accept(node: RunningNode, accept: Any) -> list[int]:
    """Accept each batch of sends by `accept(real_accept, batch)`. Returns a list that gets the row count of each."""
    sends = node.broker.sends
    real_accept, row_counts = sends.accept, []

    def count_and_accept(batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]]:
        row_counts.append(len(batch))
        result: tuple[Accepted, asyncio.Future[int]] = accept(lambda batch: real_accept(batch, caller), batch)
        return result

    sends.accept = count_and_accept
    return row_counts


def test_sends_that_arrive_during_a_commit_share_the_next_one(node: RunningNode, wire: Wire) -> None:
    row_counts = replace_accept(node, lambda real_accept, batch: real_accept(batch))
    opaques = [send(wire, b"%d" % number) for number in range(500)]
    assert all(wire.answer_to(opaque).code == 0 for opaque in opaques)
    assert sum(row_counts) == 500 and len(row_counts) < 250


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidMessage("poison"), ResponseCode.MESSAGE_ILLEGAL),
        (OverLimit("slot"), ResponseCode.SYSTEM_BUSY),
    ],
)
def test_of_a_refused_batch_only_the_send_that_breaks_a_rule_is_refused(
    node: RunningNode, wire: Wire, error: Exception, code: int
) -> None:
    def accept(real_accept: Any, batch: SendBatch) -> Any:
        if b"poison" in as_columns(batch).column("body").to_pylist():
            raise error
        return real_accept(batch)

    replace_accept(node, accept)
    opaques = [send(wire, body) for body in (b"a", b"poison", b"b", b"c")]
    assert [wire.answer_to(opaque).code for opaque in opaques] == [0, code, 0, 0]
    assert [row["body"] for row in rows(node)] == [b"a", b"b", b"c"]


def test_of_a_refused_run_only_the_sends_that_break_a_rule_are_refused(node: RunningNode, wire: Wire) -> None:
    """The sends of one read are a run. After its refusal they are accepted one by one, in their order."""

    def accept(real_accept: Any, batch: SendBatch) -> Any:
        if b"poison" in as_columns(batch).column("body").to_pylist():
            raise InvalidMessage("poison")
        return real_accept(batch)

    # The topic exists before: a run whose topic must be created is never accepted as a whole.
    assert sent(wire, b"first").code == 0
    row_counts = replace_accept(node, accept)
    bodies = [b"%d" % number for number in range(40)]
    bodies[7] = bodies[30] = b"poison"
    answers = send_at_once(wire, [(body, {}) for body in bodies])
    assert [answer.code for answer in answers] == [
        ResponseCode.MESSAGE_ILLEGAL if body == b"poison" else ResponseCode.SUCCESS for body in bodies
    ]
    assert [row["body"] for row in rows(node)] == [b"first", *(body for body in bodies if body != b"poison")]
    assert max(row_counts) > 1 and row_counts.count(1) >= len(bodies) - 1, "together first, then each alone"


def test_if_a_topic_is_closed_while_a_run_is_refused_each_of_its_sends_is_answered(
    node: RunningNode, wire: Wire
) -> None:
    """The sends of the refused run are checked again, one by one."""
    assert sent(wire).code == 0

    def accept(real_accept: Any, batch: SendBatch) -> Any:
        if len(batch) > 1:
            node.broker.tables.topics.configure("orders", TopicConfig(perm=READ))
            raise InvalidMessage("together")
        return real_accept(batch)

    replace_accept(node, accept)
    answers = send_at_once(wire, [(b"%d" % number, {}) for number in range(8)])
    assert [answer.code for answer in answers] == [ResponseCode.NO_PERMISSION] * 8


def test_plain_unusual_and_refused_sends_of_one_read_keep_their_order(node: RunningNode, wire: Wire) -> None:
    plain: dict[str, object] = {}
    no_unique_key: dict[str, object] = {"properties_text": ""}
    no_such_queue: dict[str, object] = {"queue_id": 9}
    invalid_queue: dict[str, object] = {"queue_id": "0 "}
    batch_of_half_messages: dict[str, object] = {"sys_flag": 4, "batch": True}
    forms = [plain, no_unique_key, no_such_queue, invalid_queue, batch_of_half_messages]
    assert sent(wire, b"first").code == 0
    # Two thirds of the sends have any form, the others are plain.
    sends = [(b"%d" % n, forms[n * n % 5] if n % 3 else plain) for n in range(200)]
    answers = send_at_once(wire, sends)
    accepted = [body for (body, _), answer in zip(sends, answers, strict=True) if answer.code == 0]
    assert [row["body"] for row in rows(node)] == [b"first", *accepted]
    assert 100 < len(accepted) < 200


def send_at_once(wire: Wire, sends: list[tuple[bytes, dict[str, object]]]) -> list[Command]:
    """Send messages (body, header fields) to queue 0 in one write, and return their answers."""
    written, real_send_bytes = [], wire.send_bytes
    wire.send_bytes = written.append  # type: ignore[method-assign]
    opaques = [send(wire, body, **fields) for body, fields in sends]  # type: ignore[arg-type]
    wire.send_bytes = real_send_bytes  # type: ignore[method-assign]
    wire.send_bytes(b"".join(written))
    return [wire.answer_to(opaque) for opaque in opaques]


@pytest.mark.parametrize(
    ("error", "code"),
    [(OverLimit("full"), ResponseCode.SYSTEM_BUSY), (ValueError("secret"), ResponseCode.SYSTEM_ERROR)],
)
def test_an_error_that_refuses_every_batch_is_the_answer_to_each_send(
    node: RunningNode, wire: Wire, error: Exception, code: int
) -> None:
    def refuse(real_accept: Any, batch: SendBatch) -> Any:
        raise error

    replace_accept(node, refuse)
    answers = [wire.answer_to(opaque) for opaque in [send(wire), send(wire)]]
    assert [answer.code for answer in answers] == [code, code]
    assert "secret" not in str(answers[0].remark), "the text of an internal error is not sent to clients"


def test_a_full_batch_is_accepted_without_waiting_for_more_sends(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "BATCH_ROWS_MAX", 1)
    row_counts = replace_accept(node, lambda real_accept, batch: real_accept(batch))
    opaques = [send(wire, batch=n % 2 > 0, body=ONE_IN_A_BATCH if n % 2 else b"x") for n in range(50)]
    assert all(wire.answer_to(opaque).code == 0 for opaque in opaques)
    assert row_counts == [1] * 50


def test_a_producer_that_disconnects_before_its_answers_does_not_affect_others(
    node: RunningNode, wire: Wire
) -> None:
    with Wire.to(node) as disconnecting:
        for number in range(200):
            send(disconnecting, b"%d" % number)
    assert sent(wire).code == 0


def test_sends_are_refused_if_their_batch_cannot_be_written(node: RunningNode, wire: Wire) -> None:
    def fail_after_write(real_accept: Any, batch: SendBatch) -> Any:
        accepted, durable = real_accept(batch)
        failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        durable.add_done_callback(lambda done: failed.set_exception(OSError("disk")))
        return accepted, failed

    replace_accept(node, fail_after_write)
    assert sent(wire).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(("topic", "sys_flag"), [("%RETRY%group", 0), ("orders", 4)])
def test_a_batch_of_half_messages_or_retries_is_refused(wire: Wire, topic: str, sys_flag: int) -> None:
    body = encode_batch([BatchRecord(0, b"x", encode_properties({"a": "b"}))])
    opaque = send(wire, body, code=RequestCode.SEND_BATCH_MESSAGE, topic=topic, sys_flag=sys_flag, batch=True)
    assert wire.answer_to(opaque).code == ResponseCode.MESSAGE_ILLEGAL


def test_a_row_that_cannot_be_encoded_fails_and_the_next_send_is_accepted(
    node: RunningNode, wire: Wire
) -> None:
    assert node.node.edges is not None
    send_rows = node.node.edges.remoting._sends._rows
    real_row, flag_index = send_rows._row, SEND_NAMES.index("flag")

    def too_large_flag(*args: Any) -> Any:
        row = real_row(*args)
        is_poison = row[SEND_NAMES.index("body")] == b"poison"
        return (*row[:flag_index], 1 << 40, *row[flag_index + 1 :]) if is_poison else row

    send_rows._row = too_large_flag  # type: ignore[assignment, method-assign]
    assert sent(wire, b"poison").code == ResponseCode.SYSTEM_ERROR
    assert sent(wire, b"valid").code == 0
    assert [row["body"] for row in rows(node)] == [b"valid"]


def test_a_send_whose_answer_cannot_be_encoded_is_answered_with_an_error(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> bytes:
        raise ValueError("secret")

    # The topic exists from here on, so the compiled codec accepts and answers sends.
    assert sent(wire).code == 0
    assert node.node.edges is not None
    sends = node.node.edges.remoting._sends
    monkeypatch.setattr(module, "encode_reply", broken)
    monkeypatch.setattr(sends, "_codec", replace(sends._codec, encode_replies=broken))
    with caplog.at_level("ERROR"):
        answers = [wire.answer_to(opaque) for opaque in [send(wire), send(wire)]]
    assert [answer.code for answer in answers] == [ResponseCode.SYSTEM_ERROR] * 2
    assert "secret" in caplog.text and "secret" not in str(answers[0].remark)
    assert len(rows(node)) == 3, "the messages are stored, so a producer that tries again duplicates them"
