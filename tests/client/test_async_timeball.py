"""AsyncTimeball: the calls of Timeball, awaited. The loop never blocks, and a cancelled call gives its leases back."""

import asyncio
import gc
import inspect
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode

from timeball import AsyncMessage, AsyncTimeball, Message, NotFound, RequestError, Timeball, Unavailable
from timeball.client.async_timeball import CALLS_MAX, AsyncSchedules, AsyncSelections
from timeball.client.http_calls import KEPT_MAX
from timeball.client.loop_network import LoopStream
from timeball.client.schedules import Schedules
from timeball.client.selections import Selections


def run(node: RunningNode, scenario: Callable[[AsyncTimeball], Awaitable[None]]) -> None:
    """Run the scenario with a client over HTTP and Flight, in an event loop of its own, within BOUND_S."""

    async def run_scenario() -> None:
        async with AsyncTimeball(node.http_endpoint, flight=node.endpoint) as ball, asyncio.timeout(BOUND_S):
            await scenario(ball)

    asyncio.run(run_scenario())


def public_attributes(kind: type) -> dict[str, object]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


def parameters(attribute: object) -> list[tuple[str, object]]:
    """Each parameter of a callable as its name and default."""
    return [
        (parameter.name, parameter.default) for parameter in inspect.signature(attribute).parameters.values()
    ]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [
        (Timeball, AsyncTimeball), (Message, AsyncMessage), (Schedules, AsyncSchedules),
        (Selections, AsyncSelections),
    ],
)  # fmt: skip
def test_the_asynchronous_classes_have_the_same_methods_and_parameters(blocking: type, awaited: type) -> None:
    assert public_attributes(blocking).keys() == public_attributes(awaited).keys()
    for name, attribute in public_attributes(awaited).items():
        if not callable(attribute) or getattr(attribute, "__qualname__", "").startswith("Leased."):
            continue
        assert parameters(attribute) == parameters(public_attributes(blocking)[name]), name
        # A method of Leased works without waiting for the loop, so it is the same in both classes.
        asynchronous = inspect.iscoroutinefunction(attribute) or inspect.isasyncgenfunction(attribute)
        assert asynchronous, f"{name} would block the loop"
        assert attribute.__doc__, name


def test_messages_are_sent_pulled_answered_and_cancelled(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        receipt = await ball.send("async", "one", after="10ms", tag="paid")
        (message,) = await ball.pull("async", "g")
        assert (message.body, message.id, message.tag) == (b"one", receipt.id, "paid")
        assert await message.extend("1m") and await message.nack(after="10ms")
        (redelivered,) = await ball.pull("async", "g")
        assert redelivered.attempts == 1 and await redelivered.ack() and not await redelivered.ack()
        assert (await ball.get(receipt.id)).state == "visible"
        later = await ball.send("async", "two", after="1h", keys="k")
        assert (await ball.cancel(later.id)).verdict == "cancelled"
        with pytest.raises(NotFound):
            await ball.get("of nobody")

    run(node, scenario)


def test_columns_are_sent_and_read_over_flight(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        summary = await ball.send_many([{"body": f"{i}"} for i in range(5)], topic="async-columns")
        batch = await ball.browse_batch("async-columns", "columns")
        assert batch.num_rows >= 1
        batches = [batch async for batch in ball.read_log(summary.ranges[0][0], summary.ranges[0][0] + 5)]
        assert sum(batch.num_rows for batch in batches) == 5
        assert len(await ball.browse("async-columns")) == 5

    run(node, scenario)


def test_sends_are_answered_while_long_polls_wait(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.create_topic("at-once", 1)
        polls = [asyncio.create_task(ball.pull("at-once", f"g{i}", wait="60s")) for i in range(10)]
        receipts = await asyncio.gather(*(ball.send("at-once", f"{i}", after="1h") for i in range(100)))
        assert len({receipt.seq for receipt in receipts}) == 100
        await ball.send("at-once", "for all")
        assert [len(messages) for messages in await asyncio.gather(*polls)] == [1] * 10

    run(node, scenario)


def test_a_cancelled_pull_leases_no_message(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.create_topic("cancelled-pull", 1)
        for number in range(20):
            poll = asyncio.create_task(ball.pull("cancelled-pull", "g", wait="60s", lease="10m"))
            await asyncio.sleep(0.001 * number)  # before the pull has begun, or at any later step of it
            poll.cancel()
            with pytest.raises(asyncio.CancelledError):
                await poll
        await ball.send("cancelled-pull", "x")
        (message,) = await ball.pull("cancelled-pull", "g", wait="60s")
        assert (message.attempts, await message.ack()) == (0, True)

    run(node, scenario)


@pytest.mark.parametrize("call", ["pull", "consume"])
@pytest.mark.parametrize("repeatedly", [False, True])
def test_messages_that_arrive_when_their_receive_is_cancelled_are_given_back(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, call: str, repeatedly: bool
) -> None:
    """`repeatedly`: cancel as the scopes of anyio do, at each step of the loop until the task has ended."""
    topic = f"too-late-{call}-{repeatedly}"

    async def scenario(ball: AsyncTimeball) -> None:
        receive, loop = LoopStream.data_received, asyncio.get_running_loop()

        async def consume() -> None:
            async with aclosing(ball.consume(topic, "g", lease="10m")) as messages:
                async for _ in messages:
                    raise AssertionError("the loop is cancelled before it gets a message")

        def cancel() -> None:
            receiving.cancel()
            if repeatedly and not receiving.done():
                loop.call_soon(cancel)

        def receive_and_cancel(stream: LoopStream, data: bytes) -> None:
            receive(stream, data)
            if b'"receipt"' in data and not receiving.cancelling():  # the answer has a message
                cancel()

        await ball.send(topic, "x")
        monkeypatch.setattr(LoopStream, "data_received", receive_and_cancel)
        receiving = asyncio.create_task(ball.pull(topic, "g", lease="10m") if call == "pull" else consume())
        with pytest.raises(asyncio.CancelledError):
            await receiving
        monkeypatch.undo()
        (message,) = await ball.pull(topic, "g", wait="60s")
        assert message.attempts == 0

    run(node, scenario)


def test_messages_of_an_answer_that_was_sent_before_the_cancel_are_given_back() -> None:
    """The node sends its whole answer before it learns of the cancellation, and closes the connection only later."""
    targets: list[str] = []

    async def main() -> None:
        has_asked, has_cancelled = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Hold the answer to the receive back until the client has cancelled."""
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            targets.append(head.split()[1].partition("?")[0])
            if targets[-1].endswith("/receive"):
                has_asked.set()
                await has_cancelled.wait()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(LEASED)}\r\n\r\n{LEASED}".encode())
            await has_closed.wait()
            writer.close()

        has_closed = asyncio.Event()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(BOUND_S):
            port = server.sockets[0].getsockname()[1]
            async with AsyncTimeball(f"http://127.0.0.1:{port}") as ball:
                poll = asyncio.create_task(ball.pull("t", "g"))
                await has_asked.wait()
                poll.cancel()
                await asyncio.sleep(0)
                has_cancelled.set()
                with pytest.raises(asyncio.CancelledError):
                    await poll
            has_closed.set()

    asyncio.run(main())
    assert targets == ["/v1/topics/t/receive", "/v1/topics/t/extend"]


LEASED = json.dumps(
    {
        "messages": [
            {
                "receipt": "r", "topic": "t", "attempt": 1, "seq": 1, "queue": 0, "offset": 0,
                "released": "2030-01-31T09:00:00Z", "body": "x",
            }
        ],
        "results": [{"receipt": "r", "valid": True}],
    }
)  # fmt: skip


def test_a_thousand_calls_at_once_use_no_thread_and_at_most_calls_max_connections(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.create_topic("thousand", 4)
        receipts = await asyncio.gather(*(ball.send("thousand", f"{number}") for number in range(1_000)))
        assert len({receipt.seq for receipt in receipts}) == 1_000
        assert asyncio.get_running_loop()._default_executor is None  # type: ignore[attr-defined]
        assert 1 < len(ball._calls._all) <= CALLS_MAX  # type: ignore[union-attr]

    run(node, scenario)


def test_after_many_long_polls_only_kept_max_connections_are_kept(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.create_topic("many-polls", 1)
        await asyncio.gather(*(ball.pull("many-polls", f"g{n}", wait="500ms") for n in range(KEPT_MAX + 40)))
        (kept,) = ball._calls._kept.values()  # type: ignore[union-attr]
        assert len(kept) == KEPT_MAX
        await asyncio.sleep(0)  # in this turn of the loop the other connections are closed
        assert sum(not stream.lost.done() for stream in ball._network._streams) == KEPT_MAX

    run(node, scenario)


def test_long_polls_do_not_count_against_calls_max(node: RunningNode) -> None:
    async def scenario() -> None:
        async with AsyncTimeball(node.http_endpoint, calls_max=1) as ball:
            await ball.create_topic("one-slot", 1)
            polls = [asyncio.create_task(ball.pull("one-slot", f"g{n}", wait="60s")) for n in range(3)]
            await asyncio.gather(*(ball.send("one-slot", f"{n}", after="1h") for n in range(5)))
            # The only slot is free, although three polls wait.
            await ball.send("one-slot", "now")
            assert [len(messages) for messages in await asyncio.gather(*polls)] == [1] * 3

    asyncio.run(scenario())


def test_a_client_is_usable_after_cancelled_sends(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        for number in range(50):
            sending = asyncio.create_task(ball.send("cancelled-send", "x" * 100_000))
            for _ in range(number % 10):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled() or sending.result().seq
        receipts = await asyncio.gather(*(ball.send("cancelled-send", f"{n}") for n in range(100)))
        assert len({receipt.seq for receipt in receipts}) == 100

    run(node, scenario)


def test_a_call_to_a_silent_node_can_be_cancelled(node: RunningNode) -> None:
    async def scenario() -> None:
        async with AsyncTimeball(f"http://127.0.0.1:{port}") as ball:
            for call in (ball.send("t", "x"), ball.pull("t", "g"), anext(ball.consume("t", "g"))):
                waiting = asyncio.ensure_future(call)
                accepted.append(await asyncio.to_thread(silent.accept))
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, accepted = silent.getsockname()[1], []
        asyncio.run(scenario())
    for connection, _ in accepted:
        connection.close()


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_a_client_can_be_used_in_a_later_event_loop_and_not_without_one(node: RunningNode) -> None:
    ball = AsyncTimeball(node.http_endpoint, calls_max=2)

    async def send(ball: AsyncTimeball) -> list[int]:
        receipts = await asyncio.gather(*(ball.send("later-loop", "x") for _ in range(10)))
        return [receipt.seq for receipt in receipts]

    seqs = [*asyncio.run(send(ball)), *asyncio.run(send(ball))]
    assert len(set(seqs)) == 20
    with pytest.raises(RequestError, match="no event loop"):
        ball.send("later-loop", "x").send(None)
    asyncio.run(ball.close())
    del ball
    gc.collect()  # warns of the transport of the first loop here, and not in another test


def test_a_loop_acknowledges_all_messages_and_ends_when_idle(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.send_many([{"body": f"{i}"} for i in range(300)], topic="looped")
        bodies = [
            message.body async for message in ball.consume("looped", "g", until_idle="100ms", max_messages=50)
        ]
        assert sorted(bodies) == sorted(b"%d" % i for i in range(300))
        assert sum((await ball.offsets("g", "looped")).values()) == 300
        assert await ball.pull("looped", "g", wait=0) == []

    run(node, scenario)


@pytest.mark.parametrize("how", ["cancelled", "closed", "client closed"])
def test_a_loop_that_is_left_gives_back_its_unprocessed_messages(node: RunningNode, how: str) -> None:
    """The message that was being processed comes back with an attempt, the eight after it without one."""
    topic = "left-" + how.replace(" ", "-")

    async def leave(ball: AsyncTimeball) -> None:
        """Leave the loop while its second message is processed."""
        messages = ball.consume(topic, "g", lease="10m")
        if how == "client closed":
            await anext(messages)
            await anext(messages)
            return  # `run` closes the client

        async def handle() -> None:
            async with aclosing(messages):
                await anext(messages)
                await anext(messages)
                if how == "cancelled":
                    await asyncio.Event().wait()

        handling = asyncio.create_task(handle())
        if how == "cancelled":
            for _ in range(200):  # until the task waits with its second message
                await asyncio.sleep(0.001)
            handling.cancel()
        await asyncio.wait([handling])

    with Timeball(node.http_endpoint) as observer:
        observer.create_topic(topic, 1)
        observer.send_many([{"body": f"{i}"} for i in range(10)], topic=topic)
        run(node, leave)
        unprocessed: list[Message] = []
        while len(unprocessed) < 9:
            unprocessed += observer.pull(topic, "g", wait="60s")
        assert {message.body: message.attempts for message in unprocessed} == {
            b"%d" % i: int(i == 1) for i in range(1, 10)
        }


def test_a_loop_that_waits_for_messages_can_be_cancelled(node: RunningNode) -> None:
    async def scenario(ball: AsyncTimeball) -> None:
        await ball.create_topic("waited", 1)

        async def handle() -> None:
            async for _ in ball.consume("waited", "g"):
                raise AssertionError("nothing was sent")

        handling = asyncio.create_task(handle())
        await asyncio.sleep(0.05)
        handling.cancel()
        await asyncio.wait([handling])
        assert handling.cancelled()
        await ball.send("waited", "x")
        (message,) = await ball.pull("waited", "g", wait="60s")
        assert message.attempts == 0

    run(node, scenario)


def test_a_pull_is_refused_if_its_client_is_closed_at_any_point(node: RunningNode) -> None:
    async def scenario(_: AsyncTimeball) -> None:
        for turns in range(12):  # the close comes after this many turns of the loop
            async with AsyncTimeball(node.http_endpoint) as ball:
                poll = asyncio.create_task(ball.pull("closed-meanwhile", "g", wait="60s"))
                for _turn in range(turns):
                    await asyncio.sleep(0)
            with pytest.raises(RequestError, match=r"cancelled|closed"):
                await poll

    run(node, scenario)


def test_a_close_cancels_the_pull_under_way_and_refuses_further_calls(node: RunningNode) -> None:
    async def scenario() -> None:
        ball = AsyncTimeball(node.http_endpoint, flight=node.endpoint)
        poll = asyncio.create_task(ball.pull("closed-client", "g", wait="60s"))
        await asyncio.sleep(0.05)
        await ball.close()
        with pytest.raises(RequestError, match="cancelled"):
            await poll
        with pytest.raises(RequestError, match="closed"):
            await ball.topics()

    asyncio.run(scenario())


def test_wrong_arguments_and_a_missing_broker_raise_the_errors_of_timeball(no_pauses: None) -> None:
    async def scenario() -> None:
        with pytest.raises(RequestError, match="calls_max"):
            AsyncTimeball(calls_max=0)
        async with AsyncTimeball("http://127.0.0.1:1") as ball:
            with pytest.raises(Unavailable):
                await ball.status()
            with pytest.raises(RequestError, match="one of"):
                await ball.pull("t", "g", tag="a", sql="b = 1")

    asyncio.run(scenario())
