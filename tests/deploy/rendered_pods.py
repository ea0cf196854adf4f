"""The chart's rendered containers as processes on this machine: each pod has its own address on the loopback.

Arguments, settings and probes are the rendered ones. This module replaces Kubernetes: it sets the pod's name and
address in the environment, and puts mounted files into a folder of the test.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bounds import BOUND_S
from tests.docs_pages import ROOT

MOUNTED = ("/etc/timeball", "/var/lib/timeball")
Documents = dict[str, dict[str, Any]]


def pod_specs(found: Documents) -> dict[str, dict[str, Any]]:
    """Return the spec of every pod, by the kind and name of what makes it."""
    return {
        name: document["spec"]["template"]["spec"]
        for name, document in found.items()
        if "template" in document.get("spec", {})
    }


def address(number: int) -> str:
    """Return an address that no other test uses, on which the ports of the chart are free."""
    return f"127.{100 + os.getpid() % 100}.9.{number + 1}"


@dataclass
class Pod:
    """One container with its folders in `folder`, and the processes that were started of it."""

    folder: Path
    container: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def place(self, text: str) -> str:
        """Return a text with the paths of this folder."""
        for path in MOUNTED:
            text = text.replace(path, f"{self.folder}{path}")
        return text

    def write(self, path: str, text: str) -> None:
        """Write a file that Kubernetes would mount; the paths in it are those of this folder."""
        file = Path(self.place(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.place(text))
        file.chmod(0o440)  # the mode of the chart's secrets

    def command(self) -> list[str]:
        return [sys.executable, "-m", "timeball", *map(self.place, self.container["args"])]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBALL_")}
        given = {
            each["name"]: self.place(each["value"])
            for each in self.container.get("env", [])
            if "value" in each
        }
        return {**kept, **given, **self.environment}

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the container to its end."""
        return subprocess.run(
            self.command(), env=self.variables(), capture_output=True, text=True, timeout=BOUND_S, check=False,
            cwd=ROOT,
        )  # fmt: skip

    def start(self) -> None:
        for path in MOUNTED:
            Path(self.place(path)).mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.running.append(
                subprocess.Popen(self.command(), env=self.variables(), stdout=log, stderr=log, cwd=ROOT)
            )

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait(self, probe: str, host: str) -> None:
        """Ask a probe of the container until it holds."""
        asked = self.container[probe]["httpGet"]
        (port,) = [each["containerPort"] for each in self.container["ports"] if each["name"] == asked["port"]]
        url = f"{asked['scheme'].lower()}://{host}:{port}{asked['path']}"
        until_s = time.monotonic() + BOUND_S
        while True:
            try:
                # Kubernetes takes any certificate.
                context = ssl._create_unverified_context()
                with urllib.request.urlopen(url, timeout=BOUND_S, context=context) as answer:
                    assert answer.status == 200
                    return
            except OSError:  # also a connection that a node closes as it begins to lead
                assert time.monotonic() < until_s, f"{probe} {url}\n{self.log()}"
                time.sleep(0.1)


@contextmanager
def three_pods(
    found: Documents, folder: Path, secrets: Mapping[str, str] | None = None
) -> Iterator[dict[str, Pod]]:
    """Start the pods of a rendered cluster, each at its address; yield them by address.

    `secrets`: the files that Kubernetes mounts of them, as path in the pod and file here.
    """
    name = "there-timeball"
    (container,) = pod_specs(found)[f"StatefulSet/{name}"]["containers"]
    pods = {}
    for number in range(found[f"StatefulSet/{name}"]["spec"]["replicas"]):
        (folder / str(number)).mkdir()
        host = address(number)
        pods[host] = pod = Pod(folder / str(number), container)
        pod.environment = {
            "TIMEBALL_NODE": f"{name}-{number}", "TIMEBALL_ADVERTISE": host, "TIMEBALL_HOST": host,
        }  # fmt: skip
        pod.write("/etc/timeball/timeball.toml", found[f"ConfigMap/{name}"]["data"]["timeball.toml"])
        for path, file in (secrets or {}).items():
            pod.write(path, Path(file).read_text())
    try:
        for pod in pods.values():
            pod.start()
        yield pods
    finally:
        for pod in pods.values():
            pod.stop()


def job(found: Documents, folder: Path) -> Pod:
    """Return the container of the job that makes the group."""
    (name,) = [name for name in found if name.startswith("Job/")]
    (container,) = pod_specs(found)[name]["containers"]
    pod = Pod(folder, container)
    pod.write("/etc/timeball/timeball.toml", found["ConfigMap/there-timeball"]["data"]["timeball.toml"])
    return pod
