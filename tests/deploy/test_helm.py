"""The chart: helm lints and renders it where it is, and what is rendered is what a broker can be started with.

Without helm the schema of the values is tried alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs_pages import ROOT

from timeball import __version__
from timeball.cli.options import build_settings
from timeball.config import Settings, types

CHART = ROOT / "deploy/helm/timeball"
HELM = shutil.which("helm") or shutil.which("helm", path=str(Path.home() / "go/bin"))
needs_helm = pytest.mark.skipif(
    HELM is None, reason="no helm here (Go: go install helm.sh/helm/v3/cmd/helm@latest)"
)
KUBERNETES = "--kube-version=1.31.0"
PLAIN = ["allowPlaintext=true"]
FULL = [
    "tls.secretName=pair", "accessSecretName=accounts", "settings.retention_ms=24h", "settings.queues_per_topic=4",
    "settings.auto_create_topics=false", "serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus",
    "serviceMonitor.authorization.name=scraper", "serviceMonitor.authorization.key=account",
    "prometheusRule.enabled=true", "prometheusRule.labels.release=prometheus",
    "persistence.storageClassName=local", "priorityClassName=high", "nodeSelector.disk=quick",
    "podAnnotations.team=messages", "service.annotations.a=b", "imagePullSecrets[0].name=pull",
]  # fmt: skip


def helm(verb: str, *values: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    release = ["there"] if verb == "template" else []
    options = [f"--set={value}" for value in values]
    command = [HELM, verb, *release, str(CHART), KUBERNETES, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(*values: str) -> dict[str, dict[str, Any]]:
    """Return the documents by kind and name."""
    ran = helm("template", *values)
    assert ran.returncode == 0, ran.stderr
    documents = [document for document in yaml.safe_load_all(ran.stdout) if document]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def pod(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = found["StatefulSet/there-timeball"]["spec"]["template"]["spec"]
    return spec


@needs_helm
@pytest.mark.parametrize("values", [PLAIN, FULL], ids=["plain", "full"])
def test_helm_has_nothing_to_say(values: list[str]) -> None:
    linted = helm("lint", *values)
    assert linted.returncode == 0 and "[ERROR]" not in linted.stdout, linted.stdout
    assert "[WARNING]" not in linted.stdout, linted.stdout


@needs_helm
def test_a_broker_that_others_reach_in_plain_text_must_be_asked_for() -> None:
    refused = helm("template")
    assert refused.returncode == 1 and "allowPlaintext=true" in refused.stderr


@needs_helm
@pytest.mark.parametrize(
    "wrong",
    [
        "replicas=3", "image.tagg=1", "persistence.size=much", "settings.data=/elsewhere", "settings.http_port=1",
        "service.type=Any", "allowPlaintext=perhaps", "terminationGracePeriodSeconds=1",
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(wrong: str) -> None:
    refused = helm("template", *PLAIN, wrong)
    assert refused.returncode == 1 and "schema" in refused.stderr, refused.stderr


@needs_helm
@pytest.mark.parametrize("values", [PLAIN, FULL], ids=["plain", "full"])
def test_a_broker_takes_the_settings(values: list[str], tmp_path: Path) -> None:
    found = rendered(*values)
    text = found["ConfigMap/there-timeball"]["data"]["timeball.toml"]
    (tmp_path / "timeball.toml").write_text(text)
    settings = build_settings(tmp_path / "timeball.toml", {})
    assert settings.host == "0.0.0.0"
    (container,) = pod(found)["containers"]
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    for path in (settings.data, *filter(None, (settings.tls_cert, settings.tls_key, settings.access_file))):
        assert mounted & {Path(path), *Path(path).parents}, path
    if values is FULL:
        assert (settings.retention_ms, settings.queues_per_topic) == (24 * 3_600_000, 4)
        assert not settings.auto_create_topics and not settings.allow_plaintext


@needs_helm
def test_nothing_may_write_but_to_its_volumes_and_no_right_is_gained() -> None:
    spec = pod(rendered(*FULL))
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert (
        f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in dockerfile
    )
    volumes = {volume["name"] for volume in spec["volumes"]} | {"data"}
    for container in [*spec["containers"], *spec["initContainers"]]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@needs_helm
@pytest.mark.parametrize(("values", "scheme"), [(PLAIN, "HTTP"), (FULL, "HTTPS")], ids=["plain", "full"])
def test_probes_ports_and_scrapes_are_those_of_a_broker(values: list[str], scheme: str) -> None:
    found = rendered(*values)
    (container,) = pod(found)["containers"]
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert asked == {"path": f"/health/{path}", "port": "http", "scheme": scheme}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = {f.default for f in Settings.__dataclass_fields__.values() if f.name.endswith("port")}
    # The chart runs a broker alone; the port between nodes of a cluster is not open then.
    assert set(ports.values()) == defaults - {Settings().replication_port}
    selector = found["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]
    for name in ("there-timeball", "there-timeball-pods"):
        service = found[f"Service/{name}"]["spec"]
        assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
        assert service["selector"] == selector
    if values is FULL:
        monitor = found["ServiceMonitor/there-timeball"]["spec"]
        (endpoint,) = monitor["endpoints"]
        assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
        scraped = [
            name for name, document in found.items() if name.startswith("Service/")
            and monitor["selector"]["matchLabels"].items() <= document["metadata"]["labels"].items()
        ]  # fmt: skip
        assert scraped == ["Service/there-timeball"], "each figure once"
        assert found["Service/there-timeball"]["metadata"]["labels"][monitor["jobLabel"]] == "timeball"
    else:
        assert not [name for name in found if name.startswith("ServiceMonitor")]


@needs_helm
@pytest.mark.parametrize(("values", "ruled"), [(PLAIN, False), (FULL, True)], ids=["plain", "full"])
def test_the_alerts_are_those_of_the_repository(values: list[str], ruled: bool) -> None:
    found = rendered(*values)
    assert ("PrometheusRule/there-timeball" in found) is ruled
    if ruled:
        rule = found["PrometheusRule/there-timeball"]
        assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/timeball.rules.yml").read_text())
        assert rule["metadata"]["labels"]["release"] == "prometheus"


@needs_helm
def test_a_packed_chart_has_the_alerts_in_it(tmp_path: Path) -> None:
    """They are a link to the one file; a package must hold what it leads to."""
    command = [str(HELM), "package", str(CHART), "--destination", str(tmp_path)]
    packed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(*tmp_path.iterdir()) as chart:
        rules = chart.getmember("timeball/files/timeball.rules.yml")
        assert rules.isfile() and rules.size > 0


def test_the_values_and_their_schema_name_the_same() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    own = schema["properties"]["settings"]["propertyNames"]["not"]["enum"]
    assert not [name for name in own if name not in types()], "no such setting"
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert not [name for name in values if f".Values.{name}" not in templates], "of no use"


def test_chart_and_package_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    assert f"timeball:{__version__}" in (ROOT / "deploy/docker/compose.yaml").read_text()
    assert re.search(r"^appVersion: \"", (CHART / "Chart.yaml").read_text(), re.M), "a text, not a number"
