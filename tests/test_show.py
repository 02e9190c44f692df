"""What people look at: where tokens came from, colours, no half characters."""
import html
import io
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import LLAMA, PROMPTS, make, make_round
from tokenizers import Tokenizer, decoders, models

from layerskip import SelfDraft
from methods.lookup import NGram
from speculative import generate, rounds
from support import picture, show
from support.show import Generation, Stream, origins, paint

WEIGHTS = Path(__file__).parent.parent / "weights"
STORIES = Tokenizer.from_file(str(WEIGHTS / "stories-llama" / "tokenizer.json"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def test_origins_of_real_runs():
    """Greedy, so that a draft was accepted exactly if the new token in its place is the same."""
    model, kinds = make(LLAMA), set()
    drafters = None, NGram(3, 1), SelfDraft(model, range(6), 3)
    for drafter, eos in itertools.product(drafters, ([], [7])):     # which every row soon writes
        seen = Generation(STORIES, PROMPTS)
        for _, r in seen.watch(rounds(model, PROMPTS, 20, drafter, eos=eos)):
            for b, row in enumerate(r.new):
                drafts = r.draft.tokens[b, : int(r.proposed[b])].tolist()
                last = "bonus" if len(row) > len(drafts) else "correction"
                assert origins(r, b) == [
                    "accepted" if drafts[i : i + 1] == [t] else last if drafts else "plain"
                    for i, t in enumerate(row)]
                kinds |= set(origins(r, b))
        assert [[t.id for t in row] for row in seen.rows] == generate(model, PROMPTS,
                                                                      20, eos=eos)[0]
    assert kinds == show.STYLES.keys()


def test_when_to_colour(monkeypatch):
    """no-color.org: NO_COLOR counts where it is not empty."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    for terminal, no_color, term in itertools.product((True, False), ("", "0"), ("xterm", "dumb")):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        assert show.colours(stream) is (terminal and not no_color and term == "xterm")


def test_paint_and_control_characters():
    pieces = [("Once", None), (" upon", "accepted"), ("", "accepted"), (" a", "bonus")]
    assert (ANSI.sub("", paint(pieces)) == paint(pieces, colour=False) == "Once upon a"
            != paint(pieces))
    attack = "\x1b[2J\x1b]0;owned\x07\x9b31m\rgone\x08\x7f\x00\u0085 tab\tline\n"
    for colour in (True, False):
        text = ANSI.sub("", paint([(attack, "accepted"), (attack, None)], colour))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), "a model steers the terminal"
        assert text.count("\t") == text.count("\n") == 2 and len(text) == 2 * len(attack)


def llama_2():
    """A tokenizer of words with leading spaces and of bytes, of which a run is decoded together.
    trap: in Llama 1 and 2 a run of bytes that is not valid yet decodes to one U+FFFD for each of
    them, and the second snowman's first bytes make the first one unreadable for a while."""
    vocab = {"<unk>": 0, "\u2581a": 1, "!": 2, "\u2581": 3}
    vocab |= {f"<0x{i:02X}>": 10 + i for i in range(256)}
    t = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t


def pieces_of_all(t, ids, new, shown):
    """What each new token completes, by decoding all ids for each of them."""
    pieces = []
    for n in range(len(new)):
        whole = t.decode(ids + new[: n + 1]).rstrip("\ufffd")
        pieces.append(whole[shown:])
        shown = max(shown, len(whole))
    pieces[-1] += t.decode(ids + new)[shown:]   # once nothing more will come, half a character
    return pieces


SNOW = [10 + byte for byte in "\u2603".encode()]


@pytest.mark.parametrize("t, unit", [
    (llama_2(), st.sampled_from([[1], [2], [3], SNOW, [10 + 10]])),
    (STORIES, st.integers(0, 4095).map(lambda i: [i]) | st.just(STORIES.encode("\u2603").ids))],
                         ids=["llama 2", "stories"])
@given(data=st.data())
def test_shown_pieces_are_those_of_the_whole_text(t, unit, data):
    """Words, spaces, newlines and letters of three bytes, or any ids, however they fall into the
    prompt and into rounds. Perhaps a part of a letter stands at the end."""
    ids = sum(data.draw(st.lists(unit, min_size=1, max_size=20)), [])
    cut, half = data.draw(st.integers(1, len(ids))), data.draw(st.integers(0, 2))
    prompt, ids, size = ids[:cut], ids[cut:] + [2] + SNOW[:half], data.draw(st.integers(1, 7))
    seen, shown = Generation(t, [prompt]), ""
    for at in range(0, len(ids), size):
        new = ids[at : at + size]
        seen.add(make_round([new], [len(new) - 1], [len(new) - 1]))
        shown += seen.fresh(colour=False)
    seen.close()
    want = pieces_of_all(t, prompt, ids, len(seen.prompts[0]))
    assert [token.text for token in seen.rows[0]] == want
    assert shown + seen.fresh(colour=False) == "".join(want).translate(show.SIGNS)
    assert half or seen.prompts[0] + "".join(want) == t.decode(prompt + ids)


def test_a_long_text_is_not_decoded_again_for_each_token():
    ids = STORIES.encode("Once upon a time there was a little girl. " * 20).ids
    stream, decoded = Stream(STORIES, ids[:100]), []

    def decode(some):
        decoded.append(len(some))
        return STORIES.decode(some)

    stream.decode = decode
    for i in ids[100:]:
        stream.push(i)
    assert max(decoded[1:]) < 10, "only the prompt is long"


@given(st.text(st.characters(codec=None), max_size=20))
def test_whatever_a_text_holds_it_is_well_formed_and_nothing_of_the_prompt_is_its_answer(text):
    assert ElementTree.fromstring(f"<a>{html.escape(text.translate(show.SIGNS))}</a>").text == (
        text.translate(show.SIGNS) or None)
    text = text.encode(errors="replace").decode()
    for prompt in (text, text + "\ufffd"):
        ids = STORIES.encode(prompt).ids
        stream, new = Stream(STORIES, ids), STORIES.encode(" and").ids
        answer = "".join([*map(stream.push, new), stream.rest()])
        assert (stream.text, answer) == (STORIES.decode(ids), " and")


def test_picture(tmp_path, monkeypatch):
    ids = STORIES.encode("It costs $\\frac{1}$ or <b> & {\n\nOK?").ids
    seen = Generation(STORIES, [[0]])
    seen.add(make_round([ids], [2], [len(ids)]))
    for columns in range(13, 40):
        monkeypatch.setattr(picture, "COLUMNS", columns)
        picture.draw(seen, tmp_path / "run.svg")
        texts = ElementTree.parse(tmp_path / "run.svg").getroot().iterfind("{*}text")
        drawn = "".join(a.text + "\n" * (a.get("y") != b.get("y"))
                        for a, b in itertools.pairwise(texts))
        assert all(word in drawn for word in ("$\\frac{1}$", "<b>", "OK?")), (
            "a line breaks inside a word")
