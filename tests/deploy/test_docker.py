"""The image and its compose file, checked without a daemon: by a linter, and against the files of the project."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.docs_pages import ROOT
from tests.node_fixture import running_node

from timeball.model.config import Settings, types

FOLDER = ROOT / "deploy/docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
LAST_STAGE = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
BROKER = COMPOSE["services"]["timeball"]
# Of a broker alone, as the image and the compose file run it: without the port between nodes of a cluster.
PORTS = {field.default for field in Settings.__dataclass_fields__.values() if field.name.endswith("port")} - {
    Settings().replication_port
}
HADOLINT = shutil.which("hadolint", path=f"{sys.prefix}/bin") or shutil.which("hadolint")
needs_hadolint = pytest.mark.skipif(HADOLINT is None, reason="no hadolint here (it comes with `make setup`)")


def hadolint(text: str) -> str:
    assert HADOLINT is not None
    ran = subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@needs_hadolint
def test_a_linter_has_nothing_to_say() -> None:
    assert hadolint(DOCKERFILE) == ""


@needs_hadolint
def test_a_bad_line_is_noticed() -> None:
    assert "DL3002" in hadolint(DOCKERFILE.replace("USER 7400:7400", "USER root"))


def test_the_last_stage_has_no_compiler_and_no_root() -> None:
    assert not re.search(r"apt-get|gcc|pip install", LAST_STAGE)
    assert re.findall(r"^USER (.*)$", LAST_STAGE, re.M) == ["7400:7400"]
    assert set(map(int, re.findall(r"^EXPOSE (.*)$", LAST_STAGE, re.M)[0].split())) == PORTS


def test_no_address_of_a_registry_is_named() -> None:
    named = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M) + [
        service["image"] for service in COMPOSE["services"].values()
    ]
    assert not [name for name in named if re.match(r"[^/]*[.:][^/]*/", name)], "host/name"


def test_copied_files_exist_and_are_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source}: name it in .dockerignore"
    assert not [name for name in kept if not (ROOT / name).exists()]


def locked(name: str) -> dict[str, str]:
    """Return the packages of a lock file with their versions."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([^ ;\\]+)", text, re.M))


def test_the_image_has_the_brokers_packages_and_kafkas_client() -> None:
    broker, image, everything = locked("broker"), locked("image"), locked("all")
    assert len(broker) > 40 and set(image) - set(broker) == {"confluent-kafka"}
    assert {name: image[name] for name in broker} == broker, "the same versions"
    assert image["confluent-kafka"] == everything["confluent-kafka"], "that is tested"
    assert "-r requirements/image.txt" in DOCKERFILE


def test_environment_names_settings() -> None:
    named = re.findall(r"TIMEBALL_(\w+)=", LAST_STAGE) + [
        name.removeprefix("TIMEBALL_") for name in BROKER["environment"]
    ]
    assert not [name for name in named if name.lower() not in types()]


def test_compose_keeps_the_broker_on_this_machine_and_its_files_apart() -> None:
    published = [port.split(":") for port in BROKER["ports"]]
    assert {int(inside) for _, _, inside in published} == PORTS
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (FOLDER / source).exists(), volume
    assert BROKER["read_only"] is True
    (data,) = re.findall(r"TIMEBALL_DATA=(\S+)", LAST_STAGE)
    assert f"data:{data}" in BROKER["volumes"] and f"VOLUME {data}" in LAST_STAGE


# ---- the health check, against real brokers ---------------------------------------------------------------


def health(**environment: str) -> subprocess.CompletedProcess[str]:
    (words,) = re.findall(r"CMD \[(.*health.*)\]", LAST_STAGE)
    assert '"/opt/timeball/health.py"' in words and (FOLDER / "health.py").exists()
    return subprocess.run(
        [sys.executable, str(FOLDER / "health.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def test_a_broker_that_is_full_or_gone_is_not_healthy(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node:
        port = str(node.node.http_port)
        # A proxy of the host's would not know the container's loopback.
        assert health(TIMEBALL_HTTP_PORT=port, http_proxy="http://127.0.0.1:9").returncode == 0
        node.broker.log.writer.next_segment.disk_full_error = OSError(errno.ENOSPC, "no room")
        full = health(TIMEBALL_HTTP_PORT=port)
        assert full.returncode == 1 and "disk full" in full.stderr
    gone = health(TIMEBALL_HTTP_PORT=port)
    assert gone.returncode == 1 and "no answer" in gone.stderr


def test_a_broker_with_a_certificate_is_asked_over_tls(tmp_path: Path) -> None:
    paths = certificate(tmp_path / "tls", "broker.example.org")
    with running_node(tmp_path / "data", http_port=0, **paths.settings) as node:
        port = str(node.node.http_port)
        assert health(TIMEBALL_HTTP_PORT=port).returncode == 1
        assert health(TIMEBALL_HTTP_PORT=port, TIMEBALL_TLS_CERT=paths.cert).returncode == 0
