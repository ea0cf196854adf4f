"""Three etcd members on this machine's loopback, which tests start, stop and kill.

Debian's etcd-server, or the one in TIMEBALL_ETCD. The system chooses the ports. A member whose port was taken meanwhile
does not start, and `wait_ready` then raises an error with the end of its log.
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.bounds import BOUND_S
from tests.certificates import Certificate
from tests.ports import free_ports

BINARY = os.environ.get("TIMEBALL_ETCD") or shutil.which("etcd")
HEARTBEAT_MS, ELECTION_MS = 50, 500  # TTL 1 s needs them (docs/etcd.md)


def need_etcd() -> str:
    """Return the path of etcd. Skips the test if it is not installed."""
    if BINARY is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    return BINARY


@dataclass
class Member:
    """One member. It keeps its ports and its folder over restarts."""

    name: str
    client: str
    peer: str
    arguments: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process without waiting for it."""
        assert self.process is None
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [need_etcd(), *self.arguments], stdout=log, stderr=log, cwd=self.folder
            )

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        assert self.process is not None
        self.process.kill()  # also ends a suspended process
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """Suspend the process (SIGSTOP)."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the suspended process continue."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def log_end(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()[-2_000:]


@dataclass
class EtcdCluster:
    """Members that know each other. `tls`: for clients, which must have certificates."""

    folder: Path
    size: int = 3
    tls: Certificate | None = None
    timings: bool = True  # False: etcd's defaults
    host: str = "127.0.0.1"
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scheme = "https" if self.tls else "http"
        ports = free_ports(2 * self.size)
        for number in range(self.size):
            name = f"m{number}"
            client, peer = (f"{self.host}:{ports[number + offset]}" for offset in (0, self.size))
            self.members.append(Member(name, f"{scheme}://{client}", f"http://{peer}", [], self.folder))
        initial_cluster = ",".join(f"{member.name}={member.peer}" for member in self.members)
        for member in self.members:
            member.arguments = [
                "--name", member.name, "--data-dir", str(self.folder / member.name),
                "--listen-client-urls", member.client, "--advertise-client-urls", member.client,
                "--listen-peer-urls", member.peer, "--initial-advertise-peer-urls", member.peer,
                "--initial-cluster", initial_cluster, "--initial-cluster-state", "new",
                "--initial-cluster-token", self.folder.name, "--log-level", "warn", "--logger", "zap",
            ]  # fmt: skip
            if self.timings:
                member.arguments += [
                    "--heartbeat-interval",
                    str(HEARTBEAT_MS),
                    "--election-timeout",
                    str(ELECTION_MS),
                ]
            if self.tls:
                member.arguments += ["--cert-file", self.tls.cert, "--key-file", self.tls.key]
                member.arguments += ["--client-cert-auth", "--trusted-ca-file", self.tls.roots]

    @cached_property
    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.tls.roots if self.tls else None)
        if self.tls:
            context.load_cert_chain(self.tls.cert, self.tls.key)
        return context

    @property
    def endpoints(self) -> list[str]:
        return [member.client for member in self.members]

    def __enter__(self) -> EtcdCluster:
        for member in self.members:
            member.start()
        try:
            self.wait_ready()
        except BaseException:  # members that run must end with the test that started them
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            if member.process is not None:
                member.kill()

    def wait_ready(self) -> None:
        """Wait until all members that run answer a linearizable read."""
        for member in self.members:
            if member.process is not None:
                self._wait_member(member)

    def leader(self) -> Member:
        """Return the member that reports itself as leader."""
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            for member in self.members:
                status = self.post(member, "/v3/maintenance/status", {}) if member.process else {}
                own_id = status.get("header", {}).get("member_id")
                if own_id is not None and status.get("leader") == own_id:
                    return member
            time.sleep(0.02)
        raise AssertionError("no member leads")

    def post(self, member: Member, path: str, body: dict[str, object], token: str = "") -> dict[str, Any]:
        """Query one member with another HTTP client than Timeball's. Returns {} if it gives no successful answer."""
        try:
            headers = {"authorization": token} if token else {}
            answer = httpx.post(
                member.client + path, json=body, headers=headers, timeout=1, verify=self._context
            )
        except httpx.HTTPError:
            return {}
        return dict(answer.json()) if answer.is_success else {}

    def _wait_member(self, member: Member) -> None:
        """Wait until a member answers a linearizable read. Fails with the end of its log."""
        deadline = time.monotonic() + BOUND_S
        while not self.post(member, "/v3/kv/range", {"key": "eA=="}):
            assert member.process is not None and member.process.poll() is None, member.log_end
            assert time.monotonic() < deadline, member.log_end
            time.sleep(0.02)
