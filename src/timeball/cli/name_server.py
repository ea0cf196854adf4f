"""`timeball name-server`: RocketMQ's name server for all groups of a cluster, on a machine without replicas."""

from __future__ import annotations

from timeball.cli import event_loop, log_lines
from timeball.cli.options import JsonOption, settings_options
from timeball.cli.output import print_json, print_line
from timeball.io.stop_signals import watch_stop_signals
from timeball.model.config import Settings
from timeball.model.errors import SetupError


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
    log_lines.configure(settings.log_level, settings.log_format)
    with event_loop.runner() as loop_runner:
        loop_runner.run(_run_name_server(settings, as_json))


async def _run_name_server(settings: Settings, as_json: bool) -> None:
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
