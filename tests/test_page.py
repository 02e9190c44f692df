"""The page to step through: its data are what `rounds` yielded, and whatever a model writes stays data.
`python tests/browser.py` opens it in a browser."""
import json
import re
from pathlib import Path

import pytest
import torch
from tiny import LLAMA, PROMPTS, make
from tokenizers import Tokenizer

import checkpoint
import generate
from layerskip import SelfDraft
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, Then, rounds
from support.page import Player, SeenCoins, play

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "weights" / "stories-llama"
WARM = lambda logits: to_probs(logits, temperature=1.0, top_k=20)  # noqa: E731
DRAFTERS = {"plain": lambda m: None, "exit": lambda m: SelfDraft(m, range(4), 3),
            "copy": lambda m: NGram(3, 1),
            "model": lambda m: ModelDraft(m, 2, range(2)),
            "both": lambda m: Then(SelfDraft(m, range(4), 1), NGram(2, 1))}


@pytest.fixture(scope="module")
def shipped():
    return checkpoint.load(FOLDER, "cpu", torch.float32)


def data(page):
    """What a page knows."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


@pytest.mark.parametrize("probs", [to_probs, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_page_says_what_rounds_yielded(shipped, name, probs):
    model, tokenizer = shipped
    ids = checkpoint.encode(tokenizer, "One day, a cat. One day, a", model.c.bos)
    found = data(play(model, tokenizer, ids, 16, DRAFTERS[name](model), probs, seed=5).html())
    known, tokens = list(ids), 0
    steps = rounds(model, [ids], 16, DRAFTERS[name](model), probs, Coins(5))
    for (_, r), page in zip(steps, found["rounds"], strict=True):
        drafted, accepted = r.draft.tokens[0, : int(r.draft.length[0])].tolist(), int(r.accepted)
        name_of = lambda t: tokenizer.decode([t], skip_special_tokens=False)  # noqa: E731
        assert page["start"] == len(known) - 1
        assert page["block"] == [name_of(t) for t in (known[-1], *drafted)]
        assert (page["drafted"], page["accepted"]) == (len(drafted), accepted)
        known, tokens = known + r.new[0], tokens + len(r.new[0])
        assert page["tokens"] == tokens and "".join(t for t, _ in page["new"]) == tokenizer.decode(r.new[0])
        places = page["places"]
        bonus = [None] * (accepted == len(drafted))
        assert [d["text"] for d in places] == [name_of(t) for t in drafted] + bonus
        verdicts = ["accepted"] * accepted + ["refused"] + ["dead"] * len(drafted)
        assert [d["verdict"] for d in places if d["text"] is not None] == verdicts[: len(drafted)]
        for k, d in enumerate(places[: accepted + 1]):
            q = torch.zeros_like(r.p[0, k])
            if k < len(drafted):
                q = q.scatter(0, r.draft.tokens[0, k], 1.0) if r.draft.q is None else r.draft.q[0, k]
                ratio = float(r.p[0, k, drafted[k]] / q[drafted[k]])
                assert (d["coin"] < ratio) == (d["verdict"] == "accepted"), "the coin decided"
                assert d["p"] / d["q"] == pytest.approx(ratio, rel=2e-3)
            for text, *bars in d["bars"]:
                alive = torch.maximum(r.p[0, k], q).nonzero()[:, 0].tolist()
                same = [t for t in alive if name_of(t) == text]     # pieces of a character look alike
                token = min(same, key=lambda t: abs(float(r.p[0, k, t]) - bars[0]))
                assert float(r.p[0, k, token]) == pytest.approx(bars[0], abs=1e-3)
                gap = float(r.p[0, k, token] - q[token])
                assert bars[1:] == pytest.approx([float(q[token]), max(gap, 0)], abs=1e-3)
        left = r.p[0, accepted] - (q if accepted < len(drafted) else 0)
        cdf = left.clamp(min=0).double().cumsum(0)
        near = torch.searchsorted(cdf, torch.tensor([page["coin"] - 1e-4, page["coin"] + 1e-4]) * cdf[-1])
        assert page["next"] == name_of(r.new[0][-1]) and near[0] <= r.new[0][-1] <= near[1] + 1
    assert found["tokens"] == [name_of(t) for t in known]


def test_an_end_of_text_inside_the_accepted_guesses(shipped):
    model, tokenizer = shipped
    ids = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    whole = SelfDraft(model, range(2 * model.c.n_layers), 4)
    (_, r), *_ = rounds(model, [ids], 9, whole)
    found = data(play(model, tokenizer, ids, 9, whole, eos={r.new[0][1]}).html())["rounds"]
    assert len(found) == 1 and found[0]["next"] is None
    assert [d["verdict"] for d in found[0]["places"]] == ["accepted", "accepted", "dead", "dead"]
    assert all(d["bars"] == [] for d in found[0]["places"][2:])


def test_of_a_batch_it_shows_the_first_row(shipped):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    model, player = make(LLAMA), Player(tokenizer, PROMPTS[1], 3)
    written = []
    for state, r in rounds(model, PROMPTS[1:3], 7, SelfDraft(model, range(4), 2), WARM, player.coins):
        player.add(state, r)
        written += r.new[0]
    assert player.tokens == PROMPTS[1] + written
    for page in player.rounds:
        for d in page["places"]:
            if d.get("verdict") in ("accepted", "refused"):
                assert (d["coin"] < d["p"] / d["q"]) == (d["verdict"] == "accepted")


def test_of_a_batch_whose_first_row_ends_first():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    model, prompts = make(LLAMA), [[5] * (LLAMA.max_len - 2), [3, 8]]
    player = Player(tokenizer, prompts[0])
    for state, r in rounds(model, prompts, 7, None, coins=player.coins):
        player.add(state, r)
    assert len(player.rounds) == 2 and len(player.tokens) == LLAMA.max_len


def test_whatever_a_model_writes_is_data(shipped):
    model, tokenizer = shipped
    attack = "</script><script>alert(1)</script><!--\x1b\x00 <b>&amp;"
    ids = checkpoint.encode(tokenizer, attack, model.c.bos)
    page = play(model, tokenizer, ids, 3).html()
    assert page.count("<script") == page.count("</script>") == 2 and "<!--" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page)
    assert data(page)["prompt"] == attack.replace("\x1b", "\u241b").replace("\x00", "\u2400")
    assert {"\u241b", "\u2400"} <= set(data(page)["tokens"])
    frame = play(model, tokenizer, ids, 3)._repr_html_()
    assert frame.count("<") == 2, "escaped inside the frame's attribute"


def test_it_needs_no_network_and_is_small(shipped):
    model, tokenizer = shipped
    ids = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    page = play(model, tokenizer, ids, 200, SelfDraft(model, range(4), 1), WARM).html()
    assert len(page.encode()) < 300e3
    assert not re.search(r"https?:|src=|<link|@import|url\(", page) and "default-src 'none'" in page


def test_seen_coins_are_the_coins():
    seen, plain = SeenCoins(4), Coins(4)
    p = torch.rand(3, 5)
    assert torch.equal(seen.flip(p), plain.flip(p)) and torch.equal(seen.choose(p), plain.choose(p))
    assert [len(part) for part in seen.seen] == [15, 3]


def test_nothing_to_step_through(shipped):
    with pytest.raises(ValueError, match="nothing was written"):
        Player(shipped[1], [0]).html()


def test_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "run.html"
    flags = ["--max-new", "12", "--device", "cpu", "--json"]
    assert generate.main(["Once upon a time", *flags, "--page", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    found = data(path.read_text(encoding="utf-8"))
    assert len(found["rounds"]) == told["target_passes"]
    assert "".join(t for r in found["rounds"] for t, _ in r["new"]) == told["outputs"][0]["text"]
    for wrong, why in (("run.pdf", "must name a .html file"), ("", "is empty")):
        assert generate.main(["x", *flags, "--page", wrong]) == 2
        assert f"--page {why}" in capsys.readouterr().err
    tree = ["--draft", "medusa", "--tree", "4"]
    assert generate.main(["x", *tree, "--page", str(path)]) == 2
    assert "--page shows chains" in capsys.readouterr().err


def test_a_page_changes_no_text(tmp_path, capsys):
    flags = ["Once upon a time", "--max-new", "12", "--device", "cpu", "--json", "--temperature", "1"]
    outputs = []
    for more in ([], ["--page", str(tmp_path / "run.html")]):
        assert generate.main([*flags, *more]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["outputs"])
    assert outputs[0] == outputs[1]
