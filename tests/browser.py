"""The page in a real browser: it steps, it shows what `rounds` yielded, and nothing overflows.

`python tests/browser.py` needs Chromium on the PATH. A probe is put into copies of a page; it presses keys,
looks at what the page shows, and leaves what it saw in the document, which the browser prints.
"""
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tiny import play  # noqa: E402

import checkpoint  # noqa: E402
from layerskip import SelfDraft  # noqa: E402
from sampling import to_probs  # noqa: E402

PROBE = """<script>
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const look = () => ({
  where: document.getElementById("where").textContent, text: document.getElementById("text").textContent,
  cards: [...document.querySelectorAll(".card")].map(card => card.firstChild.textContent),
  place: document.getElementById("place").textContent,
  dead: document.querySelectorAll("#after .gone").length, bold: document.querySelectorAll("#text b").length,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth });
const seen = [];
press("Home");
for (let i = 0; i < run.rounds.length; i++) { seen.push(look()); press("ArrowRight"); }
press("ArrowRight"); const end = look();
press("ArrowLeft"); const before = look();
press("Home"); press("ArrowUp"); press("ArrowUp"); press("ArrowUp"); const first = look();
parent.document.body.textContent = "SEEN" + JSON.stringify({ seen, end, before, first }) + "SEEN";
</script></body>"""


def browse(path, *flags):
    """What Chromium prints for a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or sys.exit("Chromium is missing")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", *flags]
    return subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120).stdout


def probe(page, width, folder):
    """What the page shows in each of its rounds, in a window of this width."""
    path = folder / "probe.html"
    # a frame of the wanted width: headless windows do not become as narrow as a phone
    inner = html.escape(page.replace("</body>", PROBE))
    path.write_text(f'<!doctype html><body><iframe style="width:{width}px;height:800px;border:0" '
                    f'srcdoc="{inner}"></iframe></body>', encoding="utf-8")
    dom = browse(path, "--dump-dom")
    return json.loads(html.unescape(re.search(r"SEEN(.*)SEEN", dom, re.S)[1]))


def check(player, found):
    tokens = 0
    for number, (r, shown) in enumerate(zip(player.rounds, found["seen"], strict=True), 1):
        tokens += len(r["new"])
        start = f"Round {number} of {len(player.rounds)}: {r['accepted']} of {r['drafted']} guesses accepted"
        assert shown["where"].startswith(start), shown["where"]
        assert f"so far {tokens} tokens in {number} passes" in shown["where"]
        written = "".join(text for past in player.rounds[:number] for text, _ in past["new"])
        assert shown["text"] == player.prompt + written
        guesses = [json.dumps(d["text"], ensure_ascii=False) for d in r["places"] if d["text"] is not None]
        assert shown["cards"][: len(guesses)] == guesses
        assert shown["dead"] == r["drafted"] - r["accepted"]
        assert shown["bold"] == 0, "markup in the text"
        assert shown["wide"] <= 0, f"round {number} overflows by {shown['wide']} pixels"
    assert found["end"] == found["seen"][-1] and found["before"] == found["seen"][-2]
    assert found["first"]["place"].startswith("Guess 1")


def main():
    model, tokenizer = checkpoint.load(ROOT / "weights" / "stories-llama", "cpu", torch.float32)
    probs = lambda logits: to_probs(logits, temperature=1.0, top_p=0.95)  # noqa: E731
    for text in ("Once upon a time", "<b>bold</b> " + "W" * 90 + "\n"):
        ids = checkpoint.encode(tokenizer, text, model.c.bos)
        player = play(model, tokenizer, ids, 60, SelfDraft(model, range(4), 3), probs, seed=2)
        with tempfile.TemporaryDirectory() as folder:
            for width in (320, 412, 1100):
                check(player, probe(player.html(), width, Path(folder)))
                print(f"{text[:20]!r}, {width} pixels: {len(player.rounds)} rounds, as `rounds` yielded them")


if __name__ == "__main__":
    main()
