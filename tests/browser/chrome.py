"""A headless Chromium that shows the page as on a screen of a given size, dark or light."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CANNOT_BE_SET_UP = 2
# Ends every wait that should have ended long before.
PATIENCE_SECONDS = 30

_Found = TypeVar("_Found")


class NoBrowserError(Exception):
    """There is none here, and none can be installed; the message says why."""


def installed() -> tuple[str, str]:
    """Paths of Chromium and of its driver, which are installed where that is possible.

    Raises:
        NoBrowserError: it is not.
    """
    script = Path(__file__).with_name("install.sh")
    done = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    if done.returncode == CANNOT_BE_SET_UP:
        raise NoBrowserError(done.stderr.strip().rpartition("\n")[2])
    assert done.returncode == 0, done.stderr
    browser, driver = done.stdout.split()
    return browser, driver


class Page:
    """A tab. Selectors are CSS."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def set_screen(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def until(self, condition: Callable[[], _Found], what: str) -> _Found:
        """Returns what `condition` gives as soon as that is true."""
        return WebDriverWait(self.driver, PATIENCE_SECONDS).until(lambda _: condition(), f"waited for: {what}")

    def until_text(self, selector: str, text: str) -> None:
        """Returns when `text` stands in the element."""
        self.until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        """Of the first such element, as it is written there."""
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)
        )

    def script(self, source: str, *arguments: object) -> Any:
        return self.driver.execute_script(source, *arguments)

    def is_wider_than_its_screen(self) -> bool:
        return bool(self.script("return document.documentElement.scrollWidth > innerWidth"))

    def complaints(self) -> list[str]:
        """What the browser's console has had to say since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def save(self, path: Path) -> None:
        """What is on the screen, as PNG."""
        # A frame that was begun before may still be of another size.
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )
        assert self.driver.save_screenshot(str(path))


@contextlib.contextmanager
def open_page(browser: str, driver: str) -> Iterator[Page]:
    """An empty tab of a browser of its own."""
    options = ChromeOptions()
    options.binary_location = browser
    # As root, and in a container with a small /dev/shm; and nothing else that it would do by itself.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=ChromeService(driver))
    try:
        yield Page(chrome)
    finally:
        chrome.quit()
