"""Check the signature of a request and the permissions that it requires.

A request is signed with the ACL signature of RocketMQ's clients:

    Signature = base64(HMAC-SHA1(secret, the values of all other extFields in the order of their names, then the body))

`NEEDS` maps a request code to the required permission. Header fields name its topic and group. If only the body, or the
row behind a sequence number, names the topic, the table requires just an account. The handler then asks for the rest
(`Policy.allow`), because the object that is checked must be the object that is used. A code without an entry is for
administrators.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from timeball.broker.policy import Policy
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import ASK, Access, Caller, Verb

ACCESS_KEY, SIGNATURE = "AccessKey", "Signature"
# Clients up to 4.9.3 add this field after they have computed the signature.
UNSIGNED_ONCE, UNSIGNED_UP_TO = "_UNIQUE_KEY_QUERY", 399  # MQVersion.V4_9_3

_LEFT_OUT, _LEFT_OUT_ONCE = frozenset({SIGNATURE}), frozenset({SIGNATURE, UNSIGNED_ONCE})


class Need(NamedTuple):
    """A verb, and the header fields that name its topic and its group."""

    verb: Verb
    topic: str | None = None
    group: str | None = None


_LOOK = Need(Verb.LOOK)
_RECEIVE = Need(Verb.RECEIVE, "topic", "consumerGroup")
_ENDS = Need(Verb.LOOK, "topic")
_ADMIN = Need(Verb.ADMIN)

NEEDS: dict[int, Need] = {
    RequestCode.SEND_MESSAGE: Need(Verb.SEND, "topic"),
    RequestCode.SEND_MESSAGE_V2: Need(Verb.SEND, "b"),
    RequestCode.SEND_BATCH_MESSAGE: Need(Verb.SEND, "b"),
    RequestCode.SEND_REPLY_MESSAGE: Need(Verb.SEND, "topic"),
    RequestCode.SEND_REPLY_MESSAGE_V2: Need(Verb.SEND, "b"),
    RequestCode.RECALL_MESSAGE: Need(Verb.CANCEL, "topic"),
    RequestCode.PULL_MESSAGE: _RECEIVE,
    RequestCode.LITE_PULL_MESSAGE: _RECEIVE,
    RequestCode.POP_MESSAGE: _RECEIVE,
    RequestCode.ACK_MESSAGE: _RECEIVE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _RECEIVE,
    RequestCode.NOTIFICATION: _RECEIVE,
    RequestCode.QUERY_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.UPDATE_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.QUERY_MESSAGE: Need(Verb.RECEIVE, "topic"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: Need(Verb.RECEIVE, group="consumerGroup"),
    RequestCode.CONSUMER_SEND_MSG_BACK: Need(Verb.RECEIVE, group="group"),  # and the row's topic
    RequestCode.GET_MAX_OFFSET: _ENDS,
    RequestCode.GET_MIN_OFFSET: _ENDS,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _ENDS,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _ENDS,
    # For these, the handler checks the topic or group named in the body or the row.
    RequestCode.HEART_BEAT: _LOOK,
    RequestCode.UNREGISTER_CLIENT: _LOOK,
    RequestCode.LOCK_BATCH_MQ: _LOOK,
    RequestCode.UNLOCK_BATCH_MQ: _LOOK,
    RequestCode.BATCH_ACK_MESSAGE: _LOOK,
    RequestCode.QUERY_ASSIGNMENT: _LOOK,
    RequestCode.END_TRANSACTION: _LOOK,
    RequestCode.VIEW_MESSAGE_BY_ID: _LOOK,
    # Every client sends these, also for names that are no topics.
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _LOOK,
    RequestCode.GET_BROKER_CLUSTER_INFO: _LOOK,
    RequestCode.CHECK_CLIENT_CONFIG: _LOOK,
    RequestCode.GET_KV_CONFIG: _LOOK,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _LOOK,
}


def signer(access: Access, command: Command) -> Caller:
    """Return the account that signed a request. Raises Unauthorized."""
    key = command.ext.get(ACCESS_KEY)
    if not key:
        raise access.refusal(ASK)
    try:
        signature = base64.b64decode(command.ext.get(SIGNATURE, ""), validate=True)
    except (binascii.Error, ValueError):  # ValueError: also text that is not ASCII
        signature = b""
    return access.verify(key, content(command), signature)


def content(command: Command) -> bytes:
    """Return the bytes that the signature covers."""
    ext = command.ext
    left_out = _LEFT_OUT_ONCE if command.version <= UNSIGNED_UP_TO else _LEFT_OUT
    values = "".join(ext[name] for name in sorted(ext) if name not in left_out)
    return values.encode("utf-8", "surrogatepass") + command.body


def check(caller: Caller, command: Command) -> None:
    """Check a request against the policy. Raises Forbidden, or Refused if a required header field is missing."""
    need = NEEDS.get(command.code, _ADMIN)
    names = [command.ext.get(field) for field in (need.topic, need.group) if field is not None]
    if None in names:
        raise Refused(
            ResponseCode.INVALID_PARAMETER, f"code {command.code}: the header names no topic, or no group"
        )
    topic = command.ext[need.topic] if need.topic else None
    group = command.ext[need.group] if need.group else None
    Policy.allow(caller, need.verb, topic=topic, group=group)
