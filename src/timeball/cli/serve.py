"""`timeball serve` and `timeball name-server`: run a server in the foreground, until SIGTERM or SIGINT.

    serve                              the broker alone, in one process
    serve --cluster …                  one replica of a group of the cluster
    serve --cluster … --group g1,g2    one process per group on this machine, and a process that supervises them
    name-server                        RocketMQ's name server for all groups of a cluster, on a machine without replicas

The ready line is printed once clients can connect, so a program that starts the broker waits for that line. systemd
waits for READY=1. Without a pipeline, the broker compacts by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from timeball.cli import output
from timeball.cli.options import JsonOption, settings_options
from timeball.cli.output import ExitCode, print_json, print_line
from timeball.io.clock import Clock, SystemClock
from timeball.io.threads import watch_stop_signals
from timeball.model.config import Settings
from timeball.model.errors import SetupError, StorageError

if TYPE_CHECKING:
    from timeball.node.node import Node
    from timeball.node.replicated_node import ReplicatedNode

logger = logging.getLogger(__name__)


# ---- notifications to systemd: ready, alive, stopping (sd_notify(3)) ------------------------------------------
# Each notification is a datagram to the socket named by NOTIFY_SOCKET. Without this variable nothing is sent. No
# package is used: the existing ones bind libsystemd, which requires a compiler and its headers, or had no release for
# years.

# How long to wait for a systemd that does not read its socket. After a lost READY=1 the service would never count as
# started.
NOTIFY_TIMEOUT_S = 1.0


class Systemd:
    """Notifies the service manager of this process, if there is one. The environment is read once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # A leading @ means an address in the abstract namespace, which begins with a zero byte.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = _watchdog_s(environment) if path else 0.0

    def status(self, text: str) -> None:
        """Show `text` in `systemctl status`."""
        self._notify(f"STATUS={text}")

    def ready(self, text: str) -> None:
        """Announce that the broker accepts messages from now on."""
        self._notify(f"READY=1\nSTATUS={text}")

    def stopping(self) -> None:
        """Announce that the broker saves its data and ends."""
        self._notify("STOPPING=1\nSTATUS=stopping: what was accepted is written")

    async def run_watchdog(self) -> None:
        """Announce that the event loop is alive, twice per watchdog period, until cancelled."""
        while self.watchdog_s:
            self._notify("WATCHDOG=1", wait_s=0.0)
            await asyncio.sleep(self.watchdog_s / 2)

    def _notify(self, text: str, wait_s: float = NOTIFY_TIMEOUT_S) -> None:
        """Send a notification to systemd, if it started this process. An error is only logged."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(wait_s)
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            # The broker works without systemd. A missed WATCHDOG=1 is followed by the next one.
            logger.warning("systemd not told text=%s error=%s", text.partition("\n")[0], error)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Read the time after which systemd kills a silent service, in seconds. 0 if it does not watch this process."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6


# ---- one process per group, and their supervisor --------------------------------------------------------------
# Each group's process is a separate node. Its name consists of this node's name and the group (`a.g1`). It has its own
# folder in the data folder, and its own ports, which are `PORTS_APART` above those of the group before it. The
# supervisor runs the name server, which answers for all groups. A process that ends is started again, after a pause
# that doubles each time the process ends early. If a process cannot start at all, all processes are ended: then an
# option is wrong, which only an operator can correct.

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
        """Run the process until it ends, and print the lines of its stdout. Returns its exit code."""
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
    from timeball.node.name_service import NameService

    output.configure_logging(settings.log_level, settings.log_format)
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


# ---- the command `serve`, and the broker alone ----------------------------------------------------------------


StartClient = Callable[["Node"], Callable[[], Awaitable[None]]]


@settings_options
def serve(settings: Settings, as_json: JsonOption = False) -> None:
    """Run the broker in the foreground, without a pipeline.

    The broker prints one line when it is ready. It ends on SIGTERM or Ctrl-C
    with everything acknowledged on disk. Each option can also be given as an
    environment variable (TIMEBALL_PORT for --port) or in a settings file.

    \b
    Examples:
      timeball serve
      timeball serve --data /var/lib/timeball --port 7400 --retention-ms 72h
      timeball serve --port 0 --json      # the ready line names the port it got
      timeball serve --settings timeball.toml
      timeball serve --cluster shop --node a --etcd http://etcd1:2379,http://etcd2:2379
      timeball serve --settings timeball.toml --node a --group g1,g2,g3    # a process for each
      timeball serve --host 0.0.0.0 --tls-cert chain.pem --tls-key key.pem --access-file access.toml
    """
    if settings.cluster and "," in settings.group:
        asyncio.run(supervise(settings, as_json, current_command()))
        return
    if settings.cluster:
        run_replica(settings, as_json)
        return
    with runner() as loop_runner:
        loop_runner.run(run_broker(settings, as_json))


async def run_broker(settings: Settings, as_json: bool, start_client: StartClient | None = None) -> None:
    """Run the broker until SIGTERM or SIGINT.

    `start_client` is called once the broker accepts messages. It starts a client of the broker, and returns the
    function that stops this client, which is called before the broker stops.
    """
    from timeball.broker.tables.memory import use_system_pool
    from timeball.io.cycle_collection import CYCLES
    from timeball.io.files import raise_open_files_limit
    from timeball.node.node import Node

    output.configure_logging(settings.log_level, settings.log_format)
    use_system_pool()
    CYCLES.start()
    raise_open_files_limit()
    systemd, node = Systemd(), Node(settings)
    systemd.status("recovering: reads the log from the last checkpoint on")
    await node.start()
    if settings.clock == "manual":
        logger.warning("the clock is manual: messages become due only when a client advances it")
    announce(node, as_json)
    systemd.ready(f"serves {_endpoint(settings, settings.host, node.port)}")
    watchdog = asyncio.create_task(systemd.run_watchdog())
    stop_client = start_client(node) if start_client is not None else None

    async def before_stop() -> None:
        systemd.stopping()
        if stop_client is not None:
            await stop_client()

    try:
        await node.run_until_signal(before_stop)
    finally:
        watchdog.cancel()


def announce(node: Node, as_json: bool) -> None:
    """Print the ready line."""
    from timeball import __version__

    settings, data = node.settings, str(node.settings.data.absolute())
    host, endpoint = _bracketed(settings.host), _endpoint(settings, settings.host, node.port)
    ports = {
        "name_server": node.name_server_port,
        "remoting": node.remoting_port,
        "grpc": node.grpc_port,
        "http": node.http_port,
    }
    addresses = {edge: f"{host}:{port}" if port >= 0 else None for edge, port in ports.items()}
    if not as_json:
        name_server = addresses["name_server"]
        rocketmq = f", RocketMQ name server {name_server}" if name_server else ""
        scheme = "https" if settings.tls_cert else "http"
        dashboard = f", dashboard {scheme}://{_local(host)}:{node.http_port}/" if node.http_port >= 0 else ""
        print_line(f"timeball {__version__} serves {endpoint}{rocketmq}{dashboard}, data {data}")
        return
    print_json(
        {
            "event": "ready",
            "version": __version__,
            "endpoint": endpoint,
            "host": settings.host,
            "port": node.port,
            **addresses,
            "data": data,
            "pid": os.getpid(),
        }
    )


def local_endpoint(settings: Settings, port: int) -> str:
    """Build the endpoint for processes on this machine: loopback, if the broker's host means all interfaces."""
    return _endpoint(settings, _local(settings.host), port)


def _local(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "[::1]"}.get(host, host)


def _endpoint(settings: Settings, host: str, port: int) -> str:
    return f"{'grpc+tls' if settings.tls_cert else 'grpc'}://{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---- the event loop -------------------------------------------------------------------------------------------
# uvloop is built on libuv (docs/decisions/0076-uvloop.md). Only the server commands use uvloop. No other code depends
# on the kind of loop: tests and client commands use asyncio's.


def runner() -> asyncio.Runner:
    """Create a runner that runs a coroutine on a uvloop event loop."""
    import uvloop  # imported here: client commands are installed without uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


# ---- one replica ----------------------------------------------------------------------------------------------
# When a node has lost the lead, another node starts in the same process, and reads the log from the disk. If the first
# one cannot be ended in order, the process replaces itself by a new one with the same process id (execv).

RESTARTS = (
    "TIMEBALL_RESTARTS"  # environment variable: the next pause and the last start, in ms of the boot clock
)


class RestartPauses:
    """The pauses before a node starts again.

    A start follows the start before it after RESTART_S at the earliest. This time doubles with each start up to
    RESTART_S_MAX, and is the shortest again after a run of STEADY_S. So an error that recurs at each start takes little
    CPU time, and a leader that hands over after a longer run follows again at once. The environment keeps the state,
    because execv passes it on.
    """

    def __init__(self, clock: Clock, environment: MutableMapping[str, str] = os.environ) -> None:
        self._clock, self._environment = clock, environment

    def begin(self) -> float:
        """Record that a node starts. Returns the seconds to wait before its start."""
        now_ms, pause_ms, wait_ms = self._clock.boot_ms(), 0, 0
        if last := self._environment.get(RESTARTS):
            pause_ms, started_ms = map(int, last.split())
            ran_ms = now_ms - started_ms
            pause_ms = 0 if ran_ms >= STEADY_S * 1_000 else pause_ms
            wait_ms = max(0, pause_ms - ran_ms)
        next_pause_ms = min(max(2 * pause_ms, int(RESTART_S * 1_000)), int(RESTART_S_MAX * 1_000))
        self._environment[RESTARTS] = f"{next_pause_ms} {now_ms + wait_ms}"
        return wait_ms / 1_000


def run_replica(settings: Settings, as_json: bool) -> None:
    """Run a node of a cluster. Raises StorageError and SetupError, which only an operator can resolve."""
    from timeball.broker.tables.memory import use_system_pool
    from timeball.io.cycle_collection import CYCLES
    from timeball.io.files import raise_open_files_limit

    output.configure_logging(settings.log_level, settings.log_format)
    use_system_pool()
    CYCLES.start()
    raise_open_files_limit()
    with runner() as loop_runner:
        loop_runner.run(_run_replica(settings, as_json))


async def _run_replica(settings: Settings, as_json: bool) -> None:
    """Run nodes of a cluster one after another, until SIGTERM or SIGINT.

    Raises StorageError, and SetupError if the first node cannot start. If a later node cannot, a new process follows.
    """
    from timeball.io.cycle_collection import CYCLES

    systemd, has_run, pauses = Systemd(), False, RestartPauses(SystemClock())
    watchdog = asyncio.create_task(systemd.run_watchdog())
    try:
        while True:
            if wait_s := pauses.begin():
                # A new process waits here, too: the process before it could not be ended in order, and might still hold
                # the lead while it waited.
                logger.warning("waits before it starts again wait_s=%.1f", wait_s)
                await asyncio.sleep(wait_s)
            if not await _run_node(settings, as_json, systemd):
                return
            has_run = True
            CYCLES.collect()  # the memory of the node that has ended
    except SetupError as error:
        if not has_run:
            raise
        logger.warning("not started again in this process reason=%s", error)
        _restart_process()
    finally:
        watchdog.cancel()


async def _run_node(settings: Settings, as_json: bool, systemd: Systemd) -> bool:
    """Run a node. Returns whether another node must follow in this process. Raises StorageError and SetupError."""
    from timeball import __version__
    from timeball.node.replicated_node import ReplicatedNode

    node = ReplicatedNode(settings)
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
    announcing = asyncio.create_task(_announce_leading(node, as_json))
    try:
        cause = await node.run_until_signal()
        if isinstance(cause, StorageError | SetupError):
            raise cause
        if cause is None:
            return False
        logger.warning("begins anew reason=%s", repr(cause))
        if not await node.abandon(cause):
            # Restart without a shutdown: the pending work of threads and sockets belongs to the run that is over.
            _restart_process()
        return True
    finally:
        announcing.cancel()


async def _announce_leading(node: ReplicatedNode, as_json: bool) -> None:
    """Wait until the node leads its group, and print that it does."""
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


# ---- the name server ------------------------------------------------------------------------------------------


@settings_options
def name_server(settings: Settings, as_json: JsonOption = False) -> None:
    """Tell RocketMQ clients where the topics of a cluster are, in the foreground. Stores nothing.

    Each node of a cluster answers these look-ups too, at its
    --name-server-port. Only these options are used: --cluster, --node, --etcd
    and its like, --host, --name-server-port, --tls-cert and --tls-key.

    \b
    Examples:
      timeball name-server --cluster shop --node ns1 --etcd http://etcd1:2379,http://etcd2:2379
      timeball name-server --settings shop.toml --name-server-port 9877 --json
    """
    if not settings.cluster:
        raise SetupError("--cluster: name the cluster whose groups are looked up")
    if settings.name_server_port < 0:
        raise SetupError("--name-server-port -1: choose a port, because this command has no other one")
    output.configure_logging(settings.log_level, settings.log_format)
    with runner() as loop_runner:
        loop_runner.run(_run_name_server(settings, as_json))


async def _run_name_server(settings: Settings, as_json: bool) -> None:
    """Run a name server of a cluster until SIGTERM or SIGINT. Prints the ready line. Raises SetupError."""
    from timeball.cluster.coordination.etcd import create_coordinator
    from timeball.io.clock import SystemClock
    from timeball.node.name_service import NameService

    coordinator = create_coordinator(settings, SystemClock())
    service = NameService(settings, coordinator)
    port = await service.start()
    address = f"{settings.host}:{port}"
    if as_json:
        print_json({"event": "ready", "cluster": settings.cluster, "name_server": address})
    else:
        print_line(f"name server of cluster {settings.cluster} at {address}")
    await watch_stop_signals()
    await service.close()
    await coordinator.close()
