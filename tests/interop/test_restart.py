"""Kill -9 of the broker: the clients find it again, and no acknowledged message is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.interop.conversation import ALI_ONS, CPP, JAVA4, JAVA5, Conversation, is_early
from tests.interop.drivers import ClientError, driving
from tests.interop.stock_broker import stock_broker
from tests.interop.stock_clients import command

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("restart")]  # one set of brokers and clients

CLIENTS = [CPP, ALI_ONS, JAVA4, JAVA5]
MESSAGES = 10


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """All clients at once, each with its own broker: most of the time they wait for a killed process."""
    with ThreadPoolExecutor() as pool:
        yield {
            which: pool.submit(nothing_is_lost, which, tmp_path_factory.mktemp(which)) for which in CLIENTS
        }


@pytest.mark.parametrize("which", CLIENTS)
def test_nothing_is_lost(which: str, outcomes: dict[str, Future[None]]) -> None:
    outcomes[which].result()


def nothing_is_lost(which: str, folder: Path) -> None:
    with stock_broker(folder / "data") as broker:
        with driving(command(which), broker.name_server, folder / "home") as client:
            talk = Conversation(client, broker, "restarted", queues=2)
            consumer = talk.listen(fail=1)
            kinds = {"now": {}, "level": {"level": 5}, "timer": timer(which, broker.now_ms() + 5_000)}
            sent = {
                f"{kind} {n}": talk.send(f"{kind} {n}", **how)
                for kind, how in kinds.items()
                for n in range(MESSAGES)
            }
            client.wait_deliveries(consumer, MESSAGES, done=False)
            broker.kill()
            broker.start()
            sent |= {f"after {n}": send_again(talk, f"after {n}") for n in range(MESSAGES)}

            def consumed() -> set[str]:
                return {message["body"] for message in client.deliveries(consumer, done=True)}

            def lost() -> str:
                tries = Counter(message["body"] for message in client.deliveries(consumer))
                return (
                    f"lost: {', '.join(f'{body} ({tries[body]} tries)' for body in set(sent) - consumed())}"
                )

            client.wait_until(lambda: consumed() >= set(sent), lost)
            for message in client.deliveries(consumer):
                if message["body"].startswith("level") and not message["reconsume_times"]:
                    assert not is_early(message, message["born_ms"] + 5_000)


def timer(which: str, due_ms: int) -> dict[str, object]:
    return {"timer": "__STARTDELIVERTIME" if which == ALI_ONS else "TIMER_DELIVER_MS", "timer_value": due_ms}


def send_again(talk: Conversation, body: str) -> object:
    """As an application would: once more when the connection was gone."""
    for _ in range(20):
        try:
            return talk.send(body)
        except ClientError:
            continue
    return talk.send(body)
