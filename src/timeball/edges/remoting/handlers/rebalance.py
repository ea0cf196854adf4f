"""Rebalancing: locks on queues, and assignments of queues to the members of a group.

Orderly consumers lock the queues that they read. A client renews its locks every 20 s and relies on a lock for 30 s
after the answer. Here a lock lasts 60 s, so it never expires while its holder relies on it. A client that unregisters
gives up its locks at once. A client that has only lost its connection may still process messages that it pulled: its
locks expire when it does not rely on them any more, 30 s after the last renewal. No other client gets the queue before.
Locks are not saved, as in RocketMQ: after a start of the broker, the first client that asks for a queue gets its lock.

Only existing queues can be locked, and only by existing groups. This limits the memory of the locks.

A client can also ask the broker for its queues (QUERY_ASSIGNMENT). Assignments follow RocketMQ's rules. For a group
that pulls, the broker divides the queues among the members as the clients would do themselves. A member of a group that
pops gets "any queue", or its own share and the shares of the next few members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from timeball.broker.registry.groups import RequestMode
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Verb
from timeball.model.message import RETRY_PREFIX

EXPIRY_MS = 60_000  # RocketMQ's rebalance.lockMaxLiveTime of the broker
TRUST_MS = 30_000  # time for which a client relies on a lock after the answer

QueueKey = tuple[str, int]  # topic, queue


class MessageQueue(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's MessageQueue."""

    topic: str
    queue_id: int
    broker_name: str = ""


ANY_QUEUE = -1
CLIENT_ID_CHARACTERS_MAX = 4_096  # an address and a name fit. Each lock stores the id of its holder


class _LockRequest(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: Annotated[str, msgspec.Meta(max_length=CLIENT_ID_CHARACTERS_MAX)]
    mq_set: list[MessageQueue] = []


class _AssignmentQuery(msgspec.Struct, rename="camel"):
    topic: str
    consumer_group: str
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: Literal["CLUSTERING", "BROADCASTING"] = "CLUSTERING"


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: int
    expires_ms: int


class Locks:
    """Serves LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. All times are from the monotonic clock."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._groups: dict[str, dict[QueueKey, _Lock]] = {}
        self.handlers: Handlers = {
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._unlock,
        }

    def holder(self, group: str, topic: str, queue_id: int) -> str | None:
        """Return the id of the client that holds the lock of a queue, or None."""
        lock = self._groups.get(group, {}).get((topic, queue_id))
        return lock.client_id if lock is not None and self._context.monotonic_ms() < lock.expires_ms else None

    def is_held(self, group: str) -> bool:
        """Return whether any client of the group holds a lock."""
        now_ms = self._context.monotonic_ms()
        return any(now_ms < lock.expires_ms for lock in self._locks_of(group).values())

    def release_locks(self, group: str, client_id: str) -> None:
        """Release the locks of a client that has unregistered from the group."""
        self._set_locks(
            group, {key: lock for key, lock in self._locks_of(group).items() if lock.client_id != client_id}
        )

    def shorten_locks(self, group: str, client_id: str) -> None:
        """Let the locks of a disconnected client expire TRUST_MS after their last renewal."""
        for lock in self._locks_of(group).values():
            if lock.client_id == client_id:
                lock.expires_ms = min(lock.expires_ms, lock.renewed_ms + TRUST_MS)

    def _lock(self, call: Call) -> Reply:
        """Serve LOCK_BATCH_MQ: lock or renew the requested queues, and return those that the client holds."""
        request = self._read_request(call)
        now_ms = self._context.monotonic_ms()
        locks = {
            queue_key: lock
            for queue_key, lock in self._locks_of(request.consumer_group).items()
            if now_ms < lock.expires_ms
        }
        locked = []
        for queue in request.mq_set:
            queue_key = (queue.topic, queue.queue_id)
            lock = locks.get(queue_key)
            if self._may_be_locked(request.consumer_group, queue) and (
                lock is None or lock.client_id == request.client_id
            ):
                locks[queue_key] = _Lock(request.client_id, now_ms, now_ms + EXPIRY_MS)
                locked.append(queue)
        self._set_locks(request.consumer_group, locks)
        return call.answer_json({"lockOKMQSet": locked})

    def _unlock(self, call: Call) -> Reply:
        """Serve UNLOCK_BATCH_MQ: release the client's locks on these queues."""
        request = self._read_request(call)
        queue_keys = {(queue.topic, queue.queue_id) for queue in request.mq_set}
        remaining = {
            queue_key: lock
            for queue_key, lock in self._locks_of(request.consumer_group).items()
            if queue_key not in queue_keys or lock.client_id != request.client_id
        }
        self._set_locks(request.consumer_group, remaining)
        return call.answer()

    def _read_request(self, call: Call) -> _LockRequest:
        request = call.body(_LockRequest)
        self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=request.consumer_group)
        return request

    def _may_be_locked(self, group: str, queue: MessageQueue) -> bool:
        """Return whether group and queue exist in this broker."""
        if self._context.broker.tables.groups.find_group(group) is None:
            return False
        if queue.broker_name not in ("", self._context.broker_name):
            return False
        topic = self._context.broker.tables.topics.find_topic(queue.topic)
        return topic is not None and 0 <= queue.queue_id < len(topic.queues)

    def _locks_of(self, group: str) -> dict[QueueKey, _Lock]:
        return self._groups.get(group, {})

    def _set_locks(self, group: str, locks: dict[QueueKey, _Lock]) -> None:
        if locks:
            self._groups[group] = locks
        else:
            self._groups.pop(group, None)


class Assignments:
    """Serves QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE: which queues a member consumes, and whether it pops."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker = context, context.broker
        self.handlers: Handlers = {
            RequestCode.QUERY_ASSIGNMENT: self._query_assignment,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self._set_mode,
        }

    def _query_assignment(self, call: Call) -> Reply:
        """Serve QUERY_ASSIGNMENT: the queues of one member, and whether it pulls or pops."""
        query = call.body(_AssignmentQuery)
        self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=query.topic, group=query.consumer_group)
        topic = self._broker.tables.topics.find_topic(query.topic)
        mode = self._broker.tables.request_modes.get(query.topic, query.consumer_group)
        queue_ids: list[int] | None = None
        if topic is not None and query.message_model == "BROADCASTING":
            queue_ids = list(range(topic.read_queues))
        elif topic is not None:
            queue_ids = assign(
                query.client_id,
                list(range(topic.read_queues)),
                self._context.sessions.consumer_ids(query.consumer_group),
                strategy=query.strategy_name,
                pops=mode.mode == "POP",
                share_with=mode.pop_share_queue_num,
            )
        assignments = None
        if queue_ids is not None:
            assignments = [
                {
                    "messageQueue": {
                        "topic": query.topic,
                        "brokerName": self._context.broker_name,
                        "queueId": queue_id,
                    },
                    "mode": mode.mode,
                }
                for queue_id in queue_ids
            ]
        # With null the client keeps its queues. With an empty list it gives up all of them.
        return call.answer_json({"messageQueueAssignments": assignments})

    async def _set_mode(self, call: Call) -> Reply:
        mode = call.body(RequestMode)
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        self._broker.tables.request_modes.set(mode)
        await self._broker.log.writer.flushed()
        return call.answer()


def allocate_averagely(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """RocketMQ's AVG: each client gets consecutive queues. With a remainder, the first clients get one queue more."""
    index, (count, remainder) = client_ids.index(client_id), divmod(len(queue_ids), len(client_ids))
    begin = index * count + min(index, remainder)
    return queue_ids[begin : begin + count + (index < remainder)]


def allocate_by_circle(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """RocketMQ's AVG_BY_CIRCLE: with n clients, each gets every n-th queue."""
    return queue_ids[client_ids.index(client_id) :: len(client_ids)]


STRATEGIES = {"AVG": allocate_averagely, "AVG_BY_CIRCLE": allocate_by_circle}


def assign(
    client_id: str, queue_ids: list[int], client_ids: list[str], *, strategy: str, pops: bool, share_with: int
) -> list[int] | None:
    """Assign queues to the member `client_id`. Returns None for an unknown strategy, or without members or queues.

    `share_with`: a popping member also gets the queues of this many members after it. If it is 0 or covers all other
    members, the result is ANY_QUEUE: the broker chooses the queue of each POP request.
    """
    allocate, members = STRATEGIES.get(strategy), sorted(set(client_ids))
    if allocate is None or not members or not queue_ids:
        return None
    if pops and (share_with <= 0 or share_with >= len(members) - 1):
        return [ANY_QUEUE]
    if client_id not in members:
        return []
    index = members.index(client_id)
    if not pops:
        return allocate(client_id, queue_ids, members)
    if len(members) > len(queue_ids):
        return [queue_ids[index % len(queue_ids)]]
    sharing = {members[(index + step) % len(members)] for step in range(min(share_with + 1, len(members)))}
    return sorted(queue for member in sharing for queue in allocate(member, queue_ids, members))
