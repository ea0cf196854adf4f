"""The chart: helm lints and renders it if installed, and a broker starts with the rendered settings.

Without helm, only the schema of the values is tested.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.cli.in_process import parsed, run_here
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.deploy.rendered_pods import Pod, address, job, pod_specs, three_pods
from tests.docs_pages import ROOT
from tests.edges.kafka.conftest import SmallKafka
from tests.node_fixture import running_node

from timeball import Timeball, __version__
from timeball.cli.options import build_settings
from timeball.model.config import Settings, types

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
    "env[0].name=OTEL_EXPORTER_OTLP_ENDPOINT", "env[0].value=http://collector:4318",
    "env[1].name=POD", "env[1].valueFrom.fieldRef.fieldPath=metadata.name",
    "envFrom[0].secretRef.name=object-store",
    "podAnnotations.team=messages", "service.annotations.a=b", "imagePullSecrets[0].name=pull",
]  # fmt: skip
CLUSTER = [*PLAIN, "cluster.enabled=true", "cluster.etcd.endpoints={http://etcd-0:2379,http://etcd-1:2379}"]
FULL_CLUSTER = [
    *FULL, "tls.caSecretName=pair", "cluster.enabled=true", "cluster.name=shop", "cluster.group=g2",
    "cluster.etcd.endpoints={https://etcd-0:2379,https://etcd-1:2379}", "cluster.etcd.tls.secretName=etcd",
    "cluster.etcd.user=timeball", "cluster.etcd.passwordSecretName=etcd-user", "cluster.updateStrategy=OnDelete",
]  # fmt: skip
BRIDGES = [
    "kafkaBridges[0].name=orders.eu", "kafkaBridges[0].bootstrap={kafka-0:9092,kafka-1:9092}",
    "kafkaBridges[0].in=orders.delayed", "kafkaBridges[0].out=orders", "kafkaBridges[0].dead=orders.refused",
    "kafkaBridges[0].from=latest", "kafkaBridges[0].configSecretName=orders-kafka", "kafkaBridges[0].size=2Gi",
    "kafkaBridges[0].env[0].name=TIMEBALL_LOG_LEVEL", "kafkaBridges[0].env[0].value=info",
    "kafkaBridges[0].envFrom[0].secretRef.name=orders-bridge", "kafkaBridges[0].resources.limits.memory=2Gi",
    "kafkaBridges[1].name=mail", "kafkaBridges[1].bootstrap={kafka-0:9092}", "kafkaBridges[1].in=mail.delayed",
]  # fmt: skip
PLAIN_BRIDGES, FULL_BRIDGES = [*PLAIN, *BRIDGES], [*FULL_CLUSTER, *BRIDGES]
ALL = {"plain": PLAIN, "full": FULL, "cluster": CLUSTER, "full-cluster": FULL_CLUSTER,
       "bridges": PLAIN_BRIDGES, "full-bridges": FULL_BRIDGES}  # fmt: skip
every = pytest.mark.parametrize("values", list(ALL.values()), ids=list(ALL))


def helm(verb: str, *values: str) -> subprocess.CompletedProcess[str]:
    """Run helm on the chart with these values. A rendered release has the name "there"."""
    assert HELM is not None
    release = ["there"] if verb == "template" else []
    options = [f"--set={value}" for value in values]
    command = [HELM, verb, *release, str(CHART), KUBERNETES, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(*values: str) -> dict[str, dict[str, Any]]:
    """Return the rendered documents by "Kind/name"."""
    process = helm("template", *values)
    assert process.returncode == 0, process.stderr
    documents = [document for document in yaml.safe_load_all(process.stdout) if document]
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def pod(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the spec of the pods of the broker."""
    spec: dict[str, Any] = documents["StatefulSet/there-timeball"]["spec"]["template"]["spec"]
    return spec


@needs_helm
@every
def test_helm_lints_the_chart_without_a_warning(values: list[str]) -> None:
    process = helm("lint", *values)
    assert process.returncode == 0 and "[ERROR]" not in process.stdout, process.stdout
    assert "[WARNING]" not in process.stdout, process.stdout


@needs_helm
def test_a_broker_without_tls_is_refused_unless_the_values_allow_it() -> None:
    process = helm("template")
    assert process.returncode == 1 and "allowPlaintext=true" in process.stderr


@needs_helm
@pytest.mark.parametrize(
    "wrong",
    [
        "replicas=3", "image.tagg=1", "persistence.size=much", "settings.data=/elsewhere", "settings.http_port=1",
        "service.type=Any", "allowPlaintext=perhaps", "terminationGracePeriodSeconds=1",
        "env[0].name=TIMEBALL_PORT", "env[0].name=a-b", "env[0].value=nameless", "envFrom=secret",
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_the_schema(wrong: str) -> None:
    process = helm("template", *PLAIN, wrong)
    assert process.returncode == 1 and "schema" in process.stderr, process.stderr


@needs_helm
@every
def test_a_broker_accepts_the_rendered_settings_and_their_files_are_mounted(
    values: list[str], tmp_path: Path
) -> None:
    documents = rendered(*values)
    settings = settings_of(documents, tmp_path)
    assert settings.host == "0.0.0.0"
    (container,) = pod(documents)["containers"]
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    files = ("tls_cert", "tls_key", "access_file", "replication_ca", "etcd_ca", "etcd_cert", "etcd_key",
             "etcd_password_file")  # fmt: skip
    paths = {name: getattr(settings, name) for name in files if getattr(settings, name)}
    for path in (settings.data, *paths.values()):
        assert mounted & {Path(path), *Path(path).parents}, path
    name = name_of(values)
    assert len(paths) == {"full": 3, "full-cluster": len(files), "full-bridges": len(files)}.get(name, 0)
    if "full" in name:
        assert (settings.retention_ms, settings.queues_per_topic) == (24 * 3_600_000, 4)
        assert not settings.auto_create_topics and not settings.allow_plaintext


def name_of(values: list[str]) -> str:
    """Return the name of these values in ALL."""
    (name,) = [name for name, named_values in ALL.items() if named_values is values]
    return name


def settings_of(documents: dict[str, dict[str, Any]], folder: Path) -> Settings:
    """Return the rendered settings of the broker, in a cluster those of the first pod. Writes them to the folder."""
    text = documents["ConfigMap/there-timeball"]["data"]["timeball.toml"]
    (folder / "timeball.toml").write_text(text)
    node = (
        {"node": "there-timeball-0"}
        if "StatefulSet/there-timeball" in documents and replicas(documents) > 1
        else {}
    )
    return build_settings(folder / "timeball.toml", node)


def replicas(documents: dict[str, dict[str, Any]]) -> int:
    """Return the number of pods of the broker."""
    return int(documents["StatefulSet/there-timeball"]["spec"]["replicas"])


def containers(documents: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the containers of all pods."""
    return [container for spec in pod_specs(documents).values() for container in spec["containers"]]


@needs_helm
@every
def test_the_command_line_accepts_the_arguments_of_each_container(values: list[str], tmp_path: Path) -> None:
    documents = rendered(*values)
    settings_of(documents, tmp_path)  # writes the file that the arguments name
    for container in containers(documents):
        words = [word.replace("/etc/timeball/timeball.toml", str(tmp_path / "timeball.toml"))
                 for word in container["args"]]  # fmt: skip
        parsed(words, {variable["name"]: variable.get("value", "x") for variable in container.get("env", [])})


def test_an_argument_that_the_command_line_does_not_know_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option: --node-names"):
        parsed(["cluster", "init", "--node-names", "a"], {})


@needs_helm
def test_a_container_has_only_the_variables_of_the_values_and_none_of_services() -> None:
    (container,) = pod(rendered(*FULL))["containers"]
    assert container["env"] == [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    for spec in pod_specs(rendered(*FULL_BRIDGES)).values():
        assert spec["enableServiceLinks"] is False


def test_the_variable_that_a_service_named_timeball_would_add_is_refused_as_a_setting() -> None:
    """With service links, Kubernetes would set this variable for a release named timeball, which could not start."""
    result = run_here("serve", TIMEBALL_PORT="tcp://10.0.0.1:7400")
    assert result.returncode == 2 and "--port" in result.stderr


@needs_helm
def test_containers_write_only_to_volumes_have_no_capabilities_and_do_not_run_as_root() -> None:
    spec = pod(rendered(*FULL))
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert (
        f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in dockerfile
    )
    for pod_spec in pod_specs(rendered(*FULL_BRIDGES)).values():
        assert pod_spec["securityContext"] == spec["securityContext"]
        assert not pod_spec["automountServiceAccountToken"]
        volumes = {volume["name"] for volume in pod_spec["volumes"]} | {"data"}
        for container in [*pod_spec["containers"], *pod_spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@needs_helm
@pytest.mark.parametrize(("values", "scheme"), [(PLAIN, "HTTP"), (FULL, "HTTPS")], ids=["plain", "full"])
def test_probes_ports_and_the_service_monitor_are_those_of_a_broker(values: list[str], scheme: str) -> None:
    documents = rendered(*values)
    (container,) = pod(documents)["containers"]
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        request = container[f"{probe}Probe"]["httpGet"]
        assert request == {"path": f"/health/{path}", "port": "http", "scheme": scheme}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = {
        field.default for field in Settings.__dataclass_fields__.values() if field.name.endswith("port")
    }
    # Without a cluster, the port between nodes is not open.
    assert set(ports.values()) == defaults - {Settings().replication_port}
    selector = documents["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]
    for name in ("there-timeball", "there-timeball-pods"):
        service = documents[f"Service/{name}"]["spec"]
        assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
        assert service["selector"] == selector
    if values is FULL:
        monitor = documents["ServiceMonitor/there-timeball"]["spec"]
        (endpoint,) = monitor["endpoints"]
        assert (endpoint["port"], endpoint["scheme"]) == ("http", "https")
        scraped = [
            name for name, document in documents.items() if name.startswith("Service/")
            and monitor["selector"]["matchLabels"].items() <= document["metadata"]["labels"].items()
        ]  # fmt: skip
        assert scraped == ["Service/there-timeball"], "of the two services, Prometheus scrapes one"
        assert documents["Service/there-timeball"]["metadata"]["labels"][monitor["jobLabel"]] == "timeball"
    else:
        assert not [name for name in documents if name.startswith("ServiceMonitor")]


# ---- three pods that keep one log -----------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize(
    ("without", "error_text"),  # a value that is left out, or is added if it begins with +
    [
        ("cluster.etcd.endpoints", "cluster.etcd.endpoints"),
        ("tls.caSecretName", "tls.caSecretName"),
        ("cluster.etcd.passwordSecretName", "cluster.etcd.passwordSecretName"),
        ("+settings.advertise=elsewhere", "settings.advertise"),
        ("+env[0].name=TIMEBALL_ADVERTISE", "TIMEBALL_ADVERTISE"),
        ("+cluster.etcd.endpoints={etcd-0:2379}", "schema"),
        ("+cluster.name=a/b", "schema"),
        ("+settings.etcd=elsewhere", "schema"),
    ],
)
def test_values_with_which_a_cluster_could_not_start_are_refused(without: str, error_text: str) -> None:
    values = [value for value in FULL_CLUSTER if not value.startswith(without)]
    process = helm("template", *values, *([without[1:]] if without.startswith("+") else []))
    assert process.returncode == 1 and error_text in process.stderr, process.stderr


@needs_helm
@pytest.mark.parametrize("values", [CLUSTER, FULL_CLUSTER], ids=["cluster", "full-cluster"])
def test_three_pods_have_names_to_find_each_other_and_run_on_different_machines(
    values: list[str], tmp_path: Path
) -> None:
    documents = rendered(*values)
    settings = settings_of(documents, tmp_path)
    stateful = documents["StatefulSet/there-timeball"]["spec"]
    assert (stateful["replicas"], stateful["podManagementPolicy"]) == (3, "Parallel"), (
        "a single node is not ready, so the next must not wait for it"
    )
    (container,) = pod(documents)["containers"]
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["TIMEBALL_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    # Kubernetes replaces a variable that is defined earlier. The headless service gives the pods their host names.
    assert env["TIMEBALL_ADVERTISE"]["value"] == f"$(TIMEBALL_NODE).{stateful['serviceName']}.default.svc"
    assert list(env).index("TIMEBALL_NODE") < list(env).index("TIMEBALL_ADVERTISE")
    headless = documents[f"Service/{stateful['serviceName']}"]["spec"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["replication"] == settings.replication_port
    assert {port["targetPort"]: port["port"] for port in headless["ports"]} == ports
    clients = {port["targetPort"] for port in documents["Service/there-timeball"]["spec"]["ports"]}
    assert clients == set(ports) - {"replication"}
    # A node without a leader is not ready, and a restart would not change this, so the startup probe does not ask.
    assert container["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    (anti_affinity,) = pod(documents)["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    budget = documents["PodDisruptionBudget/there-timeball"]["spec"]
    labels = stateful["selector"]["matchLabels"]
    assert anti_affinity["labelSelector"]["matchLabels"] == budget["selector"]["matchLabels"] == labels
    assert anti_affinity["topologyKey"] == "kubernetes.io/hostname" and budget["maxUnavailable"] == 1


@needs_helm
@pytest.mark.parametrize("values", [CLUSTER, FULL_CLUSTER], ids=["cluster", "full-cluster"])
def test_a_job_creates_the_group_of_the_rendered_pods(values: list[str], tmp_path: Path) -> None:
    documents = rendered(*values)
    ((name, job),) = [(name, document) for name, document in documents.items() if name.startswith("Job/")]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    settings_of(documents, tmp_path)
    words = [word.replace("/etc/timeball", str(tmp_path)) for word in container["args"]]
    options = parsed(words, {})
    assert options["nodes"].split(",") == [
        f"there-timeball-{number}" for number in range(replicas(documents))
    ]
    assert container["args"][:4] == ["cluster", "init", "--settings", "/etc/timeball/timeball.toml"]
    labels_of_pods = documents["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]
    assert not labels_of_pods.items() <= job["spec"]["template"]["metadata"]["labels"].items(), (
        "the service sends no client to the pod of the job"
    )
    changed = rendered(*values, "settings.retention_ms=25h")
    assert name not in changed, "Kubernetes cannot change a job, so other settings give it another name"
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    settings = settings_of(documents, tmp_path)
    for path in filter(None, (settings.etcd_ca, settings.etcd_key, settings.etcd_password_file)):
        assert mounted & {Path(path), *Path(path).parents}, path


@needs_helm
def test_an_affinity_of_the_values_replaces_the_default_of_the_chart() -> None:
    rule = "podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution"
    documents = rendered(*CLUSTER, f"affinity.{rule}[0].weight=1")
    assert pod(documents)["affinity"] == {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    }
    assert "affinity" not in pod(rendered(*PLAIN))


@needs_helm
@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize(
    "values", [PLAIN, ["tls.secretName=pair", "tls.caSecretName=pair"]], ids=["plain", "tls"]
)
def test_three_processes_with_the_rendered_settings_form_a_cluster(values: list[str], tmp_path: Path) -> None:
    """They run with the rendered arguments and probes, on three addresses of the loopback."""
    need_etcd()
    pair = certificate(tmp_path / "pair", *(address(number) for number in range(3)))
    secrets = {"tls/tls.crt": pair.cert, "tls/tls.key": pair.key, "ca/ca.crt": pair.roots}
    mounted = {f"/etc/timeball/{name}": file for name, file in secrets.items()} if values is not PLAIN else {}
    with EtcdCluster(tmp_path / "etcd") as etcd:
        documents = rendered(
            *values, "cluster.enabled=true", f"cluster.etcd.endpoints={{{','.join(etcd.endpoints)}}}"
        )
        with three_pods(documents, tmp_path, mounted) as pods:
            for host, pod_process in pods.items():
                pod_process.wait("startupProbe", host)
            creation = job(documents, tmp_path / "job")
            first_run = creation.run()
            assert first_run.returncode == 0, first_run.stderr
            for host, pod_process in pods.items():
                pod_process.wait("readinessProbe", host)
                pod_process.wait("livenessProbe", host)
            endpoint = ("https://" if mounted else "http://") + ",".join(f"{host}:7480" for host in pods)
            with Timeball(endpoint, tls_roots=Path(pair.roots).read_bytes() if mounted else None) as ball:
                ball.send("orders", "kept", after="1h", retry=True)
            second_run = creation.run()
            assert (second_run.returncode, second_run.stdout) == (0, first_run.stdout), (
                "the job of an upgrade runs again, and changes nothing"
            )


# ---- bridges to Kafka -----------------------------------------------------------------------------------------------


def bridge_container(documents: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the container of a bridge to Kafka."""
    (container,) = pod_specs(documents)[f"StatefulSet/there-timeball-kafka-{name}"]["containers"]
    return dict(container)


@needs_helm
@pytest.mark.parametrize("values", [PLAIN_BRIDGES, FULL_BRIDGES], ids=["plain", "full"])
def test_a_bridge_gets_its_topics_and_the_addresses_of_kafka_and_of_the_broker(values: list[str]) -> None:
    documents = rendered(*values)
    orders = parsed(bridge_container(documents, "orders-eu")["args"], {})
    assert {name: orders[name] for name in ("name", "in_topic", "out_topic", "dead_topic", "start", "bootstrap")} == {
        "name": "orders.eu", "in_topic": "orders.delayed", "out_topic": "orders", "dead_topic": "orders.refused",
        "start": "latest", "bootstrap": "kafka-0:9092,kafka-1:9092",
    }  # fmt: skip
    mail = parsed(bridge_container(documents, "mail")["args"], {})
    assert (mail["out_topic"], mail["dead_topic"], mail["start"], mail["config"]) == (
        None,
        None,
        "earliest",
        None,
    )
    hosts = [f"there-timeball-{number}.there-timeball-pods.default.svc" for number in range(3)]
    for option, port, plain, secure in (
        ("endpoint", 7480, "http", "https"),
        ("flight", 7400, "grpc", "grpc+tls"),
    ):
        nodes = ",".join(f"{host}:{port}" for host in hosts)
        alone = f"{plain}://there-timeball.default.svc:{port}"
        assert orders[option] == (f"{secure}://{nodes}" if values is FULL_BRIDGES else alone)
    for options, name in ((orders, "orders-eu"), (mail, "mail")):
        container = bridge_container(documents, name)
        mounted = {
            Path(mount["mountPath"]): mount.get("readOnly", False) for mount in container["volumeMounts"]
        }
        assert mounted[options["undeliverable"].parent] is False, (
            "the file of undeliverable records is on a writable volume"
        )
        claims = documents[f"StatefulSet/there-timeball-kafka-{name}"]["spec"]["volumeClaimTemplates"]
        assert [claim["metadata"]["name"] for claim in claims] == ["data"]
        for file in filter(None, (options["config"], variables(container).get("TIMEBALL_TLS_ROOTS"))):
            assert mounted[Path(file).parent] is True, file
        assert ("TIMEBALL_TLS_ROOTS" in variables(container)) is (values is FULL_BRIDGES)
    assert bridge_container(documents, "orders-eu")["envFrom"] == [{"secretRef": {"name": "orders-bridge"}}]
    assert variables(bridge_container(documents, "orders-eu"))["TIMEBALL_LOG_LEVEL"] == "info"


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container with their values. All must have one."""
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


@needs_helm
def test_the_selector_of_each_stateful_set_matches_only_its_own_pods() -> None:
    documents = rendered(*PLAIN_BRIDGES)
    sets = [document for name, document in documents.items() if name.startswith("StatefulSet/")]
    assert len(sets) == 3
    for stateful_set in sets:
        selector = stateful_set["spec"]["selector"]["matchLabels"].items()
        matching = [
            other for other in sets if selector <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert matching == [stateful_set]
    service = documents["Service/there-timeball"]["spec"]["selector"]
    assert service == documents["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "error_text"),
    [
        ("kafkaBridges[0].name=-a", "schema"), ("kafkaBridges[0].topic=a", "schema"),
        ("kafkaBridges[0].bootstrap={kafka}", "schema"), ("kafkaBridges[0].from=17", "schema"),
        ("kafkaBridges[0].env[0].name=TIMEBALL_PORT", "schema"),
        ("kafkaBridges[1].name=orders_EU", "orders.eu and orders_EU are one name"),
    ],
)  # fmt: skip
def test_invalid_values_of_bridges_are_refused(wrong: str, error_text: str) -> None:
    process = helm("template", *PLAIN_BRIDGES, wrong)
    assert process.returncode == 1 and error_text in process.stderr, process.stderr


@needs_helm
@pytest.mark.slow
def test_a_bridge_with_the_rendered_arguments_delivers_a_record(tmp_path: Path) -> None:
    """It runs between a real broker and the mock cluster of the client of Kafka. Only the addresses are replaced."""
    kafka = SmallKafka()
    kafka.make("orders.delayed", "orders", "orders.delayed.dead", "timeball.orders.position")
    values = {
        "name": "orders",
        "bootstrap": f"{{{kafka.bootstrap}}}",
        "in": "orders.delayed",
        "out": "orders",
    }
    documents = rendered(*PLAIN, *(f"kafkaBridges[0].{name}={value}" for name, value in values.items()))
    bridge = Pod(tmp_path, bridge_container(documents, "orders"))
    with running_node(tmp_path / "data") as node:
        args = [*bridge.container["args"]]
        endpoint, flight = (args.index(name) + 1 for name in ("--endpoint", "--flight"))
        assert args[endpoint] == "http://there-timeball.default.svc:7480"
        assert args[flight] == "grpc://there-timeball.default.svc:7400"
        args[endpoint], args[flight] = node.http_endpoint, node.endpoint
        bridge.container["args"] = args
        bridge.start()
        try:
            kafka.produce(
                "orders.delayed", {"value": b"close order 17", "key": b"17", "headers": [("after", b"1s")]}
            )
            until_s = time.monotonic() + BOUND_S
            while not (records := kafka.read("orders")):
                assert time.monotonic() < until_s, bridge.log()
        finally:
            bridge.stop()
    assert [record.value() for record in records] == [b"close order 17"]


@needs_helm
@pytest.mark.parametrize(("values", "has_rules"), [(PLAIN, False), (FULL, True)], ids=["plain", "full"])
def test_the_rendered_alerts_are_those_of_the_repository(values: list[str], has_rules: bool) -> None:
    documents = rendered(*values)
    assert ("PrometheusRule/there-timeball" in documents) is has_rules
    if has_rules:
        rule = documents["PrometheusRule/there-timeball"]
        assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/timeball.rules.yml").read_text())
        assert rule["metadata"]["labels"]["release"] == "prometheus"


@needs_helm
def test_a_packed_chart_contains_the_file_of_alerts(tmp_path: Path) -> None:
    """In the chart they are a link to a file outside of it. A package must have the file itself."""
    command = [str(HELM), "package", str(CHART), "--destination", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    with tarfile.open(*tmp_path.iterdir()) as chart:
        rules = chart.getmember("timeball/files/timeball.rules.yml")
        assert rules.isfile() and rules.size > 0


def test_the_values_their_schema_and_the_templates_have_the_same_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    refused_settings = schema["properties"]["settings"]["propertyNames"]["not"]["enum"]
    assert not [name for name in refused_settings if name not in types()], "no such setting"
    refused_variables = schema["definitions"]["env"]["items"]["properties"]["name"]["not"]["enum"]
    assert set(refused_variables) == {f"TIMEBALL_{name.upper()}" for name in [*refused_settings, "settings"]}
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert not [name for name in values if f".Values.{name}" not in templates], "no template uses the value"


def test_the_chart_and_compose_have_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    assert f"timeball:{__version__}" in (ROOT / "deploy/docker/compose.yaml").read_text()
    assert re.search(r"^appVersion: \"", (CHART / "Chart.yaml").read_text(), re.M), "a text, not a number"
