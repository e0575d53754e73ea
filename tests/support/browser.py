"""A real Chromium for tests: one window, driven over WebDriver, that talks to nobody but us.

with Browser(tmp_path) as browser:
    browser.show(url, width=390, dark=True)
    browser.text("#tiles")                      # as a reader sees it
    browser.until(lambda: browser.all(".decision"))
"""

import base64
import shutil
import time
from pathlib import Path
from typing import Any, Self

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

DEADLINE_S = 30.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

_TEXT = """
const found = [...document.querySelectorAll(arguments[0])];
return found.map(e => e.checkVisibility() ? e.innerText : '').join('\\n');
"""


def require_chromium() -> tuple[str, str]:
    """Browser and driver, or skip with the reason."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] is None or found[1] is None:
        pytest.skip("no chromium and chromedriver: run `.ci/install-chromium.sh`")
    return found[0], found[1]


class Browser:
    def __init__(self, directory: Path) -> None:
        binary, driver = require_chromium()
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for option in (*_OPTIONS, f"--user-data-dir={directory / 'chromium'}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(driver))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()

    def show(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open `url` as on a screen of this size, with the reader's preference for light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self._driver.get(url)

    def script(self, text: str, *arguments: Any) -> Any:
        return self._driver.execute_script(text, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self._driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.script(_TEXT, selector))

    def until(self, condition: Any) -> Any:
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < end, (
                f"not in time; the page says:\n{self.text('body')}\n{self.complaints()}"
            )
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What the browser's console has said since the last time."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        found = self._command("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._driver.execute_cdp_cmd(name, parameters)
