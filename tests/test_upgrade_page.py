"""Upgrades and versions: the commands of the pages run, and the formats are those of their pages."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.in_process import parsed, run_here
from tests.docs_pages import DOCS, page, section
from tests.node_fixture import RunningNode, running_node

from timeball.log.format import FORMAT_VERSION

UPGRADE, VERSIONING = page("docs/upgrade.md"), page("docs/versioning.md")


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the commands of Timeball in the blocks of a page, indented ones too, without their first word."""
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.split()[:1] == ["timeball"]:
                yield shlex.split(line, comments=True)[1:]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the settings file that the commands of a cluster name, and change to it."""
    (tmp_path / "timeball.toml").write_text('cluster = "shop"\netcd = "http://127.0.0.1:1"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_line_accepts_every_command_of_the_page(settings: Path) -> None:
    shown = list(command_lines(UPGRADE))
    assert {words[0] for words in shown} == {
        "status", "backup", "dump", "groups", "cluster", "kafka", "pipeline", "audit", "restore", "serve",
    }  # fmt: skip
    for words in shown:
        parsed(words, {})
    with pytest.raises(Exception, match="No such option"):
        parsed(["status", "--jason"], {})


def test_the_commands_around_an_upgrade_run_on_one_machine(tmp_path: Path) -> None:
    """Before, after and back: a folder, its backup, and a broker on the restored folder."""
    folder = str(tmp_path)

    def run(heading: str, node: RunningNode, *left_out: str) -> list[str]:
        """Run the commands of a section, and return their outputs."""
        outputs = []
        for words in command_lines(section(UPGRADE, heading)):
            if words[0] in left_out:
                continue
            own = [
                word.replace("/var/lib", folder).replace("/backups", f"{folder}/backups") for word in words
            ]
            result = run_here(*own, TIMEBALL_ENDPOINT=node.http_endpoint, TIMEBALL_FLIGHT=node.endpoint)
            assert result.returncode == 0, (own, result.stdout, result.stderr)
            outputs.append(result.stdout)
        return outputs

    (tmp_path / "backups").mkdir()
    with running_node(tmp_path / "timeball") as node, node.client() as ball:
        ball.send("orders", "kept", after="2h", message_id="17")
        before = run("Before", node)
        assert len(before) == 4 and json.loads(before[0])["format"] == FORMAT_VERSION
    with running_node(tmp_path / "timeball") as node:
        after = run("After", node)
        assert json.loads(after[0])["waiting_messages"] == json.loads(before[0])["waiting_messages"] == 1
        run("Back to the older version", node, "serve")
    with running_node(tmp_path / "timeball-before") as node:
        result = run_here("get", "17", "--json", TIMEBALL_ENDPOINT=node.http_endpoint)
        assert result.returncode == 0 and "waiting" in result.stdout


def test_the_formats_and_their_versions_are_those_of_their_pages() -> None:
    listed = dict(re.findall(r"^\| \[[^]]+\]\(formats/([\w-]+)\.md\) \| (\d+) \|", VERSIONING, re.MULTILINE))
    newest = {}
    for path in (DOCS / "formats").glob("*.md"):
        rows = re.findall(r"^\| (\d+) \| \S", section(path.read_text("utf-8"), "Versions"), re.MULTILINE)
        newest[path.stem] = str(max(map(int, rows)))
    assert listed == newest and len(listed) == 7
    assert f"| data folder (`FORMAT`) | {FORMAT_VERSION} |" in VERSIONING
