"""A real browser for tests of pages; where there is none they are skipped, and the run's last lines say so."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("ARBORL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = (
    "no Chromium was found, so the report page was NOT tested. Install one (Debian: apt install "
    "chromium-headless-shell) or name it in $ARBORL_CHROMIUM"
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Without a sandbox, because tests often run as root in a container; what is opened is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, everything that it asked for and everything that it complained of."""

    def __init__(self, browser: Browser, address: str | Path, viewport: dict[str, int]) -> None:
        self.page: Page = browser.new_page(viewport=viewport)  # pyright: ignore
        self.page.set_default_timeout(8000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.text_content() or ""

    def wait_for(self, condition: str) -> None:
        """Until a condition on the page holds. (Playwright's own way evaluates text, which the page forbids.)"""
        for _ in range(100):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(80)
        raise TimeoutError(condition)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    @property
    def overflows(self) -> bool:
        """Whether a reader would have to scroll sideways."""
        return self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
