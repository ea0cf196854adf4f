"""Chromium of Debian, and a tab that records faults: errors, violations of the policy, requests to other hosts.

Without Chromium the tests are skipped, and the end of the run says so in capitals (tests/not_tested.py). With
TIMEBALL_INTEROP=required they fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from tests.bounds import BOUND_S
from tests.interop import environments
from tests.interop.environments import Missing

# The heading of each page by the name in its address.
PAGES = {
    "punctual": "Punctual",
    "coming": "Coming",
    "waiting": "Waiting",
    "schedules": "Schedules",
    "bulk": "Bulk operations",
    "groups": "Groups",
    "dead-letters": "Dead letters",
    "push": "Push",
    "campaigns": "Campaigns",
    "pipeline": "Pipeline and audit",
    "cluster": "Cluster",
    "node": "Node",
}
SHOTS = environments.CACHE / "dashboard"  # git ignores this folder, and CI stores it
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
# A violation of the content policy is an event of the page. This script reports it as an error of the console.
LISTEN = "document.addEventListener('securitypolicyviolation', e => console.error(`policy: ${e.violatedDirective}`))"

T = TypeVar("T")
Answers = Callable[[str, str, dict[str, list[str]]], tuple[int, Any]]


def needed(find: Callable[[], T]) -> T:
    """Return the result of `find`. Without one, skip the test, or fail if it is required."""
    try:
        return find()
    except Missing as why:
        if os.environ.get("TIMEBALL_INTEROP") == "required":
            pytest.fail(f"the dashboard's tests are required (TIMEBALL_INTEROP), and {why}", pytrace=False)
        pytest.skip(f"dashboard: {why}")


@contextmanager
def chromium(*options: str) -> Iterator[Browser]:
    """A running Chromium. It must end with its test module, because it occupies the event loop of this thread."""
    program = needed(lambda: environments.tool("chromium", "chromium"))
    # Chromium refuses to run as root with its sandbox. In containers, tests run as root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=BOUND_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*sandbox, *options])
        yield browser
        browser.close()


class Tab:
    """A tab with the dashboard of a broker, which records faults.

    Answers with a status in `allowed` are no faults. A 0 in it allows connections that fail.
    """

    def __init__(self, browser: Browser, port: int, **options: Any) -> None:
        self.origin, self.faults = f"http://127.0.0.1:{port}", []
        self.allowed: set[int] = set()
        self._context = browser.new_context(**{"viewport": WIDE, "timezone_id": "Europe/Berlin", **options})
        self._context.set_default_timeout(BOUND_S * 1000)
        self.page = self._context.new_page()
        self.page.add_init_script(LISTEN)
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._note_request)
        self.page.on(
            "dialog", lambda dialog: self.faults.append(f"a dialog that the page does not have: {dialog}")
        )

    def _note_console(self, message: Any) -> None:
        """Record an error or a warning of the console, unless it is about an allowed status."""
        if message.type not in ("error", "warning"):
            return
        # Chromium reports a status from 400 on, and a server that does not answer, as an error.
        if any(f"status of {status}" in message.text for status in self.allowed):
            return
        if 0 in self.allowed and "net::ERR" in message.text:
            return
        self.faults.append(f"console: {message.text}")

    def _note_request(self, request: Any) -> None:
        """Record a request to another host than the broker."""
        if not request.url.startswith((self.origin, "data:")):
            self.faults.append(f"asked another host: {request.url}")

    def open(self, name: str, **query: str) -> Page:
        """Open a page of the dashboard, with the parameters of its address, and wait for its heading."""
        text = "&".join(f"{key}={value}" for key, value in query.items())
        self.page.goto(f"{self.origin}/dashboard/#/{name}{'?' + text if text else ''}")
        expect(self.page.locator("h1")).to_have_text(PAGES[name])
        return self.page

    def answer(self, answers: Answers) -> None:
        """Answer the requests of the page to the HTTP API in the place of the broker."""

        def fulfil(route: Route) -> None:
            """Answer a request with the status and the value from `answers`."""
            url = urlsplit(route.request.url)
            status, value = answers(route.request.method, url.path, parse_qs(url.query))
            kind = "application/json" if status < 400 else "application/problem+json"
            route.fulfill(status=status, content_type=kind, json=value)

        self.page.route("**/v1/**", fulfil)

    def shoot(self, name: str) -> Path:
        """Store a picture of the page in SHOTS, for readers of a failed run. Returns its path."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    def close(self) -> None:
        self._context.close()


def overflow(page: Page) -> int:
    """Return by how many pixels the page, or a table in it, is too wide."""
    excess = "node => node.scrollWidth - node.clientWidth"
    frames = "[document.documentElement, ...document.querySelectorAll('.table-frame')]"
    return int(page.evaluate(f"Math.max(...{frames}.map({excess}))"))
