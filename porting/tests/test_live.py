"""The live page in a real browser: it writes what Python writes, in int8 and in bfloat16; each
control acts, and nothing complains. Where there is no browser, these tests only warn."""
import functools
import http.server
import threading

import pytest
import safetensors.torch
import torch
from browser import Browser, find
from test_port_js import ENGINE, node
from tiny import command

import checkpoint
from layerskip import SelfDraft, early_exit
from porting.web import bundle
from sampling import Coins, to_probs
from speculative import rounds

STATE = """(...states) => new Promise((done, fail) => {
    const look = () => states.includes(document.body.dataset.state)
        ? done(document.body.dataset.state) : setTimeout(look, 20);
    look();
    // so that no test hangs
    setTimeout(() => fail("still " + document.body.dataset.state), 200_000);
})"""
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The bundled page."""
    out = tmp_path_factory.mktemp("page") / "live.html"
    with torch.inference_mode():
        out.write_text(bundle.bundle(), encoding="utf-8")
    return out


@pytest.fixture
def browser(tmp_path):
    path = find()
    opened = Browser(path, tmp_path) if path else None
    yield opened
    if opened:
        opened.close()


def until(browser, *states):
    return browser.run(f"({STATE})({', '.join(map(repr, states))})")


def change(browser, control, value):
    browser.run(f"$('{control}').value = {value!r}; $('{control}').onchange()")
    assert until(browser, "ready", "failed") == "ready"


def written(browser, button="write", end="done"):
    """Press a button and wait. The ids of the story."""
    browser.run(f"$('{button}').click()")
    assert until(browser, end, "failed") == end
    return browser.run("story.ids")


# --- without a browser


def test_the_bundle_is_small_and_bad_input_gets_a_line(page, call, tmp_path):
    assert page.stat().st_size < 20e6
    call.refuses([], tmp_path, "out")
    call.refuses([tmp_path / "no" / "live.html"], tmp_path, "cannot be written")


@torch.inference_mode()
def test_under_node_the_int8_weights_write_what_python_writes_with_them(tmp_path):
    stored = bundle.in_int8(safetensors.torch.load_file(bundle.MODEL / "model.safetensors"))
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((bundle.MODEL / "config.json").read_bytes())
    prompt = shipped(True)[1].encode("Once upon a time").ids
    sampling = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
    drafter = {"kind": "sublayers", "gamma": 3, "sublayers": list(range(8)), "widths": []}
    request = {"case": 1, "op": "rounds", "model": str(tmp_path), "prompts": [prompt],
               "max_new": 40, "seed": 0, "eos": [0], "sampling": sampling, "drafter": drafter,
               "trees": False}
    for answer in node(ENGINE, lines=[request]) or []:
        ids = [token for line in answer["rounds"] for token in line["new"][0]]
        assert ids == ids_of_python(True, most=40)


# --- in a browser


def test_it_writes_what_python_writes_and_each_control_acts(page, browser):
    if browser is None:
        return
    browser.open(page.as_uri())
    assert until(browser, "ready", "failed") == "ready"
    plain = ids_of_python(True)
    assert written(browser) == plain
    said = browser.run("$('compared').textContent")
    assert said == "The same text: all 120 tokens are those of plain decoding."
    numbers = browser.run("[...$('numbers').rows].map(row => row.cells[1].textContent)")
    tested, tau = (float(numbers[i].split()[0]) for i in (0, 1))
    assert 0 < tested <= 1 < tau < 4 and all(float(x) > 0 for x in numbers[2:])

    browser.run("$('same').checked = false")
    change(browser, "temperature", "0.8")
    assert written(browser) == ids_of_python(True, 0.8) != plain
    browser.run("$('same').checked = true; $('same').onchange()")
    until(browser, "comparing")
    assert until(browser, "done", "failed") == "done"
    said = browser.run("$('compared').textContent")
    assert "drafted and plain decoding both wrote the same" in said

    change(browser, "temperature", "0")
    change(browser, "gamma", "1")
    change(browser, "exit", "24")
    first = written(browser, "step", "resting")
    assert first == plain[:2] and browser.run("$('cards').children.length") == 2
    _, flip, last = Coins(0).take(3, torch.device("cpu")).tolist()
    cards = browser.run("[...$('cards').children].map(card => card.innerText)")
    assert f"coin {flip:.3f}: accepted" in cards[0]
    assert cards[1].endswith(f"bonus token\ncoin {last:.3f}")
    browser.run("$('cards').children[0].click()")
    assert "is at least 1, so any coin accepts it" in browser.run("$('why').textContent")
    head = browser.run("$('bars').rows[0].innerText").split()
    assert head == "likeliest tokens p q max(p \u2212 q, 0)".split()
    change(browser, "gamma", "0")
    assert written(browser, "step", "resting") == plain[:1]

    browser.run("$('write').click()")
    browser.run("$('write').click()")
    assert until(browser, "resting") and 1 < browser.run("story.ids.length") < 120
    assert written(browser) == plain
    browser.run("$('again').click()")
    assert until(browser, "ready") and browser.run("$('text').textContent") == "Once upon a time"
    change(browser, "prompt", "The <b>cat</b>")
    written(browser, "step", "resting")
    assert browser.run("$('text').textContent").startswith("The <b>cat</b>")
    assert browser.troubles == []


def test_served_beside_the_weights_it_writes_what_python_writes(browser):
    if browser is None:
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    serve = functools.partial(Quiet, directory=bundle.ROOT)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/docs/live.html")
        assert until(browser, "ready", "failed") == "ready"
        assert written(browser) == ids_of_python(False)
        server.shutdown()
    assert browser.troubles == []


def test_by_keyboard_on_a_phone_and_read_aloud(page, browser):
    if browser is None:
        return
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1,
                 mobile=True)
    browser.open(page.as_uri())
    assert until(browser, "ready", "failed") == "ready"

    def press(key, code, text=""):
        for kind in ("keyDown", "keyUp"):
            browser.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                         windowsVirtualKeyCode=code)

    order = []
    for _ in range(8):
        press("Tab", 9)
        order.append(browser.run("document.activeElement.id"))
    assert order == ["prompt", "exit", "gamma", "temperature", "write", "step", "again", "same"]
    browser.run("$('gamma').focus()")
    press("ArrowRight", 39)
    assert until(browser, "ready") and browser.run("$('gamma-says').textContent") == "4"
    browser.run("$('step').focus()")
    press("Enter", 13, "\r")
    assert until(browser, "resting") and browser.run("document.activeElement.id") == "step"
    browser.run("$('cards').children[0].click()")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    browser.send("Accessibility.enable")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node["name"]["value"]) for node in nodes if node.get("name")}
    roles = {"slider": ["Blocks that draft", "Tokens per draft (gamma)", "Temperature"],
             "button": ["Write", "One round", "Start again"], "textbox": ["Begin with"],
             "checkbox": ["Same text?"], "region": ["the story"]}
    for role, names in roles.items():
        for name in names:
            assert any(r == role and said.startswith(name) for r, said in named), (role, name)
    assert browser.troubles == []
