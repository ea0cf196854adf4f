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
    """Run promtool with a text as its input."""
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True, check=False)


def alerts() -> dict[str, dict[str, Any]]:
    """Return the rule of each alert, by its name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard that show data."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each query of the alerts and of the dashboard."""
    yield from ((name, rule["expr"]) for name, rule in alerts().items())
    yield from ((panel["title"], target["expr"]) for panel in panels() for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    yield from ((annotation["name"], annotation["expr"]) for annotation in DASHBOARD["annotations"]["list"])


def families(text: str) -> dict[str, set[str]]:
    """Return the labels of each series in docs/metrics.md. A histogram has three series."""
    labels: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `timeball_.*$", text, re.M):
        cells = re.fullmatch(r"\| `(\w+)(?:\{([\w,]+)\})?` \| ([^|]+) \|", row)
        assert cells, row
        name, own_labels = cells[1], set(filter(None, (cells[2] or "").split(",")))
        if cells[3].startswith("histogram: "):
            labels |= {
                f"{name}_bucket": own_labels | {"le"},
                f"{name}_sum": own_labels,
                f"{name}_count": own_labels,
            }
        else:
            labels[name] = own_labels
    for name in re.findall(r"`(process_\w+)`", text):
        labels[name] = set()
    return labels


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
def test_each_query_names_only_metrics_and_labels_that_exist(place: str, expression: str) -> None:
    assert not unknown(expression), place


def test_a_metric_or_label_that_is_not_there_is_noticed() -> None:
    assert unknown("rate(timeball_accepted_total[5m])") == {"timeball_accepted_total"}
    assert unknown("sum by (topic, colour) (timeball_group_lag_messages)") == {"colour"}


@needs_promtool
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    for kind, name in (("rules", RULES.name), ("config", "prometheus.yml")):
        process = promtool("check", kind, str(FOLDER / name))
        assert process.returncode == 0, process.stdout + process.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    process = promtool("test", "rules", *map(str, TESTS_OF_RULES))
    assert process.returncode == 0, process.stdout + process.stderr


@needs_promtool
def test_an_alert_that_never_fires_is_noticed(tmp_path: Path) -> None:
    """If the expressions find nothing, a test of each alert fails. So each alert has a test in which it fires."""
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = f"({rule['expr']}) and on () vector(1) < 0"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules))
    process = promtool("test", "rules", *(str(shutil.copy(path, tmp_path)) for path in TESTS_OF_RULES))
    failed = set(re.findall(r"alertname: (\w+)", process.stdout + process.stderr))
    assert process.returncode == 1 and failed == set(alerts()), process.stdout + process.stderr


def test_each_alert_has_a_severity_a_summary_an_action_and_an_entry_in_the_documentation() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert set(rule["annotations"]) == {"summary", "action"}, name
        assert f"`{name}`" in page("docs/metrics.md"), name


@needs_promtool
def test_promtool_finds_no_fault_in_the_metrics_of_a_broker(tmp_path: Path) -> None:
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
    process = promtool("check", "metrics", text=text)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


# ---- the dashboard ------------------------------------------------------------------------------------------


def test_panels_have_descriptions_and_queries_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    covered: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered and place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
    assert all(panel["description"] and panel["targets"] for panel in panels())


def test_every_metric_except_two_is_on_the_dashboard_or_in_an_alert() -> None:
    queries = " ".join(expression for _, expression in expressions())
    # The first has its information only in a label, the second is a state that the page of the pipeline shows.
    hidden = {"timeball_build_info", "timeball_pipeline_compacts"}
    series = {
        name for name in KNOWN if name.startswith("timeball_") and not name.endswith(("_sum", "_count"))
    }
    assert not [name for name in series - hidden if name not in queries]
