"""The page to step through: its data are what `rounds` yielded, and what a model writes stays data."""
import json
import re
from pathlib import Path

import pytest
import torch
from tiny import LLAMA, PROMPTS, make, play

import checkpoint
import generate
from layerskip import SelfDraft
from methods.then import Then
from sampling import Coins, to_probs
from speculative import NGram, rounds
from support.page import Player

FOLDER = Path(__file__).parent.parent / "weights" / "stories-llama"
WARM = lambda logits: to_probs(logits, temperature=1.0, top_k=20)  # noqa: E731


@pytest.fixture(scope="module")
def shipped():
    return checkpoint.load(FOLDER, "cpu", torch.float32)


def data(page):
    """What a page knows."""
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])


@pytest.mark.parametrize("drafter", [
    lambda m: None, lambda m: Then(SelfDraft(m, range(4), 2), NGram(2, 1))], ids=["plain", "both"])
def test_the_page_says_what_rounds_yielded(shipped, drafter):
    model, tokenizer = shipped
    ids = checkpoint.encode(tokenizer, "One day, a cat. One day, a", model.c.bos)
    found = data(play(model, tokenizer, ids, 16, drafter(model), WARM, seed=5).html())
    known, count = list(ids), 0

    def names(ids):
        return [tokenizer.decode([t], skip_special_tokens=False) for t in ids]

    steps = rounds(model, [ids], 16, drafter(model), WARM, Coins(5))
    for (_, r), page in zip(steps, found["rounds"], strict=True):
        drafted, accepted = r.draft.tokens[0, : int(r.draft.length[0])].tolist(), int(r.accepted)
        assert page["start"] == len(known) - 1 and page["block"] == names([known[-1], *drafted])
        known, count = known + r.new[0], count + len(r.new[0])
        assert (page["drafted"], page["accepted"], page["tokens"]) == (len(drafted), accepted, count)
        assert "".join(t for t, _ in page["new"]) == tokenizer.decode(r.new[0])
        verdicts = ["accepted"] * accepted + ["refused"] + ["dead"] * len(drafted)
        tried = [d for d in page["places"] if d["text"] is not None]
        assert [d["text"] for d in tried] == names(drafted)
        assert [d["verdict"] for d in tried] == verdicts[: len(drafted)]
        for k, d in enumerate(tried[: accepted + 1]):
            p = r.p[0, k]
            q = r.draft.q[0, k] if r.draft.q is not None else torch.eye(len(p))[drafted[k]]
            ratio = float(p[drafted[k]] / q[drafted[k]])
            assert (d["coin"] < ratio) == (d["verdict"] == "accepted"), "the coin decided"
            want = [float(x[drafted[k]]) for x in (p, q, (p - q).clamp(min=0))]
            assert any(bar[1:] == pytest.approx(want, abs=1e-3) for bar in d["bars"])
        assert page["next"] == names(r.new[0][-1:])[0]
    assert found["tokens"] == names(known)


def test_an_end_of_text_inside_the_accepted_guesses(shipped):
    model, tokenizer = shipped
    ids = checkpoint.encode(tokenizer, "Once upon a time", model.c.bos)
    whole = SelfDraft(model, range(2 * model.c.n_layers), 4)
    (_, r), *_ = rounds(model, [ids], 9, whole)
    (page,) = play(model, tokenizer, ids, 9, whole, eos={r.new[0][1]}).rounds
    assert page["next"] is None
    assert [d["verdict"] for d in page["places"]] == ["accepted", "accepted", "dead", "dead"]


def test_of_a_batch_it_shows_the_first_row_which_may_end_first(shipped):
    model, prompts = make(LLAMA), [[5] * (LLAMA.max_len - 3), PROMPTS[1]]
    player, written = Player(shipped[1], prompts[0], 3), []
    for state, r in rounds(model, prompts, 7, SelfDraft(model, range(4), 2), WARM, player.coins):
        player.add(state, r)
        written += r.new[0]
    assert player.tokens == prompts[0] + written and len(player.tokens) == LLAMA.max_len
    places = [d for page in player.rounds for d in page["places"] if "coin" in d]
    assert places and all((d["coin"] < d["p"] / d["q"]) == (d["verdict"] == "accepted") for d in places)


def test_whatever_a_model_writes_is_data(shipped):
    model, tokenizer = shipped
    attack = "</script><script>alert(1)</script><!--\x1b\x00 <b>&amp;"
    player = play(model, tokenizer, checkpoint.encode(tokenizer, attack, model.c.bos), 3)
    page = player.html()
    assert page.count("<script") == page.count("</script>") == 2 and "<!--" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f]|https?:|src=|<link|@import|url\(", page)
    assert data(page)["prompt"] == attack.replace("\x1b", "\u241b").replace("\x00", "\u2400")
    assert {"\u241b", "\u2400"} <= set(data(page)["tokens"])


def test_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "run.html"
    assert generate.main(["Once upon a time", "--max-new", "12", "--json", "--page", str(path)]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    found = data(path.read_text(encoding="utf-8"))
    assert "".join(t for r in found["rounds"] for t, _ in r["new"]) == output["text"]
