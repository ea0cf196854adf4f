"""kombu's transport and Celery's worker against a broker whose clock the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import ChannelError
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.client.celery import Control, transport
from timeball.model.errors import InvalidDelay, InvalidMessage, RequestError, Unavailable
from timeball.testing import TestBroker

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:celery"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning:celery"),
]
WAIT_S = 30.0


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    """A broker for each test, because some tests advance its clock by years."""
    with TestBroker() as running:
        yield running


@pytest.fixture
def host(request: pytest.FixtureRequest) -> str:
    """A virtual host for each test, by its name. It is the prefix of the topics of the test."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:60]


@pytest.fixture
def connection(broker: TestBroker, host: str) -> Iterator[Connection]:
    with Connection(f"{broker.endpoint.replace('http', 'timeball', 1)}/{host}") as connection:
        yield connection


@contextmanager
def consume(connection: Connection, *queues: Queue, prefetch: int = 0, **options: Any) -> Iterator[list[Any]]:
    """Consume on a new channel. Yields the list of received messages, to which `drain` adds."""
    received: list[Any] = []
    channel = connection.channel()
    with Consumer(
        channel, list(queues), on_message=received.append, prefetch_count=prefetch or None, **options
    ):
        yield received
    channel.close()


def drain(connection: Connection, received: list[Any], count: int) -> list[Any]:
    """Receive until the list `received` of `consume` has `count` messages. Returns the list."""
    while len(received) < count:
        connection.drain_events(timeout=WAIT_S)
    return received


def assert_no_message(connection: Connection) -> None:
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)


TASKS = Queue("tasks", Exchange("tasks"), routing_key="tasks")


def send(connection: Connection, *bodies: Any, queue: Queue = TASKS, **options: Any) -> None:
    """Declare the queue, and publish each body to it."""
    producer = Producer(connection)
    for body in bodies:
        producer.publish(
            body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **options
        )


# ---- queues ---------------------------------------------------------------------------------------------------


def test_an_acknowledged_message_is_received_once(connection: Connection) -> None:
    send(connection, {"a": 1}, b"\x00\xff".hex())
    with consume(connection, TASKS) as received:
        first, second = drain(connection, received, 2)
        assert sorted([str(first.decode()), str(second.decode())]) == ["00ff", "{'a': 1}"]
        first.ack()
        second.ack()
        assert_no_message(connection)
    eventually(
        lambda: connection.default_channel.queue_declare("tasks", passive=True)[1] == 0, "acknowledged"
    )


def test_a_closed_channel_gives_its_messages_back_without_an_attempt(connection: Connection) -> None:
    send(connection, "a")
    with consume(connection, TASKS) as received:
        drain(connection, received, 1)
    with consume(connection, TASKS) as received:
        (redelivered,) = drain(connection, received, 1)
        assert not redelivered.delivery_info.get("redelivered"), "no attempt was counted"
        redelivered.ack()


def test_a_rejected_message_is_redelivered_with_requeue_and_else_a_dead_letter(
    connection: Connection, broker: TestBroker, host: str
) -> None:
    send(connection, "a")
    with consume(connection, TASKS) as received:
        drain(connection, received, 1)[0].reject(requeue=True)
        redelivered = drain(connection, received, 2)[1]
        assert redelivered.delivery_info["redelivered"] and redelivered.decode() == "a"
        redelivered.reject()
        assert_no_message(connection)
    (dead,) = broker.client().dead_letters(f"{host}-tasks").dead_letters
    assert dead.topic == f"{host}-tasks"


def test_the_delay_doubles_with_each_requeue_after_the_first(
    connection: Connection, broker: TestBroker, host: str
) -> None:
    ball = broker.client()
    send(connection, "a", timeball_id="one")

    def remaining_delay_s() -> float | None:
        """How long the broker holds the message back. None while it is leased."""
        (place,) = ball.get("one").groups
        return ((place.until_ms or 0) - broker.clock.now_ms) / 1_000 if place.state == "waiting" else None

    with consume(connection, TASKS) as received:
        drain(connection, received, 1)[0].reject(requeue=True)
        # The first requeue has no delay. After it, the n-th delivery is requeued with this delay.
        for count, delay_s in ((2, 1), (3, 2), (4, 4)):
            drain(connection, received, count)[-1].reject(requeue=True)
            eventually(lambda: remaining_delay_s() is not None, "the broker has the reject")
            assert remaining_delay_s() == delay_s
            broker.clock.advance(f"{delay_s}s")
        drain(connection, received, 5)[-1].ack()
        assert_no_message(connection)


def test_a_channel_gets_at_most_its_prefetch_count_of_messages(connection: Connection) -> None:
    send(connection, *"abcd")
    with consume(connection, TASKS, prefetch=2) as received:
        drain(connection, received, 2)
        assert_no_message(connection)
        received[0].ack()
        drain(connection, received, 3)
        assert_no_message(connection)
        for message in received[1:]:
            message.ack()
        drain(connection, received, 4)[3].ack()


def test_a_message_that_waits_at_the_prefetch_limit_goes_to_another_consumer(connection: Connection) -> None:
    """Two queues share a prefetch count of 1. While a message of one is processed, one of the other must wait."""
    other = Queue("other", Exchange("other"), routing_key="other")
    with connection.clone() as free_connection, consume(connection, TASKS, other, prefetch=1) as received:
        send(connection, "a")
        (running,) = drain(connection, received, 1)
        send(connection, "b", queue=other)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=2.5)  # longer than FULL_S, after which "b" is given back
        with consume(free_connection, other) as received_by_free:
            assert drain(free_connection, received_by_free, 1)[0].decode() == "b"
            received_by_free[0].ack()
        running.ack()
        send(connection, "c", queue=other)
        assert drain(connection, received, 2)[1].decode() == "c"
        received[1].ack()


def test_messages_of_a_consumer_with_no_ack_are_not_delivered_again(connection: Connection) -> None:
    send(connection, "a", "b")
    with consume(connection, TASKS, no_ack=True) as received:
        drain(connection, received, 2)
    with consume(connection, TASKS, no_ack=True):
        assert_no_message(connection)


def test_get_returns_one_message_or_none(connection: Connection) -> None:
    queue = TASKS(connection)
    queue.declare()
    assert queue.get() is None
    send(connection, "a", "b")
    message = queue.get()
    assert message.decode() in ("a", "b")
    message.ack()
    assert queue.get(no_ack=True).decode() in ("a", "b")
    assert queue.get() is None


def test_a_purge_empties_a_queue_and_returns_its_length(connection: Connection) -> None:
    channel = connection.default_channel
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        channel.queue_declare("tasks", passive=True)
    send(connection, *range(5))
    assert channel.queue_declare("tasks", passive=True).message_count == 5
    assert TASKS(channel).purge() == 5
    assert channel.queue_declare("tasks", passive=True).message_count == 0
    assert TASKS(channel).purge() == 0
    with consume(connection, TASKS):
        assert_no_message(connection)


def test_a_priority_is_refused(connection: Connection) -> None:
    with pytest.raises(
        InvalidMessage, match=r"priority 3: .* leave it out, and send urgent tasks to a queue with"
    ):
        send(connection, "a", priority=3)


def test_a_message_of_another_program_becomes_a_dead_letter(
    connection: Connection, broker: TestBroker, host: str
) -> None:
    ball = broker.client()
    ball.send(f"{host}-tasks", "hello")
    with consume(connection, TASKS):
        assert_no_message(connection)
        eventually(lambda: ball.dead_letters(f"{host}-tasks").dead_letters, "a dead letter")


def test_a_persistent_message_for_an_unknown_queue_is_refused(connection: Connection) -> None:
    with pytest.raises(ChannelError, match="no queue is known"):
        Producer(connection).publish("a", exchange="nowhere", routing_key="tasks")


def test_a_publish_that_kombu_repeats_is_stored_once(connection: Connection) -> None:
    """kombu repeats a publish with the same properties if the connection broke."""
    channel, properties = connection.default_channel, {"delivery_info": {}, "delivery_mode": 2}
    TASKS(channel).declare()
    for _ in range(2):
        channel.basic_publish(channel.prepare_message("a", properties=properties), "tasks", "tasks")
    assert channel.queue_declare("tasks", passive=True).message_count == 1


# ---- exchanges ------------------------------------------------------------------------------------------------


def temporary(name: str, exchange: Exchange, routing_key: str = "") -> Queue:
    """A queue that ends with its connection."""
    return Queue(name, exchange, routing_key=routing_key, auto_delete=True, durable=False)


def test_a_fanout_exchange_reaches_each_temporary_queue(connection: Connection) -> None:
    exchange = Exchange("news", type="fanout")
    one, two = temporary("one", exchange), temporary("two", exchange)
    with (
        connection.clone() as other,
        consume(connection, one, no_ack=True) as first,
        consume(other, two, no_ack=True) as second,
    ):
        Producer(connection).publish("a", exchange=exchange, declare=[exchange])
        assert drain(connection, first, 1)[0].decode() == "a"
        assert drain(other, second, 1)[0].decode() == "a"
        assert_no_message(connection)


def test_each_durable_queue_of_a_fanout_exchange_gets_the_message(connection: Connection) -> None:
    exchange = Exchange("orders", type="fanout")
    billing, mail = Queue("billing", exchange), Queue("mail", exchange)
    with consume(connection, billing, mail) as received:
        Producer(connection).publish("a", exchange=exchange, declare=[exchange])
        for message in drain(connection, received, 2):
            message.ack()
        assert_no_message(connection)


def test_a_queue_of_a_topic_exchange_gets_the_messages_that_match_its_pattern(connection: Connection) -> None:
    exchange = Exchange("events", type="topic")
    producer = Producer(connection)
    with consume(connection, temporary("some", exchange, "task.#"), no_ack=True) as received:
        for key in ("worker.online", "task.sent", "task.multi.x"):
            producer.publish(key, exchange=exchange, routing_key=key, declare=[exchange], delivery_mode=1)
        assert [message.decode() for message in drain(connection, received, 2)] == [
            "task.sent",
            "task.multi.x",
        ]
        assert_no_message(connection)


def test_a_reply_that_comes_before_its_queue_is_consumed_is_received(connection: Connection) -> None:
    exchange = Exchange("replies", type="direct", durable=False, delivery_mode="transient")
    queue = temporary("mine", exchange, "mine")
    queue(connection.default_channel).declare()
    with connection.clone() as other:
        for key in ("another", "mine"):
            Producer(other).publish(key, exchange=exchange, routing_key=key)
    with consume(connection, queue, no_ack=True) as received:
        assert drain(connection, received, 1)[0].decode() == "mine"
        assert_no_message(connection)
    connection.default_channel.after_reply_message_received("mine")


# ---- outages --------------------------------------------------------------------------------------------------


def test_consumers_continue_after_a_restart_of_the_broker(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        exchange = Exchange("news", type="fanout")
        with (
            Connection(node.http_endpoint.replace("http", "timeball", 1)) as connection,
            consume(connection, TASKS) as received,
            consume(connection, temporary("one", exchange), no_ack=True) as news,
        ):
            send(connection, "before")
            (running,) = drain(connection, received, 1)
            node.stop()
            node.start()
            running.ack()  # the lease outlives the restart
            send(connection, "after")
            Producer(connection).publish("published", exchange=exchange, declare=[exchange])
            while not (len(received) == 2 and news):
                connection.drain_events(timeout=WAIT_S)
            assert (received[1].decode(), news[0].decode()) == ("after", "published")
            received[1].ack()
            channel = connection.default_channel
            eventually(
                lambda: channel.queue_declare("tasks", passive=True).message_count == 0, "acknowledged"
            )


@contextmanager
def outage(tmp_path: Path) -> Iterator[tuple[RunningNode, Connection]]:
    """A node that the test stops and starts, and a connection whose calls have a time limit of 1 s."""
    with running_node(tmp_path / "data") as node:
        url = node.http_endpoint.replace("http", "timeball", 1)
        with Connection(url, transport_options={"timeout_ms": 1_000}) as connection:
            yield node, connection


def test_a_prefetch_count_that_changes_during_an_outage_counts_afterwards(tmp_path: Path) -> None:
    with outage(tmp_path) as (node, connection):
        channel, received = connection.channel(), list[Any]()
        with Consumer(channel, [TASKS], on_message=received.append, prefetch_count=1) as consumer:
            node.stop()
            consumer.qos(prefetch_count=2)
            node.start()
            send(connection, "a", "b")
            assert len(drain(connection, received, 2)) == 2


def test_a_consumer_whose_first_attempt_failed_receives_after_the_outage(tmp_path: Path) -> None:
    """kombu takes the consumer for a running one after the error, and does not call the transport again."""
    with outage(tmp_path) as (node, connection):
        channel, received = connection.channel(), list[Any]()
        consumer = Consumer(channel, [TASKS], on_message=received.append)
        node.stop()
        with pytest.raises(Unavailable):
            consumer.consume()
        node.start()
        send(connection, "a")
        assert drain(connection, received, 1)[0].decode() == "a"


def test_a_queue_paused_at_its_prefetch_limit_continues_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message that is processed is acknowledged while the broker is away, so the limit is no longer reached."""
    monkeypatch.setattr(transport, "FULL_S", 0.01)
    other = Queue("other", Exchange("other"), routing_key="other")

    def drain_once() -> None:
        """Let the transport work for a moment, in which no message need arrive."""
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.02)

    with (
        outage(tmp_path) as (node, connection),
        connection.clone() as free,
        consume(connection, TASKS, other, prefetch=1) as received,
    ):
        send(connection, "a")
        (running,) = drain(connection, received, 1)
        send(connection, "b", queue=other)
        other_queue = other(free)
        while (message := other_queue.get()) is None:  # until "b" is given back
            drain_once()
        message.ack()
        node.stop()
        running.ack()
        drain_once()  # notices that the limit is no longer reached
        node.start()
        send(connection, "c", queue=other)
        assert drain(connection, received, 2)[1].decode() == "c"
        channel = connection.default_channel
        eventually(lambda: channel.queue_declare("tasks", passive=True).message_count == 0, "acknowledged")


# ---- Celery ---------------------------------------------------------------------------------------------------


class Shop:
    """An application with two tasks, and the orders with which `close` has run."""

    def __init__(self, url: str) -> None:
        self.ran: list[str] = []
        self.app = Celery("shop", broker=url, control=Control, set_as_current=False)
        self.app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

        @self.app.task(shared=False, name="shop.close", bind=True, acks_late=True)
        def close(task: Any, order: str) -> None:
            assert task.request.eta is None
            self.ran.append(order)

        @self.app.task(shared=False, name="shop.refuse", acks_late=True)
        def refuse() -> None:
            raise Reject("no", requeue=False)

        self.close, self.refuse = close, refuse

    @contextmanager
    def worker(self, **options: Any) -> Iterator[Any]:
        """Run a worker of the application in a thread."""
        with start_worker(
            self.app, pool="solo", perform_ping_check=False, loglevel="WARNING", **options
        ) as started:
            yield started


@pytest.fixture
def shop(broker: TestBroker, host: str) -> Shop:
    return Shop(f"{broker.endpoint.replace('http', 'timeball', 1)}/{host}")


@pytest.mark.parametrize("days", [1 / 12, 3_652], ids=["2 h", "10 years"])
def test_a_task_with_an_eta_is_pending_at_the_broker_until_its_eta(
    broker: TestBroker, host: str, shop: Shop, days: float
) -> None:
    eta = broker.clock.now + timedelta(days=days)
    with shop.worker():
        result = shop.close.apply_async(["17"], eta=eta)
        pending = broker.assert_scheduled(f"{host}-celery", key=result.id)
        assert pending.due >= eta and pending.due - eta < timedelta(milliseconds=1)
        assert pending.tag == "shop.close"
        broker.clock.advance_to(eta - timedelta(seconds=1))
        shop.close.delay("now")
        eventually(lambda: shop.ran == ["now"], "the task without an ETA")
        assert len(broker.clock.advance("2s")) == 1
        eventually(lambda: shop.ran == ["now", "17"], "the task")


def test_a_task_with_a_countdown_and_its_retry_are_pending_at_the_broker(
    broker: TestBroker, host: str, shop: Shop
) -> None:
    retries: list[int] = []  # the number of earlier attempts, at each attempt

    @shop.app.task(
        shared=False, name="shop.retry", bind=True, max_retries=2, default_retry_delay=14_400
    )  # the delay counts from now by the clock of the worker
    def retry(task: Any) -> None:
        retries.append(task.request.retries)
        if task.request.retries == 0:
            raise task.retry()

    with shop.worker():
        retry.apply_async(countdown=7_200)
        (pending,) = broker.pending(f"{host}-celery")
        assert pending.due - broker.clock.now > timedelta(hours=1, minutes=59)
        broker.clock.advance_to(pending.due)
        eventually(lambda: broker.pending(f"{host}-celery"), "a retry")
        assert retries == [0]
        broker.clock.advance_to(broker.pending(f"{host}-celery")[0].due)
        eventually(lambda: retries == [0, 1], "the second attempt")


def test_an_eta_beyond_the_limit_of_the_broker_is_refused(broker: TestBroker, shop: Shop) -> None:
    with pytest.raises(InvalidDelay):
        shop.close.apply_async(["17"], eta=broker.clock.now + timedelta(days=5_000))


def test_a_revoked_task_is_cancelled_at_the_broker(broker: TestBroker, host: str, shop: Shop) -> None:
    first, second = (shop.close.apply_async([order], countdown=3_600) for order in "ab")
    assert [verdict.verdict for verdict in shop.app.control.revoke(first.id)] == ["cancelled"]
    second.revoke()
    assert broker.pending(f"{host}-celery") == []
    verdicts = shop.app.control.revoke([first.id, "unknown"])
    assert [verdict.verdict for verdict in verdicts] == ["already_cancelled", "not_found"]


def test_a_task_that_raises_reject_is_a_dead_letter(broker: TestBroker, host: str, shop: Shop) -> None:
    with shop.worker():
        shop.refuse.delay()
        ball = broker.client()
        eventually(lambda: has_dead_letter(ball, f"{host}-celery"), "a dead letter")


def has_dead_letter(ball: Any, group: str) -> bool:
    """Whether the group exists and has a dead letter."""
    return any(state.group == group for state in ball.groups()) and bool(
        ball.dead_letters(group).dead_letters
    )


def test_a_worker_answers_to_remote_control(shop: Shop) -> None:
    with shop.worker() as worker:
        inspect = shop.app.control.inspect([worker.hostname], timeout=WAIT_S)
        assert list(inspect.ping()) == [worker.hostname]
        assert [queue["name"] for queue in inspect.active_queues()[worker.hostname]] == ["celery"]
        assert inspect.scheduled() == {worker.hostname: []}


def test_events_of_a_task_reach_a_receiver(shop: Shop) -> None:
    event_types: list[str] = []
    ready = threading.Event()
    with shop.worker(task_events=True), shop.app.connection_for_read() as connection:
        receiver = shop.app.events.Receiver(
            connection, handlers={"*": lambda event: event_types.append(event["type"])}
        )
        receiver.on_consume_ready = lambda *_, **__: ready.set()
        thread = threading.Thread(target=lambda: receiver.capture(limit=None, timeout=None, wakeup=False))
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            shop.close.delay("a")
            eventually(lambda: "task-succeeded" in event_types, "an event of the task")
        finally:
            receiver.should_stop = True
            thread.join(WAIT_S)


def test_results_arrive_over_rpc(shop: Shop) -> None:
    shop.app.conf.result_backend = "rpc://"

    @shop.app.task(shared=False, name="shop.add")
    def add(left: int, right: int) -> int:
        return left + right

    with shop.worker():
        results = [add.delay(number, 1) for number in range(3)]
        assert [result.get(timeout=WAIT_S) for result in results] == [1, 2, 3]


def test_chain_group_and_chord_with_etas_have_the_results_of_celery(
    broker: TestBroker, host: str, shop: Shop
) -> None:
    """The tasks with an ETA wait at the broker, and the results are those of Celery with any broker."""
    shop.app.conf.result_backend = "cache+memory://"

    @shop.app.task(shared=False, name="shop.add")
    def add(left: int, right: int) -> int:
        return left + right

    @shop.app.task(shared=False, name="shop.total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    topic, eta = f"{host}-celery", broker.clock.now + timedelta(hours=2)
    with shop.worker():
        chain_result = chain(add.s(1, 2), add.s(10).set(eta=eta))()
        eventually(
            lambda: len(broker.pending(topic)) == 1, "the second task of the chain, after the first one"
        )
        group_result = group(add.s(number, number) for number in range(3)).apply_async(eta=eta)
        chord_result = chord((add.s(number, 1).set(eta=eta) for number in range(3)), total.s())()
        assert len(broker.pending(topic)) == 7, "one of the chain, three of the group, three of the chord"
        assert {pending.due for pending in broker.pending(topic)} == {broker.pending(topic)[0].due}
        broker.clock.advance_to(eta + timedelta(seconds=1))
        assert chain_result.get(timeout=WAIT_S) == 13
        assert group_result.get(timeout=WAIT_S) == [0, 2, 4]
        assert chord_result.get(timeout=WAIT_S) == 6


# ---- connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "endpoint"),
    [
        ("timeball://", {}, "http://127.0.0.1:7480"),
        ("timeball://broker:7000/shop", {}, "http://broker:7000"),
        ("timeball://a:7480;timeball://b:7481", {}, "http://a:7480,b:7481"),
        ("timeball://[::1]:7480", {}, "http://[::1]:7480"),
        ("timeball://broker", {"ssl": True}, "https://broker:7480"),
    ],
)
def test_a_url_of_kombu_becomes_the_endpoint_of_all_nodes(
    url: str, options: dict[str, Any], endpoint: str
) -> None:
    connection = Connection(url, **options)
    assert connection.transport.link.calls._endpoints == tuple(
        f"{endpoint.partition('://')[0]}://{address}" for address in endpoint.partition("://")[2].split(",")
    )


def test_a_missing_file_of_certificates_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "roots.pem"
    with pytest.raises(RequestError, match=f"ca_certs={path}"):
        Connection("timeball://broker", ssl={"ca_certs": str(path)}).transport  # noqa: B018 - the property raises
