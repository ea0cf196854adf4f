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
from timeball.model.message import SendBatch, encode_properties

# Without an id of its own, which the compiled codec leaves to the reference: it ends a run.
ONE_IN_A_BATCH = encode_batch([BatchRecord(0, b"x", "")])


def accepted_by(node: RunningNode, accept: Any) -> list[int]:
    """Pass each batch through `accept(real, batch)`. Return a list that gets the number of rows of each."""
    sends = node.broker.sends
    real, seen = sends.accept, []

    def counted(batch: SendBatch, caller: Caller) -> tuple[Accepted, asyncio.Future[int]]:
        seen.append(len(batch))
        result: tuple[Accepted, asyncio.Future[int]] = accept(lambda batch: real(batch, caller), batch)
        return result

    sends.accept = counted
    return seen


def test_sends_that_arrive_during_a_commit_share_the_next(node: RunningNode, wire: Wire) -> None:
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
def test_sends_of_a_refused_batch_are_tried_one_by_one(
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


def test_sends_of_one_read_are_refused_one_by_one(node: RunningNode, wire: Wire) -> None:
    """The sends of a run are refused separately, and keep their order."""

    def accept(real: Any, batch: SendBatch) -> Any:
        if b"poison" in as_columns(batch).column("body").to_pylist():
            raise InvalidMessage("poison")
        return real(batch)

    assert sent(wire, b"first").code == 0  # the topic is made: a run that makes one is read one by one
    seen = accepted_by(node, accept)
    bodies = [b"%d" % n for n in range(40)]
    bodies[7] = bodies[30] = b"poison"
    answers = send_at_once(wire, [(body, {}) for body in bodies])
    wrong, right = ResponseCode.MESSAGE_ILLEGAL, ResponseCode.SUCCESS
    assert [answer.code for answer in answers] == [wrong if body == b"poison" else right for body in bodies]
    assert [row["body"] for row in rows(node)] == [b"first", *(body for body in bodies if body != b"poison")]
    assert max(seen) > 1 and seen.count(1) >= len(bodies) - 1, "together first, then each alone"


def test_a_topic_that_is_closed_meanwhile_leaves_nobody_waiting(node: RunningNode, wire: Wire) -> None:
    """A run is split and its sends are refused if the policy does not allow them any more."""
    assert sent(wire).code == 0

    def accept(real: Any, batch: SendBatch) -> Any:
        if len(batch) > 1:
            node.broker.tables.topics.configure("orders", TopicConfig(perm=READ))
            raise InvalidMessage("together")
        return real(batch)

    accepted_by(node, accept)
    answers = send_at_once(wire, [(b"%d" % n, {}) for n in range(8)])
    assert [answer.code for answer in answers] == [ResponseCode.NO_PERMISSION] * 8


def test_sends_of_all_forms_keep_their_order(node: RunningNode, wire: Wire) -> None:
    """Plain sends, sends without a unique key, and refused sends, in one read."""
    kinds: list[dict[str, object]] = [{}, {"i": ""}, {"e": 9}, {"e": "0 "}, {"f": 4, "m": True}]
    assert sent(wire, b"first").code == 0
    sends = [(b"%d" % n, kinds[n * n % 5 if n % 3 else 0]) for n in range(200)]
    answers = send_at_once(wire, sends)
    kept = [body for (body, _), answer in zip(sends, answers, strict=True) if answer.code == 0]
    assert [row["body"] for row in rows(node)] == [b"first", *kept]
    assert 100 < len(kept) < 200


def send_at_once(wire: Wire, sends: list[tuple[bytes, dict[str, object]]]) -> list[Command]:
    """Send all in one write, to queue 0. Return their answers."""
    written, real = [], wire.send_bytes
    wire.send_bytes = written.append  # type: ignore[method-assign]
    opaques = [send(wire, body, **more) for body, more in sends]
    wire.send_bytes = real  # type: ignore[method-assign]
    wire.send_bytes(b"".join(written))
    return [wire.answer_to(opaque) for opaque in opaques]


@pytest.mark.parametrize(
    ("error", "code"),
    [(OverLimit("full"), ResponseCode.SYSTEM_BUSY), (ValueError("secret"), ResponseCode.SYSTEM_ERROR)],
)
def test_an_internal_fault_is_answered_to_all(
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
    opaques = [send(wire, m=n % 2 > 0, body=ONE_IN_A_BATCH if n % 2 else b"x") for n in range(50)]
    assert all(wire.answer_to(opaque).code == 0 for opaque in opaques)
    assert seen == [1] * 50


def test_a_disconnected_producer_does_not_affect_the_others(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as gone:
        for n in range(200):
            send(gone, b"%d" % n)
    assert sent(wire).code == 0


def test_sends_to_a_failed_log_are_refused(node: RunningNode, wire: Wire) -> None:
    def dead(real: Any, batch: SendBatch) -> Any:
        accepted, durable = real(batch)
        failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        durable.add_done_callback(lambda done: failed.set_exception(OSError("disk")))
        return accepted, failed

    accepted_by(node, dead)
    assert sent(wire).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(("topic", "sys_flag"), [("%RETRY%group", 0), ("orders", 4)])
def test_a_batch_of_half_messages_or_retries_is_refused(wire: Wire, topic: str, sys_flag: int) -> None:
    body = encode_batch([BatchRecord(0, b"x", encode_properties({"a": "b"}))])
    opaque = send(wire, body, code=RequestCode.SEND_BATCH_MESSAGE, topic=topic, f=sys_flag, m=True)
    assert wire.answer_to(opaque).code == ResponseCode.MESSAGE_ILLEGAL


def test_a_failed_batch_is_answered_once(node: RunningNode, wire: Wire) -> None:
    assert node.node.edges is not None
    columns = node.node.edges.remoting._sends._rows
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

    assert (
        sent(wire).code == 0
    )  # the topic is made: from here on the compiled codec reads and answers, if it runs
    assert node.node.edges is not None
    sends = node.node.edges.remoting._sends
    monkeypatch.setattr(module, "encode_reply", broken)
    monkeypatch.setattr(sends, "_codec", replace(sends._codec, encode_replies=broken))
    with caplog.at_level("ERROR"):
        answers = [wire.answer_to(opaque) for opaque in [send(wire), send(wire)]]
    assert [answer.code for answer in answers] == [ResponseCode.SYSTEM_ERROR] * 2
    assert "secret" in caplog.text and "secret" not in str(answers[0].remark)
    assert len(rows(node)) == 3, "they are kept: a producer that tries again sends a second one"
