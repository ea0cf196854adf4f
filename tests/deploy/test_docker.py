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
# The image and the compose file run a single broker, so the port between nodes of a cluster is missing.
PORTS = {field.default for field in Settings.__dataclass_fields__.values() if field.name.endswith("port")} - {
    Settings().replication_port
}
HADOLINT = shutil.which("hadolint", path=f"{sys.prefix}/bin") or shutil.which("hadolint")
needs_hadolint = pytest.mark.skipif(HADOLINT is None, reason="no hadolint here (it comes with `make setup`)")


def hadolint(text: str) -> str:
    """Return the output of the linter for a Dockerfile."""
    assert HADOLINT is not None
    process = subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, check=False)
    return process.stdout + process.stderr


@needs_hadolint
def test_the_linter_finds_no_fault_in_the_dockerfile() -> None:
    assert hadolint(DOCKERFILE) == ""


@needs_hadolint
def test_a_bad_line_is_noticed() -> None:
    assert "DL3002" in hadolint(DOCKERFILE.replace("USER 7400:7400", "USER root"))


def test_the_last_stage_has_no_compiler_runs_not_as_root_and_exposes_the_ports_of_a_broker() -> None:
    assert not re.search(r"apt-get|gcc|pip install", LAST_STAGE)
    assert re.findall(r"^USER (.*)$", LAST_STAGE, re.M) == ["7400:7400"]
    assert set(map(int, re.findall(r"^EXPOSE (.*)$", LAST_STAGE, re.M)[0].split())) == PORTS


def test_no_image_names_the_address_of_a_registry() -> None:
    images = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M) + [
        service["image"] for service in COMPOSE["services"].values()
    ]
    assert not [name for name in images if re.match(r"[^/]*[.:][^/]*/", name)], "an image as host/name"


def test_each_copied_file_exists_and_is_named_in_dockerignore() -> None:
    included = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
            assert source in included, f"{source}: name it in .dockerignore"
    assert not [name for name in included if not (ROOT / name).exists()]


def locked(name: str) -> dict[str, str]:
    """Return the packages of a lock file with their versions."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([^ ;\\]+)", text, re.M))


def test_the_image_has_the_locked_packages_of_the_broker_and_the_client_of_kafka() -> None:
    broker, image, everything = locked("broker"), locked("image"), locked("all")
    assert len(broker) > 40 and set(image) - set(broker) == {"confluent-kafka"}
    assert {name: image[name] for name in broker} == broker, "the same versions"
    assert image["confluent-kafka"] == everything["confluent-kafka"], "the version that is tested"
    assert "-r requirements/image.txt" in DOCKERFILE


def test_the_variables_of_the_image_and_of_compose_are_settings() -> None:
    names = re.findall(r"TIMEBALL_(\w+)=", LAST_STAGE) + [
        name.removeprefix("TIMEBALL_") for name in BROKER["environment"]
    ]
    assert not [name for name in names if name.lower() not in types()]


def test_compose_publishes_ports_on_the_loopback_only_and_mounts_only_declared_or_existing_volumes() -> None:
    published = [port.split(":") for port in BROKER["ports"]]
    assert {int(container_port) for _, _, container_port in published} == PORTS
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
    """Run the health check of the image with only these variables in its environment."""
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


def test_a_broker_with_a_full_disk_or_without_an_answer_is_not_healthy(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node:
        port = str(node.node.http_port)
        # The check must not use a proxy of the host, which cannot reach the loopback of the container.
        assert health(TIMEBALL_HTTP_PORT=port, http_proxy="http://127.0.0.1:9").returncode == 0
        node.broker.log.writer.next_segment.disk_full_error = OSError(errno.ENOSPC, "no room")
        full = health(TIMEBALL_HTTP_PORT=port)
        assert full.returncode == 1 and "disk full" in full.stderr
    gone = health(TIMEBALL_HTTP_PORT=port)
    assert gone.returncode == 1 and "no answer" in gone.stderr


def test_a_broker_with_a_certificate_is_healthy_only_if_the_check_uses_tls(tmp_path: Path) -> None:
    paths = certificate(tmp_path / "tls", "broker.example.org")
    with running_node(tmp_path / "data", http_port=0, **paths.settings) as node:
        port = str(node.node.http_port)
        assert health(TIMEBALL_HTTP_PORT=port).returncode == 1
        assert health(TIMEBALL_HTTP_PORT=port, TIMEBALL_TLS_CERT=paths.cert).returncode == 0
