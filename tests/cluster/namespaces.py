"""A network on this machine: each node in a namespace, joined by a router in which connections can be cut.

A cut is a rule of the router that drops all packets from one address to another, silently and one way, as a network
does. Links may be slow and lossy: then a process copies their frames (slow_links.py), as not every kernel has netem.
This needs Linux with root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, for namespaces. Otherwise the tests are skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

HERE, ETCD = "here", "etcd"  # the tests' clients, and etcd: both run outside of the nodes' namespaces
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


@dataclass(frozen=True)
class Slow:
    """The delay of each end's frames, and the chance that a frame is lost."""

    hold_ms: int
    loss: float
    seed: int = 0


@dataclass
class Network:
    """The namespaces of some nodes. `addresses`: of the nodes, of the tests' clients and of etcd.

    `frames`: how many a slow network has delayed and lost, once it is removed.
    """

    names: str
    slow: Slow | None = None
    frames: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    cuts: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._mark = f"tb{os.getpid() % 100_000}"
        self._subnets = {name: index + 1 for index, name in enumerate([*self.names, HERE])}
        # The addresses depend on the process, so that other runs on this machine rarely use the same ones.
        self._range = f"10.{64 + os.getpid() % 128}"
        self.addresses = {name: f"{self._range}.{index}.2" for name, index in self._subnets.items()}
        self.addresses[ETCD] = f"{self._range}.{self._subnets[HERE]}.3"
        self._copier: subprocess.Popen[str] | None = None

    def within(self, name: str) -> list[str]:
        """Return the command prefix that runs a command in a node's namespace."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def cut(self, source: str, target: str) -> None:
        """Drop all packets from one node to the other from now on."""
        if (source, target) not in self.cuts:
            self.cuts.add((source, target))
            self._rule("add", source, target)

    def heal(self) -> None:
        """Remove all cuts."""
        for source, target in self.cuts:
            self._rule("del", source, target)
        self.cuts.clear()

    def make(self) -> None:
        """Make namespaces, links and routes. Skips the test where that is not allowed."""
        hub = self._namespace("hub")
        process = subprocess.run(["ip", "netns", "add", hub], capture_output=True, text=True, check=False)
        if process.returncode:
            pytest.skip(f"no namespaces here: {process.stderr.strip()}")
        run("ip", "netns", "exec", hub, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        if self.slow:
            run("ip", "netns", "add", self._namespace("wire"))
        for name, index in self._subnets.items():
            near, far, subnet = f"{self._mark}{name[0]}n", f"{self._mark}{name[0]}f", f"{self._range}.{index}"
            self._link(near, far)
            run("ip", "link", "set", far, "netns", hub)
            run("ip", "-n", hub, "addr", "add", f"{subnet}.1/24", "dev", far)
            run("ip", "-n", hub, "link", "set", far, "up")
            inside = []
            if name != HERE:
                run("ip", "netns", "add", self._namespace(name))
                run("ip", "link", "set", near, "netns", self._namespace(name))
                inside = ["-n", self._namespace(name)]
                run("ip", *inside, "link", "set", "lo", "up")
            for address in {f"{subnet}.2", *([self.addresses[ETCD]] if name == HERE else [])}:
                run("ip", *inside, "addr", "add", f"{address}/24", "dev", near)
            run("ip", *inside, "link", "set", near, "up")
            run("ip", *inside, "route", "add", f"{self._range}.0.0/16", "via", f"{subnet}.1")
        if self.slow:
            self._copy(self.slow)

    def remove(self) -> None:
        """Remove all namespaces and links. The link of this process is removed by name.

        The kernel removes the links of a namespace later than the namespace.
        """
        if self._copier is not None:
            self._copier.terminate()
            self.frames = json.loads(self._copier.communicate()[0])
        subprocess.run(["ip", "link", "del", f"{self._mark}{HERE[0]}n"], capture_output=True, check=False)
        for name in ["hub", *(["wire"] if self.slow else []), *self.names]:
            subprocess.run(
                ["ip", "netns", "del", self._namespace(name)], capture_output=True, text=True, check=False
            )

    def _link(self, near: str, far: str) -> None:
        """Make the link between a machine (interface `near`) and the router (`far`)."""
        if self.slow is None:
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            return
        for end, middle in ((near, f"{near}w"), (far, f"{far}w")):
            run("ip", "link", "add", end, "type", "veth", "peer", "name", middle)
            run("ip", "link", "set", middle, "netns", self._namespace("wire"))
            run("ip", "-n", self._namespace("wire"), "link", "set", middle, "up")
        fill_checksums(near)

    def _copy(self, slow: Slow) -> None:
        """Start the process that copies frames from one middle of a link to the other."""
        ends = [f"{self._mark}{name[0]}{{}}w" for name in self._subnets]
        command = [*self.within("wire"), sys.executable, "-m", "tests.cluster.slow_links"]
        command += [str(slow.hold_ms), str(slow.loss), str(slow.seed)]
        command += [f"{end.format('n')}={end.format('f')}" for end in ends]
        self._copier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._copier.stdout is not None and self._copier.stdout.readline() == "ready\n"

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _rule(self, verb: str, source: str, target: str) -> None:
        ends = ["from", self.addresses[source], "to", self.addresses[target]]
        run("ip", "-n", self._namespace("hub"), "rule", verb, *ends, "blackhole")


def fill_checksums(interface: str) -> None:
    """Let the kernel compute the checksums of the frames of an interface. No device does that for copied frames."""
    request = array("I", [ETHTOOL_STXCSUM, 0])
    interface_request = struct.pack("16sP16x", interface.encode(), request.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCETHTOOL, interface_request)


def run(*words: str) -> None:
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{' '.join(words)}: {process.stderr}"


@contextmanager
def network(names: str = "abc", slow: Slow | None = None) -> Iterator[Network]:
    """Make a network for the length of a block."""
    created = Network(names, slow)
    try:
        created.make()
        yield created
    finally:
        created.remove()
