"""A siege with clients of each kind of state.

Each client repeats one step, and records what it may rely on after an answer. After a call without an answer it
accepts both outcomes. The checker (checker.py) judges all messages: a step records which ones it has sent, cancelled,
moved or given up. An occurrence of a schedule is a sent message whose id is known before, and a rollback is a cancel.
`Known` judges leases, and `Record` the requests of a push.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from tests.broker.consuming.test_kill import GROUP as HOLDERS
from tests.broker.consuming.test_kill import TOPIC as HELD_TOPIC
from tests.broker.consuming.test_kill import Known, held
from tests.cli.processes import Running
from tests.crash.checker import Fault, Sent
from tests.crash.siege import BUSY, CLOCK, FAR_MS, NEAR_MS, STEPS, Siege, rows_of, some_due
from tests.crash.world import SECOND_MS, SELECTED, table_rows
from tests.edges.http.client import Client
from tests.edges.push.siege import FAILS, RETRY_MS, TIMES_MAX, Record
from tests.edges.remoting.wire import Wire
from tests.node_fixture import BOUND_S, eventually
from tests.ports import free_ports

from timeball import Timeball
from timeball.client.attempts import FAILED_DISK
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.model.errors import InvalidDelay, OverLimit, TimeballError, Unavailable
from timeball.model.message import DLQ_PREFIX, encode_properties
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import Store
from timeball.table import layout
from timeball.table.attachment import Attachment

TOPICS = {
    "mail": 2, "batches": 2, "moved": 2, "keyed": 2, "unique": 2, "pushed": 2, "letters": 2, "paid": 2, "ticks": 2,
    HELD_TOPIC: 4,
}  # fmt: skip
PAYERS, CLERKS, PUSHERS = "payers", "clerks", "pushers"
HALF, COMMIT, ROLLBACK = 4, 8, 12  # RocketMQ's flags
PAUSE_MS = 20  # between two steps of a client, so that a broker can start meanwhile
OCCURRENCES = 3
UNIQUE_KEYS = 3
# Selections come before their messages are due, and are forgotten soon: the broker keeps a hundred.
SELECTED_AFTER_MS, SELECTED_BEFORE_MS = 10 * SECOND_MS, 8 * SECOND_MS


# ---- campaigns, selections ------------------------------------------------------------------------------------


def campaign(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Write files of a campaign and attach them. Then pause and resume it, cancel it, or leave it."""
    name, now_ms = f"c{siege.next_number()}", CLOCK.wall_ms()
    dues: list[int | None] = [now_ms + int(rng.choice((NEAR_MS, *FAR_MS))) + n for n in range(10)]
    sent = sorted(siege.ask("mail", dues), key=lambda one: one.due_ms or 0)
    keys = [one.key for one in sent]
    with Endpoint(siege.broker.endpoint) as broker, siege.while_it_lives():
        broker.change_campaign(name, "plan", rows=len(sent), at_ms=now_ms)
        first_seq = broker.reserve(len(sent))
        rows = layout.sort_rows(table_rows(sent, first_seq, now_ms))
        files = list(Store(broker.status().table.uri).put_rows(rows, now_ms))
        broker.attach(
            Attachment(job="bulk", job_id=name, epoch=0, files=files, ranges=[(first_seq, len(sent))])
        )
        accept(sent)
        siege.note("campaigns")
        action = rng.choice(("", "pause", "cancel"))
        if action == "cancel":
            siege.observed.cancel_asked.update(keys)
            broker.change_campaign(name, "cancel")
            if CLOCK.wall_ms() < (sent[0].due_ms or 0):
                judge(siege, keys, SELECTED)
        elif action == "pause":
            for one in sent:
                one.is_at_least = True  # if it is held beyond its due time, it is due at the resume
            broker.change_campaign(name, "pause")
            siege.note("campaigns")
            broker.change_campaign(name, "resume")
    siege.note("campaigns")


def select(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send messages, and carry out a bulk operation (ACTIONS) on exactly these."""
    batch, due_ms = f"b{siege.next_number()}", CLOCK.wall_ms() + SELECTED_AFTER_MS
    sent = siege.ask("batches", [due_ms + n for n in range(4)])
    for one in sent:
        ball.send(
            one.topic, one.body, at=one.due_ms, message_id=one.key, properties={"batch": batch}, retry=True
        )
        one.acked = True
    try:
        ACTIONS[int(rng.integers(len(ACTIONS)))](siege, ball, sent, f"batch = '{batch}'")
    except OverLimit:
        pass  # a hundred selections, none of which may be forgotten yet
    siege.note("selections")


def in_time(sent: list[Sent]) -> bool:
    """Check whether all were still pending when the request was answered: none was near its due time."""
    return CLOCK.wall_ms() < min(one.due_ms or 0 for one in sent) - SELECTED_AFTER_MS + SELECTED_BEFORE_MS


def cancel_and_undo(siege: StatefulSiege, ball: Timeball, sent: list[Sent], where: str) -> None:
    """Cancel by a selection. For messages with an even number, undo the selection again."""
    keys = [one.key for one in sent]
    siege.observed.cancel_asked.update(keys)
    selection = ball.selections.cancel(where, topics=["batches"])
    if in_time(sent):
        judge(siege, keys, SELECTED)
    siege.note("selections")
    if int(keys[0][1:]) % 2:
        return
    for key in keys:
        siege.observed.verdicts.pop(key, None)
    ball.selections.undo(selection.id)
    if in_time(sent):
        siege.observed.cancel_asked.difference_update(keys)


def shift(siege: StatefulSiege, ball: Timeball, sent: list[Sent], where: str) -> None:
    """Move the due times a second later by a selection. Until the answer both times are accepted."""
    before = [one.due_ms or 0 for one in sent]
    for one, due_ms in zip(sent, before, strict=True):
        one.maybe_due.add(due_ms + SECOND_MS)
        one.former_ms.add(due_ms)
    ball.selections.shift("1s", where, topics=["batches"])
    if in_time(sent):
        for one, due_ms in zip(sent, before, strict=True):
            one.move(due_ms + SECOND_MS)


def move(siege: StatefulSiege, ball: Timeball, sent: list[Sent], where: str) -> None:
    """Move to another topic by a selection. Until the answer both topics are accepted."""
    for one in sent:
        one.maybe_topics.add("moved")
    ball.selections.move("moved", where, topics=["batches"])
    if in_time(sent):
        for one in sent:
            one.topic, one.maybe_topics = "moved", set()


def hold(siege: StatefulSiege, ball: Timeball, sent: list[Sent], where: str) -> None:
    """Pause the messages by a selection, and resume them by another."""
    for one in sent:
        one.is_at_least = True  # if it is held beyond its due time, it is due at the resume
    ball.selections.pause(where, topics=["batches"])
    siege.note("selections")
    ball.selections.resume(where, topics=["batches"])


ACTIONS: list[Callable[[StatefulSiege, Timeball, list[Sent], str], None]] = [
    cancel_and_undo,
    shift,
    move,
    hold,
]


# ---- keys -----------------------------------------------------------------------------------------------------


def send_again(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send with an idempotency key: a new one, or an earlier one again, whose answer may be lost or long past."""
    keyed = siege.keyed
    if keyed and rng.random() < 0.5:
        one = keyed[int(rng.integers(len(keyed)))]
    else:
        (one,) = siege.ask("keyed", [some_due(rng)])
        keyed.append(one)
    ball.send(one.topic, one.body, at=one.due_ms, message_id=one.key, retry=True)
    one.acked = True
    siege.note("idempotency keys")


def replace(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send with a unique key and `on_pending=replace`, which cancels the pending message of this key."""
    unique_key = f"u{rng.integers(UNIQUE_KEYS)}"
    (one,) = siege.ask("unique", [CLOCK.wall_ms() + int(rng.choice((NEAR_MS, *FAR_MS)))])
    # The last message with an answer, and all later ones: one of them may be pending.
    former = siege.unique.setdefault(unique_key, [])
    earlier = [sent.key for sent in former]
    siege.observed.cancel_asked.update(earlier)
    former.append(one)
    receipt = ball.send(
        one.topic, one.body, at=one.due_ms, message_id=one.key, unique_key=unique_key, on_pending="replace"
    )
    one.acked = True
    former[:] = [one]
    if receipt.replaced is not None:
        judge(siege, [receipt.replaced.id], "cancelled")
    elif len(earlier) == 1:
        siege.observed.cancel_asked.discard(earlier[0])  # it was released before
    siege.note("unique keys")


# ---- transactions, schedules ----------------------------------------------------------------------------------


def transact(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send a half message, and often end an earlier one, whose sequence number stays valid after a power cut."""
    with Wire(siege.broker.remoting_port) as wire:
        (one,) = siege.ask("paid", [None])
        properties = {"UNIQ_KEY": one.key, "TRAN_MSG": "true", "PGROUP": PAYERS}
        half = wire.ask(
            RequestCode.SEND_MESSAGE_V2, one.body, a=PAYERS, b=one.topic, c="TBW102", d=4, e=0, f=HALF,
            g=CLOCK.wall_ms(), h=0, i=encode_properties(properties), j=0,
        )  # fmt: skip
        if half.code == ResponseCode.SUCCESS:
            siege.halves.append((one, parse_offset_msg_id(half.ext["msgId"])[1]))
            siege.note("transactions")
        if len(siege.halves) > int(rng.integers(4)):
            end_a_half(siege, wire, int(rng.integers(len(siege.halves))))
    siege.note("transactions")


def end_a_half(siege: StatefulSiege, wire: Wire, index: int) -> None:
    """Commit or roll back the half message `siege.halves[index]`. A repeated call makes the same decision again."""
    life, (one, seq) = siege.leases.life, siege.halves[index]
    commits, is_repeated = int(one.key[1:]) % 3 > 0, one.key in siege.ends_asked
    siege.ends_asked.add(one.key)
    if not commits:
        siege.observed.cancel_asked.add(one.key)
    answer = wire.ask(
        RequestCode.END_TRANSACTION, producerGroup=PAYERS, commitLogOffset=seq, tranStateTableOffset=0,
        commitOrRollback=COMMIT if commits else ROLLBACK, fromTransactionCheck=False, msgId=one.key,
        transactionId=one.key,
    )  # fmt: skip
    if answer.code == ResponseCode.SUCCESS:
        del siege.halves[index]
        if commits:
            one.acked = True
        else:
            judge(siege, [one.key], "cancelled")
    elif siege.leases.life == life:
        siege.found.append(
            Fault("lost", f"half message {one.key} ({'again' if is_repeated else 'first'}): {answer.remark}")
        )
        del siege.halves[index]


def schedule(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Put a schedule whose few occurrences are known before, and sometimes pause and resume it."""
    name, now_ms = f"s{siege.next_number()}", CLOCK.wall_ms()
    first_ms = (now_ms // SECOND_MS + int(rng.integers(2, 5))) * SECOND_MS
    times_ms = range(first_ms, first_ms + OCCURRENCES * SECOND_MS, SECOND_MS)
    occurrences = [Sent(f"{name}.{due_ms}", "ticks", b"tick", due_ms) for due_ms in times_ms]
    siege.observed.sent.update({one.key: one for one in occurrences})
    starts_at = datetime.fromtimestamp(first_ms / 1_000, UTC).isoformat()
    rule = {"every": "1s", "starts_at": starts_at, "count": OCCURRENCES}
    try:
        put = ball.schedules.put(name, rule, topic="ticks", body="tick", catch_up="all", catch_up_within="7d")
    except InvalidDelay:
        return  # the broker was down for so long that all occurrences are past
    is_whole = put.next is not None and put.next.due_ms == first_ms
    siege.note("schedules")
    if rng.random() < 0.3:
        ball.schedules.pause(name)
        siege.note("schedules")
        ball.schedules.resume(name)
    if is_whole:
        accept(occurrences)
    siege.note("schedules")


# ---- leases, dead letters -------------------------------------------------------------------------------------


@dataclass
class Leases:
    """The knowledge of a consumer. Within `save_ms` after an answer, leases and acknowledgements may be lost."""

    save_ms: int
    known: Known = field(default_factory=Known)
    life: int = 0  # odd while the power is off
    _unsaved: Counter[str] = field(default_factory=Counter)
    _unsaved_acks: set[str] = field(default_factory=set)

    def change_life(self) -> None:
        """Record that the power is cut, or back. Unsaved leases and acknowledgements may be lost then."""
        with self.known.lock:
            self.life += 1
            self.known.received -= self._unsaved
            self._unsaved.clear()
            self._unsaved_acks.clear()

    def receive(self, bodies: list[str], life: int) -> None:
        """Record received messages. `life`: the life in which they were requested."""
        with self.known.lock:
            if not self.save_ms:
                self.known.received.update(bodies)
            elif life == self.life:
                self.known.received.update(bodies)
                self._unsaved.update(bodies)

    def doubt(self, body: str) -> None:
        """Record that a message is about to be acknowledged."""
        with self.known.lock:
            self.known.doubtful.add(body)

    def acknowledge(self, body: str, life: int) -> None:
        """Record the answer to an acknowledgement. `life`: the life in which it was requested."""
        with self.known.lock:
            if not self.save_ms:
                self.known.doubtful.discard(body)
                self.known.acked.add(body)
            elif life == self.life:
                self._unsaved_acks.add(body)

    def save(self, life: int) -> None:
        """Record that all answers so far are on the disk, unless the power was cut since `life` was read."""
        with self.known.lock:
            if life == self.life:
                self.known.doubtful -= self._unsaved_acks
                self.known.acked |= self._unsaved_acks
                self._unsaved.clear()
                self._unsaved_acks.clear()


def lease(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Receive some messages, and acknowledge every second one."""
    leases = siege.leases
    siege.save_leases(ball)
    life = leases.life
    messages = ball.pull(HELD_TOPIC, HOLDERS, max_messages=8, wait="0s", lease="12h")
    leases.receive([message.body.decode() for message in messages], life)
    siege.note("leases")
    for message in messages[::2]:
        body = message.body.decode()
        leases.doubt(body)
        if message.ack():
            leases.acknowledge(body, life)
            siege.note("leases")


def bury(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Receive some messages, and give each up."""
    (one,) = siege.ask("letters", [None])
    ball.send(one.topic, one.body, message_id=one.key, retry=True)
    one.acked = True
    for message in ball.pull("letters", CLERKS, max_messages=4, wait="0s", lease="12h"):
        assert message.id is not None
        siege.observed.dead_asked[message.id] = DLQ_PREFIX + CLERKS
        if message.dead_letter():
            siege.observed.dead.add(message.id)
        siege.note("dead letters")


# ---- push -----------------------------------------------------------------------------------------------------


class Pushes:
    """A receiver in a process of its own, which refuses some requests, and the record of its requests."""

    def __init__(self, folder: Path) -> None:
        self.record, self._path = Record(), folder / "pushed"
        self._path.touch()
        (self._port,) = free_ports(1)
        self._receiver: Running | None = None
        self.in_flight_max = {1}  # the settings that the second subscription may have

    def begin(self, siege: Siege) -> None:
        """Make the group and its subscription, and start the receiver."""
        config = {
            "groupName": PUSHERS, "retryMaxTimes": TIMES_MAX,
            "groupRetryPolicy": {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [RETRY_MS] * 3}},
        }  # fmt: skip
        with Wire(siege.broker.remoting_port) as wire:
            wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)
        with http(siege) as client:
            secret = self.put(client, PUSHERS, "pushed", 16)["secret"]
            self.put(client, "changing", "none", 1)
        self._receiver = Running(
            command=[
                sys.executable, "-m", "tests.edges.push.flaky_receiver", str(self._port), str(self._path), secret,
                str(FAILS), "0",
            ]
        )  # fmt: skip

    def put(self, client: Client, name: str, topic: str, in_flight_max: int) -> dict[str, str]:
        """Create or change a subscription."""
        subscription = {
            "topic": topic, "group": name, "url": f"http://127.0.0.1:{self._port}/", "timeout": "5s",
            "in_flight_max": in_flight_max,
        }  # fmt: skip
        reply = client.ask("PUT", f"/v1/subscriptions/{name}", subscription)
        if reply.status >= 500:
            raise Unavailable(str(reply.value))
        assert reply.status in (200, 201), reply
        value: dict[str, str] = reply.value
        return value

    def faults(self, ball: Timeball, sent: set[str]) -> list[Fault]:
        """Wait until each message was granted or is a dead letter. `sent`: those that may have been sent."""
        topic = DLQ_PREFIX + PUSHERS

        def is_over() -> bool:
            self.record.read(self._path)
            self.record.dead = [row.key for row in rows_of(ball, topic)] if topic in ball.topics() else []
            return not self.record.open()

        eventually(is_over, "each message is pushed")
        self.record.sent |= self.record.grants.keys() & sent
        return [Fault("push", text) for text in self.record.faults()]

    def close(self) -> None:
        """End the receiver."""
        if self._receiver is not None:
            self._receiver.end()


@contextmanager
def http(siege: Siege) -> Iterator[Client]:
    """Provide a connection to the HTTP port."""
    client = Client(SimpleNamespace(node=SimpleNamespace(http_port=siege.broker.http_port)))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def push(siege: StatefulSiege, ball: Timeball, rng: np.random.Generator) -> None:
    """Send a message for the receiver, and change another subscription."""
    pushes = siege.pushes
    now_ms = CLOCK.wall_ms()
    (one,) = siege.ask("pushed", [None if rng.random() < 0.5 else now_ms + int(rng.integers(NEAR_MS))])
    ball.send(one.topic, one.body, at=one.due_ms, message_id=one.key, retry=True)
    one.acked = True
    pushes.record.sent.add(one.key)
    siege.note("push subscriptions")
    in_flight_max = int(rng.integers(2, 1_000))
    with http(siege) as client:
        reply = client.ask("GET", "/v1/subscriptions/changing")
        if reply.status == 404 or (
            reply.status == 200 and reply.value["in_flight_max"] not in pushes.in_flight_max
        ):
            text = f"subscription: {reply.value}, asked for {pushes.in_flight_max}"
            siege.found.append(Fault("lost", text))
        pushes.in_flight_max.add(in_flight_max)
        pushes.put(client, "changing", "none", in_flight_max)
        pushes.in_flight_max = {in_flight_max}
    siege.note("push subscriptions")


# ---- all of them ----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any, Timeball, np.random.Generator], None]] = {
    "campaigns": campaign,
    "selections": select,
    "idempotency keys": send_again,
    "unique keys": replace,
    "push subscriptions": push,
    "dead letters": bury,
    "transactions": transact,
    "schedules": schedule,
    "leases": lease,
}


class StatefulSiege(Siege):
    """A siege with these clients beside those of every siege, and their knowledge."""

    def __init__(self, data: Path, seed: int, ack_save_ms: int) -> None:
        """`ack_save_ms`: the broker's setting, by which leases are judged."""
        super().__init__(data, seed, pause_ms=PAUSE_MS)
        self.options = {**BUSY, "ack-save-ms": str(ack_save_ms), "push-allow": "127.0.0.1"}
        self.keyed: list[Sent] = []
        self.unique: dict[str, list[Sent]] = {}
        self.halves: list[tuple[Sent, int]] = []  # and their sequence numbers
        self.ends_asked: set[str] = set()
        self.leases, self.pushes = Leases(ack_save_ms), Pushes(data.parent)
        self.found: list[Fault] = []
        self._names = itertools.count(1)

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            with self.broker.client() as ball:
                for topic, queues in TOPICS.items():
                    ball.create_topic(topic, queues)
                    self.observed.topics[topic] = queues
            self.pushes.begin(self)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.pushes.close()
        super().__exit__(*error)

    def is_lost(self, error: Exception) -> bool:
        """See Siege."""
        return isinstance(error, HTTPException) or is_without_disk(error) or super().is_lost(error)

    def next_number(self) -> int:
        """Return a number for a name."""
        return next(self._names)

    def begin(self) -> None:
        """Let all clients begin."""
        self.clients(*STEPS, *KINDS.values())

    def change_life(self) -> None:
        """Note that the power goes, or comes back."""
        self.leases.change_life()
        self.pushes.record.kills.append((time.time(), "broker"))

    @contextmanager
    def while_it_lives(self) -> Iterator[None]:
        """Take errors of the block for a lost answer, if the power was cut meanwhile."""
        life = self.leases.life
        try:
            yield
        except TimeballError as error:
            if self.leases.life == life:
                raise
            raise Unavailable(str(error)) from error

    def faults(self, schedule: str = "hour_log") -> list[Fault]:
        """Compare leases and pushes, which the total-queue checker does not see, and then the rest with it."""
        self.end_clients()
        with self.broker.client(timeout_ms=BOUND_S * 1_000) as ball:
            self._resume_all(ball)
            self.found += self._lease_faults(ball) + self.pushes.faults(ball, {*self.observed.sent})
        return [*self.found, *super().faults(schedule)]

    def _resume_all(self, ball: Timeball) -> None:
        """Resume all that a client has paused before its next answer was lost."""
        with Endpoint(self.broker.endpoint) as broker:
            for campaign_state in broker.campaigns():
                if campaign_state.state == "paused":
                    broker.change_campaign(campaign_state.campaign, "resume")
        ball.selections.resume("TRUE")

    def save_leases(self, ball: Timeball) -> None:
        """Send some messages. Their commit comes after that of the leases, which are saved within `save_ms`."""
        life = self.leases.life
        threading.Event().wait(2 * self.leases.save_ms / 1_000)
        for one in self.ask(HELD_TOPIC, [None] * 6):
            ball.send(one.topic, one.body, message_id=one.key, retry=True)
            one.acked = True
        self.leases.save(life)

    def _lease_faults(self, ball: Timeball) -> list[Fault]:
        """Compare the leases and acknowledgements with the messages that are received now."""
        sent = self.observed.sent
        before = {one.body.decode() for one in sent.values() if one.topic == HELD_TOPIC and one.acked}
        after: Counter[str] = Counter()
        while messages := ball.pull(HELD_TOPIC, HOLDERS, max_messages=1_000, wait="0s", lease="12h"):
            after.update(message.body.decode() for message in messages)
        self.save_leases(ball)
        return [Fault("lease", text) for text in self.leases.known.faults(before, after, held(ball))]


def is_without_disk(error: Exception) -> bool:
    """Check whether this is a broker's error for a failed disk."""
    return isinstance(error, TimeballError) and error.code in FAILED_DISK


def accept(sent: list[Sent]) -> None:
    """Record that these messages were acknowledged."""
    for one in sent:
        one.acked = True


def judge(siege: Siege, keys: list[str], verdict: str) -> None:
    """Record this answer to a cancel of each of these messages."""
    for key in keys:
        siege.observed.verdicts.setdefault(key, []).append(verdict)
