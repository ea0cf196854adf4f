"""The recipes of docs/recipes.md, as they stand, against a broker."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs_pages import page, section
from tests.node_fixture import HttpNode, RunningNode, eventually, running_node

from timeball import Timeball, Worker

WEB = "http://shop"  # no port is listened on
ENDPOINT = "http://127.0.0.1:7480"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("recipes") / "data", kind=HttpNode) as running:
        yield running


def recipe(title: str, endpoint: str) -> Any:
    """Return a recipe's program as a module, imported and not run."""
    (code,) = re.findall(r"^```python\n(.*?)^```", section(page("docs/recipes.md"), title), re.M | re.S)
    module = types.ModuleType("recipe")
    exec(compile(code.replace(ENDPOINT, endpoint), "docs/recipes.md", "exec"), vars(module))
    return module


def test_every_recipe_has_a_test_here() -> None:
    titles = re.findall(r"^## (.+)$", page("docs/recipes.md"), re.M)
    here = Path(__file__).read_text("utf-8")
    assert len(titles) == 2 and all(f'recipe("{title}"' in here for title in titles)


def test_a_web_application(node: RunningNode) -> None:
    import httpx

    app = recipe("A web application (FastAPI)", node.endpoint).app

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url=WEB) as web,
        ):
            placed = await web.post("/orders/17")
            assert placed.status_code == 201
            look = f"/reminders/{placed.json()['reminder']}"
            assert (await web.get(look)).json() == {"state": "waiting"}
            assert (await web.post("/orders/17/payment")).json() == {"closing": ["cancelled"]}
            assert (await web.get(look)).json() == {"state": "cancelled"}
            assert (await web.get("/reminders/none")).status_code == 404
            assert (await web.post("/orders/18", params={"pay_within": "soon"})).status_code == 422

    asyncio.run(ask())


def test_a_worker(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    handler = recipe("A worker", node.endpoint).close_if_unpaid
    with Timeball(node.endpoint) as ball:
        ball.send_many([{"body": f"close order {name}"} for name in ("17", "18", "?")], topic="orders-due")
        with Worker(ball, "billing", "orders-due", handler, threads=4) as worker:
            eventually(lambda: worker.counts.acknowledged == 2 and worker.counts.dead == 1, "handled")
        assert [dead.body for dead in ball.dead_letters("billing").dead_letters] == [b"close order ?"]
    assert sorted(capsys.readouterr().out.split()) == ["17", "18", "closed", "closed"]
