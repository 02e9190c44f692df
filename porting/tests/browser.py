"""A browser without a window, driven over two pipes by the DevTools protocol."""
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import warnings

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"


def find():
    """The path of a browser; None, with a warning, if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        warnings.warn("the live page was not opened: there is no Chromium", stacklevel=2)
    return path


class Browser:
    """One page. troubles: what its console and its scripts complained of."""

    def __init__(self, path, folder):
        read, self.out = os.pipe()
        back, write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read, write)]

        def connect():      # the numbers that the protocol wants
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic",
                 "--no-first-run", "--disable-background-networking", "--disable-component-update",
                 "--disable-sync", "--remote-debugging-pipe", f"--user-data-dir={folder}",
                 "about:blank"]
        self.process = subprocess.Popen([path, *flags], preexec_fn=connect, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (read, write, *ends):
            os.close(end)
        self.input = os.fdopen(back, "rb")
        self.numbers = itertools.count(1)
        self.troubles = []
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Send a command and return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self.read())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.note(answer)

    def read(self):
        """The next message, which ends with a zero byte."""
        message = bytearray()
        while (byte := self.input.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return message

    def note(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.troubles.append(params["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.troubles.append(params["args"])

    def run(self, script):
        """The value of a script, or of what it promises."""
        result = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, url):
        self.send("Page.navigate", url=url)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : onload = done)")

    def click(self, name):
        """A real click, with the mouse, in the middle of the element of this id."""
        x, y = self.run(f"""(() => {{
            const element = document.getElementById({name!r});
            element.scrollIntoView({{ block: 'nearest' }});
            const {{ x, y, width, height }} = element.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, code, text=""):
        """A key, which goes where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                      windowsVirtualKeyCode=code)

    def close(self):
        self.session = None
        try:
            self.send("Browser.close")
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.input.close()
            os.close(self.out)
