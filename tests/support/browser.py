"""Debian's Chromium over WebDriver (https://www.w3.org/TR/webdriver2/), spoken with httpx: `apt-get install chromium
chromium-driver` is all it needs. It may reach nothing but this machine."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support.ports import held_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
MISSING = "a browser: `apt-get install chromium chromium-driver`"


def programs() -> tuple[str, str] | None:
    """Chromium and its driver; None where one of them is not installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return (found[0], found[1]) if found[0] and found[1] else None


class Browser:
    """One window. `find` waits for what it looks for."""

    def __init__(self, client: httpx.Client, session: str, url: str) -> None:
        self._client = client
        self._session = f"/session/{session}"
        self.url = url.rstrip("/")
        """Of the service."""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._client.request(method, self._session + path, json=body if method == "POST" else None)
        value = reply.json()["value"]
        if reply.is_error:
            raise BrowserError(f"{value['error']}: {value['message'].splitlines()[0]}")
        return value

    def go(self, path: str) -> None:
        self.ask("POST", "/url", {"url": path if "://" in path else f"{self.url}/{path.lstrip('/')}"})

    @property
    def path(self) -> str:
        """Path and query of the address bar."""
        return str(self.ask("GET", "/url")).removeprefix(self.url)

    def find(self, css: str, timeout: float = 10) -> str:
        """An element's id, once it is there."""
        return str(self.wait(lambda: self.all(css), f"`{css}`", timeout)[0])

    def all(self, css: str) -> list[str]:
        found = self.ask("POST", "/elements", {"using": "css selector", "value": css})
        return [one[ELEMENT] for one in found]

    def text(self, css: str) -> str:
        """What a reader sees of the first such element; nothing where there is none."""
        found = self.run("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", css)
        return str(found)

    def click(self, css: str) -> None:
        try:
            self.ask("POST", f"/element/{self.find(css)}/click", {})
        except BrowserError as error:
            if "stale element" not in str(error):
                raise
            self.ask("POST", f"/element/{self.find(css)}/click", {})  # the page has put another in its place

    def type(self, css: str, text: str) -> None:
        element = self.find(css)
        self.ask("POST", f"/element/{element}/clear", {})
        self.ask("POST", f"/element/{element}/value", {"text": text})

    def choose(self, css: str, path: Path) -> None:
        """A file, in an input for files."""
        self.ask("POST", f"/element/{self.find(css)}/value", {"text": str(path)})

    def accept(self, said: str | None = None) -> None:
        """Answer the open question of the page with yes, or with these words."""
        self.wait(lambda: self._try("GET", "/alert/text") is not None, "a question")
        if said is not None:
            self.ask("POST", "/alert/text", {"text": said})
        self.ask("POST", "/alert/accept", {})

    def press(self, css: str, keys: str) -> None:
        """Keys on an element, which has the focus then."""
        self.run("document.querySelector(arguments[0]).focus()", css)
        self.ask("POST", f"/element/{self.find(css)}/value", {"text": keys})

    def tab(self, path: str) -> str:
        """Open a page in another tab, which is looked at from now on; its handle."""
        self.show(str(self.ask("POST", "/window/new", {"type": "tab"})["handle"]))
        self.go(path)
        return self.showing

    @property
    def showing(self) -> str:
        """Handle of the tab that is looked at."""
        return str(self.ask("GET", "/window"))

    def show(self, tab: str) -> None:
        self.ask("POST", "/window", {"handle": tab})

    def close(self, then: str) -> None:
        """Close this tab, and look at another."""
        self.ask("DELETE", "/window")
        self.show(then)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The script calls its last argument with the result."""
        return self.ask("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def wait(self, look: Callable[[], Any], what: str, timeout: float = 20) -> Any:
        end = time.monotonic() + timeout
        while True:
            with contextlib.suppress(BrowserError):  # the page is being replaced
                if found := look():
                    return found
            if time.monotonic() > end:
                raise AssertionError(f"waited {timeout:g} s for {what} on {self.path}:\n{self.text('body')[:3000]}")
            time.sleep(0.1)

    def wait_for_text(self, css: str, text: str, timeout: float = 20) -> None:
        self.wait(lambda: text in self.text(css), f"`{text}` in `{css}`", timeout)

    def size(self, width: int, height: int) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, whole: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        found = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def messages(self) -> list[str]:
        """Errors and warnings of the page's console since the last look."""
        found = self.ask("POST", "/se/log", {"type": "browser"})
        return [one["message"] for one in found if one["level"] in ("SEVERE", "WARNING")]

    def cookie(self, name: str) -> dict[str, Any] | None:
        return next((one for one in self.ask("GET", "/cookie") if one["name"] == name), None)

    def forget(self) -> None:
        self.ask("DELETE", "/cookie")

    def _try(self, method: str, path: str) -> Any:
        try:
            return self.ask(method, path)
        except BrowserError:
            return None


class BrowserError(Exception):
    """What the driver refused."""


@contextlib.contextmanager
def browser(url: str, folder: Path) -> Iterator[Browser]:
    """A browser without a window, with a profile of its own below `folder`."""
    found = programs()
    assert found is not None, MISSING
    chromium, driver = found
    with held_port() as port, (folder / "chromedriver.log").open("wb") as log:
        process = subprocess.Popen([driver, f"--port={port}"], stdout=log, stderr=log)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    try:
        _until_ready(client)
        options = {
            "binary": chromium,
            "args": [
                *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
                *("--hide-scrollbars", "--force-color-profile=srgb", f"--user-data-dir={folder / 'profile'}"),
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        wanted["unhandledPromptBehavior"] = "ignore"
        made = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        assert "sessionId" in made, made
        try:
            yield Browser(client, made["sessionId"], url)
        finally:
            client.delete(f"/session/{made['sessionId']}")
    finally:
        client.close()
        process.terminate()
        process.wait(20)


def _until_ready(client: httpx.Client) -> None:
    for _ in range(200):
        with contextlib.suppress(httpx.TransportError):
            if client.get("/status").json()["value"]["ready"]:
                return
        time.sleep(0.05)
    raise AssertionError("the driver of the browser does not start")
