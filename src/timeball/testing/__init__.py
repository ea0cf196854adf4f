"""Tests of applications that schedule messages: a real broker in the test's process, with a clock that the test moves.

    from timeball.testing import TestBroker

    with TestBroker() as broker:
        broker.client().send("orders", b"close 17", after="40d", keys="17")
        broker.assert_scheduled("orders", key="17", after="40d")
        assert [message.body for message in broker.clock.advance("40d")] == [b"close 17"]

It needs the extra `timeball[broker]`. pytest finds the fixtures of `timeball.testing.pytest_plugin` by itself.
"""

from timeball.model.errors import not_installed_text

try:
    from timeball.testing.broker import ReleasedMessage, ScheduledMessage, TestBroker, VirtualClock
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "timeball":
        raise  # a module of Timeball is missing, or Timeball has written the text
    raise ModuleNotFoundError(not_installed_text(error.name, "broker"), name=error.name) from error

__all__ = ["ReleasedMessage", "ScheduledMessage", "TestBroker", "VirtualClock"]
