"""A headless Chromium that tests drive: keys as a person presses them, what a page logs and asks servers for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}
TEXTS = {"Enter": "\r", "Space": " "}


def program() -> str:
    """Chromium; without it a test is skipped, or fails where ``PERFED_REQUIRE_BROWSER`` is 1."""
    found = shutil.which("chromium")
    if found is None:
        missing = "needs chromium on the PATH (Debian: apt install chromium)"
        if os.environ.get("PERFED_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


class Tab:
    """One page, over the DevTools protocol on two pipes.

    ``said`` are lines of its console and errors, ``asked`` the addresses that it requested beside its own.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest, self._number, self._session = b"", 0, ""
        self._begun: dict[str, str] = {}
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            found = self.heard()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])

    def heard(self) -> dict[str, Any]:
        """The next message; what it says of the console and of requests is kept."""
        while b"\0" not in self._rest:
            self._rest += os.read(self._back, 1 << 16)
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        given = found.get("params", {})
        if found.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(given)[:500])
        if found.get("method") == "Network.requestWillBeSent":
            self._begun[given["requestId"]] = given["request"]["url"]
        if found.get("method") in ("Network.loadingFailed", "Network.loadingFinished"):
            address = self._begun.pop(given["requestId"], "")
            if address[:5] not in ("", "file:", "data:") and given.get("blockedReason") != "csp":
                self.asked.append(address)
        return found

    def open(self, page: Path, *, width: int = 1400, dark: bool = False, media: str = "") -> float:
        """Show a file; returns the seconds until it was there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme], media=media)
        start = time.perf_counter()
        self.call("Page.navigate", url=page.as_uri())
        while self.run("document.readyState") != "complete":
            time.sleep(0.02)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """Value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Keys by name; single letters as they are."""
        for key in keys:
            code, text = KEYS.get(key, ord(key[0].upper())), TEXTS.get(key, key if len(key) == 1 else None)
            more = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def focus(self, selector: str) -> None:
        """Press Tab until the element has the focus: a control that no Tab reaches cannot be used by keyboard."""
        self.run("document.activeElement.blur(); window.getSelection().removeAllRanges(); window.scrollTo(0, 0)")
        for _ in range(300):
            self.press("Tab")
            if self.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"no Tab reaches {selector}")


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A browser with an empty profile."""
    inward, outward = os.pipe(), os.pipe()

    def join() -> None:
        ends = os.dup(inward[0]), os.dup(outward[1])
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)
        for end in (3, 4):
            os.set_inheritable(end, True)

    command = [program(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(command, preexec_fn=join, close_fds=False, **quiet)
    try:
        yield Tab(inward[1], outward[0])
    finally:
        started.terminate()
        started.wait()
        for end in (*inward, *outward):
            os.close(end)
