"""Headless Chromium, driven over its DevTools pipe: no package is needed for it.

with Browser() as browser:
    browser.open("http://localhost:8233")
    browser.wait_for_text("Completed")
    browser.screenshot(Path("x.png"))
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS: Final = 60.0


class BrowserMissingError(RuntimeError):
    """There is no Chromium; the message says how to get one."""


def find_chromium() -> str:
    """The browser's path: CHROMIUM if set, else what is on PATH. Raises BrowserMissingError."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else NAMES:
        if found := shutil.which(name):
            return found
    raise BrowserMissingError(
        "there is no Chromium on the PATH. On Debian or Ubuntu: "
        "apt-get install --no-install-recommends chromium; "
        "elsewhere set CHROMIUM to the path of Chromium or Chrome"
    )


class Browser:
    """One page in one browser."""

    def __init__(self, width: int = 1600, height: int = 980) -> None:
        self._program = find_chromium()
        self._size = (width, height)
        self._number = 0
        self._session: str | None = None
        self._buffer = b""

    def __enter__(self) -> Self:
        self._profile = tempfile.mkdtemp(prefix="perdure-ui-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        width, height = self._size
        arguments = [
            "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
            "--hide-scrollbars", "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={self._profile}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        if os.geteuid() == 0:
            arguments.insert(0, "--no-sandbox")  # Chromium's sandbox refuses to run as root
        # DevTools speak on descriptors 3 and 4; the shell puts ours there, since Popen cannot.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, self._program, *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        """Goes to an address."""
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError when it throws."""
        reply = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def text(self) -> str:
        """What a reader sees on the page."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_for_text(self, *wanted: str, seconds: float = _SECONDS) -> str:
        """Waits until the page shows all of these. Raises AssertionError with what it shows instead."""
        end = time.monotonic() + seconds
        while True:
            shown = self.text()
            missing = [one for one in wanted if one not in shown]
            if not missing:
                return shown
            assert time.monotonic() < end, f"the page does not show {missing}; it shows:\n{shown[:3000]}"
            time.sleep(0.2)

    def click(self, script: str, what: str) -> None:
        """Clicks the element that a JavaScript expression gives, once there is one."""
        end = time.monotonic() + _SECONDS
        while not self.run(f"(() => {{ const e = {script}; if (e) e.click(); return !!e }})()"):
            assert time.monotonic() < end, f"there is no {what}; the page shows:\n{self.text()[:3000]}"
            time.sleep(0.2)

    def screenshot(self, path: Path) -> None:
        """Saves what is seen as PNG."""
        self.run("document.activeElement?.blur()")  # no focus ring in the picture
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                result: dict[str, Any] = reply["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """The next message; events among them are read past."""
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._read], [], [], _SECONDS)
            assert readable, "the browser does not answer"
            got = os.read(self._read, 1 << 20)
            assert got, "the browser ended"
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
