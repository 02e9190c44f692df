"""What people look at: where tokens came from, needless colours, no half characters."""
import html
import io
import re
from pathlib import Path

import pytest
import torch
from tiny import LLAMA, PROMPTS, make, make_round, oracle
from tokenizers import Tokenizer, decoders, models

from layerskip import SelfDraft
from sampling import to_probs
from speculative import NGram, generate, rounds
from support import show
from support.show import Generation, Stream, origins, paint
from support.stats import Timed

WEIGHTS = Path(__file__).parent.parent / "weights"
STORIES = Tokenizer.from_file(str(WEIGHTS / "stories-llama" / "tokenizer.json"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Letters:
    """A tokenizer for the tiny models: id 0 is `a`."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


def test_origins_of_real_runs():
    """Greedy, so that a draft was accepted exactly if the new token in its place is the same."""
    model = make(LLAMA)
    eos = [oracle(model, PROMPTS[0], 6)[-1]]
    for drafter in None, NGram(3, 1), SelfDraft(model, range(6), 3):
        seen = Generation(Letters(), PROMPTS)
        for _, r in seen.watch(rounds(model, PROMPTS, 20, drafter, eos=eos)):
            for b, row in enumerate(r.new):
                drafts = r.draft.tokens[b, : int(r.proposed[b])].tolist()
                last = "bonus" if len(row) > len(drafts) else "correction"
                assert origins(r, b) == [
                    "accepted" if drafts[i : i + 1] == [t] else last if drafts else "plain"
                    for i, t in enumerate(row)]
        ids = [[t.id for t in row] for row in seen.rows]
        assert ids == generate(model, PROMPTS, 20, eos=eos)[0]


def test_probability_of_each_token_is_the_targets_own():
    """Neither 1, as when greedy, nor what is left after temperature and cuts."""
    model, prompt = make(LLAMA), PROMPTS[0]
    probs = lambda logits: to_probs(logits, 2.0, top_k=3)  # noqa: E731
    seen = show.record(model, Letters(), [prompt], 9, SelfDraft(model, range(6), 2), probs)
    ids = [t.id for t in seen.rows[0]]
    p = model(torch.tensor([prompt + ids]))[0].softmax(-1)[len(prompt) - 1 : -1]
    assert [t.p for t in seen.rows[0]] == pytest.approx(p[range(9), ids].tolist())


def test_summary_of_counts_and_times():
    seen = Generation(Letters(), [[0], [0]])
    seen.add(make_round([[1, 2, 3], [1]], [2, 0], [2, 2]))
    seen.add(make_round([[], [1]], [0, 0], [0, 1]))
    first, second, _ = seen.summary().split("\n")
    assert first == "5 tokens in 2 passes over 2 rows: 1.67 a pass (tau)"
    assert second == "2 of 5 drafted tokens accepted (40%), 33% of the first ones (alpha)"
    seen.timed = Timed()
    seen.timed.seconds = {"draft": 7.5, "verify": 10.0, "loop": 2.5}
    assert seen.summary().split("\n")[2] == "time: draft 38%, verify 50%, loop 12%"


@pytest.mark.parametrize("terminal, settings, expected", [
    (True, {}, True), (True, {"NO_COLOR": ""}, True),   # no-color.org: only when not empty
    (True, {"NO_COLOR": "0"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)])
def test_when_to_colour(monkeypatch, terminal, settings, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | settings).items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    assert show.colours(stream) is expected


def test_paint_and_control_characters():
    pieces = [("Once", None), (" upon", "accepted"), ("", "accepted"), (" a", "bonus")]
    assert paint(pieces) == "Once\x1b[38;5;32m upon\x1b[0m\x1b[1;38;5;36m a\x1b[0m"
    assert paint(pieces, colour=False) == "Once upon a"
    attack = "\x1b[2J\x1b]0;owned\x07\x9b31m\rgone\x08\x7f\x00\u0085 tab\tline\n"
    for colour in (True, False):
        text = ANSI.sub("", paint([(attack, "accepted"), (attack, None)], colour))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), "a model steers the terminal"
        assert text.count("\t") == text.count("\n") == 2 and len(text) == 2 * len(attack)


@pytest.mark.parametrize("size", [1, 7])
def test_streamed_text_is_the_decoded_text(size):
    """However the tokens fall into rounds, and whatever the prompt ends with."""
    text = "A \u2603\u2603 fell, na\u00efve \U0001f642\U0001f642!\nThe\tend. \U0001f1eb\U0001f1f7"
    ids = STORIES.encode(text).ids
    for cut in (1, 4, 5, 9):
        seen, shown = Generation(STORIES, [ids[:cut]]), ""
        for at in range(cut, len(ids) - 1, size):
            new = ids[:-1][at : at + size]
            seen.add(make_round([new], [len(new) - 1], [len(new) - 1], vocab=4096))
            part = seen.fresh()
            assert "\ufffd" not in part, "half a character"
            shown += part
        seen.close()
        shown = ANSI.sub("", shown + seen.fresh())
        assert shown.endswith("\ufffd"), "once nothing more will come, half a character is shown"
        assert seen.prompts[0] + shown == STORIES.decode(ids[:-1]) and seen.fresh() == ""


def test_a_shown_character_is_not_shown_again():
    """trap: in Llama 1 and 2 a run of bytes that is not valid yet decodes to one U+FFFD for each of
    them, and the second snowman's first bytes make the first one unreadable for a while."""
    vocab = {"<unk>": 0, "\u2581a": 1, "!": 2, "\u2581": 3}
    vocab |= {f"<0x{i:02X}>": 10 + i for i in range(256)}
    t = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    snow = [10 + byte for byte in "\u2603".encode()]
    ids = [1, *snow, *snow, 1, 3, 1, *snow, 2]
    for cut in range(len(ids)):
        stream = Stream(t, ids[:cut])
        pieces = [stream.push(i) for i in ids[cut:]]
        assert stream.text + "".join(pieces) + stream.rest() == "a\u2603\u2603 a  a\u2603!"
        assert not any("\ufffd" in piece for piece in pieces)


def test_html_of_a_generation_is_escaped():
    ids = STORIES.encode(' <b>&"</b>\x1b').ids
    seen = Generation(STORIES, [[0]])
    seen.add(make_round([ids], [len(ids) - 1], [len(ids) - 1], vocab=4096))
    page = seen.html()
    assert "<b>" not in page and "\x1b" not in page
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert text.endswith(STORIES.decode(ids).replace("\x1b", "\u241b") + seen.summary())


def test_html_of_a_round():
    """Dead: after a rejection, after an end of text, or beyond a row's own draft."""
    q = torch.full((3, 3, 8), 0.25)
    r = make_round([[4, 7], [1, 2, 3], []], [1, 2, 0], [3, 2, 0], [[4, 5, 6], [1, 2, 0], [0, 0, 0]], q,
                   vocab=8)
    r.p[0, 1, 5] = 0.0625
    rows = [row.split("<td>")[1:] for row in show.round_html(r).split("<tr>")]
    verdicts = [row[4] for row in rows if len(row) == 5]
    assert verdicts == ["accepted", "refused", "dead"] + ["accepted"] * 2 + ["dead"] * 4
    assert rows[2:4] == [["0", "4", "0.125", "0.25", "accepted"], ["0", "5", "0.0625", "0.25", "refused"]]
    r.draft.q = None
    assert "<td>4<td>0.125<td>1<td>" in show.round_html(r), "a copied token is certain"


def test_picture(tmp_path):
    ids = STORIES.encode("It costs $\\frac{1}$ or $6^2$ {\n\nOK?").ids  # none of it is mathematics
    seen = Generation(STORIES, [ids])
    seen.add(make_round([ids], [2], [4], vocab=4096))
    show.picture(seen, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
