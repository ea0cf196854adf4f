"""`timeball serve --cluster …`: run one replica in the foreground, until SIGTERM or SIGINT.

A process that has lost the lead, or whose disk has failed once, replaces itself by a new process with the same process
id (execv). The new process starts with empty memory and reads the log from the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from timeball.cli import event_loop, log_lines
from timeball.cli.output import print_json, print_line
from timeball.model.config import Settings
from timeball.model.errors import SetupError, StorageError

if TYPE_CHECKING:
    from timeball.node.replicated_node import ReplicatedNode

logger = logging.getLogger(__name__)


def run_replica(settings: Settings, as_json: bool) -> None:
    """Run a node of a cluster. Raises StorageError and SetupError, which only an operator can resolve."""
    from timeball.broker.tables.memory import collect_cycles_rarely, use_system_pool
    from timeball.io.descriptors import raise_open_files_limit

    log_lines.configure(settings.log_level, settings.log_format)
    use_system_pool()
    collect_cycles_rarely()
    raise_open_files_limit()
    with event_loop.runner() as loop_runner:
        loop_runner.run(_run_replica(settings, as_json))


async def _run_replica(settings: Settings, as_json: bool) -> None:
    from timeball import __version__
    from timeball.monitoring.systemd import Systemd
    from timeball.node.replicated_node import ReplicatedNode

    systemd, node = Systemd(), ReplicatedNode(settings)
    await node.start()
    replica = node.thread.state.rules.replica
    if as_json:
        print_json(
            {"event": "ready", "version": __version__, "cluster": settings.cluster, "group": settings.group,
             "replica": replica, "pid": os.getpid()}
        )  # fmt: skip
    else:
        print_line(
            f"timeball {__version__}, cluster {settings.cluster}, group {settings.group}: replica {replica}"
        )
    systemd.ready(f"replica {replica} of group {settings.group}")
    watchdog = asyncio.create_task(systemd.run_watchdog())
    announcing = asyncio.create_task(_announce_leading(node, as_json))
    try:
        cause = await node.run_until_signal()
        if isinstance(cause, StorageError | SetupError):
            raise cause
        if cause is not None:
            # Restart without a shutdown: the pending work of threads and sockets belongs to the run that is over.
            logger.warning("begins anew reason=%r", cause)
            _restart_process()
    finally:
        watchdog.cancel()
        announcing.cancel()


async def _announce_leading(node: ReplicatedNode, as_json: bool) -> None:
    await node.serving.wait()
    epoch = node.thread.epoch
    if as_json:
        print_json(
            {"event": "leads", "group": node.settings.group, "epoch": epoch, "port": node.settings.port}
        )
    else:
        print_line(f"leads group {node.settings.group} in epoch {epoch}, serves port {node.settings.port}")


def _restart_process() -> None:
    """Replace this process by a new one with the same command, which inherits only the descriptors 0, 1 and 2."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd"):
        # Mark the descriptor, so that the system closes it at execv. Another thread may be writing to it until then: if
        # it were closed here, the thread could hit another file with the same number.
        if int(name) > 2:
            with suppress(OSError):  # the descriptor by which the folder was listed is closed already
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
