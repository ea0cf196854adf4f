"""All paths of the HTTP edge, with the handler of each method."""

from __future__ import annotations

from typing import NamedTuple

from timeball.broker.service import Broker
from timeball.edges.http.handlers import receives
from timeball.edges.http.handlers.campaigns import Campaigns, Subscriptions
from timeball.edges.http.handlers.events import Events
from timeball.edges.http.handlers.groups import GroupQuestions, Groups
from timeball.edges.http.handlers.operators import Operators, Status
from timeball.edges.http.handlers.receives import Receives
from timeball.edges.http.handlers.scheduled import PendingMessages, Scheduled
from timeball.edges.http.handlers.sends import Sends
from timeball.edges.http.requests import Paths
from timeball.monitoring.metrics import Metrics


class Routes(NamedTuple):
    """Handlers by path and method. `open_paths` need no account.

    `former_methods`: by path and method that only older versions offered, the advice for the client.
    """

    paths: Paths
    open_paths: Paths
    former_methods: dict[str, dict[str, str]]


def collect_routes(broker: Broker, metrics: Metrics, status: Status) -> Routes:
    """Collect the handlers of all paths."""
    operators = Operators(broker, metrics, status)
    paths: Paths = {}
    handlers = (
        operators,
        Sends(broker),
        Receives(broker),
        Scheduled(broker),
        PendingMessages(broker),
        Events(broker),
        Campaigns(broker),
        Groups(broker),
        GroupQuestions(broker),
        Subscriptions(broker, metrics.push),
    )
    for handler in handlers:
        for path, methods in handler.paths.items():
            paths[path] = {**paths.get(path, {}), **methods}
    return Routes(paths, operators.open_paths, receives.FORMER_METHODS)
