"""The rendered containers of the chart as processes on this machine: each pod has an address on the loopback.

Arguments, settings and probes are the rendered ones. This module stands for Kubernetes: it sets the name and the
address of a pod in its environment, and puts mounted files into a folder of the test.
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


def pod_specs(documents: Documents) -> dict[str, dict[str, Any]]:
    """Return the spec of every pod, by the kind and name of the document that creates it."""
    return {
        name: document["spec"]["template"]["spec"]
        for name, document in documents.items()
        if "template" in document.get("spec", {})
    }


def address(number: int) -> str:
    """Return the loopback address of a pod. It is derived from the process id, so that other processes use others."""
    return f"127.{100 + os.getpid() % 100}.9.{number + 1}"


@dataclass
class Pod:
    """A container whose mounted paths are folders in `folder`, and the processes that `start` has started."""

    folder: Path
    container: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def in_folder(self, text: str) -> str:
        """Return a text in which mounted paths are those within this folder."""
        for path in MOUNTED:
            text = text.replace(path, f"{self.folder}{path}")
        return text

    def write(self, path: str, text: str) -> None:
        """Write a file that Kubernetes would mount at `path`. Mounted paths in its text become those in the folder."""
        file = Path(self.in_folder(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.in_folder(text))
        file.chmod(0o440)  # the mode of the chart's secrets

    def command(self) -> list[str]:
        return [sys.executable, "-m", "timeball", *map(self.in_folder, self.container["args"])]

    def variables(self) -> dict[str, str]:
        """The environment of a process: of this one without settings of Timeball, of the container, and of the test."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBALL_")}
        rendered = {
            variable["name"]: self.in_folder(variable["value"])
            for variable in self.container.get("env", [])
            if "value" in variable
        }
        return {**inherited, **rendered, **self.environment}

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run the container to its end, for a job."""
        return subprocess.run(
            self.command(), env=self.variables(), capture_output=True, text=True, timeout=BOUND_S, check=False,
            cwd=ROOT,
        )  # fmt: skip

    def start(self) -> None:
        """Start the container in the background. Its output goes to the file `log` of the folder."""
        for path in MOUNTED:
            Path(self.in_folder(path)).mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.running.append(
                subprocess.Popen(self.command(), env=self.variables(), stdout=log, stderr=log, cwd=ROOT)
            )

    def stop(self) -> None:
        """Kill all processes that `start` has started."""
        for process in self.running:
            process.kill()
            process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def wait(self, probe: str, host: str) -> None:
        """Repeat a probe of the container at this host until it succeeds, or fail after BOUND_S with the log."""
        request = self.container[probe]["httpGet"]
        (port,) = [
            port["containerPort"] for port in self.container["ports"] if port["name"] == request["port"]
        ]
        url = f"{request['scheme'].lower()}://{host}:{port}{request['path']}"
        until_s = time.monotonic() + BOUND_S
        while True:
            try:
                # Kubernetes does not check the certificate either.
                context = ssl._create_unverified_context()
                with urllib.request.urlopen(url, timeout=BOUND_S, context=context) as answer:
                    assert answer.status == 200
                    return
            except OSError:  # no answer yet, or a connection that a node closes when it begins to lead
                assert time.monotonic() < until_s, f"{probe} {url}\n{self.log()}"
                time.sleep(0.1)


@contextmanager
def three_pods(
    documents: Documents, folder: Path, secrets: Mapping[str, str] | None = None
) -> Iterator[dict[str, Pod]]:
    """Start the pods of a rendered cluster, and yield them by their addresses.

    `secrets` has a file of this machine for each path at which Kubernetes would mount it.
    """
    name = "there-timeball"
    (container,) = pod_specs(documents)[f"StatefulSet/{name}"]["containers"]
    pods = {}
    for number in range(documents[f"StatefulSet/{name}"]["spec"]["replicas"]):
        (folder / str(number)).mkdir()
        host = address(number)
        pods[host] = pod = Pod(folder / str(number), container)
        pod.environment = {
            "TIMEBALL_NODE": f"{name}-{number}", "TIMEBALL_ADVERTISE": host, "TIMEBALL_HOST": host,
        }  # fmt: skip
        pod.write("/etc/timeball/timeball.toml", documents[f"ConfigMap/{name}"]["data"]["timeball.toml"])
        for path, file in (secrets or {}).items():
            pod.write(path, Path(file).read_text())
    try:
        for pod in pods.values():
            pod.start()
        yield pods
    finally:
        for pod in pods.values():
            pod.stop()


def job(documents: Documents, folder: Path) -> Pod:
    """Return the container of the job that creates the group of the cluster."""
    (name,) = [name for name in documents if name.startswith("Job/")]
    (container,) = pod_specs(documents)[name]["containers"]
    pod = Pod(folder, container)
    pod.write("/etc/timeball/timeball.toml", documents["ConfigMap/there-timeball"]["data"]["timeball.toml"])
    return pod
