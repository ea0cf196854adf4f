"""Benchmarks: what Timeball costs on this machine, against the bars of the design.

Each module has `run(small) -> Report` and says in its docstring what it does not measure. All of them start
the real server as a process of its own, in a temporary folder, and load it over a socket from this process, so
that the two share the machine as they would on a single node. `small=True` only shows that they still run.
"""

NAMES = [
    "append",
    "remoting",
    "pop",
    "grpc",
    "flight",
    "http",
    "beside",
    "punctual",
    "burst",
    "memory",
    "schedules",
    "restart",
    "keys",
    "compact",
    "pipeline",
    "up",
    "designs",
    "cluster",
    "add_replica",
    "kafka",
    "soak",
]
