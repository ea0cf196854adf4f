"""Kills of the broker or of a client: no send and no receipt is lost, and leased messages are delivered again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from tests.interop.drivers import BOUND_S, ClientError, driving
from tests.interop.grpc_conversation import WITH_GO, GrpcConversation, came_early
from tests.interop.stock_broker import stock_broker
from tests.interop.stock_clients import command

from timeball.model.message import Kind

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("grpc_restart")]  # one set of brokers and clients

MESSAGES = 10
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[None]]]:
    """Start all scenarios, each with its own broker. They run at once, because they mostly wait for processes.

    The keys are the killed process and the client.
    """
    scenarios = {"broker": kill_the_broker, "client": kill_the_client}
    with ThreadPoolExecutor(len(scenarios) * len(WITH_GO)) as pool:
        yield {
            (killed, which): pool.submit(scenario, which, tmp_path_factory.mktemp(f"{which}-{killed}"))
            for killed, scenario in scenarios.items()
            for which in WITH_GO
        }


@pytest.mark.parametrize("which", WITH_GO)
@pytest.mark.parametrize("killed", ["broker", "client"])
def test_no_message_or_receipt_is_lost_after_a_kill(
    killed: str, which: str, outcomes: dict[tuple[str, str], Future[None]]
) -> None:
    outcomes[killed, which].result()


def kill_the_broker(which: str, folder: Path) -> None:
    """Kill and restart the broker. All sent messages must be delivered, and all receipts must remain in effect."""
    # With 0, each receipt is on disk before its answer. With the default, those of the last 50 ms may be lost.
    with stock_broker(folder / "data", "--ack-save-ms", "0") as broker:
        with driving(command(which), broker.grpc, folder / "home") as client:
            talk = GrpcConversation(which, client, broker, "restarted", queues=2)
            push, simple = talk.listen(group="push"), talk.simple()
            due_ms = talk.due_ms(4_000)
            sent = {f"now {n}" for n in range(MESSAGES)} | {f"delayed {n}" for n in range(MESSAGES)}
            for body in sorted(sent):
                talk.send(body, **({"due_ms": due_ms} if body.startswith("delayed") else {}))
            leased = {m["body"]: m for m in talk.receive(simple, {f"now {n}" for n in range(MESSAGES)})}
            talk.ack(simple, leased["now 0"])
            talk.change(simple, leased["now 1"], 6)
            broker.kill()
            broker.start()
            sent |= {f"after {n}" for n in range(MESSAGES)}
            for n in range(MESSAGES):
                repeat_until_connected(lambda n=n: talk.send(f"after {n}"))
            # A receipt handle from before the kill is valid, and a leased message is delivered after its own time.
            repeat_until_connected(lambda: talk.ack(simple, leased["now 2"]))
            expected = sent - set(leased) | {"now 1"}
            received = repeat_until_connected(lambda: talk.receive(simple, expected))
            assert sorted(m["body"] for m in received) == sorted(expected)
            attempts = {m["body"]: m["attempt"] for m in received}
            assert attempts == {body: 2 if body == "now 1" else 1 for body in expected}
            client.wait_until(
                lambda: consumed_bodies(talk, push) >= sent,
                lambda: f"lost: {sent - consumed_bodies(talk, push)}",
            )
            assert not any(talk.is_early(f"delayed {n}", due_ms) for n in range(MESSAGES))


def kill_the_client(which: str, folder: Path) -> None:
    """Kill a push consumer. Its message must be delivered again when its session ends, before its lease would end."""
    with (
        stock_broker(folder / "data") as broker,
        driving(command(which), broker.grpc, folder / "home") as client,
    ):
        talk = GrpcConversation(which, client, broker, "given-back", group={"retry_ms": [1_000]})
        with driving(command(which), broker.grpc, folder / "killed") as killed:
            killed.call("push", name="killed", hold=True, topic=talk.topic, group=talk.group)
            talk.send("held")
            [first] = killed.wait_deliveries("killed", 1)
        [second] = client.wait_deliveries(talk.listen(), 1)
        assert (first["attempt"], second["attempt"], second["body"]) == (1, 2, "held")
        [row] = talk.returned()
        assert not came_early(row)
        with broker.client() as ball:
            log = ball.status()["log"]
            rows = ball.read_log(log["first_seq"], log["durable_seq"]).read_all().to_pylist()
        given_back = [r["seq"] for r in rows if r["kind"] == Kind.SCHEDULED and r["topic"] == row["topic"]]
        assert len(given_back) == 1, (
            "the message waited once for a retry: it was given back at the end of the session"
        )


def consumed_bodies(talk: GrpcConversation, push: str) -> set[str]:
    """Return the bodies of the messages that a push consumer has consumed."""
    return {message["body"] for message in talk.client.deliveries(push, done=True)}


def repeat_until_connected(call: Callable[[], Result]) -> Result:
    """Make a call, and repeat it while it fails. The client reconnects some time after the restart of the broker."""
    end_s = time.monotonic() + BOUND_S
    while True:
        try:
            return call()
        except ClientError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.1)
