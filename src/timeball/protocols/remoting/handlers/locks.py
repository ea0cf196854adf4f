"""Locks on queues, by which the members of a group that consumes in order agree who reads which queue.

A client renews its locks every 20 s and trusts each for 30 s from the answer on; a lock lasts 60 s here, so it
never ends while its holder still trusts it. Who says goodbye gives its locks up at once. Who has only lost its
connection may still be at work on what it has pulled: its locks end when it cannot trust them any more,
30 s after they were last renewed, and nobody else gets the queue before. Nothing here is saved, as in RocketMQ:
a broker that starts knows no locks, and the first to ask gets the queue.

Only queues that exist can be locked, by groups that exist, so what is kept is bounded by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from timeball.access import Verb
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode
from timeball.protocols.remoting.site import Site

EXPIRY_MS = 60_000  # RocketMQ's rebalance.lockMaxLiveTime of the broker
TRUST_MS = 30_000  # and the client's: how long after an answer it goes on without another

Place = tuple[str, int]  # topic, queue


class MessageQueue(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's MessageQueue."""

    topic: str
    queue_id: int
    broker_name: str = ""


CLIENT_ID_CHARACTERS_MAX = 4_096  # an address and a name; each lock keeps its holder's


class _Wanted(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: Annotated[str, msgspec.Meta(max_length=CLIENT_ID_CHARACTERS_MAX)]
    mq_set: list[MessageQueue] = []


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: int
    ends_ms: int


class Locks:
    """See the module. Times are monotonic."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._groups: dict[str, dict[Place, _Lock]] = {}

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {RequestCode.LOCK_BATCH_MQ: self._lock, RequestCode.UNLOCK_BATCH_MQ: self._unlock}

    def holder(self, group: str, topic: str, queue_id: int) -> str | None:
        """The client that holds a queue now."""
        lock = self._groups.get(group, {}).get((topic, queue_id))
        return lock.client_id if lock is not None and self._site.monotonic_ms() < lock.ends_ms else None

    def is_held(self, group: str) -> bool:
        """Whether a client of the group holds any queue now."""
        now_ms = self._site.monotonic_ms()
        return any(now_ms < lock.ends_ms for lock in self._of(group).values())

    def give_up(self, group: str, client_id: str) -> None:
        """The client has said goodbye to the group: its queues are free."""
        self._keep(group, {p: lock for p, lock in self._of(group).items() if lock.client_id != client_id})

    def doubt(self, group: str, client_id: str) -> None:
        """The client's last connection is gone: its locks end with its own trust in them."""
        for lock in self._of(group).values():
            if lock.client_id == client_id:
                lock.ends_ms = min(lock.ends_ms, lock.renewed_ms + TRUST_MS)

    def _lock(self, call: Call) -> Reply:
        wanted = self._wanted(call)
        now_ms = self._site.monotonic_ms()
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
        self._site.broker.policy.allow(call.caller, Verb.RECEIVE, group=wanted.consumer_group)
        return wanted

    def _exists(self, group: str, queue: MessageQueue) -> bool:
        if self._site.broker.parts.groups.find(group) is None:
            return False
        if queue.broker_name not in ("", self._site.broker_name):
            return False
        topic = self._site.broker.parts.topics.find(queue.topic)
        return topic is not None and 0 <= queue.queue_id < len(topic.queues)

    def _of(self, group: str) -> dict[Place, _Lock]:
        return self._groups.get(group, {})

    def _keep(self, group: str, locks: dict[Place, _Lock]) -> None:
        if locks:
            self._groups[group] = locks
        else:
            self._groups.pop(group, None)
