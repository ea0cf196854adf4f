"""Kill -9 of the broker or of a client: no send and no receipt is lost, and leased messages come again."""

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
    """All clients at once, each with its own broker: most of the time they wait for a killed process."""
    stories = {"broker": nothing_is_lost, "client": who_dies_gives_back}
    with ThreadPoolExecutor(len(stories) * len(WITH_GO)) as pool:
        yield {
            (dies, which): pool.submit(story, which, tmp_path_factory.mktemp(f"{which}-{dies}"))
            for dies, story in stories.items()
            for which in WITH_GO
        }


@pytest.mark.parametrize("which", WITH_GO)
@pytest.mark.parametrize("dies", ["broker", "client"])
def test_kill_9(dies: str, which: str, outcomes: dict[tuple[str, str], Future[None]]) -> None:
    outcomes[dies, which].result()


def nothing_is_lost(which: str, folder: Path) -> None:
    # Each answer is durable. With the default, those of the last 50 ms may be forgotten.
    with stock_broker(folder / "data", "--ack-save-ms", "0") as broker:
        with driving(command(which), broker.grpc, folder / "home") as client:
            talk = GrpcConversation(which, client, broker, "restarted", queues=2)
            push, asked = talk.listen(group="given"), talk.simple()
            due_ms = talk.due_ms(4_000)
            sent = {f"now {n}" for n in range(MESSAGES)} | {f"late {n}" for n in range(MESSAGES)}
            for body in sorted(sent):
                talk.send(body, **({"due_ms": due_ms} if body.startswith("late") else {}))
            handed_out = {m["body"]: m for m in talk.receive(asked, {f"now {n}" for n in range(MESSAGES)})}
            talk.ack(asked, handed_out["now 0"])
            talk.change(asked, handed_out["now 1"], 6)
            broker.kill()
            broker.start()
            sent |= {f"after {n}" for n in range(MESSAGES)}
            for n in range(MESSAGES):
                again(lambda n=n: talk.send(f"after {n}"))
            # A receipt from before is good, and what was not acknowledged comes when its own time is up, not sooner.
            again(lambda: talk.ack(asked, handed_out["now 2"]))
            wanted = sent - set(handed_out) | {"now 1"}
            found = again(lambda: talk.receive(asked, wanted))
            assert sorted(m["body"] for m in found) == sorted(wanted)
            attempts = {m["body"]: m["attempt"] for m in found}
            assert attempts == {body: 2 if body == "now 1" else 1 for body in wanted}
            client.wait_until(lambda: given(talk, push) >= sent, lambda: f"lost: {sent - given(talk, push)}")
            assert not any(talk.is_early(f"late {n}", due_ms) for n in range(MESSAGES))


def who_dies_gives_back(which: str, folder: Path) -> None:
    """A push consumer's messages come again when it is missed, and not only when their own time is over."""
    with (
        stock_broker(folder / "data") as broker,
        driving(command(which), broker.grpc, folder / "home") as client,
    ):
        talk = GrpcConversation(which, client, broker, "given-back", group={"retry_ms": [1_000]})
        with driving(command(which), broker.grpc, folder / "mortal") as mortal:
            mortal.call("push", name="mortal", hold=True, topic=talk.topic, group=talk.group)
            talk.send("held")
            [held] = mortal.wait_deliveries("mortal", 1)
        [again] = client.wait_deliveries(talk.listen(), 1)
        assert (held["attempt"], again["attempt"], again["body"]) == (1, 2, "held")
        [row] = talk.returned()
        assert not came_early(row)
        with broker.client() as ball:
            log = ball.status()["log"]
            rows = ball.read_log(log["first_seq"], log["durable_seq"]).read_all().to_pylist()
        given_back = [r["seq"] for r in rows if r["kind"] == Kind.SCHEDULED and r["topic"] == row["topic"]]
        assert len(given_back) == 1, (
            "it was given back once, for a second, and not when its own time was over"
        )


def given(talk: GrpcConversation, push: str) -> set[str]:
    return {message["body"] for message in talk.client.deliveries(push, done=True)}


def again(call: Callable[[], Result]) -> Result:
    """As an application would: once more when the connection was gone. gRPC itself waits before it dials again."""
    end_s = time.monotonic() + BOUND_S
    while True:
        try:
            return call()
        except ClientError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.1)
