"""Tests the page at / in headless Chromium, by its DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time

import httpx
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A page of headless Chromium. Pictures go to the folder named by FLASHCELL_SCREENSHOTS."""

    def __init__(self, folder, url: str):
        (theirs_in, self.to), (self.of, theirs_out) = os.pipe(), os.pipe()
        command = (
            f"exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage "
            f"--user-data-dir={folder / 'profile'} --remote-debugging-pipe "
            f"--window-size=1100,800 about:blank 3<&{theirs_in} 4>&{theirs_out}"
        )
        with (folder / "chromium.log").open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", command], pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest, self.number, self.session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **parameters):
        self.number += 1
        asked = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.to, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                got = os.read(self.of, 2**20)
                assert got, "Chromium has ended"
                self.rest += got
            message, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, code: str):
        """Runs JavaScript in the page; returns its value."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, code: str, seconds: float = 30):
        deadline = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < deadline, f"{code}: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def picture(self, name: str) -> None:
        place = os.environ.get("FLASHCELL_SCREENSHOTS")
        data = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        assert data.startswith(b"\x89PNG")
        if place:
            with open(os.path.join(place, name), "wb") as file:
                file.write(data)

    def close(self) -> None:
        os.close(self.to)
        self.process.terminate()
        self.process.wait(20)
        os.close(self.of)


@pytest.fixture
def browser(served, tmp_path):
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    one = Browser(tmp_path, f"{served.url}/")
    one.wait("document.readyState === 'complete' && typeof at === 'function' && model !== null")
    yield one
    one.close()


def fill(browser, **values: str) -> None:
    for name, value in values.items():
        browser.run(f"at({name!r}).value = {json.dumps(value)}; at({name!r}).onchange?.()")


IDLE = "at('stop').disabled && !at('send').disabled"


def test_the_page_needs_nothing_else(served):
    answer = httpx.get(f"{served.url}/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in answer.text


def test_completion_chat_and_stop(browser, served, alone):
    want, _ = alone("def read_", 80)
    fill(browser, mode="completion", temperature="0", tokens="80", text="def read_")
    browser.run("at('send').click()")
    browser.wait("document.querySelector('.answer') && " + IDLE)
    assert browser.run("document.querySelector('.answer').textContent") == "def read_" + want
    assert "80 tokens" in browser.wait("at('speed').textContent")
    assert "tokens/s" in browser.run("at('speed').textContent")
    browser.picture("completion.png")

    fill(browser, tokens="4000", temperature="1", text="import ")
    browser.run("at('send').click()")
    browser.wait("document.querySelectorAll('.answer')[1]?.textContent.length > 40")
    assert not browser.run("at('stop').disabled")
    browser.run("at('stop').click()")
    browser.wait(IDLE)
    assert "stopped" in browser.run("at('speed').textContent")
    served.wait_idle()

    fill(browser, mode="chat", tokens="30", temperature="0", text="def f(")
    assert browser.run("document.querySelectorAll('.answer').length") == 0
    browser.run("at('send').click()")
    browser.wait("document.querySelector('.answer')?.textContent && " + IDLE)
    first = browser.run("document.querySelector('.answer').textContent")
    assert first == alone(["# user\ndef f(\n", "# assistant\n"], 30)[0]
    fill(browser, text="<img src=x onerror=\"document.title='broken'\">")
    browser.run("at('send').click()")
    browser.wait("document.querySelectorAll('.answer')[1]?.textContent && " + IDLE)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("messages.length") == 4
    browser.picture("chat.png")


def test_errors_are_shown(browser):
    fill(browser, mode="completion", tokens="999999", text="x")
    browser.run("at('send').click()")
    browser.wait("document.querySelector('.problem') && " + IDLE)
    assert "max_tokens is 999999" in browser.run("document.querySelector('.problem').textContent")
    browser.run("at('clear').click()")
    assert browser.run("document.querySelectorAll('.problem').length") == 0
