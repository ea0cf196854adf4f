"""`timeball serve`: run the broker alone in the foreground, until SIGTERM or SIGINT.

The ready line is printed once clients can connect, so a program that starts the broker waits for that line. systemd
waits for READY=1. Without a pipeline, the broker compacts by itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from timeball.cli import event_loop, log_lines
from timeball.cli.options import JsonOption, settings_options
from timeball.cli.output import print_json, print_line
from timeball.model.config import Settings

if TYPE_CHECKING:
    from timeball.node.node import Node

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
        from timeball.cli.supervisor import current_command, supervise

        asyncio.run(supervise(settings, as_json, current_command()))
        return
    if settings.cluster:
        from timeball.cli.replica import run_replica

        run_replica(settings, as_json)
        return
    with event_loop.runner() as loop_runner:
        loop_runner.run(run_broker(settings, as_json))


async def run_broker(settings: Settings, as_json: bool, start_client: StartClient | None = None) -> None:
    """Run the broker until SIGTERM or SIGINT.

    `start_client` is called once the broker accepts messages. It starts a client of the broker, and returns the
    function that stops this client, which is called before the broker stops.
    """
    from timeball.broker.tables.memory import collect_cycles_rarely, use_system_pool
    from timeball.io.descriptors import raise_open_files_limit
    from timeball.monitoring.systemd import Systemd
    from timeball.node.node import Node

    log_lines.configure(settings.log_level, settings.log_format)
    use_system_pool()
    collect_cycles_rarely()
    raise_open_files_limit()
    systemd, node = Systemd(), Node(settings)
    systemd.status("recovering: reads the log from the last checkpoint on")
    await node.start()
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
