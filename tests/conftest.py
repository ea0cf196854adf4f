"""Fixtures and settings of all tests. Keep it small: a fixture of one package belongs in that package's conftest.py."""

import gc
import os
import signal

import hypothesis
import pytest
from tests.controls import CONTROLS
from tests.examples import bound_examples
from tests.java_options import java_options

# The second import measures how long this process took to start, so it comes as early as possible.
pytest_plugins = ["tests.flaky", "tests.bounds", "tests.not_tested", "tests.sharing", "tests.rewriting"]

# In CI the examples are always the same, so that only a change can make a run fail. No deadline: machines are shared.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")
# `make test` loads this one; `make slow` runs each property again, with all its examples.
hypothesis.settings.register_profile("quick", hypothesis.settings.default, max_examples=8)

# Brokers that tests start listen for RocketMQ clients too, many at a time: on any free port unless a test names one.
os.environ.setdefault("TIMEBALL_NAME_SERVER_PORT", "0")
os.environ.setdefault("TIMEBALL_REMOTING_PORT", "0")
# Each also allocates its log, twice the size of a segment.
os.environ.setdefault("TIMEBALL_SEGMENT_BYTES", "16MiB")

os.environ.setdefault("SPARK_SUBMIT_OPTS", java_options())

COLLECT_EVERY = 100
TESTS_DONE = pytest.StashKey[list[int]]()

# A job in the background ignores Ctrl-C, and so would all processes that its tests start.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Freeze modules and tests, so that collections of cycles skip them: they stay until the end."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Collect cycles from time to time: a stopped broker's log keeps its disk space as long as a cycle refers to it."""
    done = item.session.stash.setdefault(TESTS_DONE, [0])
    done[0] += 1
    if done[0] % COLLECT_EVERY == 0:
        gc.collect()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for its groups, and pytest for markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the defaults of tests. One process has the Spark session, because a second one costs too much."""
    for item in items:
        if item.nodeid.partition("[")[0] in CONTROLS:
            item.add_marker("control")
        test = getattr(item, "function", None)
        if test is not None and hypothesis.is_hypothesis_test(test):
            item.add_marker("property")
            bound_examples(test, hypothesis.settings.get_current_profile_name())
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that finds no broker makes all attempts at once."""
    from timeball.client import attempts  # here: bounds.py measures how long this file takes to import

    monkeypatch.setattr(attempts, "RETRY_PAUSES_S", (0.0,) * len(attempts.RETRY_PAUSES_S))
