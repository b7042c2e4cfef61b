"""A real Chromium without a window, driven over chromedriver's HTTP interface."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import services
from tests.waiting import until

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One page of a browser."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return _ask(f"{self._base}/{path}", body)

    def open(self, url: str) -> None:
        self.ask("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script's ``return`` gives."""
        return self.ask("execute/sync", {"script": script, "args": list(arguments)})

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.ask("goog/cdp/execute", {"cmd": command, "params": parameters})

    def until(self, script: str, what: str = "", timeout: float = 30.0) -> Any:
        """Wait until an expression is true in the page."""
        return until(
            lambda: self.run(f"return {script}"),
            timeout,
            what or script,
            lambda: f":\n{self.text()}",
        )

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def click(self, name: str) -> None:
        """Click the button or link with a text or a label."""
        found = self.run(
            "const name = arguments[0];"
            "const all = [...document.querySelectorAll('dialog[open] button, button, a, summary')];"
            "const one = all.find(e => e.textContent.trim() === name || e.ariaLabel === name);"
            "if (one) one.click(); return Boolean(one)", name,
        )  # fmt: skip
        assert found, f"there is no {name!r} to click:\n{self.text()}"

    def press(self, keys: str) -> None:
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("actions", {"actions": [{"type": "key", "id": "keys", "actions": pressed}]})

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Have a screen of this size, and prefer this colour scheme."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("screenshot")))

    def complaints(self) -> list[str]:
        """The errors that the browser logged so far, such as what the policy of the page forbade."""
        entries = self.ask("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A fresh browser; skips the test where there is none."""
    program, driver = services.program("chromium"), services.program("chromedriver")
    profile = tempfile.mkdtemp(prefix="chromium-")
    command = [driver, "--port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = next(
                found[1]
                for line in process.stdout
                if (found := re.search(r"successfully on port (\d+)", line))
            )
            address = f"http://127.0.0.1:{port}"
            options = {"binary": program, "args": [*FLAGS, f"--user-data-dir={profile}", *flags]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            body = {"capabilities": {"alwaysMatch": wanted}}
            session = _ask(f"{address}/session", body)["sessionId"]
            try:
                yield Browser(address, session)
            finally:
                _ask(f"{address}/session/{session}", method="DELETE")
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(profile, ignore_errors=True)


def _ask(url: str, body: dict[str, Any] | None = None, method: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    request.method = method or ("GET" if body is None else "POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()[:600]}") from error
