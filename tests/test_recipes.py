"""The recipes of docs/recipes.md run unchanged with a broker."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import environment
from tests.docs_pages import page, section
from tests.node_fixture import RunningNode, eventually, running_node

from timeball import Worker

WEB = "http://shop"  # no port is listened on
ENDPOINT = "http://127.0.0.1:7480"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Run a node for all recipes."""
    with running_node(tmp_path_factory.mktemp("recipes") / "data") as running:
        yield running


def program(title: str, endpoint: str) -> str:
    """Return a recipe's program, with the address of a broker."""
    (code,) = re.findall(r"^```python\n(.*?)^```", section(page("docs/recipes.md"), title), re.M | re.S)
    return str(code).replace(ENDPOINT, endpoint)


def recipe(title: str, endpoint: str) -> Any:
    """Return a recipe's program as a module, imported and not run."""
    module = types.ModuleType("recipe")
    exec(compile(program(title, endpoint), "docs/recipes.md", "exec"), vars(module))
    return module


def test_every_recipe_has_a_test_here() -> None:
    titles = re.findall(r"^## (.+)$", page("docs/recipes.md"), re.M)
    here = Path(__file__).read_text("utf-8")
    assert len(titles) == 3 and all(f'("{title}"' in here for title in titles)


def test_the_recipe_of_a_web_application_runs(node: RunningNode) -> None:
    import httpx

    app = recipe("A web application (FastAPI)", node.http_endpoint).app

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url=WEB) as web,
        ):
            placed = await web.post("/orders/17")
            assert placed.status_code == 201
            path = f"/reminders/{placed.json()['reminder']}"
            assert (await web.get(path)).json() == {"state": "waiting"}
            assert (await web.post("/orders/17/payment")).json() == {"closing": ["cancelled"]}
            assert (await web.get(path)).json() == {"state": "cancelled"}
            assert (await web.get("/reminders/none")).status_code == 404
            assert (await web.post("/orders/18", params={"pay_within": "soon"})).status_code == 422

    asyncio.run(ask())


FORKING = """
import os
import wsgi

def order(number):
    (answer,) = wsgi.application({"PATH_INFO": f"/{number}"}, lambda status, _: None)
    print(answer.decode(), flush=True)

order(31)
if not (child := os.fork()):
    order(32)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
order(33)
"""


def test_the_recipe_of_a_web_server_that_forks_runs(node: RunningNode, tmp_path: Path) -> None:
    (tmp_path / "wsgi.py").write_text(program("A web server that forks (gunicorn)", node.http_endpoint))
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with node.client() as ball:
        messages = [ball.get(message_id) for message_id in result.stdout.split()]
    assert [message.content and message.content.keys for message in messages] == [
        ["order-31"],
        ["order-32"],
        ["order-33"],
    ]


def test_the_recipe_of_a_worker_runs(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    handler = recipe("A worker", node.http_endpoint).close_if_unpaid
    with node.client() as ball:
        ball.send_many(
            [{"body": f"close order {name} if unpaid"} for name in ("17", "18", "?")], topic="orders"
        )
        with Worker(ball, "billing", "orders", handler, threads=4) as worker:
            eventually(lambda: worker.counts.acknowledged == 2 and worker.counts.dead == 1, "handled")
        assert [dead.body for dead in ball.dead_letters("billing").dead_letters] == [
            b"close order ? if unpaid"
        ]
    assert sorted(capsys.readouterr().out.split()) == ["17", "18", "closed", "closed"]
