"""Check the signature of a request and the permissions that it requires.

A request is signed with the ACL signature of RocketMQ's clients:

    Signature = base64(HMAC-SHA1(secret, the values of all other extFields in the order of their names, then the body))

`REQUIRED_PERMISSIONS` maps each request code to a verb and to the header fields that name the topic and the group. For
some requests, the topic or group is only in the body or in a stored row. For them the table requires only an account
(LOOK), and the handler checks the rest (`Policy.allow`) when it has read the topic or group. A code without an entry
requires ADMIN.
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
UNSIGNED_FIELD, UNSIGNED_UP_TO_VERSION = "_UNIQUE_KEY_QUERY", 399  # MQVersion.V4_9_3

_UNSIGNED_FIELDS, _UNSIGNED_FIELDS_OLD = frozenset({SIGNATURE}), frozenset({SIGNATURE, UNSIGNED_FIELD})


class RequiredPermission(NamedTuple):
    """The verb that a request requires, and the header fields that name its topic and its group."""

    verb: Verb
    topic: str | None = None
    group: str | None = None


_LOOK = RequiredPermission(Verb.LOOK)
_RECEIVE = RequiredPermission(Verb.RECEIVE, "topic", "consumerGroup")
_LOOK_AT_TOPIC = RequiredPermission(Verb.LOOK, "topic")
_ADMIN = RequiredPermission(Verb.ADMIN)

REQUIRED_PERMISSIONS: dict[int, RequiredPermission] = {
    RequestCode.SEND_MESSAGE: RequiredPermission(Verb.SEND, "topic"),
    RequestCode.SEND_MESSAGE_V2: RequiredPermission(Verb.SEND, "b"),
    RequestCode.SEND_BATCH_MESSAGE: RequiredPermission(Verb.SEND, "b"),
    RequestCode.SEND_REPLY_MESSAGE: RequiredPermission(Verb.SEND, "topic"),
    RequestCode.SEND_REPLY_MESSAGE_V2: RequiredPermission(Verb.SEND, "b"),
    RequestCode.RECALL_MESSAGE: RequiredPermission(Verb.CANCEL, "topic"),
    RequestCode.PULL_MESSAGE: _RECEIVE,
    RequestCode.LITE_PULL_MESSAGE: _RECEIVE,
    RequestCode.POP_MESSAGE: _RECEIVE,
    RequestCode.ACK_MESSAGE: _RECEIVE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _RECEIVE,
    RequestCode.NOTIFICATION: _RECEIVE,
    RequestCode.QUERY_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.UPDATE_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.QUERY_MESSAGE: RequiredPermission(Verb.RECEIVE, "topic"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: RequiredPermission(Verb.RECEIVE, group="consumerGroup"),
    # The handler also checks the topic of the stored row.
    RequestCode.CONSUMER_SEND_MSG_BACK: RequiredPermission(Verb.RECEIVE, group="group"),
    RequestCode.GET_MAX_OFFSET: _LOOK_AT_TOPIC,
    RequestCode.GET_MIN_OFFSET: _LOOK_AT_TOPIC,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _LOOK_AT_TOPIC,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _LOOK_AT_TOPIC,
    # For these, the handler checks the topics and groups that the body or the stored row names.
    RequestCode.HEART_BEAT: _LOOK,
    RequestCode.UNREGISTER_CLIENT: _LOOK,
    RequestCode.LOCK_BATCH_MQ: _LOOK,
    RequestCode.UNLOCK_BATCH_MQ: _LOOK,
    RequestCode.BATCH_ACK_MESSAGE: _LOOK,
    RequestCode.QUERY_ASSIGNMENT: _LOOK,
    RequestCode.END_TRANSACTION: _LOOK,
    RequestCode.VIEW_MESSAGE_BY_ID: _LOOK,
    # Every client sends these, also for names that are not topics.
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _LOOK,
    RequestCode.GET_BROKER_CLUSTER_INFO: _LOOK,
    RequestCode.CHECK_CLIENT_CONFIG: _LOOK,
    RequestCode.GET_KV_CONFIG: _LOOK,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _LOOK,
}


def verify_signer(access: Access, command: Command) -> Caller:
    """Verify the signature of a request and return its account. Raises Unauthorized."""
    key = command.ext.get(ACCESS_KEY)
    if not key:
        raise access.refusal(ASK)
    try:
        signature = base64.b64decode(command.ext.get(SIGNATURE, ""), validate=True)
    except (binascii.Error, ValueError):  # ValueError: also text that is not ASCII
        signature = b""
    return access.verify(key, signed_content(command), signature)


def signed_content(command: Command) -> bytes:
    """Return the bytes that the signature covers."""
    ext = command.ext
    unsigned_fields = _UNSIGNED_FIELDS_OLD if command.version <= UNSIGNED_UP_TO_VERSION else _UNSIGNED_FIELDS
    values = "".join(ext[name] for name in sorted(ext) if name not in unsigned_fields)
    return values.encode("utf-8", "surrogatepass") + command.body


def check_permission(caller: Caller, command: Command) -> None:
    """Check that the caller may make this request. Raises Forbidden, or Refused if a header field is missing."""
    required = REQUIRED_PERMISSIONS.get(command.code, _ADMIN)
    names = [command.ext.get(field) for field in (required.topic, required.group) if field is not None]
    if None in names:
        raise Refused(
            ResponseCode.INVALID_PARAMETER, f"code {command.code}: the header names no topic, or no group"
        )
    topic = command.ext[required.topic] if required.topic else None
    group = command.ext[required.group] if required.group else None
    Policy.allow(caller, required.verb, topic=topic, group=group)
