"""What people look at: where tokens came from, colours that are never needed, no half characters."""
import html
import io
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, LLAMA, PROMPTS, make, make_round, oracle
from tokenizers import Tokenizer, decoders, models

from layerskip import SelfDraft
from sampling import to_probs
from speculative import NGram, Round, generate, rounds
from support import show
from support.show import Generation, Stream, origins, paint

ROOT = Path(__file__).parent.parent
STORIES = Tokenizer.from_file(str(ROOT / "weights" / "stories-llama" / "tokenizer.json"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")
DRAFTERS = [lambda m: None, lambda m: SelfDraft(m, range(6), 3), lambda m: NGram(3, 1)]


class Letters:
    """A tokenizer for the tiny models: id 0 is `a`."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


def add_texts(generation, groups):
    """One round per group of ids, each of a single row: all but the last of them accepted drafts."""
    for ids in groups:
        n = len(ids) - 1
        generation.add(make_round([ids], [n], [n], vocab=4096))


# --- origins


@pytest.mark.parametrize("new, accepted, proposed, expected", [
    ([5, 6, 7], 2, 2, ["accepted", "accepted", "bonus"]),
    ([5, 6], 1, 3, ["accepted", "correction"]),
    ([5], 0, 3, ["correction"]),
    ([5], 0, 0, ["plain"]),
    ([], 0, 0, []),                             # finished
    ([5, 6], 2, 2, ["accepted", "accepted"]),   # the second is an end-of-text id: no bonus after it
    ([5], 1, 1, ["accepted"]),                  # the first is one
])
def test_origins(new, accepted, proposed, expected):
    assert origins(make_round([new], [accepted], [proposed])) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make_drafter", DRAFTERS)
def test_origins_of_real_runs(family, make_drafter):
    """Greedy, so that a draft was accepted exactly if the new token in its place is the same; ragged, with
    rows that end early."""
    model = make(FAMILIES[family])
    eos = [oracle(model, PROMPTS[0], 6)[-1]]
    seen, new = Generation(Letters(), PROMPTS), 0
    for _, r in seen.watch(rounds(model, PROMPTS, 20, make_drafter(model), eos=eos)):
        for b, row in enumerate(r.new):
            new += len(row)
            drafts = r.draft.tokens[b, : int(r.proposed[b])].tolist()
            for i, (token, origin) in enumerate(zip(row, origins(r, b), strict=True)):
                same = i < len(drafts) and drafts[i] == token
                last = "plain" if not drafts else "bonus" if i == len(drafts) else "correction"
                assert origin == ("accepted" if same else last)
    assert sum(map(len, seen.rows)) == new > 0
    assert [[t.id for t in row] for row in seen.rows] == generate(model, PROMPTS, 20, eos=eos)[0]
    assert sum(t.origin == "accepted" for row in seen.rows for t in row) == seen.counts.accepted


def test_end_of_text_inside_an_accepted_draft_is_no_bonus():
    model = make(LLAMA)
    text = oracle(model, PROMPTS[0], 12)
    at = next(i for i, t in enumerate(text) if text.index(t) == i and i % 4 != 3)
    seen = show.record(model, Letters(), PROMPTS[:1], 12, SelfDraft(model, range(12), 3), eos=[text[at]])
    expected = (["accepted"] * 3 + ["bonus"]) * 3
    assert [t.origin for t in seen.rows[0]] == expected[: at + 1], "a perfect draft that ends within a block"


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_probability_of_each_token_is_the_targets_own(temperature):
    """Neither 1, as when greedy, nor what is left after temperature and cuts."""
    model, prompt = make(LLAMA), PROMPTS[0]
    probs = lambda logits: to_probs(logits, temperature, top_k=3)  # noqa: E731
    seen = show.record(model, Letters(), [prompt], 9, SelfDraft(model, range(6), 2), probs)
    ids = [t.id for t in seen.rows[0]]
    p = model(torch.tensor([prompt + ids]))[0].softmax(-1)[len(prompt) - 1 : -1]
    assert [t.p for t in seen.rows[0]] == pytest.approx(p[range(9), ids].tolist()) and len(ids) == 9
    assert f"target's raw probability {seen.rows[0][0].p:.3g}" in html.unescape(seen.html())


# --- the summary


def test_summary_of_counts():
    seen = Generation(Letters(), [[0], [0]])
    seen.add(make_round([[1, 2, 3], [1]], [2, 0], [2, 2]))
    seen.add(make_round([[1], [1, 2, 3]], [0, 2], [0, 2]))
    seen.add(make_round([[], [1]], [0, 0], [0, 1]))
    first, second, last = seen.summary().split("\n")
    assert first == "9 tokens in 3 passes over 2 rows: 1.80 a pass (tau)", "a finished row takes no pass"
    assert second == "4 of 7 drafted tokens accepted (57%), 50% of the first ones (alpha)"
    assert "too short" in last


def test_summary_of_an_empty_run():
    seen = show.record(make(LLAMA), Letters(), PROMPTS[:1], 0)
    assert seen.summary().startswith("0 tokens in 0 passes: 0.00 a pass (tau)\nNothing was drafted")
    assert seen.html()


def test_summary_splits_the_time(monkeypatch):
    model, asked = make(LLAMA), []
    seen = show.record(model, Letters(), PROMPTS[:1], 40, SelfDraft(model, range(12), 3))
    n = seen.counts.passes
    seen.timed.seconds = {"draft": 0.75 * n, "verify": 1.0 * n, "loop": 0.25 * n}
    seen.timed.verified = [(4, 0.5), (4, 1.5)] * (n // 2)
    lines = seen.summary().split("\n")
    assert lines[0] == "40 tokens in 10 passes: 4.00 a pass (tau)"
    assert lines[2] == "time: draft 38%, verify 50%, loop 12%"
    assert lines[3].startswith("Drafting is the limit: it takes 38% of the time")

    monkeypatch.setattr(show, "limit", lambda *args: asked.append(args) or "")
    seen.summary()  # every round drafted: nothing says what a plain pass takes
    seen.summary(plain=0.5, speedup=1.2)
    seen.timed.verified += [(1, 0.25)] * 30
    seen.summary()
    counts = 10, 4.0, 3.0, 1.0, 1.0, {"draft": 0.75, "verify": 1.0, "loop": 0.25}
    few, many = (pytest.approx((0.25 * n / passes) ** 0.5) for passes in (9, 38))
    assert asked == [(*counts, None, None, few), (*counts, 0.5, 1.2, few),
                     (*counts, 0.25 + 2.5 / 40, None, many)]


# --- the terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream, settings, expected", [
    (Terminal(), {}, True),
    (Terminal(), {"NO_COLOR": ""}, True),  # no-color.org: only when not empty
    (Terminal(), {"NO_COLOR": "0"}, False),
    (Terminal(), {"NO_COLOR": "1"}, False),
    (Terminal(), {"TERM": "dumb"}, False),
    (Terminal(), {"TERM": "xterm"}, True),
    (io.StringIO(), {}, False),
])
def test_when_to_colour(monkeypatch, stream, settings, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert show.colours(stream) is expected


def test_paint_and_legend():
    pieces = [("Once", None), (" upon", "accepted"), ("", "accepted"), (" a", "bonus")]
    assert paint(pieces) == "Once\x1b[38;5;32m upon\x1b[0m\x1b[1;38;5;36m a\x1b[0m"
    assert paint(pieces, colour=False) == "Once upon a"
    assert ANSI.sub("", show.legend()) == "accepted draft  correction  bonus token  plain"
    assert "\n" not in show.legend() and show.legend(colour=False) == ""


def test_nothing_is_told_by_hue_alone():
    hues = [hue for hue, *_ in show.STYLES.values()]
    without = [re.sub(r";?38;5;\d+", "", codes) for _, codes, *_ in show.STYLES.values()]
    lines = [line for _, _, line, _ in show.STYLES.values()]
    for one_each in (hues, without, lines):
        assert len(set(one_each)) == len(show.STYLES)


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_streamed_text_is_the_decoded_text(size, colour):
    """However the tokens fall into rounds, and whatever the prompt ends with."""
    text = "A \u2603\u2603 fell, na\u00efve \U0001f642\U0001f642!\nThe\tend. \U0001f1eb\U0001f1f7"
    ids = STORIES.encode(text).ids
    for cut in (1, 4, 5, 9):
        seen, shown = Generation(STORIES, [ids[:cut]]), ""
        for at in range(cut, len(ids), size):
            add_texts(seen, [ids[at : at + size]])
            part = seen.fresh(colour)
            assert "\ufffd" not in part, "half a character"
            assert ("\x1b" in part) <= colour
            shown += part
        seen.close()
        shown = ANSI.sub("", shown + seen.fresh(colour))
        assert seen.prompts[0] + shown == STORIES.decode(ids)
        assert ANSI.sub("", paint(seen.pieces())) == STORIES.decode(ids)
        assert seen.fresh() == "", "everything once"


def test_a_character_has_the_colour_of_the_token_that_completes_it():
    snow = STORIES.encode("\u2603").ids[1:]
    assert len(snow) == 3
    seen = Generation(STORIES, [[0]])
    seen.add(make_round([snow[:2]], [1], [3], vocab=4096))
    assert seen.fresh() == ""
    seen.add(make_round([snow[2:]], [0], [0], vocab=4096))
    assert [(t.text, t.origin) for t in seen.rows[0]] == [
        ("", "accepted"), ("", "correction"), ("\u2603", "plain")]
    assert seen.fresh() == paint([("\u2603", "plain")])


def test_half_a_character_at_the_very_end_is_shown():
    ids = STORIES.encode("a\u2603").ids
    seen = Generation(STORIES, [ids[:2]])
    for _ in seen.watch((None, make_round([[t]], [0], [0], vocab=4096)) for t in ids[2:-1]):
        assert seen.fresh() == ""
    assert seen.prompts[0] + seen.fresh(False) == STORIES.decode(ids[:-1]) == "a\ufffd"
    assert seen.pieces()[-1] == ("\ufffd", "plain")
    seen.close()
    assert seen.fresh() == "", "once"


def byte_fallback():
    """As in Llama 1 and 2: a run of bytes that is not valid yet decodes to one U+FFFD for each of them."""
    vocab = {"<unk>": 0, "\u2581a": 1, "!": 2, "\u2581": 3} | {f"<0x{i:02X}>": 10 + i for i in range(256)}
    t = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    return t


def test_a_shown_character_is_not_shown_again():
    """trap: the second snowman's first bytes make the first one unreadable for a while."""
    t, snow = byte_fallback(), [10 + byte for byte in "\u2603".encode()]
    ids = [1, *snow, *snow, 1, 3, 1, *snow, 2]
    for cut in range(len(ids)):
        stream = Stream(t, ids[:cut])
        pieces = [stream.push(i) for i in ids[cut:]]
        assert stream.text + "".join(pieces) + stream.rest() == t.decode(ids) == "a\u2603\u2603 a  a\u2603!"
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_long_text_costs_no_more_per_token_than_a_short_one():
    longest = 0

    class Counting(Letters):
        def decode(self, ids, skip_special_tokens=True):
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    stream = Stream(Counting(), [0] * 50)
    for token in range(5):
        stream.push(token)
    longest = 0
    for token in range(20):
        assert stream.push(token) == chr(97 + token)
    assert longest < 5


ATTACK = "\x1b[2J\x1b]0;owned\x07\x9b31m\rgone\x08\x7f\x00\u0085 tab\tline\n"


@pytest.mark.parametrize("colour", [True, False])
def test_control_characters_become_signs(colour):
    text = ANSI.sub("", paint([(ATTACK, "accepted"), (ATTACK, None)], colour))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), "a model must not steer the terminal"
    assert text.count("\t") == text.count("\n") == 2 and "\u241b[2J" in text
    assert len(text) == 2 * len(ATTACK)


# --- notebooks


def test_html_of_a_generation():
    ids = STORIES.encode(' <b>&"</b>\x1b').ids
    seen = Generation(STORIES, [[0], [0, *ids]])
    seen.add(make_round([ids, ids[:1]], [len(ids) - 1, 0], [len(ids) - 1, 1], vocab=4096))
    page = seen.html()
    assert "<b>" not in page and "\x1b" not in page and "&lt;" in page
    blocks = re.findall(r"<pre.*?>(.*?)</pre>", page, re.S)
    texts = [html.unescape(re.sub(r"<[^>]*>", "", block)) for block in blocks]
    assert texts[0] == "accepted draft correction bonus token plain", "a legend"
    assert texts[1] == STORIES.decode(ids).replace("\x1b", "\u241b")
    assert texts[2] == (STORIES.decode(ids) + STORIES.decode(ids[:1])).replace("\x1b", "\u241b")
    assert texts[3] == seen.summary()
    title = f'title="accepted, id {ids[1]}, target\'s raw probability 0.000244"'
    assert title in page.replace("&#x27;", "'")


def test_html_suits_light_and_dark_pages():
    page = show.span("x", "bonus") + show.span("y") + Generation(Letters(), []).html()
    for look in re.findall(r'style="([^"]*)"', page):
        rules = dict(rule.split(":") for rule in look.split(";"))
        assert rules.get("color", "inherit") == "inherit"
        assert re.fullmatch(r"none|#[0-9a-f]{6}[0-5][0-9a-f]", rules.get("background", "none")), "translucent"


def cells(table):
    rows = re.findall(r"<tr>(.*?)(?=<tr>|</table>)", table, re.S)
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.split(r"<t[dh][^>]*>", row)[1:]]
            for row in rows]


@pytest.mark.parametrize("certain", [True, False])
def test_html_of_a_round(certain):
    q = torch.full((3, 3, 8), 0.25)
    q[0, 0, 4] = 0.5
    r = make_round([[4, 7], [1, 2, 3], []], [1, 2, 0], [3, 2, 0], [[4, 5, 6], [1, 2, 0], [0, 0, 0]],
                   None if certain else q, vocab=8)
    r.p[0, 1, 5] = 0.0625
    half, quarter = ("1", "1") if certain else ("0.5", "0.25")
    assert cells(show.round_html(r)) == [
        ["row", "drafted", "p", "q", "verdict"],
        ["0", "4", "0.125", half, "accepted"],
        ["0", "5", "0.0625", quarter, "refused"],
        ["0", "6", "0.125", quarter, "dead"],
        ["0", "new: 4 7"],
        ["1", "1", "0.125", quarter, "accepted"],
        ["1", "2", "0.125", quarter, "accepted"],
        ["1", "0", "0.125", quarter, "dead"],
        ["1", "new: 1 2 3"],
        ["2", "0", "0.125", quarter, "dead"],
        ["2", "0", "0.125", quarter, "dead"],
        ["2", "0", "0.125", quarter, "dead"],
        ["2", "new: "],
    ]


def test_html_of_a_plain_round_and_of_texts():
    table = cells(show.round_html(make_round([[4]], [0], [0])))
    assert table == [["row", "drafted", "p", "q", "verdict"], ["0", "new: 4"]]
    ids = STORIES.encode("<b>").ids
    page = show.round_html(make_round([ids], [0], [1], [[ids[1]]], vocab=4096), STORIES)
    assert "<'" not in page and "<|" not in page, "escaped, in the table and in the spans"
    assert cells(page)[1][1] == f"{ids[1]} {STORIES.decode(ids[1:2])!r}"
    assert "0 '<|endoftext|>'" in cells(page)[2][1]


def test_html_of_real_rounds():
    model = make(LLAMA)
    for drafter in (None, NGram(3, 1), SelfDraft(model, range(4), 2)):
        for _, r in rounds(model, PROMPTS, 6, drafter):
            verdicts = [row[-1] for row in cells(show.round_html(r)) if len(row) == 5]
            assert verdicts.count("accepted") == int(r.accepted.sum())
            assert verdicts.count("refused") == int((r.accepted < r.proposed).sum())


def test_registers_with_a_running_ipython(monkeypatch):
    known = {}
    formatter = types.SimpleNamespace(for_type=known.__setitem__)
    display = types.SimpleNamespace(formatters={"text/html": formatter})
    shell = types.SimpleNamespace(display_formatter=display)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    show.register()
    assert set(known) == {Round, Generation}
    assert known[Round](make_round([[1]], [0], [0])).startswith("<table>")
    assert known[Generation](Generation(Letters(), [[1]])).startswith("<pre")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    show.register()  # imported by something, but not running


def test_import_is_light_and_silent(monkeypatch, capsys):
    for name in ("matplotlib", "IPython"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it would now raise
    runpy.run_path(str(ROOT / "support" / "show.py"))
    assert capsys.readouterr() == ("", "")


# --- the picture


def test_wrap_breaks_between_words_and_drops_no_ink():
    pieces = [("Once", None), (" upon", "accepted"), ("on", "bonus"), (" a", "plain"),
              ("\n\tx \x1b", "bonus")]
    assert show.wrap(pieces, 9) == [
        (0, 0, "Once", None), (1, 0, "upon", "accepted"), (1, 4, "on", "bonus"), (1, 7, "a", "plain"),
        (2, 2, "x \u241b", "bonus")]
    assert show.wrap([("abcde", "plain"), ("fgh", "bonus")], 3) == [
        (0, 0, "abc", "plain"), (1, 0, "de", "plain"), (1, 2, "f", "bonus"), (2, 0, "gh", "bonus")]
    assert show.wrap([(" ", "plain")], 3) == show.wrap([], 3) == []
    story = [(w, "plain") for w in re.findall(r"\s?\S+", "the quick brown fox " * 20)]
    got = show.wrap(story, 30)
    assert "".join(text for *_, text, _ in got) == "".join("".join(w for w, _ in story).split())
    assert all(column + len(text) <= 30 for _, column, text, _ in got)


@pytest.mark.parametrize("name, magic", [("run.png", b"\x89PNG"), ("run.svg", b"<?xml")])
def test_picture(tmp_path, name, magic):
    ids = STORIES.encode("It costs $\\frac{1}$ or $6^2$ {\n\nOK?").ids  # nothing of this is mathematics
    seen = Generation(STORIES, [ids])
    add_texts(seen, [ids[i : i + 3] for i in range(0, len(ids), 3)])
    show.picture(seen, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    show.picture(Generation(STORIES, [[]]), tmp_path / name)  # nothing to show is no error
