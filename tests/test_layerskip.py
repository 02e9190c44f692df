"""Skip sets, how users write them, and how often a text accepts a draft, as in the loop. And
drafting itself, beside the drafts that well-known mistakes give: these tests grade an exercise."""
import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from teach import compare, fail
from tiny import LIVELY, LLAMA, PROMPTS, each_family, make, read, warm

from kvcache import KVCache
from layerskip import SelfDraft, early_exit, shared_prefix, without
from machine.files import read_beside
from methods.standin import ShortHead, most_frequent, read_vocab
from model import Placement
from sampling import Coins, to_probs
from search import Teacher
from speculative import generate, rounds
from support.skips import read_skip

IDS = [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]  # longer than the window of 5
SOME = [4, 9, 0, 2, 16, 3, 8]
DRAFTS = {
    "exit": early_exit(6, 4),
    "skip": without(6, attn=[1, 4], mlp=[2]),
    "skip the first block": without(6, attn=[0], mlp=[0]),
    "only attention": without(6, mlp=range(6))}


# --- skip sets


def test_skip_sets_by_hand():
    assert without(3, attn=[1], mlp=[0, 2]) == [0, 3, 4], "attention i is sub-layer 2i"
    assert without(3, attn=(2, 1, 1)) == [0, 1, 3, 5], "any order, and twice is once"
    assert early_exit(3, 1) == [0, 1] and early_exit(3, 3) == without(3) == [*range(6)]


# --- a draft vocabulary


def test_a_short_head_knows_its_tokens_and_no_other(models):
    m, x = models["gemma2"], models["gemma2"].embed(torch.tensor([IDS]))
    short, whole = ShortHead(m, SOME), m.unembed(x)
    got, others = short.unembed(x), sorted(set(range(17)) - set(SOME))
    assert got.shape == whole.shape and (got - whole)[..., SOME].abs().max() < 1e-12
    assert got[..., others].isneginf().all() and short.share == 7 / 17


def test_a_draft_vocabulary_is_of_the_most_frequent_tokens():
    texts = [3, 1, 1, 2, 2, 7], [1, 3, 2, 7], [2, 7]
    assert most_frequent(texts, 3) == {"ids": [2, 1, 7], "share": 10 / 12}


# --- acceptance, as a Teacher scores it


@pytest.mark.parametrize("ids", [None, SOME], ids=["whole", "short"])
@each_family
def test_acceptance_is_that_of_the_loop(models, family, ids):
    """Of its first round after each prefix, of one drafted token. One teacher scores all."""
    m, probs = models[family], lambda logits: to_probs(logits, 1.3, top_p=0.95)
    teacher, short, seen = Teacher(m, IDS, probs), ids and ShortHead(m, ids), set()
    prefixes = [IDS[: i + 1] for i in range(len(IDS))]
    for sublayers in DRAFTS.values():
        _, r = next(rounds(m, prefixes, 2, SelfDraft(short or m, sublayers, 1), probs))
        got = teacher.acceptance(sublayers, short)
        assert (got - torch.minimum(r.p[:, 0], r.draft.q[:, 0]).sum(-1)).abs().max() < 1e-12
        assert (teacher.q(sublayers, short)[0] - r.draft.q[:, 0]).abs().max() < 1e-12
        assert 0 <= float(got.min()) < float(got.max()) <= 1
        seen.add(tuple(got.tolist()))
    assert len(seen) == len(DRAFTS), "acceptances that do not differ prove little"


def test_texts_of_one_token_and_of_the_whole_context(models):
    m = make(replace(LIVELY["gemma2"], max_len=len(IDS)))
    long = Teacher(models["gemma2"], IDS).acceptance(DRAFTS["skip"])
    for n in (1, len(IDS)):
        assert torch.equal(Teacher(m, IDS[:n]).acceptance(DRAFTS["skip"]), long[:n])


def test_acceptances_are_float64_and_from_0_to_1():
    """Whatever the weights are, whatever two rounded distributions sum to,
    and where a draft overflows."""
    teacher = Teacher(make(LLAMA).to(torch.bfloat16), IDS, warm)
    assert teacher.acceptance(DRAFTS["exit"]).dtype == torch.float64
    assert teacher.overlap(torch.full_like(teacher.p, torch.nan)).tolist() == [0.0] * len(IDS)
    teacher.p = teacher.p * 1.0001
    assert teacher.overlap(teacher.p).tolist() == [1.0] * len(IDS)


@pytest.mark.parametrize("call, message", [
    (lambda m: without(3, attn=[-1]), "attention of block -1"),
    (lambda m: early_exit(3, 0), "exit layer.* 3.* 0"),
    (lambda m: read_skip("m3,a1,m77", 6), "MLP of block 77"),
    (lambda m: read_skip(",".join(f"a{i},m{i}" for i in range(6)), 6), "no sub-layer"),
    (lambda m: Teacher(m, []), "a text of 0 tokens cannot be scored: the context holds 1 to 64"),
    (lambda m: Teacher(m, IDS).acceptance([]), "no sub-layer"),
    (lambda m: Teacher(m, IDS).acceptance([0, 12]), "must rise within 0 .. 11"),
    (lambda m: most_frequent([[5], [5, 2]], 3), "only 2 different tokens")])
def test_what_cannot_be_is_refused(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models["llama"])


# --- files and words


def test_skip_sets_as_users_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a3.json"     # a file may be called almost like a skip set
    for text, attn, mlp in (('{"attn": [1, 4], "mlp": [2]}', [1, 4], [2]),
                            ('{"mlp": [5], "alpha": 0.4}', [], [5])):
        file.write_text(text)
        assert read_skip("a3.json", 6) == without(6, attn, mlp)
    assert read_skip("a3,m4", 6) == without(6, [3], [4])
    assert read_skip(" a5 , a0,m5,a5", 6) == without(6, [0, 5], [5])
    for words in ("a3,m", "a3,,m4", "A3"):
        with pytest.raises(FileNotFoundError, match=words):
            read_skip(words, 6)


@pytest.mark.parametrize("read, size, texts", [
    (read_skip, 6,
     ['{"mlp": ["3"]}', '{"attn": [true]}', '{"attn": null}', '{"attn": [6]}', "[3]", "{}"]),
    (read_vocab, 17,
     ['{"ids": 3}', '{"ids": []}', '{"ids": [1, 1]}', '{"ids": [17]}', '{"ids": [true]}'])])
def test_files_that_make_no_sense_are_refused(read, size, texts, tmp_path):
    file = tmp_path / "file.json"
    for text in texts:
        file.write_text(text)
        with pytest.raises(ValueError, match="file.json: expected|block 6"):
            read(str(file), size)


def test_what_lies_beside_weights_by_chance_is_left_out(tmp_path):
    file = tmp_path / "skip.json"
    assert read_beside(file, read_skip, 17) is None, "there is no such file"
    for content, want in (({"rows": 3}, None), ({"attn": [1]}, without(17, attn=[1]))):
        file.write_text(json.dumps(content))
        assert read_beside(file, read_skip, 17) == want


# --- drafting with some of the sub-layers


TARGET = make(LLAMA)


def begun(sublayers, prompts, taps=(), model=TARGET):
    """A state after one plain round, and the draft of a SelfDraft that has begun there.
    Temperature 1."""
    state, _ = next(rounds(TARGET, prompts, 20, probs=warm, coins=Coins(3)))
    state.taps, drafter = taps, SelfDraft(model, sublayers, 3)
    drafter.begin(state, {})
    return state, drafter.propose(state)


SLIPS = {
    "all": "it drafts with all sub-layers; it is to draft with self.sublayers",
    "stands": "every step stands at the position of the first; the k-th token stands at "
              "state.span(k, k + 1)",
    "late": "the steps stand one position too far: the last known token stands at offset 0",
    "repeats": "every step reads the last known token; it must read the token that was drawn "
               "before it",
    "alone": "it runs without the cache, and so knows only the token that it reads"}


def drafted_states(text, tokens, sublayers, slip=None):
    """The states that a draft reads its tokens from, (1, K, dim)."""
    m, n, ids, xs = TARGET, len(text), torch.tensor([[*text, *tokens]]), []
    cache = KVCache(m.c, 1, n + len(tokens) + 2, torch.float64)
    m.run(m.embed(ids[:, : n - 1]), Placement.span(0, n - 1), cache)
    for k in range(len(tokens)):
        at = n - 1 + {"stands": 0, "late": k + 1}.get(slip, k)
        token = ids[:, n - 1 + (0 if slip == "repeats" else k)]
        here = Placement.span(at, at + 1)
        xs.append(m.run(m.embed(token[:, None]), here, None if slip == "alone" else cache,
                        None if slip == "all" else sublayers))
    return torch.cat(xs, 1)


def by_sublayers(*args):
    """Their q, (K, V)."""
    return warm(TARGET.unembed(drafted_states(*args)))[0]


SUBLAYERS = {"exit after block 2": [0, 1, 2, 3], "skip": [0, 1, 3, 4, 7, 10],
             "skip the first": list(range(1, 12))}
TEXTS = {"one row": [[1, 5, 3, 2]], "three rows": [[1, 5, 3, 2, 9, 4], [3, 8], [2]]}


@pytest.mark.parametrize("rows", TEXTS)
@pytest.mark.parametrize("name", SUBLAYERS)
@torch.inference_mode()
def test_a_draft_is_what_its_sublayers_say(name, rows):
    subs, B = SUBLAYERS[name], len(TEXTS[rows])
    state, draft = begun(subs, TEXTS[rows])
    if draft.tokens.shape != (B, 3) or draft.q is None or draft.q.shape != (B, 3, 17):
        fail(f"{rows}, gamma = 3, 17 tokens", f"tokens {(B, 3)} and q {(B, 3, 17)}",
             f"tokens {tuple(draft.tokens.shape)}, q "
             f"{None if draft.q is None else tuple(draft.q.shape)}")
    for b, text in enumerate(state.known):
        tokens = draft.tokens[b].tolist()
        compare(draft.q[b], by_sublayers(text, tokens, subs),
                {why: by_sublayers(text, tokens, subs, slip) for slip, why in SLIPS.items()},
                f"the sub-layers {subs}, row {b} of {rows}, which ends with token {text[-1]}: q of "
                f"the drafted {tokens}", rtol=1e-7)


@pytest.mark.parametrize("rows", TEXTS)
@pytest.mark.parametrize("name", SUBLAYERS)
@torch.inference_mode()
def test_what_a_draft_hands_over_is_the_targets(name, rows, record_property):
    """Reuse(i, x, trace): the target need not run the sub-layers before i on this block."""
    subs, B = SUBLAYERS[name], len(TEXTS[rows])
    shared = shared_prefix(subs)
    state, draft = begun(subs, TEXTS[rows], taps=(0, 1, 9))
    if shared and (draft.reuse is None or draft.reuse.first < shared):
        record_property("remark", "right, but it gains less: the target runs the sub-layers again "
                                  "that the draft shares with it; hand them over as `reuse`")
    if draft.reuse is None:
        return
    first, x, trace = draft.reuse.first, draft.reuse.x, draft.reuse.trace
    given = f"the sub-layers {subs}, of which the first {shared} are the target's; 3 drafts"
    if first > shared:
        fail(given, f"at most {shared} sub-layers handed over", first,
             "after its first gap a draft computes other states than the target; only what comes "
             "before is shared")
    if x.shape != (B, 4, 32):
        fail(given, f"x of all 4 tokens, {(B, 4, 32)}", tuple(x.shape),
             "the last draft was not run: nobody drafts from it, but the target must verify it" if
             x.shape[1] == 3 else None)
    for b, text in enumerate(state.known):
        n, ids = len(text), [*text, *draft.tokens[b].tolist()]
        states = {i + 1: s[0, n - 1 :] for i, s in read(TARGET, ids, range(12))[1].items()}
        states[0] = TARGET.embed(torch.tensor(ids[n - 1 :]))
        compare(x[b], states[first], {
            "these are the states after all sub-layers of the draft; hand over those before its "
            "first gap":
                torch.cat([drafted_states(text, ids[n:], subs)[0], x[b, -1:]])},
            f"{given}: x of row {b}, as it enters sub-layer {first}", rtol=1e-7)
        if set(trace) != {tap for tap in (0, 1, 9) if tap < first}:
            fail(given + ", taps (0, 1, 9)", f"a trace of the taps before {first}", sorted(trace))
        for tap, got in trace.items():
            compare(got[b], states[tap + 1], {},
                    f"{given}: the trace after sub-layer {tap}", rtol=1e-7)


@torch.inference_mode()
def test_a_copy_in_few_bits_hands_nothing_over():
    """Its states are rough, and the target would go on from them."""
    name = "exit after block 2"
    rough = deepcopy(TARGET)
    for w in rough.parameters():
        w.copy_((4 * w).round() / 4)
    _, draft = begun(SUBLAYERS[name], TEXTS["three rows"], (0, 1, 9), rough)
    if draft.reuse is not None:
        fail(f"a quantised copy of the target drafts with the sub-layers {SUBLAYERS[name]}",
             "reuse = None",
             f"the states before sub-layer {draft.reuse.first}",
             "a copy's states are not the target's, and its text would change: hand them over only "
             "where self.is_target is true")


@pytest.mark.parametrize("name", SUBLAYERS)
def test_the_text_of_a_self_draft_is_the_targets(models, truth, name):
    """Greedy, with whatever draft, in rows that end at different places."""
    m = models["gemma2"]
    want = [row[:8] for row in truth["gemma2"]]
    for prompts in (PROMPTS, PROMPTS[:1]):
        for row, got in enumerate(generate(m, prompts, 8, SelfDraft(m, SUBLAYERS[name], 3))[0]):
            if got != want[row]:
                fail(f"{name}, the prompt {prompts[row]}, row {row}", want[row], got,
                     "the text has changed: does `reuse` hand over states, or the cache hold keys, "
                     "that are not the target's? The last draft must have run through the shared "
                     "sub-layers, too")
