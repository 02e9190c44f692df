"""The live page in a real browser, with real clicks and keys: it writes what Python writes, with
both drafts; each control acts, and nothing complains. Where there is no browser, these tests only
warn."""
import functools
import json
import re
import threading

import pytest
import safetensors.torch
import torch
from browser import Browser, find
from test_port_js import ENGINE, WITH, node
from test_port_js import drafted as case_of
from tiny import command

import checkpoint
from layerskip import SelfDraft, early_exit
from machine.quant import quantise
from porting.web import bundle, serve
from sampling import Coins, to_probs
from speculative import rounds

WAIT = """new Promise((done, fail) => {{
    const look = () => {{ const found = {}; found ? done(found) : setTimeout(look, 20); }};
    look();
    // so that no test hangs
    setTimeout(() => fail("still " + document.body.dataset.state), 100_000);
}})"""
MOST = 400      # as the page has it
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


@functools.cache
@torch.inference_mode()
def ids_of_python(int8, temperature=0.0, blocks=3, gamma=2, copy=False, most=MOST,
                  prompt="Once upon a time"):
    model, tokenizer = shipped(int8)
    prompt = tokenizer.encode(prompt).ids
    drafts = quantise(model, "int8", head="int8", rounds=True) if copy else model
    drafter = SelfDraft(drafts, early_exit(model.c.n_layers, blocks), gamma)
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


def wait(browser, condition):
    """Until it holds. Its value."""
    return browser.run(WAIT.format(condition))


def until(browser, *states):
    """Wait for one of these states of the page, and return it."""
    state = "document.body.dataset.state"
    return wait(browser, f"{list(states)}.includes({state}) && {state}")


def opened(browser, url):
    browser.open(url)
    assert until(browser, "ready", "failed") == "ready", browser.run("$('status').textContent")


def change(browser, **controls):
    for control, value in controls.items():
        browser.run(f"$('{control}').value = {value!r}; $('{control}').onchange()")
    assert until(browser, "ready", "failed") == "ready"


def choose(browser, copy):
    """The model's int8 copy drafts, or its first blocks."""
    browser.click("copy" if copy else "exit")
    browser.click("again")
    assert until(browser, "ready", "failed") == "ready"


def drafted(browser):
    """The ids of the story with drafts."""
    return browser.run("story.lanes[1].ids")


def written(browser, button="write", end="done"):
    """Click a button and wait. The ids of the story with drafts."""
    browser.click(button)
    assert until(browser, end, "failed") == end
    return drafted(browser)


# --- without a browser


def test_the_bundle_is_small_and_bad_input_gets_a_line(page, call, tmp_path):
    assert page.stat().st_size < 20e6
    call.refuses([], tmp_path, "out")
    call.refuses([tmp_path / "no" / "live.html"], tmp_path, "cannot be written")


def test_a_taken_port_is_named_and_another_one_taken(capsys):
    with serve.server(0) as first, serve.server(first.server_port) as second:
        assert second.server_port != first.server_port
    said = capsys.readouterr().err
    assert f"port {first.server_port} cannot be used (Address already in use)" in said
    assert f"taking {second.server_port} instead" in said


@WITH
def test_under_node_the_int8_weights_write_what_python_writes_with_them(tmp_path, kernels):
    stored = bundle.in_int8(safetensors.torch.load_file(bundle.MODEL / "model.safetensors"))
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((bundle.MODEL / "config.json").read_bytes())
    prompt = shipped(True)[1].encode("Once upon a time").ids
    for answer in node(ENGINE, *kernels, lines=[case_of(tmp_path, prompt, 4)]) or []:
        ids = [token for line in answer["rounds"] for token in line["new"][0]]
        assert ids == ids_of_python(True, blocks=4, gamma=3, most=40)


# --- in a browser


def test_it_writes_what_python_writes_with_both_drafts(page, browser):
    """Greedy and at temperature 0.8, from the file itself. The gains are printed: how large they
    are is for the machine to say."""
    if browser is None:
        return
    opened(browser, page.as_uri())
    gains = []
    for _ in range(3):
        plain = written(browser)
        gains.append(float(browser.run("$('gain').textContent").split()[0]))
        said = browser.run("$('gain').textContent")
        assert said.endswith(f"The same text: all {len(plain)} tokens.")
    print("gains of the default settings:", *gains, browser.run("JSON.stringify(chosen())"))
    assert plain == ids_of_python(True)
    for copy, blocks in ((False, 3), (True, 24)):
        choose(browser, copy)
        assert browser.run("value('blocks')") == blocks
        change(browser, gamma="3")
        assert written(browser) == plain
        numbers = browser.run("[...$('numbers').rows].map(row => row.cells[1].textContent)")
        tested, tau = (float(numbers[i].split()[0]) for i in (0, 1))
        assert (0.9 if copy else 0.6) < tested <= 1 < tau < 4
        change(browser, temperature="0.8")
        # The copy rounds what it multiplies. A number half-way between two whole ones falls by the
        # order of the sums before it, so q differs from Python's by a thousandth. Some coin at last
        # falls between the two, and from there on both write other texts.
        count = 24 if copy else MOST
        sampled = written(browser)[:count]
        assert sampled == ids_of_python(True, 0.8, blocks, 3, copy)[:count] != plain[:count]
        said = wait(browser, "$('gain').textContent.includes('race') && $('gain').textContent")
        assert "drafted and plain decoding wrote the same 40" in said
        change(browser, temperature="0")
    assert browser.troubles == []


def test_each_control_acts(page, browser):
    if browser is None:
        return
    opened(browser, page.as_uri())
    plain = ids_of_python(True)
    change(browser, gamma="1", blocks="24")
    assert written(browser, "step", "resting") == plain[:2]
    assert browser.run("$('cards').children.length") == 2
    _, flip, last = Coins(0).take(3, torch.device("cpu")).tolist()
    cards = browser.run("[...$('cards').children].map(card => card.innerText)")
    assert f"coin {flip:.3f}: accepted" in cards[0]
    assert cards[1].endswith(f"bonus token\ncoin {last:.3f}")
    browser.run("$('cards').children[0].click()")
    assert "is at least 1, so any coin accepts it" in browser.run("$('why').textContent")
    head = browser.run("$('bars').rows[0].innerText").split()
    assert head == "likeliest tokens p q min(p, q) max(p \u2212 q, 0)".split()
    change(browser, gamma="0")
    assert written(browser, "step", "resting") == plain[:1]
    assert browser.run("story.v[0]") == 1

    browser.click("write")
    browser.click("write")      # now it says Pause
    assert until(browser, "resting", "done") == "resting"
    assert len(drafted(browser)) < len(plain)
    assert written(browser) == plain == browser.run("story.lanes[0].ids")
    browser.click("again")
    assert until(browser, "ready") and browser.run("$('text1').textContent") == "Once upon a time"
    change(browser, prompt="The <b>cat</b>")
    written(browser, "step", "resting")
    assert browser.run("$('text1').textContent").startswith("The <b>cat</b>")
    assert browser.troubles == []


def test_what_is_typed_or_moved_before_a_click_counts(page, browser):
    """The field loses the focus by the click on Write. Enter in it writes, too."""
    if browser is None:
        return
    opened(browser, page.as_uri())
    want = ids_of_python(True, prompt="Once upon a time a cat")
    browser.click("prompt")
    browser.press("End", 35)
    browser.send("Input.insertText", text=" a cat")
    assert written(browser) == want
    browser.click("prompt")
    browser.press("End", 35)
    browser.send("Input.insertText", text="!")
    browser.press("Backspace", 8)
    browser.press("Enter", 13, "\r")
    assert until(browser, "measuring", "writing") and until(browser, "done") == "done"
    assert drafted(browser) == want
    browser.run("$('temperature').focus()")
    browser.press("ArrowRight", 39)
    browser.click("write")
    assert until(browser, "writing", "done") and until(browser, "done")
    assert browser.run("value('temperature')") == 0.1 and browser.troubles == []


def test_beginnings_that_are_too_long_are_refused_and_letters_of_several_tokens_are_whole(
        page, browser):
    if browser is None:
        return
    opened(browser, page.as_uri())
    for text, words in (("ab " * 3400, "longer than 10,000 characters"),
                        ("cat " * 1000, "tokens, and the model reads 448 at most")):
        change_to = f"$('prompt').value = {text!r}; $('prompt').onchange()"
        browser.run(change_to)
        assert until(browser, "refused", "ready") == "refused"
        assert words in browser.run("$('status').textContent")
    # what the model writes, as if it wrote these letters
    browser.run("""(() => {
        const source = $("worker").textContent.replace("lane.news.push(...shown)",
            "lane.news.push(...tokenizer.encode('\\ufeff\u201cna\u00efve\u201d \U0001f600')"
            + ".slice(1).map(id => [lane.reader(id), 'plain']))");
        worker.terminate();
        $("worker").textContent = source;
        $("prompt").value = "Once";
        return load();
    })()""")
    assert until(browser, "ready", "failed") == "ready"
    browser.run("$('text1').replaceChildren()")
    written(browser, "step", "resting")
    assert browser.run("$('text1').textContent") == "\ufeff\u201cna\u00efve\u201d \U0001f600"


def test_served_beside_the_weights_it_writes_what_python_writes(browser):
    if browser is None:
        return
    with serve.server(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened(browser, f"http://127.0.0.1:{server.server_port}/docs/live.html")
        for copy in (False, True):
            choose(browser, copy)
            assert written(browser) == ids_of_python(False)
        browser.run("files.kernels = files.fused = new ArrayBuffer(8); send('load', files)")
        browser.run("state = document.body.dataset.state = 'loading'")
        assert until(browser, "ready", "failed") == "ready"
        assert "no SIMD" in browser.run("$('arithmetic').textContent")
        assert written(browser) == ids_of_python(False)
        server.shutdown()
    assert browser.troubles == []


@pytest.mark.parametrize("damage, words", [
    (lambda text: text[: len(text) // 2], "this file is cut off"),
    (lambda text: re.sub(r"(data-file=\"weights\".{9000})(.)", r"\1+", text, count=1), "damaged"),
])
def test_a_bundle_that_is_cut_off_or_damaged_says_so(page, browser, tmp_path, damage, words):
    if browser is None:
        return
    broken = tmp_path / "broken.html"
    broken.write_text(damage(page.read_text(encoding="utf-8")), encoding="utf-8")
    browser.open(broken.as_uri())
    assert until(browser, "ready", "failed") == "failed"
    assert words in browser.run("$('status').textContent")


def test_another_model_from_a_folder(page, browser, tmp_path):
    if browser is None:
        return
    opened(browser, page.as_uri())
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    field = browser.send("DOM.querySelector", nodeId=root, selector="#folder")["nodeId"]
    folder = bundle.ROOT / "weights" / "stories-plain"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no model")
    browser.send("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / "other")])
    assert until(browser, "refused", "failed") == "refused"
    assert "there is no config.json" in browser.run("$('status').textContent")
    assert written(browser) == ids_of_python(True)      # with the model before
    browser.send("DOM.setFileInputFiles", nodeId=field, files=[str(folder)])
    blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    wait(browser, f"L === {blocks} && document.body.dataset.state === 'ready'")
    written(browser)
    assert "The same text" in browser.run("$('gain').textContent")
    assert browser.troubles == []


def test_by_keyboard_on_a_phone_and_read_aloud(page, browser):
    if browser is None:
        return
    for width, height in ((320, 568), (360, 640)):
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=True)
        opened(browser, page.as_uri())
        story = browser.run("$('text1').getBoundingClientRect().toJSON()")
        assert 0 < story["top"] < story["bottom"] < height      # in sight
        assert browser.run("document.documentElement.scrollWidth") <= width

    order = []
    for _ in range(10):
        browser.press("Tab", 9)
        order.append(browser.run("document.activeElement.id"))
    assert order == ["prompt", "write", "step", "again", "text1", "text0", browser.run(
        "$('copy').checked ? 'copy' : 'exit'"), "blocks", "gamma", "temperature"]
    browser.run("$('gamma').value = 3; $('gamma').focus()")
    browser.press("ArrowRight", 39)
    assert until(browser, "ready") and browser.run("$('gamma-says').textContent") == "4"
    browser.run("$('step').focus()")
    for _ in range(3):
        browser.press("Enter", 13, "\r")
        assert until(browser, "resting") and browser.run("document.activeElement.id") == "step"
    browser.run("$('cards').children[0].click()")
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.send("Accessibility.enable")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node["name"]["value"]) for node in nodes if node.get("name")}
    roles = {"slider": ["Blocks that draft", "Tokens per draft (gamma)", "Temperature"],
             "button": ["Write", "One round", "Start again"], "textbox": ["Begin with"],
             "radio": ["Its first blocks", "Its int8 copy"],
             "region": ["the story with drafts", "the story without drafts"]}
    for role, names in roles.items():
        for name in names:
            assert any(r == role and said.startswith(name) for r, said in named), (role, name)
    # what was accepted, rejected, put in its place and added differs for screen readers, too
    roles = {node["role"]["value"] for node in nodes}
    assert {"mark", "deletion", "insertion", "emphasis"} <= roles
    assert browser.troubles == []
