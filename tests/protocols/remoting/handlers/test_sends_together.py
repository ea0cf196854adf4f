"""Sends that share a commit: each has its answer, and a batch the broker refuses costs only who caused it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.node_fixture import RunningNode
from tests.protocols.remoting.handlers.test_sends import rows, send, sent
from tests.protocols.remoting.wire import Wire

from timeball.access import Caller
from timeball.broker import ingress
from timeball.broker.admission import as_columns
from timeball.broker.appender import Accepted
from timeball.errors import InvalidMessage, OverLimit
from timeball.message import SendBatch, encode_properties
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.records import BatchRecord, encode_batch
from timeball.protocols.remoting.handlers import sends as module


def accepted_by(node: RunningNode, accept: Any) -> list[int]:
    """Have batches pass through `accept(real, batch)`; returns the rows of each as they come."""
    sends = node.broker.sends
    real, seen = sends.accept, []

    def counted(batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]]:
        seen.append(len(batch))
        result: tuple[Accepted, asyncio.Future[int]] = accept(lambda batch: real(batch, caller), batch)
        return result

    sends.accept = counted
    return seen


def test_what_arrives_meanwhile_shares_a_commit(node: RunningNode, wire: Wire) -> None:
    seen = accepted_by(node, lambda real, batch: real(batch))
    opaques = [send(wire, b"%d" % n) for n in range(500)]
    assert all(wire.answer_to(opaque).code == 0 for opaque in opaques)
    assert sum(seen) == 500 and len(seen) < 250


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidMessage("poison"), ResponseCode.MESSAGE_ILLEGAL),
        (OverLimit("slot"), ResponseCode.SYSTEM_BUSY),
    ],
)
def test_a_batch_the_broker_refuses_is_handed_over_one_by_one(
    node: RunningNode, wire: Wire, error: Exception, code: int
) -> None:
    def accept(real: Any, batch: SendBatch) -> Any:
        if b"poison" in as_columns(batch).column("body").to_pylist():
            raise error
        return real(batch)

    accepted_by(node, accept)
    opaques = [send(wire, body) for body in (b"a", b"poison", b"b", b"c")]
    assert [wire.answer_to(opaque).code for opaque in opaques] == [0, code, 0, 0]
    assert [row["body"] for row in rows(node)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(OverLimit("full"), ResponseCode.SYSTEM_BUSY), (ValueError("secret"), ResponseCode.SYSTEM_ERROR)],
)
def test_what_is_nobodys_fault_is_told_to_all(
    node: RunningNode, wire: Wire, error: Exception, code: int
) -> None:
    def refuse(real: Any, batch: SendBatch) -> Any:
        raise error

    accepted_by(node, refuse)
    answers = [wire.answer_to(opaque) for opaque in [send(wire), send(wire)]]
    assert [answer.code for answer in answers] == [code, code]
    assert "secret" not in str(answers[0].remark)


def test_a_full_gathering_does_not_wait(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "BATCH_ROWS_MAX", 1)
    seen = accepted_by(node, lambda real, batch: real(batch))
    opaques = [send(wire) for _ in range(50)]
    assert all(wire.answer_to(opaque).code == 0 for opaque in opaques)
    assert seen == [1] * 50


def test_a_producer_that_has_gone_costs_the_others_nothing(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as gone:
        for n in range(200):
            send(gone, b"%d" % n)
    assert sent(wire).code == 0


def test_a_dead_log_is_told(node: RunningNode, wire: Wire) -> None:
    def dead(real: Any, batch: SendBatch) -> Any:
        accepted, durable = real(batch)
        failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        durable.add_done_callback(lambda done: failed.set_exception(OSError("disk")))
        return accepted, failed

    accepted_by(node, dead)
    assert sent(wire).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(("topic", "sys_flag"), [("%RETRY%group", 0), ("orders", 4)])
def test_a_batch_is_for_ordinary_messages(wire: Wire, topic: str, sys_flag: int) -> None:
    body = encode_batch([BatchRecord(0, b"x", encode_properties({"a": "b"}))])
    opaque = send(wire, body, code=RequestCode.SEND_BATCH_MESSAGE, topic=topic, f=sys_flag, m=True)
    assert wire.answer_to(opaque).code == ResponseCode.MESSAGE_ILLEGAL


def test_what_cannot_be_made_a_batch_is_answered_and_does_not_come_up_again(
    node: RunningNode, wire: Wire
) -> None:
    assert node.node.remoting is not None
    columns = node.node.remoting._sends._rows
    real = columns._row

    def careless(*args: Any) -> Any:
        row = real(*args)
        return (*row[:9], 1 << 40, *row[10:]) if row[1] == b"poison" else row

    columns._row = careless  # type: ignore[assignment, method-assign]
    assert wire.answer_to(send(wire, b"poison")).code == ResponseCode.SYSTEM_ERROR
    assert wire.answer_to(send(wire, b"sound")).code == 0
    assert [row["body"] for row in rows(node)] == [b"sound"]


def test_an_answer_that_fails_leaves_nobody_waiting(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> bytes:
        raise ValueError("secret")

    monkeypatch.setattr(module, "encode_reply", broken)
    with caplog.at_level("ERROR"):
        answers = [wire.answer_to(opaque) for opaque in [send(wire), send(wire)]]
    assert [answer.code for answer in answers] == [ResponseCode.SYSTEM_ERROR] * 2
    assert "secret" in caplog.text and "secret" not in str(answers[0].remark)
    assert len(rows(node)) == 2, "they are kept: a producer that tries again sends a second one"
