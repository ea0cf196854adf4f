"""RocketMQ 5.5.0 as its own documentation starts it: a name server and a broker, or the proxy in local mode, which
holds a broker. Maven fetches its jars into `.interop/`, as those of the stock clients; their hashes are checked.

All ports are free ones on loopback; data and logs are in the peer's folder. When it does not start, the error names
the folder with the logs, which is kept.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
from tests.interop.environments import rocketmq

from benchmarks.versus.peers import GRPC, NAME_SERVER, REMOTING, Flush, Peer
from benchmarks.versus.wire import Link

VERSION = "5.5.0"
HEAP = ["-Xms1g", "-Xmx1g"]
START_S = 120.0
HOST = "127.0.0.1"
PORTS, PORT_BLOCK = (15_000, 32_000), 8
NAMESRV = "org.apache.rocketmq.namesrv.NamesrvStartup"
BROKER = "org.apache.rocketmq.broker.BrokerStartup"
PROXY = "org.apache.rocketmq.proxy.ProxyStartup"
FLUSHES = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


class RocketMQ(Peer):
    """Name server and broker. `proxy`: the proxy in local mode holds the broker and speaks gRPC."""

    name = "RocketMQ"

    def __init__(
        self, folder: Path, flush: Flush, *, proxy: bool = False, timer_precision_ms: int = 1_000
    ) -> None:
        super().__init__(folder)
        self._proxy = proxy
        self._command = rocketmq(*HEAP)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = _free_ports()
        disk = FLUSHES[flush]
        mode = ", in its proxy in local mode" if proxy else ""
        precision = f"`timerPrecisionMs={timer_precision_ms}`"
        self.settings = (
            f"RocketMQ {VERSION}{mode}, `flushDiskType={disk}`, {precision}, heap `{' '.join(HEAP)}`"
        )
        name_server, broker, grpc, proxied = self._ports
        self._write("namesrv.conf", {"listenPort": name_server})
        self._write(
            "broker.conf",
            {
                "brokerClusterName": "DefaultCluster", "brokerName": "broker-a", "brokerId": 0, "brokerIP1": HOST,
                "namesrvAddr": f"{HOST}:{name_server}", "listenPort": broker, "flushDiskType": disk,
                "storePathRootDir": self.data, "storePathCommitLog": self.data / "commitlog",
                "timerPrecisionMs": timer_precision_ms,
            },
        )  # fmt: skip
        proxy_settings = {
            "rocketMQClusterName": "DefaultCluster", "namesrvAddr": f"{HOST}:{name_server}",
            "grpcServerPort": grpc, "remotingListenPort": proxied, "proxyMode": "LOCAL",
        }  # fmt: skip
        (self.folder / "proxy.json").write_text(json.dumps(proxy_settings))
        self.addresses = {REMOTING: f"{HOST}:{broker}", NAME_SERVER: f"{HOST}:{name_server}"}
        if proxy:
            self.addresses = {**self.addresses, GRPC: f"{HOST}:{grpc}"}

    @property
    def data(self) -> Path:
        """See Peer."""
        return self.folder / "store"

    def start(self) -> None:
        """See Peer."""
        folder = self.folder
        if "namesrv" not in self._running:
            self._spawn("namesrv", NAMESRV, "-c", str(folder / "namesrv.conf"))
        self._await("namesrv", lambda: _listens(self._ports[0]))
        broker = ["-bc" if self._proxy else "-c", str(folder / "broker.conf")]
        if self._proxy:
            self._spawn("broker", PROXY, *broker, "-pm", "local", "-pc", str(folder / "proxy.json"))
        else:
            self._spawn("broker", BROKER, *broker)
        self._await("broker", self._answers)

    def stop(self) -> None:
        """See Peer."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def kill(self) -> None:
        """See Peer. The name server lives on."""
        broker = self._running.pop("broker")
        broker.kill()
        broker.wait()

    def processes(self) -> list[psutil.Process]:
        """See Peer. Without the name server, which does nothing for a message."""
        if "broker" not in self._running:
            return []
        process = psutil.Process(self._running["broker"].pid)
        return [process, *process.children(recursive=True)]

    def _spawn(self, name: str, main: str, *arguments: str) -> None:
        java, *options = self._command
        # Its logs go below user.home, which would be that of whoever runs this.
        command = [java, f"-Duser.home={self.folder}", *options, main, *arguments]
        environment = {**os.environ, "ROCKETMQ_HOME": str(self.folder), "RMQ_PROXY_HOME": str(self.folder)}
        with (self.folder / f"{name}.out").open("ab") as out:
            self._running[name] = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=self.folder
            )

    def _await(self, name: str, reached: Callable[[], bool]) -> None:
        give_up = time.monotonic() + START_S
        while not reached():
            status = self._running[name].poll()
            if status is not None or time.monotonic() > give_up:
                how = (
                    f"ended with status {status}"
                    if status is not None
                    else f"is not up after {START_S:.0f} s"
                )
                raise RuntimeError(
                    f"RocketMQ's {name} {how}: see {self.folder}/{name}.out and {self.folder}/logs"
                )
            time.sleep(0.1)

    def _answers(self) -> bool:
        ports = [address.rpartition(":")[2] for address in self.addresses.values()]
        if not all(_listens(int(port)) for port in ports):
            return False
        with Link(self.addresses[REMOTING]) as link:
            return link.is_registered()

    def _write(self, name: str, settings: dict[str, object]) -> None:
        lines = [f"{key}={value}\n" for key, value in settings.items()]
        (self.folder / name).write_text("".join(lines))


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports() -> tuple[int, int, int, int]:
    """Name server, broker, gRPC, proxied remoting. The broker opens the ports 2 below and 1 above its own as well.

    From below the range that the kernel gives to clients: there they could be taken before RocketMQ has started.
    """
    for _ in range(1_000):
        base = random.randrange(*PORTS, PORT_BLOCK)
        with ExitStack() as stack:
            try:
                for port in range(base, base + PORT_BLOCK):
                    stack.enter_context(socket.socket()).bind((HOST, port))
            except OSError:
                continue
        return base, base + 3, base + 5, base + 6
    raise RuntimeError(f"no {PORT_BLOCK} free ports in a row between {PORTS[0]} and {PORTS[1]}")
