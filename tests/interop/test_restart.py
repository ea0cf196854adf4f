"""A kill of the broker: the remoting clients reconnect, and no acknowledged message is lost."""

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
    """Start the scenario for all clients, each with its own broker. They run at once, because they mostly wait."""
    with ThreadPoolExecutor() as pool:
        yield {
            which: pool.submit(kill_the_broker, which, tmp_path_factory.mktemp(which)) for which in CLIENTS
        }


@pytest.mark.parametrize("which", CLIENTS)
def test_no_acknowledged_message_is_lost_after_a_kill(which: str, outcomes: dict[str, Future[None]]) -> None:
    outcomes[which].result()


def kill_the_broker(which: str, folder: Path) -> None:
    """Send messages, kill and restart the broker, and send more. All of them must be consumed, none too early."""
    with stock_broker(folder / "data") as broker:
        with driving(command(which), broker.name_server, folder / "home") as client:
            talk = Conversation(client, broker, "restarted", queues=2)
            consumer = talk.listen(fail=1)
            kinds = {"now": {}, "level": {"level": 5}, "timer": timer(which, broker.now_ms() + 5_000)}
            sent = {
                f"{kind} {n}": talk.send(f"{kind} {n}", **options)
                for kind, options in kinds.items()
                for n in range(MESSAGES)
            }
            client.wait_deliveries(consumer, MESSAGES, done=False)
            broker.kill()
            broker.start()
            sent |= {f"after {n}": send_until_connected(talk, f"after {n}") for n in range(MESSAGES)}

            def consumed() -> set[str]:
                return {message["body"] for message in client.deliveries(consumer, done=True)}

            def lost() -> str:
                counts = Counter(message["body"] for message in client.deliveries(consumer))
                missing = set(sent) - consumed()
                return f"lost: {', '.join(f'{body} ({counts[body]} deliveries)' for body in missing)}"

            client.wait_until(lambda: consumed() >= set(sent), lost)
            for message in client.deliveries(consumer):
                if message["body"].startswith("level") and not message["reconsume_times"]:
                    assert not is_early(message, message["born_ms"] + 5_000)


def timer(which: str, due_ms: int) -> dict[str, object]:
    """Return the options of a send with a due time, by the property that the client has for it."""
    return {"timer": "__STARTDELIVERTIME" if which == ALI_ONS else "TIMER_DELIVER_MS", "timer_value": due_ms}


def send_until_connected(talk: Conversation, body: str) -> object:
    """Send a message, and repeat the send if it fails. The client reconnects after the restart of the broker."""
    for _ in range(20):
        try:
            return talk.send(body)
        except ClientError:
            continue
    return talk.send(body)
