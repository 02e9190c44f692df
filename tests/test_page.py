"""The page to step through: its data are what `rounds` yielded,
and what a model writes stays data."""
import json
import re

import pytest
import torch
from tiny import LLAMA, PROMPTS, make, play

import checkpoint
import generate
from lab.then import Then
from layerskip import SelfDraft
from methods.lookup import NGram
from model import Placement
from sampling import Coins, to_probs
from speculative import rounds
from support.page import Player

WARM = lambda logits: to_probs(logits, temperature=1.0, top_k=20)  # noqa: E731


def data(page):
    """What a page knows."""
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])


@pytest.mark.parametrize("drafter, ends", [
    (lambda m: None, False), (lambda m: Then(SelfDraft(m, range(4), 2), NGram(2, 1)), False),
    (lambda m: SelfDraft(m, range(2 * m.c.n_layers), 4), True)],
                         ids=["plain", "both", "an end of text inside the accepted tokens"])
def test_the_page_says_what_rounds_yielded(stories, drafter, ends):
    model, tokenizer = stories
    ids = checkpoint.encode(tokenizer, "One day, a cat. One day, a", model.c.bos)
    _, r = next(rounds(model, [ids], 16, drafter(model), WARM, Coins(5)))
    eos = {r.new[0][1]} if ends else ()
    found = data(play(model, tokenizer, ids, 16, drafter(model), WARM, 5, eos).html())
    known, name = list(ids), lambda t: tokenizer.decode([t], skip_special_tokens=False)
    steps = rounds(model, [ids], 16, drafter(model), WARM, Coins(5), eos)
    for (_, r), page in zip(steps, found["rounds"], strict=True):
        drafted, accepted = r.draft.tokens[0, : int(r.draft.length[0])].tolist(), int(r.accepted)
        assert page["start"] == len(known) - 1
        assert page["block"] == [name(t) for t in (known[-1], *drafted)]
        assert page["accepted"] == accepted and len(page["places"]) == len(r.new[0])
        known += r.new[0]
        assert "".join(t for t, _ in page["new"]) == tokenizer.decode(r.new[0])
        assert [d["text"] for d in page["places"]] == [*map(name, drafted), None][: len(r.new[0])]
        for k, d in enumerate(page["places"][: len(drafted)]):
            p = r.p[0, k]
            q = r.draft.q[0, k] if r.draft.q is not None else torch.eye(len(p))[drafted[k]]
            want = [float(x[drafted[k]]) for x in (p, q)]
            assert (d["coin"] < want[0] / want[1]) == (k < accepted), "the coin decided"
            assert any(bar[1:3] == pytest.approx(want, abs=1e-3) for bar in d["bars"])
            assert d["left"] == pytest.approx(float((p - q).clamp(min=0).sum()), abs=1e-3)
        if ends:
            continue
        (p, q, end), = (bar[1:4] for bar in page["places"][-1]["bars"]
                        if bar[0] == name(r.new[0][-1]))
        assert end - (p - q) / page["places"][-1]["left"] - 1e-3 < page["coin"] < end + 1e-3, (
            "it fell there")
    assert found["tokens"] == [name(t) for t in known] and (known[-1] in eos) == ends


def test_of_a_batch_it_shows_the_first_row_which_may_end_first(stories):
    model, prompts = make(LLAMA), [[5] * (LLAMA.max_len - 3), PROMPTS[1]]
    player, written = Player(stories[1], prompts[0], 3), []
    for state, r in rounds(model, prompts, 7, SelfDraft(model, range(4), 2), WARM, player.coins):
        player.add(state, r)
        written += r.new[0]
    assert player.tokens == prompts[0] + written and len(player.tokens) == LLAMA.max_len
    tested = [(d, k < r["accepted"]) for r in player.rounds for k, d in enumerate(r["places"])
              if d["text"]]
    assert tested and all(ok == (d["coin"] < d["p"] / d["q"]) for d, ok in tested)


def test_whatever_a_model_writes_is_data(stories):
    model, tokenizer = stories
    attack = "</script><script>alert(1)</script><!--\x1b\x00 <b>&amp;"
    player = play(model, tokenizer, checkpoint.encode(tokenizer, attack, model.c.bos), 3)
    page = player.html()
    assert page.count("<script") == page.count("</script>") == 2 and "<!--" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f]|https?:|src=|<link|@import|url\(", page)
    assert data(page)["prompt"] == attack.replace("\x1b", "\u241b").replace("\x00", "\u2400")
    assert {"\u241b", "\u2400"} <= set(data(page)["tokens"])


def test_on_the_command_line(stories, tmp_path, capsys):
    """A greedy page also has p and q from before the one-hot,
    which are computed here without a cache."""
    path, (model, tokenizer) = tmp_path / "run.html", stories
    argv = ["Once upon a time", *"--max-new 12 --draft exit --dtype float32 --json --page".split()]
    assert generate.main([*argv, str(path)]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    found = data(path.read_text(encoding="utf-8"))
    assert "".join(t for r in found["rounds"] for t, _ in r["new"]) == output["text"]
    assert found["settings"]["model"] == "stories-llama" and found["settings"]["temperature"] == 0
    ids = torch.tensor([checkpoint.encode(tokenizer, argv[0], model.c.bos) + output["ids"]])
    places = [d for r in found["rounds"] for d in r["places"]]
    at = Placement.span(0, ids.shape[1], "cpu")
    for column, blocks in ((4, 24), (5, 4)):
        x = model.run(model.embed(ids), at, None, range(2 * blocks))
        for d, top in zip(places, model.unembed(x)[0, -13:-1].softmax(-1).amax(-1).tolist(),
                          strict=True):
            found = max(bar[column] for bar in d["bars"])
            assert found == pytest.approx(top, abs=1e-3) or (column == 5 and d["text"] is None)
