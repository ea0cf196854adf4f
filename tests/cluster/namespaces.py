"""A network of this machine's own: each node in a namespace, all joined by one that routes, in which ways are cut.

A cut is a rule of the router that drops what one address sends to another, in silence and one way, as a network does.
Linux needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, for namespaces; without it the tests are skipped. The kernel's
netem, for delays and losses, is not asked for.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

HERE, ETCD = "here", "etcd"  # the tests' clients, and etcd: both run outside of the nodes' namespaces


@dataclass
class Network:
    """The namespaces of some nodes. `addresses`: of the nodes, of the tests' clients and of etcd."""

    names: str
    addresses: dict[str, str] = field(default_factory=dict)
    cuts: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._mark = f"tb{os.getpid() % 100_000}"
        self._subnets = {name: index + 1 for index, name in enumerate([*self.names, HERE])}
        # Of this process alone, as far as may be: another run on this machine has others.
        self._range = f"10.{64 + os.getpid() % 128}"
        self.addresses = {name: f"{self._range}.{index}.2" for name, index in self._subnets.items()}
        self.addresses[ETCD] = f"{self._range}.{self._subnets[HERE]}.3"

    def within(self, name: str) -> list[str]:
        """Return what runs a command in a node's namespace."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def cut(self, source: str, target: str) -> None:
        """Drop from now on what one sends to another."""
        if (source, target) not in self.cuts:
            self.cuts.add((source, target))
            self._rule("add", source, target)

    def heal(self) -> None:
        """Mend all ways."""
        for source, target in self.cuts:
            self._rule("del", source, target)
        self.cuts.clear()

    def make(self) -> None:
        """Make namespaces, links and routes; skips the test where that is not allowed."""
        hub = self._namespace("hub")
        made = subprocess.run(["ip", "netns", "add", hub], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no namespaces here: {made.stderr.strip()}")
        run("ip", "netns", "exec", hub, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        for name, index in self._subnets.items():
            near, far, subnet = f"{self._mark}{name[0]}n", f"{self._mark}{name[0]}f", f"{self._range}.{index}"
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
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

    def remove(self) -> None:
        """Remove all of it. The link here is removed by name: the kernel takes its time for those of a namespace."""
        subprocess.run(["ip", "link", "del", f"{self._mark}{HERE[0]}n"], capture_output=True, check=False)
        for name in ["hub", *self.names]:
            subprocess.run(
                ["ip", "netns", "del", self._namespace(name)], capture_output=True, text=True, check=False
            )

    def _namespace(self, name: str) -> str:
        return f"{self._mark}-{name}"

    def _rule(self, verb: str, source: str, target: str) -> None:
        ends = ["from", self.addresses[source], "to", self.addresses[target]]
        run("ip", "-n", self._namespace("hub"), "rule", verb, *ends, "blackhole")


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@contextmanager
def network(names: str = "abc") -> Iterator[Network]:
    """Make a network for the length of a block."""
    made = Network(names)
    try:
        made.make()
        yield made
    finally:
        made.remove()
