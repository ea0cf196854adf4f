"""Actors for the tests of the broker whose workers are processes: `dramatiq tests.client.dramatiq_actors`."""

import os

import dramatiq

from timeball import Timeball
from timeball.client.dramatiq import TimeballBroker

broker = TimeballBroker(Timeball(os.environ["SHOP_ENDPOINT"]), lease="2s")
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="forwarding")
def forward(topic: str, word: str) -> None:
    """Send a message to a topic at which the test looks."""
    broker.ball.send(topic, word)
