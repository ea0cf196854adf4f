"""Which member of a group reads which queue: locks on queues, and assignments if clients let the broker decide.

Groups that consume in order divide the queues with locks. A client renews its locks every 20 s and trusts each for 30 s
after the answer. Here a lock lasts 60 s, so it never ends while its holder still trusts it. A client that says goodbye
gives up its locks at once. A client that has only lost its connection may still process the messages that it pulled.
Its locks end when it cannot trust them any more, 30 s after they were last renewed. No other client gets the queue
before that. Locks are not saved, as in RocketMQ: after a start of the broker, the first client to ask gets the queue.

Only existing queues can be locked, and only by existing groups. This bounds the memory of the locks.

Assignments follow RocketMQ's rules. For a group that pulls, the broker divides the queues among the members as the
clients would do themselves. A group that pops needs no division: each member asks for "any queue", or for its own share
and the shares of the next few members.
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
TRUST_MS = 30_000  # the client's trust in a lock after the answer

Place = tuple[str, int]  # topic, queue


class MessageQueue(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's MessageQueue."""

    topic: str
    queue_id: int
    broker_name: str = ""


ANY_QUEUE = -1
CLIENT_ID_CHARACTERS_MAX = 4_096  # an address and a name. Each lock stores the id of its holder


class _Wanted(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: Annotated[str, msgspec.Meta(max_length=CLIENT_ID_CHARACTERS_MAX)]
    mq_set: list[MessageQueue] = []


class _Assignment(msgspec.Struct, rename="camel"):
    topic: str
    consumer_group: str
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: Literal["CLUSTERING", "BROADCASTING"] = "CLUSTERING"


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: int
    ends_ms: int


class Locks:
    """Serves LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. Times are monotonic."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._groups: dict[str, dict[Place, _Lock]] = {}
        self.handlers: Handlers = {
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._unlock,
        }

    def holder(self, group: str, topic: str, queue_id: int) -> str | None:
        """Return the id of the client that holds a queue now."""
        lock = self._groups.get(group, {}).get((topic, queue_id))
        return lock.client_id if lock is not None and self._context.monotonic_ms() < lock.ends_ms else None

    def is_held(self, group: str) -> bool:
        """Return whether a client of the group holds any queue now."""
        now_ms = self._context.monotonic_ms()
        return any(now_ms < lock.ends_ms for lock in self._of(group).values())

    def give_up(self, group: str, client_id: str) -> None:
        """Free the queues of a client that has said goodbye to the group."""
        self._keep(group, {p: lock for p, lock in self._of(group).items() if lock.client_id != client_id})

    def doubt(self, group: str, client_id: str) -> None:
        """Shorten the locks of a client without a connection to the time for which it trusts them."""
        for lock in self._of(group).values():
            if lock.client_id == client_id:
                lock.ends_ms = min(lock.ends_ms, lock.renewed_ms + TRUST_MS)

    def _lock(self, call: Call) -> Reply:
        wanted = self._wanted(call)
        now_ms = self._context.monotonic_ms()
        held = {
            place: lock for place, lock in self._of(wanted.consumer_group).items() if now_ms < lock.ends_ms
        }
        got = []
        for queue in wanted.mq_set:
            place = (queue.topic, queue.queue_id)
            lock = held.get(place)
            if self._exists(wanted.consumer_group, queue) and (
                lock is None or lock.client_id == wanted.client_id
            ):
                held[place] = _Lock(wanted.client_id, now_ms, now_ms + EXPIRY_MS)
                got.append(queue)
        self._keep(wanted.consumer_group, held)
        return call.answer_json({"lockOKMQSet": got})

    def _unlock(self, call: Call) -> Reply:
        wanted = self._wanted(call)
        places = {(queue.topic, queue.queue_id) for queue in wanted.mq_set}
        kept = {
            place: lock
            for place, lock in self._of(wanted.consumer_group).items()
            if place not in places or lock.client_id != wanted.client_id
        }
        self._keep(wanted.consumer_group, kept)
        return call.answer()

    def _wanted(self, call: Call) -> _Wanted:
        wanted = call.body(_Wanted)
        self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=wanted.consumer_group)
        return wanted

    def _exists(self, group: str, queue: MessageQueue) -> bool:
        if self._context.broker.tables.groups.find_group(group) is None:
            return False
        if queue.broker_name not in ("", self._context.broker_name):
            return False
        topic = self._context.broker.tables.topics.find_topic(queue.topic)
        return topic is not None and 0 <= queue.queue_id < len(topic.queues)

    def _of(self, group: str) -> dict[Place, _Lock]:
        return self._groups.get(group, {})

    def _keep(self, group: str, locks: dict[Place, _Lock]) -> None:
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
        asked = call.body(_Assignment)
        self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=asked.topic, group=asked.consumer_group)
        topic = self._broker.tables.topics.find_topic(asked.topic)
        mode = self._broker.tables.request_modes.get(asked.topic, asked.consumer_group)
        queue_ids: list[int] | None = None
        if topic is not None and asked.message_model == "BROADCASTING":
            queue_ids = list(range(topic.read_queues))
        elif topic is not None:
            queue_ids = assign(
                asked.client_id,
                list(range(topic.read_queues)),
                self._context.sessions.consumer_ids(asked.consumer_group),
                strategy=asked.strategy_name,
                pops=mode.mode == "POP",
                share_with=mode.pop_share_queue_num,
            )
        found = None
        if queue_ids is not None:
            found = [
                {
                    "messageQueue": {
                        "topic": asked.topic,
                        "brokerName": self._context.broker_name,
                        "queueId": i,
                    },
                    "mode": mode.mode,
                }
                for i in queue_ids
            ]
        # Null leaves the client's queues as they are. An empty list takes them all away.
        return call.answer_json({"messageQueueAssignments": found})

    async def _set_mode(self, call: Call) -> Reply:
        mode = call.body(RequestMode)
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        self._broker.tables.request_modes.set(mode)
        await self._broker.log.writer.flushed()
        return call.answer()


def averagely(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """AVG: neighbouring queues. The first clients get one more."""
    at, (each, more) = client_ids.index(client_id), divmod(len(queue_ids), len(client_ids))
    begin = at * each + min(at, more)
    return queue_ids[begin : begin + each + (at < more)]


def by_circle(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """AVG_BY_CIRCLE: every n-th queue."""
    return queue_ids[client_ids.index(client_id) :: len(client_ids)]


STRATEGIES = {"AVG": averagely, "AVG_BY_CIRCLE": by_circle}


def assign(
    client_id: str, queue_ids: list[int], client_ids: list[str], *, strategy: str, pops: bool, share_with: int
) -> list[int] | None:
    """Return the queues of one member, or None if that cannot be decided. The client then continues as before.

    `share_with`: a popping member also gets the queues of this many members after it. If these are all members, or it
    is 0, the member pops from any queue in one request. Only then does the broker decide which queue comes first.
    """
    allocate, members = STRATEGIES.get(strategy), sorted(set(client_ids))
    if allocate is None or not members or not queue_ids:
        return None
    if pops and (share_with <= 0 or share_with >= len(members) - 1):
        return [ANY_QUEUE]
    if client_id not in members:
        return []
    at = members.index(client_id)
    if not pops:
        return allocate(client_id, queue_ids, members)
    if len(members) > len(queue_ids):
        return [queue_ids[at % len(queue_ids)]]
    sharing = {members[(at + i) % len(members)] for i in range(min(share_with + 1, len(members)))}
    return sorted(queue for member in sharing for queue in allocate(member, queue_ids, members))
