"""The stock clients by name: the command that starts each, and the result of a test whose client is missing."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.interop import environments
from tests.interop.environments import Missing

COMMANDS: dict[str, Callable[[], list[str]]] = {
    "cpp": environments.cpp,
    "ali_ons": environments.ali_ons,
    "java4": lambda: environments.java("v4"),
    "java5": lambda: environments.java("v5"),
    "java5_5": environments.java_5_5,
    "java5_binary": lambda: environments.java("v5", "-Drocketmq.serialize.type=ROCKETMQ"),
    "mqadmin": environments.mqadmin,
    "grpc_python": environments.grpc_python,
    "grpc_node": environments.grpc_node,
    "grpc_java": environments.grpc_java,
    "grpc_go": environments.grpc_go,
    "kafka": environments.kafka,
    "versus": environments.versus,
    "pyright": environments.pyright,
}

_made: dict[str, list[str] | Missing] = {}  # the commands so far, or why there is none


def command(name: str) -> list[str]:
    """Return the command that starts a client. Its environment is built at the first call.

    If the client cannot be had, skip the test, or fail it if the environment has TIMEBALL_INTEROP=required.
    """
    if name not in _made:
        try:
            _made[name] = COMMANDS[name]()
        except Missing as why:
            _made[name] = why
    found = _made[name]
    if not isinstance(found, Missing):
        return found
    if os.environ.get("TIMEBALL_INTEROP") == "required":
        pytest.fail(f"{name} is required (TIMEBALL_INTEROP), and {found}", pytrace=False)
    pytest.skip(f"{name}: {found}")
