"""The application of test_celery.py, for workers and for the processes that send tasks.

Environment: SHOP_BROKER, the URL; SHOP_RUNS, a file with a line for the begin and the end of each run; SHOP_OPTIONS,
settings of Celery as JSON.
"""

from __future__ import annotations

import json
import os
import time

from celery import Celery

import timeball.client.celery

app = Celery("celery_shop", broker=os.environ["SHOP_BROKER"], control=timeball.client.celery.Control)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    worker_enable_remote_control=True,
    **json.loads(os.environ.get("SHOP_OPTIONS", "{}")),
)


def note(what: str, name: str) -> None:
    """Append "begin" or "end" of a task's run in one write, so that the lines of several processes do not mix."""
    now_ms = time.time_ns() // 1_000_000
    line = json.dumps({"what": what, "name": name, "ms": now_ms, "pid": os.getpid(), "worker": os.getpgid(0)})
    descriptor = os.open(os.environ["SHOP_RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@app.task(name="shop.run")
def run(name: str, seconds: float = 0.0) -> None:
    """Take some seconds. `name` is the name that the test gives to the task."""
    note("begin", name)
    time.sleep(seconds)
    note("end", name)


@app.task(name="shop.die", acks_late=True, reject_on_worker_lost=True)
def die(name: str) -> None:
    """Kill the process in which the task runs."""
    note("begin", name)
    os.kill(os.getpid(), 9)
