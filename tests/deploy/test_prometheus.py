"""Alerts and dashboard: promtool accepts the rules, each alert fires on its own fault, all named metrics exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.bounds import BOUND_S
from tests.docs_pages import ROOT, page
from tests.node_fixture import running_node

FOLDER = ROOT / "deploy/prometheus"
RULES = FOLDER / "timeball.rules.yml"
TESTS_OF_RULES = sorted(FOLDER.glob("timeball.rules*.test.yml"))
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/timeball.json").read_text())
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian: prometheus)")


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True, check=False)


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the place of each query, and the query."""
    yield from ((name, rule["expr"]) for name, rule in alerts().items())
    yield from ((panel["title"], target["expr"]) for panel in panels() for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    yield from ((each["name"], each["expr"]) for each in DASHBOARD["annotations"]["list"])


def families(text: str) -> dict[str, set[str]]:
    """Return the metrics of docs/metrics.md with their labels, as Prometheus names their series."""
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `timeball_.*$", text, re.M):
        cells = re.fullmatch(r"\| `(\w+)(?:\{([\w,]+)\})?` \| ([^|]+) \|", row)
        assert cells, row
        name, own = cells[1], set(filter(None, (cells[2] or "").split(",")))
        if cells[3].startswith("histogram: "):
            found |= {f"{name}_bucket": own | {"le"}, f"{name}_sum": own, f"{name}_count": own}
        else:
            found[name] = own
    for name in re.findall(r"`(process_\w+)`", text):
        found[name] = set()
    return found


KNOWN = families(page("docs/metrics.md"))


def unknown(expression: str) -> set[str]:
    """Return the metrics and labels of an expression that no broker has."""
    named = set(re.findall(r"\b(?:timeball|process)_\w+", expression))
    labels = {label for name in named & set(KNOWN) for label in KNOWN[name]} | {"job", "instance"}
    grouped = {
        word.strip()
        for words in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression)
        for word in words.split(",")
    }
    return (named - set(KNOWN)) | (grouped - labels)


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_requested_files_exist(place: str, expression: str) -> None:
    assert not unknown(expression), place


def test_a_metric_or_label_that_is_not_there_is_noticed() -> None:
    assert unknown("rate(timeball_accepted_total[5m])") == {"timeball_accepted_total"}
    assert unknown("sum by (topic, colour) (timeball_group_lag_messages)") == {"colour"}


@needs_promtool
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for what, name in (("rules", RULES.name), ("config", "prometheus.yml")):
        checked = promtool("check", what, str(FOLDER / name))
        assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    ran = promtool("test", "rules", *map(str, TESTS_OF_RULES))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_an_alert_that_never_fires_is_noticed(tmp_path: Path) -> None:
    """The test of each alert fails when its expression finds nothing: so each has one that sees it fire."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = f"({rule['expr']}) and on () vector(1) < 0"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules))
    ran = promtool("test", "rules", *(str(shutil.copy(path, tmp_path)) for path in TESTS_OF_RULES))
    failed = set(re.findall(r"alertname: (\w+)", ran.stdout + ran.stderr))
    assert ran.returncode == 1 and failed == set(alerts()), ran.stdout + ran.stderr


def test_each_alert_says_what_is_so_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert set(rule["annotations"]) == {"summary", "action"}, name
        assert f"`{name}`" in page("docs/metrics.md"), name


@needs_promtool
def test_prometheus_finds_no_fault_in_what_a_broker_says(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "data", http_port=0) as node,
        node.client() as ball,
    ):
        ball.send("orders", "now")
        ball.send("orders", "later", after="2d")
        ball.pull("orders", "billing")
        url = f"http://127.0.0.1:{node.node.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            text = answer.read().decode()
    checked = promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


# ---- the dashboard ------------------------------------------------------------------------------------------


def test_panels_say_what_they_show_and_lie_side_by_side() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= own
    assert all(panel["description"] and panel["targets"] for panel in panels())


def test_every_metric_that_a_person_looks_at_is_on_the_dashboard() -> None:
    shown = " ".join(expression for _, expression in expressions())
    hidden = {
        "timeball_build_info",
        "timeball_pipeline_compacts",
    }  # a label, and a state of the pipeline's page
    series = {
        name for name in KNOWN if name.startswith("timeball_") and not name.endswith(("_sum", "_count"))
    }
    assert not [name for name in series - hidden if name not in shown]
