"""The examples in the client's docstrings run unchanged against a real node."""

import doctest
import importlib

import pytest
from tests.node_fixture import RunningNode

MODULES = ["timeball.client.timeball", "timeball.client.reader", "timeball.model.time_parsing"]


@pytest.mark.parametrize("name", MODULES)
def test_all_examples_of_a_module_pass(name: str, node: RunningNode) -> None:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_ONLY_FIRST_FAILURE)
    for test in finder.find(
        module, name, extraglobs={"endpoint": node.http_endpoint, "flight_endpoint": node.endpoint}
    ):
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0


def test_a_wrong_example_is_noticed(node: RunningNode) -> None:
    wrong = doctest.DocTestParser().get_doctest(
        ">>> endpoint\n'elsewhere'\n", {"endpoint": node.http_endpoint}, "x", None, 0
    )
    report: list[str] = []
    assert doctest.DocTestRunner().run(wrong, out=report.append).failed == 1
    assert "elsewhere" in "".join(report)
