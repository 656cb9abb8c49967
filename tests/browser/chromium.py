"""A page in a real browser: its network requests, its content, and a screenshot.

The browser is led through a pair of pipes (DevTools protocol, one JSON value and a zero byte per message), so that
nothing listens anywhere, and nothing has to be waited for but what the browser says.
"""

import base64
import json
import os
import select
import shutil
import subprocess
from contextlib import contextmanager

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 60.0


def find_chromium():
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A browser with one tab."""

    def __init__(self, write_end, read_end):
        self.write_end, self.read_end = write_end, read_end
        self.buffer, self.number, self.session = b"", 0, None
        self.events = []

    def ask(self, method, **params):
        """The browser's reply; other messages are kept in ``events``."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            result = self.next_message()
            if result.get("id") == self.number:
                assert "result" in result, result
                return result["result"]
            self.events.append(result)

    def next_message(self):
        """The next message of the browser."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], PATIENCE_S)
            assert ready, f"the browser has said nothing for {PATIENCE_S} s"
            self.buffer += os.read(self.read_end, 1 << 16)
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def wait_for(self, method):
        """The next event of a kind, or one that has come already."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self.next_message())

    def open(self, url):
        """Load and render the page in a new tab."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def value(self, expression):
        """Value of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def requests(self):
        """The addresses that the page asked for."""
        sent = (event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def complaints(self):
        """Log entries of the page."""
        entries = (event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded")
        return [entry["text"] for entry in entries]

    def photograph(self, path):
        """Save a screenshot of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(folder):
    """Run a browser with its profile in a folder."""
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()

    def place_pipes():
        first, second = os.dup(command_in), os.dup(answer_out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    browser = subprocess.Popen(
        [find_chromium() or "chromium", *FLAGS, f"--user-data-dir={folder}", "--window-size=1300,1000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4), preexec_fn=place_pipes,
    )  # fmt: skip
    os.close(command_in)
    os.close(answer_out)
    led = Browser(command_out, answer_in)
    try:
        yield led
        led.session = None
        led.ask("Browser.close")
    finally:
        os.close(command_out)
        os.close(answer_in)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
