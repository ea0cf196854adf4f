"""Signed requests: a real node with an access file, and accounts with different permissions."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.accounts import ACCESS_FILE, access_file, guarded_node
from tests.edges.remoting.handlers.test_sends import send, sent
from tests.edges.remoting.signing import SignedWire
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.remoting import edge as edges
from timeball.edges.remoting.calls import (
    REQUIRED_PERMISSIONS,
    check_permission,
    signed_content,
    verify_signer,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, HEADER_BYTES_MAX, JSON, Command
from timeball.edges.remoting.connection import UNSIGNED_S
from timeball.edges.remoting.handlers.sends import Transactions
from timeball.model.access import Access, Verb, parse
from timeball.model.errors import RequestError, Unauthorized
from timeball.model.message import Kind

DENIED = ResponseCode.NO_PERMISSION
ACCESS = Access(parse(ACCESS_FILE.encode(), "access.toml"))
VERSION = 409
# printf 'shop20orders0hello' | openssl dgst -sha1 -hmac 'shop secret 1' -binary | base64
FIELDS = {"AccessKey": "shop", "a": "20", "b": "orders", "e": "0"}
SIGNATURE = "qWZGN1pDVDGk1PiwphENuMc++ac="


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with guarded_node(tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.fixture
def shop(node: RunningNode) -> Iterator[SignedWire]:
    with SignedWire.of(node, "shop") as wire:
        yield wire


@pytest.fixture
def other(node: RunningNode) -> Iterator[SignedWire]:
    with SignedWire.of(node, "other") as wire:
        yield wire


@pytest.fixture
def root(node: RunningNode) -> Iterator[SignedWire]:
    with SignedWire.of(node, "root") as wire:
        yield wire


def request(signature: str = SIGNATURE, body: bytes = b"hello", **changed: str) -> Command:
    """Return a signed send. Other fields or another body make the signature wrong."""
    ext = {**FIELDS, "Signature": signature, **changed}
    return Command(RequestCode.SEND_MESSAGE_V2, ext=ext, body=body, version=VERSION)


# ---- the signature ------------------------------------------------------------------------------------------


def test_the_signature_is_over_the_values_in_the_order_of_their_names_and_the_body() -> None:
    assert signed_content(request()) == b"shop20orders0hello"
    assert verify_signer(ACCESS, request()).name == "shop"


@pytest.mark.parametrize(
    "changed",
    [
        {"body": b"hullo"},
        {"b": "news"},
        {"more": "1"},
        {"AccessKey": "other"},
        {"AccessKey": ""},
        {"signature": ""},
        {"signature": SIGNATURE[:-4]},
        {"signature": "§"},
        {"signature": SIGNATURE + " "},
    ],
    ids=str,
)
def test_a_changed_request_is_unauthorized(changed: dict[str, Any]) -> None:
    with pytest.raises(Unauthorized):
        verify_signer(ACCESS, request(**changed))


def test_the_unique_key_query_field_of_clients_up_to_4_9_3_is_not_signed() -> None:
    command = request(_UNIQUE_KEY_QUERY="true")
    with pytest.raises(Unauthorized):
        verify_signer(ACCESS, command)
    command.version = 399
    assert verify_signer(ACCESS, command).name == "shop"


@given(st.dictionaries(st.sampled_from(["AccessKey", "Signature", "b", "topic"]), st.text()), st.binary())
def test_a_header_without_a_valid_signature_is_refused(ext: dict[str, str], body: bytes) -> None:
    with pytest.raises(Unauthorized):
        verify_signer(ACCESS, Command(310, ext=ext, body=body, version=VERSION))


@given(
    st.sampled_from([*REQUIRED_PERMISSIONS, 17, 25, 999]),
    st.dictionaries(st.sampled_from(["b", "topic", "group"]), st.text()),
)
def test_an_account_without_rules_may_only_send_requests_that_need_no_permission(
    code: int, ext: dict[str, str]
) -> None:
    access = Access(parse(b'[[accounts]]\naccess_key = "bare"\nsecret_key = "12345678"', "f"))
    caller = access.authenticate({"authorization": "Bearer bare:12345678"}, 0)
    required = REQUIRED_PERMISSIONS.get(code)
    if required is not None and required.verb is Verb.LOOK and required.topic is None:
        check_permission(caller, Command(code, ext=ext))
        return
    with pytest.raises(RequestError):
        check_permission(caller, Command(code, ext=ext))


# ---- on a real node -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_an_account_with_send_permission_can_send(node: RunningNode, serialisation: int) -> None:
    with SignedWire.of(node, "shop", serialisation=serialisation) as wire:
        answer = sent(wire)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert sent(wire, topic="news").code == DENIED
        assert sent(wire).code == ResponseCode.SUCCESS, "the connection stays usable after a refusal"


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize(("account", "secret"), [("shop", "wrong"), ("nobody", "x"), ("", "")])
def test_a_request_without_a_valid_signature_is_refused(
    node: RunningNode, serialisation: int, account: str, secret: str
) -> None:
    before = node.broker.log.writer.next_seq
    with SignedWire.of(node, account, secret, serialisation) as wire:
        for code in sorted({int(code) for code in RequestCode if code < 1 << 15}):
            answer = wire.ask(
                code, b"{}", topic="orders", b="orders", consumerGroup="workers", a="p", group="workers"
            )
            assert answer.code == DENIED, (code, answer)
            assert "access key" in (answer.remark or "")
    assert node.broker.log.writer.next_seq == before


def test_an_account_without_rights_is_refused_all_requests_that_need_a_permission(
    node: RunningNode, other: SignedWire
) -> None:
    """Every request code, with a topic and a group that the account may not use."""
    remoting = node.node.edges.remoting
    assert remoting is not None
    before = node.broker.log.writer.next_seq
    accepted_codes = set()
    for code in [*sorted(remoting._dispatch._handlers), 10, 310, 320]:
        bodies: dict[int, Any] = {
            RequestCode.HEART_BEAT: {
                "clientID": "c", "consumerDataSet": [{"groupName": "workers", "subscriptionDataSet": []}]
            },
            RequestCode.LOCK_BATCH_MQ: {"consumerGroup": "workers", "clientId": "c", "mqSet": []},
            RequestCode.UNLOCK_BATCH_MQ: {"consumerGroup": "workers", "clientId": "c", "mqSet": []},
            RequestCode.BATCH_ACK_MESSAGE: {
                "acks": [{"c": "workers", "t": "orders", "so": 0, "q": 0, "pt": 1, "b": ""}]
            },
            RequestCode.QUERY_ASSIGNMENT: {"topic": "orders", "consumerGroup": "workers"},
        }  # fmt: skip
        answer = other.ask(
            code, bodies.get(RequestCode(code), b"{}"), topic="orders", b="orders", consumerGroup="workers",
            a="p", group="workers", offset=0, queueId=0, recallHandle="x", key="k", clientID="c",
            commitLogOffset=1 << 40, producerGroup="p", commitOrRollback=8, namespace="n",
        )  # fmt: skip
        if answer.code != DENIED:
            accepted_codes.add(RequestCode(code))
    assert accepted_codes == {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.END_TRANSACTION,  # there is no such half message
        RequestCode.VIEW_MESSAGE_BY_ID,  # there is no such message
    }
    assert node.broker.log.writer.next_seq == before
    assert "orders_of_nobody" not in node.broker.topics()


def test_an_unknown_code_is_not_supported_instead_of_forbidden(other: SignedWire) -> None:
    assert other.ask(323).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_an_administrator_may_create_topics_and_send(root: SignedWire) -> None:
    root.ask_ok(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic="created", readQueueNums=1, writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG", defaultTopic="TBW102",
    )  # fmt: skip
    assert sent(root, topic="created").code == ResponseCode.SUCCESS


def test_a_request_without_a_topic_or_group_name_is_refused(shop: SignedWire) -> None:
    assert shop.ask(RequestCode.GET_MAX_OFFSET, queueId=0).code == ResponseCode.INVALID_PARAMETER


def test_a_forbidden_one_way_request_is_not_answered_and_has_no_effect(
    node: RunningNode, shop: SignedWire
) -> None:
    before = node.broker.log.writer.next_seq
    shop.send(310, b"x", one_way=True, a="p", b="news", e=0, f=0, g=1, h=0, i="")
    assert sent(shop).code == ResponseCode.SUCCESS
    messages = node.broker.read_log(before, node.broker.log.writer.next_seq, [Kind.MESSAGE])
    assert sum(rows.num_rows for rows in messages) == 1


def test_a_request_with_two_codes_is_checked_as_it_is_handled(node: RunningNode) -> None:
    """The header has the codes 310 (a send) and 105 (a route), and two topics. Both times the last one counts."""
    before = node.broker.log.writer.next_seq
    header = (
        b'{"code":310,"opaque":8,"flag":0,"version":409,"extFields":{"AccessKey":"shop","a":"p","b":"orders",'
        b'"b":"news","e":"0","f":"0","g":"1","h":"0","i":"","Signature":"%s"},"code":105}'
    )
    digest = hmac.new(b"shop secret 1", b"shoppnews0010", hashlib.sha1).digest()
    header %= base64.b64encode(digest)
    with Wire.to(node) as wire:
        wire.send_bytes((4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header)
        assert wire.answer_to(8).code != DENIED, (
            "an account without permission to send to `news` may ask for routes"
        )
    assert node.broker.log.writer.next_seq == before


# ---- permissions that depend on the body of a request or on a stored message ------------------------------------


def test_the_sequence_number_of_a_forbidden_message_gives_no_access(
    node: RunningNode, shop: SignedWire, other: SignedWire
) -> None:
    answer = sent(shop, b"private")
    seq = int(answer.ext["msgId"][-16:], 16)
    view = RequestCode.VIEW_MESSAGE_BY_ID
    assert other.ask(view, offset=seq).code == DENIED
    assert b"private" in shop.ask_ok(view, offset=seq).body
    node.broker.tables.groups.ensure("readers")
    back = RequestCode.CONSUMER_SEND_MSG_BACK
    assert other.ask(back, offset=seq, group="readers", delayLevel=0, originTopic="news").code == DENIED
    assert shop.ask(back, offset=seq, group="readers", delayLevel=0).code == DENIED
    node.broker.tables.groups.ensure("workers")
    shop.ask_ok(back, offset=seq, group="workers", delayLevel=0)


def test_a_half_message_is_ended_and_checked_only_by_accounts_that_may_send_it(
    node: RunningNode, shop: SignedWire, other: SignedWire
) -> None:
    half = sent(shop, b"half", sys_flag=4, properties={"TRAN_MSG": "true", "PGROUP": "payers"})
    seq = int(half.ext["msgId"][-16:], 16)
    for wire, name in ((other, "b"), (shop, "a")):
        wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": name, "producerDataSet": [{"groupName": "payers"}]})
    remoting = node.node.edges.remoting
    assert remoting is not None
    result = node.broker.transactions.find_half(seq)
    assert result is not None
    assert len(remoting.context.sessions.producers("payers")) == 2
    [producer] = Transactions(remoting.context)._permitted_producers(result)
    assert producer.caller.name == "shop"
    rollback = {"producerGroup": "payers", "commitLogOffset": seq, "commitOrRollback": 12}
    assert other.ask(RequestCode.END_TRANSACTION, **rollback).code == DENIED
    shop.ask_ok(RequestCode.END_TRANSACTION, **rollback)


def test_a_heartbeat_with_a_forbidden_group_or_topic_is_refused(node: RunningNode, other: SignedWire) -> None:
    def beat(group: str, topic: str) -> int:
        consumer = {
            "groupName": group,
            "subscriptionDataSet": [{"topic": topic, "subString": "*", "subVersion": 1}],
        }
        return other.ask(RequestCode.HEART_BEAT, {"clientID": "c", "consumerDataSet": [consumer]}).code

    assert beat("workers", "news") == beat("readers", "orders") == DENIED
    assert node.node.edges is not None
    assert not node.node.edges.remoting.context.sessions.consumer_ids("readers")
    assert beat("readers", "news") == ResponseCode.SUCCESS
    assert other.ask(RequestCode.UNREGISTER_CLIENT, clientID="c", consumerGroup="workers").code == DENIED


def test_a_delayed_message_is_recalled_only_by_accounts_that_may_send_it(
    shop: SignedWire, other: SignedWire
) -> None:
    delayed = sent(shop, properties={"UNIQ_KEY": "C" * 32, "TIMER_DELAY_SEC": "3600"})
    handle = delayed.ext["recallHandle"]
    recall = RequestCode.RECALL_MESSAGE
    assert other.ask(recall, topic="orders", recallHandle=handle).code == DENIED
    assert other.ask(recall, topic="news", recallHandle=handle).code != ResponseCode.SUCCESS
    shop.ask_ok(recall, topic="orders", recallHandle=handle)


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff\x00\x00\x00\x04",
        b"\x00\x00\x00\x08\x00\x00\x00\x04nope",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # a TLS handshake; the port has no TLS
    ],
)
def test_a_client_without_valid_frames_is_disconnected_and_others_are_not(
    node: RunningNode, shop: SignedWire, data: bytes
) -> None:
    assert sent(shop).code == ResponseCode.SUCCESS
    with Wire.to(node) as bad:
        bad.send_bytes(data)
        assert bad.is_closed()
    assert sent(shop).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("ext", [{"a": "no topic"}, {"b": "orders", "e": "no number"}])
def test_a_bad_header_is_denied_unless_it_is_signed(
    node: RunningNode, shop: SignedWire, ext: dict[str, str]
) -> None:
    assert shop.ask(310, b"body", **ext).code == ResponseCode.INVALID_PARAMETER
    with Wire.to(node) as unsigned:
        assert unsigned.ask(310, b"body", **ext).code == DENIED
        too_large = {"i": "x" * HEADER_BYTES_MAX}
        assert unsigned.ask(310, b"body", **too_large).code == ResponseCode.MESSAGE_ILLEGAL
    assert sent(shop).code == ResponseCode.SUCCESS


def test_a_removed_account_is_refused_at_its_next_request(tmp_path: Path) -> None:
    path = access_file(tmp_path)
    with running_node(tmp_path / "data", access_file=str(path)) as node, SignedWire.of(node, "shop") as wire:
        assert sent(wire).code == ResponseCode.SUCCESS
        path.write_text(ACCESS_FILE.replace("shop secret 1", "shop secret 9"))
        node.loop.call_soon_threadsafe(node.node.security.reload)
        eventually(lambda: sent(wire).code == DENIED, "the old secret is refused")
        wire.secret = "shop secret 9"
        assert sent(wire).code == ResponseCode.SUCCESS


def test_a_connection_without_a_signed_request_is_closed(node: RunningNode, shop: SignedWire) -> None:
    remoting = node.node.edges.remoting
    assert remoting is not None
    assert sent(shop).code == ResponseCode.SUCCESS
    [signed_connection] = remoting._connections
    with Wire.to(node) as unsigned:
        assert unsigned.ask(105, topic="TBW102").code == DENIED
        [unsigned_connection] = remoting._connections - {signed_connection}
        for connection in (signed_connection, unsigned_connection):
            later_s = node.loop.time() + UNSIGNED_S + 1
            node.loop.call_soon_threadsafe(partial(connection.check_deadlines, later_s, must_sign=True))
        assert unsigned.is_closed()
    assert sent(shop).code == ResponseCode.SUCCESS


# ---- the table of permissions ---------------------------------------------------------------------------------


def test_permissions_are_stated_only_for_codes_with_a_handler(node: RunningNode) -> None:
    remoting = node.node.edges.remoting
    assert remoting is not None
    assert set(REQUIRED_PERMISSIONS) <= {int(code) for code in remoting._dispatch._handlers} | {10, 310, 320}


def test_signatures_are_not_checked_without_an_access_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges.calls, "verify_signer", lambda *_: 1 / 0)
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        opaques = [send(wire, properties={"UNIQ_KEY": f"{n:032}"}) for n in range(10)]
        assert {wire.answer_to(opaque).code for opaque in opaques} == {0}
        wire.ask_ok(RequestCode.GET_BROKER_CLUSTER_INFO, Signature="nonsense")
