"""The two projects of a release: together they have each file of the package once, and the client works alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deploy.distributions import toml, write_projects
from tests.cli.processes import environment
from tests.client.test_light import CLIENT, COLUMNS, run
from tests.docs_pages import ROOT
from tests.node_fixture import running_node

from timeball import __version__
from timeball.model.errors import not_installed_text

IMPORTS = """
import importlib, json, sys

for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name, error)
"""

IMPORT_CLIENT = """
import importlib, json, pkgutil, sys

import timeball.client

for module in pkgutil.walk_packages(timeball.client.__path__, "timeball.client."):
    importlib.import_module(module.name)
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "timeball"]))
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the client's and of the broker's project."""
    return write_projects(ROOT, tmp_path_factory.mktemp("projects"))


def files(project: Path) -> set[str]:
    """Return the source files of a project, without files that a build makes, as paths within the project."""
    paths = [path for path in (project / "src/timeball").rglob("*") if path.is_file()]
    return {
        path.relative_to(project).as_posix()
        for path in paths
        if path.suffix not in (".pyc", ".so") and "_generated" not in path.parts
    }


def test_each_file_is_in_one_of_the_projects_except_the_init_of_the_package(
    projects: tuple[Path, Path],
) -> None:
    client, broker = map(files, projects)
    assert client | broker == files(ROOT)
    # Cython needs this file to find the package. No wheel of the broker has it: tests/test_wheel.py.
    assert client & broker == {"src/timeball/__init__.py"}


def test_the_client_works_without_the_project_of_the_broker(
    projects: tuple[Path, Path], tmp_path: Path
) -> None:
    client = str(projects[0] / "src")
    with running_node(tmp_path / "data") as node:
        result = run(CLIENT, node.http_endpoint, PYTHONPATH=client)
        assert result.stdout.splitlines() == ["True visible", "cancelled"], result.stderr
        result = run(COLUMNS, node.http_endpoint, node.endpoint, extras=["arrow"], PYTHONPATH=client)
        assert result.stdout.splitlines() == ["2 [b'x', b'y']"], result.stderr


def test_the_client_has_the_modules_that_it_imports_and_no_others(projects: tuple[Path, Path]) -> None:
    client = projects[0] / "src"
    modules = {
        ".".join(path.relative_to(client).with_suffix("").parts).removesuffix(".__init__")
        for path in client.rglob("*.py")
    }
    command = [sys.executable, "-P", "-c", IMPORT_CLIENT]
    process = subprocess.run(
        command, env=environment(PYTHONPATH=str(client)), capture_output=True, check=True
    )
    assert set(json.loads(process.stdout)) == modules - {"timeball.__main__"}


def test_the_import_of_a_missing_package_names_the_extra(projects: tuple[Path, Path]) -> None:
    client, broker = projects
    packages = [path.parent.name for path in (broker / "src/timeball").glob("*/__init__.py")]
    names = [f"timeball.{package}" for package in sorted(packages)]
    assert len(names) == 12
    other_modules = ["timeball.client.gone", "cli", "timeball.testing.pytest_plugin"]
    result = run(IMPORTS, json.dumps([*names, *other_modules]), PYTHONPATH=str(client / "src"))
    extras = {"timeball.cli": "cli", "timeball.spark": "spark"}
    assert result.stdout.splitlines() == [
        *(f"{name} {not_installed_text(name, extras.get(name, 'broker'))}" for name in names),
        "timeball.client.gone No module named 'timeball.client.gone'",
        "cli No module named 'cli'",
        f"timeball.testing {not_installed_text('timeball.testing', 'broker')}",
    ], result.stderr
    result = run("from timeball import testing", PYTHONPATH=str(client / "src"))
    assert result.stderr.endswith(
        f"ModuleNotFoundError: {not_installed_text('timeball.testing', 'broker')}\n"
    )
    result = run(IMPORTS, json.dumps(["timeball.model", "timeball.broker.gone"]))
    assert result.stdout == "timeball.broker.gone No module named 'timeball.broker.gone'\n", (
        "the control: with both projects only a module that does not exist fails"
    )


def test_the_broker_requires_the_client_of_its_version_and_the_extras_require_the_broker(
    projects: tuple[Path, Path],
) -> None:
    client, broker = (
        tomllib.loads((project / "pyproject.toml").read_text())["project"] for project in projects
    )
    assert (broker["name"], broker["version"], broker["dependencies"]) == (
        "timeball-broker", __version__, [f"timeball=={__version__}"],
    )  # fmt: skip
    assert "optional-dependencies" not in broker and "scripts" not in broker
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = whole["optional-dependencies"]
    del extras["dev"]
    assert client["dependencies"] == whole["dependencies"] and client["scripts"] == whole["scripts"]
    assert broker["entry-points"] == whole["entry-points"] and "entry-points" not in client
    assert client["optional-dependencies"].pop("cli") == [
        f"timeball-broker=={__version__}",
        *extras.pop("cli"),
    ]
    assert client["optional-dependencies"] == extras
    # The other extras are for programs that have only the client, or come with `broker`.
    with_cli = {name for name, lines in extras.items() if "timeball[cli]" in lines}
    assert with_cli == {"broker", "spark", "kafka"}


def test_a_table_that_is_written_as_toml_is_read_back_unchanged() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name in ("project", "build-system", "dependency-groups"):
        table = {name: tomllib.loads(text)[name]}
        assert tomllib.loads(toml(table)) == table
    with_special_characters = {"a": {"b.c": {"*": ['"é\n\\'], "d": [{"e f": True}]}}}
    assert tomllib.loads(toml(with_special_characters)) == with_special_characters
