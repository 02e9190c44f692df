"""The live page in a real browser: it writes what Python writes, in int8 and in bfloat16; each
control acts, and nothing complains. Where there is no browser, these tests only warn."""
import functools
import http.server
import json
import shutil
import subprocess
import time
import warnings

import pytest
import safetensors.torch
import torch
from test_port_js import ENGINE, drafted, node
from tiny import command

import checkpoint
from layerskip import SelfDraft, early_exit
from porting.web import bundle
from sampling import Coins, to_probs
from speculative import rounds

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
# what a test adds to the page: its own steps, and a last one that posts what they found
STEPS = """<script>
const troubles = [];
addEventListener("error", e => troubles.push(e.message));
addEventListener("unhandledrejection", e => troubles.push(String(e.reason)));
addEventListener("securitypolicyviolation", e => troubles.push(e.blockedURI));
console.error = (...words) => troubles.push(words.join(" "));
const until = (...states) => new Promise(done => {
    const look = () => [...states, "failed"].includes(document.body.dataset.state)
        ? done(document.body.dataset.state) : setTimeout(look, 20);
    look();
});
const texts = nodes => [...nodes].map(node => node.innerText);
const change = (control, value) => {
    $(control).value = value;
    $(control).onchange();
    return until("ready");
};
const written = async (button = "write", end = "done") => {
    $(button).click();
    await until(end);
    return story.ids;
};
addEventListener("load", async () => {
    const found = {};
    try { await until("ready"); STEPS } catch (error) { troubles.push(String(error)); }
    fetch("URL", { method: "POST", mode: "no-cors", body: JSON.stringify({ ...found, troubles }) });
});
</script>"""
call = command(bundle.main)


@functools.cache
def shipped(int8):
    """The model of the page as Python has it, in float32, and its tokenizer."""
    model, tokenizer = checkpoint.load(bundle.MODEL, "cpu", torch.float32)
    if int8:
        stored = bundle.in_int8(safetensors.torch.load_file(bundle.MODEL / "model.safetensors"))
        for name, piece in checkpoint.parts(model):
            if f"{name}.scale" in stored:
                full = stored[name].float() * stored[f"{name}.scale"][:, None]
                piece.copy_(full.view(piece.shape))
    return model, tokenizer


@torch.inference_mode()
def ids_of_python(int8, temperature=0.0, exit_layer=4, gamma=3, most=120):
    model, tokenizer = shipped(int8)
    prompt = tokenizer.encode("Once upon a time").ids
    drafter = SelfDraft(model, early_exit(model.c.n_layers, exit_layer), gamma)
    probs = functools.partial(to_probs, temperature=temperature)
    steps = rounds(model, [prompt], most, drafter, probs, Coins(0), model.c.eos)
    return [token for _, r in steps for token in r.new[0]]


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves the repository with `server.page` as its live page, and keeps what is posted."""

    def do_GET(self):
        if self.path != "/docs/live.html":
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.page.encode())

    def do_POST(self):
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def in_browser(text, steps, folder, served=False):
    """What these steps found on a page of this text, opened as a file or from a server; None, with
    a warning, where there is no browser."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        warnings.warn("the live page was not opened: there is no Chromium", stacklevel=2)
        return None
    serve = functools.partial(Server, directory=bundle.ROOT)
    with http.server.HTTPServer(("127.0.0.1", 0), serve) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        text = text.replace("connect-src 'self'", f"connect-src 'self' {url}")
        added = STEPS.replace("STEPS", steps).replace("URL", f"{url}/found")
        server.page = text.replace("<body>", f"<body>{added}")
        server.found = None
        server.timeout = 1
        (folder / "live.html").write_text(server.page, encoding="utf-8")
        page = f"{url}/docs/live.html" if served else (folder / "live.html").as_uri()
        browser = subprocess.Popen(
            [path, "--headless=new", "--no-sandbox", "--disable-gpu",
             f"--user-data-dir={folder}/profile", page],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        latest = time.monotonic() + 300
        while server.found is None and time.monotonic() < latest:
            server.handle_request()
        browser.terminate()
        browser.wait()
        assert server.found and server.found["troubles"] == [], server.found
        return server.found


@pytest.fixture(scope="module")
def page():
    """The bundled page."""
    with torch.inference_mode():
        return bundle.bundle()


def test_the_bundle_is_small_and_bad_input_gets_a_line(page, call, tmp_path):
    assert len(page) < 20e6
    call.refuses([], tmp_path, "out")
    call.refuses([tmp_path / "no" / "live.html"], tmp_path, "cannot be written")


@torch.inference_mode()
def test_under_node_the_int8_weights_write_what_python_writes_with_them(tmp_path):
    stored = bundle.in_int8(safetensors.torch.load_file(bundle.MODEL / "model.safetensors"))
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((bundle.MODEL / "config.json").read_bytes())
    prompt = shipped(True)[1].encode("Once upon a time").ids
    for answer in node(ENGINE, lines=[drafted(tmp_path, prompt, 4)]) or []:
        ids = [token for line in answer["rounds"] for token in line["new"][0]]
        assert ids == ids_of_python(True, most=40)


def test_it_writes_what_python_writes_and_each_control_acts(page, tmp_path):
    found = in_browser(page, """
        found.greedy = await written();
        found.compared = $("compared").textContent;
        found.numbers = [...$("numbers").rows].map(row => parseFloat(row.cells[1].textContent));

        $("same").checked = false;
        await change("temperature", "0.8");
        found.sampled = await written();
        $("same").checked = true; $("same").onchange();
        await until("comparing"); await until("done");
        found.raced = $("compared").textContent;

        await change("temperature", "0");
        await change("gamma", "1");
        await change("exit", "24");
        found.step = await written("step", "resting");
        found.cards = texts($("cards").children);
        $("cards").children[0].click();
        found.why = $("why").textContent;
        found.head = $("bars").rows[0].innerText;
        await change("gamma", "0");
        found.plain = await written("step", "resting");

        $("write").click(); $("write").click();
        await until("resting");
        found.paused = story.ids.length;
        found.on = await written();
        $("again").click();
        await until("ready");
        found.again = $("text").textContent;
        await change("prompt", "The <b>cat</b>");
        await written("step", "resting");
        found.markup = $("text").textContent;
        """, tmp_path)
    if found is None:
        return
    plain = ids_of_python(True)
    assert found["greedy"] == found["on"] == plain
    assert found["compared"] == "The same text: all 120 tokens are those of plain decoding."
    tested, tau, *others = found["numbers"]
    assert 0 < tested <= 1 < tau < 4 and all(x > 0 for x in others)
    assert found["sampled"] == ids_of_python(True, 0.8) != plain
    assert "drafted and plain decoding both wrote the same" in found["raced"]
    assert found["step"] == plain[:2] and len(found["cards"]) == 2 and found["plain"] == plain[:1]
    _, flip, last = Coins(0).take(3, torch.device("cpu")).tolist()
    assert f"coin {flip:.3f}: accepted" in found["cards"][0]
    assert found["cards"][1].endswith(f"bonus token\ncoin {last:.3f}")
    assert "is at least 1, so any coin accepts it" in found["why"]
    assert found["head"].split() == "likeliest tokens p q max(p \u2212 q, 0)".split()
    assert 1 < found["paused"] < 120
    assert found["again"] == "Once upon a time" and found["markup"].startswith("The <b>cat</b>")


def test_served_beside_the_weights_on_a_narrow_screen_and_read_aloud(tmp_path):
    """Every control has a name, and they stand in the order in which one needs them."""
    text = (bundle.ROOT / "docs" / "live.html").read_text(encoding="utf-8")
    found = in_browser(text, """
        found.ids = await written();
        document.documentElement.style.width = "360px";
        found.width = document.body.scrollWidth;
        found.controls = [...document.querySelectorAll("fieldset input, #buttons [id]")]
            .map(e => [e.id, (e.labels[0] || e).innerText]);
        """, tmp_path, served=True)
    if found is None:
        return
    assert found["ids"] == ids_of_python(False) and found["width"] <= 360
    says = {"prompt": "Begin with", "exit": "Blocks that draft", "gamma": "Tokens per draft",
            "temperature": "Temperature", "write": "Write", "step": "One round",
            "again": "Start again", "same": "Same text?"}
    assert [name for name, _ in found["controls"]] == [*says]
    assert all(words.strip().startswith(says[name]) for name, words in found["controls"])
