"""`timeball serve --group g1,g2`: run one process per group on this machine, and restart those that end.

Each group's process is a separate node. Its name consists of this node's name and the group (`a.g1`). It has its own
folder in the data folder, and its own ports, which are `PORTS_APART` above those of the group before it. The
supervising process runs the name server, which answers for all groups.

A process that ends is started again, after a pause that doubles each time the process ends early. If a process cannot
start at all, all processes are ended: then an option is wrong, which only an operator can correct.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from timeball.cli import log_lines
from timeball.cli.exit_codes import ExitCode
from timeball.cli.output import print_json, print_line
from timeball.io.clock import SystemClock
from timeball.io.stop_signals import watch_stop_signals
from timeball.model.config import Settings
from timeball.model.errors import SetupError

logger = logging.getLogger(__name__)

PORTS_APART = 100
RESTART_S, RESTART_S_MAX = 0.5, 10.0
STEADY_S = 60.0  # after a run of this length, the next pause is the shortest again
PORTS = ("port", "http_port", "remoting_port", "grpc_port", "replication_port")


def parse_group_names(settings: Settings) -> list[str]:
    """Split the groups in `--group`. Raises SetupError for an empty or repeated name."""
    names = [name.strip() for name in settings.group.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise SetupError(f"--group {settings.group}: name each group once, with commas between them")
    return names


def build_options(settings: Settings, group: str, index: int) -> dict[str, str]:
    """Build the options for the process of one group. `index` is the group's position in `--group`."""
    ports = {name: int(getattr(settings, name)) for name in PORTS}
    # -1 leaves a port's server out, and 0 takes any free port: both stay as they are.
    shifted = {name: port + index * PORTS_APART if port > 0 else port for name, port in ports.items()}
    if (highest := max(shifted.values())) > 65_535:
        raise SetupError(
            f"--group {settings.group}: group {group} would listen on {highest}; choose lower ports, each group's "
            f"are {PORTS_APART} above those of the group before it"
        )
    host, separator, port = settings.advertise.rpartition(":")
    if separator and port.isdigit() and not host.endswith(":"):
        advertise = f"{host}:{int(port) + index * PORTS_APART}"
    else:
        advertise = settings.advertise
    return {
        "group": group,
        "node": f"{settings.node}.{group}",
        "data": str(Path(settings.data) / group),
        "advertise": advertise,
        "name_server_port": "-1",
        **{name: str(port) for name, port in shifted.items()},
    }


def build_command(command: list[str], options: dict[str, str]) -> list[str]:
    """Append the options of a group to this process's command. If an option occurs twice, the last value counts."""
    return [
        *command,
        *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)),
    ]


@dataclasses.dataclass
class GroupProcess:
    """The process of one group, which is started again when it ends. Belongs to the event loop."""

    group: str
    command: list[str]
    process: asyncio.subprocess.Process | None = None
    has_started: bool = False  # True once the process has printed its ready line
    ending: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # no new start once set

    async def run(self) -> None:
        """Keep the process running until `end`. Raises SetupError when it cannot start at all."""
        pause_s = RESTART_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            code = await self._run_once()
            if self.ending.is_set():
                return
            if not self.has_started and code in (ExitCode.SETUP, ExitCode.USAGE):
                raise SetupError(f"the process of group {self.group} cannot start; the line above says why")
            if loop.time() - started_s > STEADY_S:
                pause_s = RESTART_S
            logger.warning("process ended group=%s code=%d again_s=%.1f", self.group, code, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), pause_s)
                return
            pause_s = min(2 * pause_s, RESTART_S_MAX)

    async def _run_once(self) -> int:
        # The children must not notify systemd, which would take their messages for those of this process.
        environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        self.process = process = await asyncio.create_subprocess_exec(
            *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        if self.ending.is_set():  # `end` was called while the process was being created
            process.terminate()
        while line := await process.stdout.readline():
            self.has_started = True  # the first line is the ready line
            print_line(line.decode(errors="replace").rstrip("\n"))
        return await process.wait()

    def end(self) -> None:
        """Stop the process for good with SIGTERM. A leader first hands over, which takes a moment."""
        self.ending.set()
        self.send(signal.SIGTERM)

    def send(self, signal_number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal_number)


async def supervise(settings: Settings, as_json: bool, command: list[str]) -> None:
    """Run `command` once for each group, with the group's options, until SIGTERM or SIGINT.

    Raises SetupError when one of the processes cannot start.
    """
    from timeball.cluster.coordination.etcd import create_coordinator
    from timeball.monitoring.systemd import Systemd
    from timeball.node.name_service import NameService

    log_lines.configure(settings.log_level, settings.log_format)
    groups = parse_group_names(settings)
    processes = [
        GroupProcess(group, build_command(command, build_options(settings, group, index)))
        for index, group in enumerate(groups)
    ]
    coordinator = create_coordinator(settings, SystemClock())
    name_service, systemd = NameService(settings, coordinator), Systemd()
    await name_service.start()
    stop_signal = watch_stop_signals()

    def send_hup() -> None:
        for process in processes:
            process.send(signal.SIGHUP)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, send_hup)
    if as_json:
        print_json({"event": "supervises", "cluster": settings.cluster, "groups": groups, "pid": os.getpid()})
    else:
        print_line(f"node {settings.node} of cluster {settings.cluster} keeps the groups {', '.join(groups)}")
    systemd.ready(f"keeps {len(groups)} groups")
    watchdog = asyncio.create_task(systemd.run_watchdog())
    process_tasks = [asyncio.create_task(process.run()) for process in processes]
    try:
        done, _ = await asyncio.wait([stop_signal, *process_tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task  # raises the error with which the task has ended
    finally:
        systemd.stopping()
        watchdog.cancel()
        for process in processes:
            process.end()
        await asyncio.gather(*process_tasks, return_exceptions=True)
        await name_service.close()
        await coordinator.close()


def current_command() -> list[str]:
    """Build the command line that started this process, to start it again with more options."""
    return [sys.executable, *sys.orig_argv[1:]]
