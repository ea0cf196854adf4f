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
@every
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
        "env[0].name=TIMEBALL_PORT", "env[0].name=a-b", "env[0].value=nameless", "envFrom=secret",
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(wrong: str) -> None:
    refused = helm("template", *PLAIN, wrong)
    assert refused.returncode == 1 and "schema" in refused.stderr, refused.stderr


@needs_helm
@every
def test_a_broker_takes_the_settings(values: list[str], tmp_path: Path) -> None:
    found = rendered(*values)
    settings = settings_of(found, tmp_path)
    assert settings.host == "0.0.0.0"
    (container,) = pod(found)["containers"]
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    files = ("tls_cert", "tls_key", "access_file", "replication_ca", "etcd_ca", "etcd_cert", "etcd_key",
             "etcd_password_file")  # fmt: skip
    named = {name: getattr(settings, name) for name in files if getattr(settings, name)}
    for path in (settings.data, *named.values()):
        assert mounted & {Path(path), *Path(path).parents}, path
    name = name_of(values)
    assert len(named) == {"full": 3, "full-cluster": len(files), "full-bridges": len(files)}.get(name, 0)
    if "full" in name:
        assert (settings.retention_ms, settings.queues_per_topic) == (24 * 3_600_000, 4)
        assert not settings.auto_create_topics and not settings.allow_plaintext


def name_of(values: list[str]) -> str:
    (name,) = [name for name, own in ALL.items() if own is values]
    return name


def settings_of(found: dict[str, dict[str, Any]], folder: Path) -> Settings:
    """Return the settings of the broker: of a node as the first pod has its name."""
    text = found["ConfigMap/there-timeball"]["data"]["timeball.toml"]
    (folder / "timeball.toml").write_text(text)
    own = (
        {"node": "there-timeball-0"} if "StatefulSet/there-timeball" in found and replicas(found) > 1 else {}
    )
    return build_settings(folder / "timeball.toml", own)


def replicas(found: dict[str, dict[str, Any]]) -> int:
    return int(found["StatefulSet/there-timeball"]["spec"]["replicas"])


def containers(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [container for spec in pod_specs(found).values() for container in spec["containers"]]


@needs_helm
@every
def test_the_command_line_takes_every_argument(values: list[str], tmp_path: Path) -> None:
    found = rendered(*values)
    settings_of(found, tmp_path)
    for container in containers(found):
        words = [word.replace("/etc/timeball/timeball.toml", str(tmp_path / "timeball.toml"))
                 for word in container["args"]]  # fmt: skip
        parsed(words, {each["name"]: each.get("value", "x") for each in container.get("env", [])})


def test_an_argument_that_the_command_line_does_not_know_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option: --node-names"):
        parsed(["cluster", "init", "--node-names", "a"], {})


@needs_helm
def test_the_environment_is_the_users_and_no_service_adds_to_it() -> None:
    (container,) = pod(rendered(*FULL))["containers"]
    assert container["env"] == [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    for spec in pod_specs(rendered(*FULL_BRIDGES)).values():
        assert spec["enableServiceLinks"] is False


def test_the_variable_that_a_service_named_timeball_would_add_is_a_setting() -> None:
    """The reason for no service links: with them a release named timeball would not start."""
    ran = run_here("serve", TIMEBALL_PORT="tcp://10.0.0.1:7400")
    assert ran.returncode == 2 and "--port" in ran.stderr


@needs_helm
def test_nothing_may_write_but_to_its_volumes_and_no_right_is_gained() -> None:
    spec = pod(rendered(*FULL))
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert (
        f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in dockerfile
    )
    for each in pod_specs(rendered(*FULL_BRIDGES)).values():
        assert each["securityContext"] == spec["securityContext"]
        assert not each["automountServiceAccountToken"]
        volumes = {volume["name"] for volume in each["volumes"]} | {"data"}
        for container in [*each["containers"], *each.get("initContainers", [])]:
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


# ---- three pods that keep one log -----------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize(
    ("without", "says"),
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
def test_a_cluster_that_could_not_start_is_refused(without: str, says: str) -> None:
    values = [value for value in FULL_CLUSTER if not value.startswith(without)]
    refused = helm("template", *values, *([without[1:]] if without.startswith("+") else []))
    assert refused.returncode == 1 and says in refused.stderr, refused.stderr


@needs_helm
@pytest.mark.parametrize("values", [CLUSTER, FULL_CLUSTER], ids=["cluster", "full-cluster"])
def test_three_pods_find_each_other_and_lie_apart(values: list[str], tmp_path: Path) -> None:
    found = rendered(*values)
    settings = settings_of(found, tmp_path)
    stateful = found["StatefulSet/there-timeball"]["spec"]
    assert (stateful["replicas"], stateful["podManagementPolicy"]) == (3, "Parallel"), (
        "one alone is not ready"
    )
    (container,) = pod(found)["containers"]
    given = {each["name"]: each for each in container["env"]}
    assert given["TIMEBALL_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    # Kubernetes puts the variable in, if it stands before. The headless service gives pods their names.
    assert given["TIMEBALL_ADVERTISE"]["value"] == f"$(TIMEBALL_NODE).{stateful['serviceName']}.default.svc"
    assert list(given).index("TIMEBALL_NODE") < list(given).index("TIMEBALL_ADVERTISE")
    headless = found[f"Service/{stateful['serviceName']}"]["spec"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["replication"] == settings.replication_port
    assert {port["targetPort"]: port["port"] for port in headless["ports"]} == ports
    clients = {port["targetPort"] for port in found["Service/there-timeball"]["spec"]["ports"]}
    assert clients == set(ports) - {"replication"}
    # A node without a leader is not ready, and a new start would not help it.
    assert container["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    (apart,) = pod(found)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    budget = found["PodDisruptionBudget/there-timeball"]["spec"]
    own = stateful["selector"]["matchLabels"]
    assert apart["labelSelector"]["matchLabels"] == budget["selector"]["matchLabels"] == own
    assert apart["topologyKey"] == "kubernetes.io/hostname" and budget["maxUnavailable"] == 1


@needs_helm
@pytest.mark.parametrize("values", [CLUSTER, FULL_CLUSTER], ids=["cluster", "full-cluster"])
def test_a_job_makes_the_group_of_these_pods(values: list[str], tmp_path: Path) -> None:
    found = rendered(*values)
    ((name, job),) = [(name, document) for name, document in found.items() if name.startswith("Job/")]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    settings_of(found, tmp_path)
    words = [word.replace("/etc/timeball", str(tmp_path)) for word in container["args"]]
    asked = parsed(words, {})
    assert asked["nodes"].split(",") == [f"there-timeball-{number}" for number in range(replicas(found))]
    assert container["args"][:4] == ["cluster", "init", "--settings", "/etc/timeball/timeball.toml"]
    own = found["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]
    assert not own.items() <= job["spec"]["template"]["metadata"]["labels"].items(), "no client is led to it"
    again = rendered(*values, "settings.retention_ms=25h")
    assert name not in again, "a job cannot be changed, so another text is another job"
    mounted = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    settings = settings_of(found, tmp_path)
    for path in filter(None, (settings.etcd_ca, settings.etcd_key, settings.etcd_password_file)):
        assert mounted & {Path(path), *Path(path).parents}, path


@needs_helm
def test_an_affinity_takes_the_place_of_the_charts_own() -> None:
    wanted = "podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution"
    found = rendered(*CLUSTER, f"affinity.{wanted}[0].weight=1")
    assert pod(found)["affinity"] == {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}
    }
    assert "affinity" not in pod(rendered(*PLAIN))


@needs_helm
@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize(
    "values", [PLAIN, ["tls.secretName=pair", "tls.caSecretName=pair"]], ids=["plain", "tls"]
)
def test_three_processes_of_the_rendered_cluster_are_one(values: list[str], tmp_path: Path) -> None:
    """The rendered settings, arguments and probes, on three addresses of this machine's loopback."""
    need_etcd()
    pair = certificate(tmp_path / "pair", *(address(number) for number in range(3)))
    secrets = {"tls/tls.crt": pair.cert, "tls/tls.key": pair.key, "ca/ca.crt": pair.roots}
    mounted = {f"/etc/timeball/{name}": file for name, file in secrets.items()} if values is not PLAIN else {}
    with EtcdCluster(tmp_path / "etcd") as etcd:
        found = rendered(
            *values, "cluster.enabled=true", f"cluster.etcd.endpoints={{{','.join(etcd.endpoints)}}}"
        )
        with three_pods(found, tmp_path, mounted) as pods:
            for host, each in pods.items():
                each.wait("startupProbe", host)
            making = job(found, tmp_path / "job")
            ran = making.run()
            assert ran.returncode == 0, ran.stderr
            for host, each in pods.items():
                each.wait("readinessProbe", host)
                each.wait("livenessProbe", host)
            endpoint = ("https://" if mounted else "http://") + ",".join(f"{host}:7480" for host in pods)
            with Timeball(endpoint, tls_roots=Path(pair.roots).read_bytes() if mounted else None) as ball:
                ball.send("orders", "kept", after="1h", retry=True)
            again = making.run()
            assert (again.returncode, again.stdout) == (0, ran.stdout), "as the job of an upgrade does"


# ---- bridges to Kafka -----------------------------------------------------------------------------------------------


def bridge_container(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    (container,) = pod_specs(found)[f"StatefulSet/there-timeball-kafka-{name}"]["containers"]
    return dict(container)


@needs_helm
@pytest.mark.parametrize("values", [PLAIN_BRIDGES, FULL_BRIDGES], ids=["plain", "full"])
def test_a_bridge_is_told_its_topics_and_where_both_sides_are(values: list[str]) -> None:
    found = rendered(*values)
    asked = parsed(bridge_container(found, "orders-eu")["args"], {})
    assert {name: asked[name] for name in ("name", "in_topic", "out_topic", "dead_topic", "start", "bootstrap")} == {
        "name": "orders.eu", "in_topic": "orders.delayed", "out_topic": "orders", "dead_topic": "orders.refused",
        "start": "latest", "bootstrap": "kafka-0:9092,kafka-1:9092",
    }  # fmt: skip
    small = parsed(bridge_container(found, "mail")["args"], {})
    assert (small["out_topic"], small["dead_topic"], small["start"], small["config"]) == (
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
        assert asked[option] == (f"{secure}://{nodes}" if values is FULL_BRIDGES else alone)
    for asking, name in ((asked, "orders-eu"), (small, "mail")):
        container = bridge_container(found, name)
        mounted = {
            Path(mount["mountPath"]): mount.get("readOnly", False) for mount in container["volumeMounts"]
        }
        assert mounted[asking["undeliverable"].parent] is False, "on a volume that can be written"
        claims = found[f"StatefulSet/there-timeball-kafka-{name}"]["spec"]["volumeClaimTemplates"]
        assert [claim["metadata"]["name"] for claim in claims] == ["data"]
        for file in filter(None, (asking["config"], variables(container).get("TIMEBALL_TLS_ROOTS"))):
            assert mounted[Path(file).parent] is True, file
        assert ("TIMEBALL_TLS_ROOTS" in variables(container)) is (values is FULL_BRIDGES)
    assert bridge_container(found, "orders-eu")["envFrom"] == [{"secretRef": {"name": "orders-bridge"}}]
    assert variables(bridge_container(found, "orders-eu"))["TIMEBALL_LOG_LEVEL"] == "info"


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", [])}


@needs_helm
def test_no_client_is_led_to_a_bridge_and_none_to_another() -> None:
    found = rendered(*PLAIN_BRIDGES)
    sets = [document for name, document in found.items() if name.startswith("StatefulSet/")]
    assert len(sets) == 3
    for one in sets:
        own = one["spec"]["selector"]["matchLabels"].items()
        chosen = [each for each in sets if own <= each["spec"]["template"]["metadata"]["labels"].items()]
        assert chosen == [one]
    service = found["Service/there-timeball"]["spec"]["selector"]
    assert service == found["StatefulSet/there-timeball"]["spec"]["selector"]["matchLabels"]


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("kafkaBridges[0].name=-a", "schema"), ("kafkaBridges[0].topic=a", "schema"),
        ("kafkaBridges[0].bootstrap={kafka}", "schema"), ("kafkaBridges[0].from=17", "schema"),
        ("kafkaBridges[0].env[0].name=TIMEBALL_PORT", "schema"),
        ("kafkaBridges[1].name=orders_EU", "orders.eu and orders_EU are one name"),
    ],
)  # fmt: skip
def test_bridges_that_cannot_be_are_refused(wrong: str, says: str) -> None:
    refused = helm("template", *PLAIN_BRIDGES, wrong)
    assert refused.returncode == 1 and says in refused.stderr, refused.stderr


@needs_helm
@pytest.mark.slow
def test_the_rendered_bridge_carries_a_record(tmp_path: Path) -> None:
    """The rendered arguments between a real broker and the mock cluster of Kafka's client."""
    kafka = SmallKafka()
    kafka.make("orders.delayed", "orders", "orders.delayed.dead", "timeball.orders.position")
    own = {"name": "orders", "bootstrap": f"{{{kafka.bootstrap}}}", "in": "orders.delayed", "out": "orders"}
    found = rendered(*PLAIN, *(f"kafkaBridges[0].{name}={value}" for name, value in own.items()))
    bridge = Pod(tmp_path, bridge_container(found, "orders"))
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
    variables = schema["definitions"]["env"]["items"]["properties"]["name"]["not"]["enum"]
    assert set(variables) == {f"TIMEBALL_{name.upper()}" for name in [*own, "settings"]}
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert not [name for name in values if f".Values.{name}" not in templates], "of no use"


def test_chart_and_package_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    assert f"timeball:{__version__}" in (ROOT / "deploy/docker/compose.yaml").read_text()
    assert re.search(r"^appVersion: \"", (CHART / "Chart.yaml").read_text(), re.M), "a text, not a number"
