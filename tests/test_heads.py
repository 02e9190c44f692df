"""Trained heads: the loop stays exact, drafting says what training trained, files, and what is refused.

One thing to remember: greedy text cannot show that a head drafts badly. What can is the comparison of every
drafted q with training's own forward, `predict`, over the whole text at once."""
import itertools
from dataclasses import replace

import promises
import pytest
import torch
from promises import Watched, compared
from test_speculative import known
from tiny import LIVELY, PROMPTS, TINY, TINY_GEMMA, Says, Unsure, devices, each_family, fork, make, read, warm

from control import Confidence, Foreseen
from kvcache import KVCache
from layerskip import SelfDraft, without
from methods import heads
from methods.heads import M2R2, Eagle, ExitBlock, Kangaroo, Medusa, Prophet, Transfer
from methods.trees import Siblings
from sampling import Coins
from speculative import Draft, Drafter, ModelDraft, NGram, Then, Wrapper, ahead, ancestors, generate, rounds


def wild(head, size=0.3):
    """The same head with random weights: it says something of its own, also where it should start at zero."""
    g = torch.Generator().manual_seed(1)
    for p in head.weights.parameters():
        middle = 0 if p.dim() > 1 else 1 - head.model.c.norm_offset
        p.data.copy_(middle + size * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return head


def still(head):
    """The same head with blocks that change nothing, so that an adapter is the bare exit."""
    c = head.model.c
    for b in head.own.blocks:
        for part, post, last in ("attn", "attn_post", "wo"), ("mlp", "mlp_post", "down"):
            if hasattr(b, part):    # behind a post-norm an update of any size is one of size 1
                zero = getattr(b, post).weight if c.post_norm else getattr(getattr(b, part), last)
                zero.data.fill_(-c.norm_offset if c.post_norm else 0.0)
    return head


def foreseeing(head, gamma):
    wild(head)
    return head.drafter(Foreseen(head.foresee, 0.5, gamma))


class Turns(Wrapper):
    """The drafters in turn, a round each."""

    def begin(self, state, trace):
        super().begin(state, trace)
        self.round = 0

    def propose(self, state):
        self.round += 1
        return self.drafters[self.round % len(self.drafters)].propose(state)


GROVE = [0, 0, 1, 1, 2, 3, 3, 5, 6]   # families of two, and four levels
DRAFTERS = {
    "kangaroo": lambda m: wild(Kangaroo(m, 2)).drafter(3),
    "kangaroo, confident": lambda m: wild(Kangaroo(m, 2)).drafter(Confidence(0.4, 6)),
    "kangaroo, siblings": lambda m: Siblings(wild(Kangaroo(m, 4)).drafter(3), [3, 1]),
    "exit block": lambda m: wild(ExitBlock(m, 3)).drafter(4),
    "eagle": lambda m: wild(Eagle(m)).drafter(4),
    "eagle, stopped": lambda m: wild(Eagle(m)).drafter(Unsure(5)),
    "eagle, siblings": lambda m: Siblings(wild(Eagle(m)).drafter(3), [3, 1]),
    "m2r2": lambda m: wild(M2R2(m, 3)).drafter(4),
    "m2r2, stopped": lambda m: foreseeing(M2R2(m, 4), 5),
    "m2r2, siblings": lambda m: Siblings(wild(M2R2(m, 5, 4)).drafter(3), [3, 1]),
    "m2r2 and n-gram": lambda m: Then(wild(M2R2(m, 2)).drafter(2), NGram(2, 1)),
    "medusa": lambda m: wild(Medusa(m, 4)).drafter(4),
    "medusa, own head": lambda m: wild(Medusa(m, 3, own_head=True)).drafter(3),
    "medusa, stopped": lambda m: wild(Medusa(m, 4)).drafter(Unsure(4)),
    "medusa, tree": lambda m: wild(Medusa(m, 4)).drafter(4, GROVE),
    "medusa, uneven tree": lambda m: wild(Medusa(m, 3)).drafter(
        Says(lambda state: [3, 1, 2, 0][: len(state.known)]), [0, 0, 0, 1, 1, 3, 4, 4]),
    "medusa, siblings": lambda m: Siblings(wild(Medusa(m, 3)).drafter(3), [2, 2]),
    "transfer": lambda m: wild(Transfer(m, 3, 3)).drafter(3),
    "transfer, stopped": lambda m: wild(Transfer(m, 0, 4)).drafter(Unsure(4)),
    "transfer, tree": lambda m: wild(Transfer(m, 4, 4)).drafter(4, GROVE),
    "transfer, siblings": lambda m: Siblings(wild(Transfer(m, 6, 3)).drafter(3), [3, 1]),
    "transfer and n-gram": lambda m: Then(wild(Transfer(m, 3, 2)).drafter(2), NGram(2, 1)),
    "prophet": lambda m: wild(Prophet(m, 1)).drafter(4),
    "prophet, two blocks": lambda m: wild(Prophet(m, 2)).drafter(Unsure(5)),
    "prophet, siblings": lambda m: Siblings(wild(Prophet(m, 1)).drafter(3), [3]),
    "kangaroo and n-gram": lambda m: Then(wild(Kangaroo(m, 2)).drafter(2), NGram(2, 1)),
    "in turns": lambda m: Turns(
        wild(Kangaroo(m, 2)).drafter(3), SelfDraft(m, without(6, [3], [4]), 2), wild(Medusa(m, 3)).drafter(3),
        NGram(3, 1), wild(Prophet(m, 1)).drafter(2), Siblings(SelfDraft(m, range(8), 3), [3, 2]),
        wild(M2R2(m, 4)).drafter(2), wild(Eagle(m)).drafter(3), wild(Transfer(m, 2, 2)).drafter(2)),
}


test_greedy_identity = promises.greedy_identity(DRAFTERS)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(DRAFTERS)
test_a_head_drafts_for_stand_ins_too = promises.stand_ins(DRAFTERS, ["kangaroo", "m2r2"])
ENDS = ["kangaroo", "m2r2", "medusa, tree", "medusa, uneven tree", "prophet", "eagle", "in turns"]
test_context_limit = promises.context_limit(DRAFTERS, ENDS)
test_end_of_text = promises.end_of_text(DRAFTERS, ENDS, range(0, 12, 3))
test_short_answers = promises.short_answers(DRAFTERS, ENDS)
test_one_wait_a_round = promises.one_wait_a_round(
    DRAFTERS, ["kangaroo", "kangaroo, siblings", "m2r2", "m2r2, stopped", "medusa", "medusa, stopped",
               "medusa, tree", "transfer", "transfer, tree", "prophet", "eagle", "in turns"],
    extra={"m2r2, stopped": 5, "medusa, stopped": 5})   # a rule that stops waits for each token


SMALL_TREE = [0, 0, 1]
LAWS = {
    "kangaroo": (TINY, lambda m: wild(Kangaroo(m, 2)).drafter(2)),
    "kangaroo, stopped": (TINY, lambda m: wild(Kangaroo(m, 1)).drafter(Unsure(2))),
    "gemma2 kangaroo": (TINY_GEMMA, lambda m: wild(Kangaroo(m, 1)).drafter(2)),
    "exit block": (TINY, lambda m: wild(ExitBlock(m, 2)).drafter(2)),
    "gemma2 exit block": (TINY_GEMMA, lambda m: wild(ExitBlock(m, 1)).drafter(2)),
    "eagle": (TINY, lambda m: wild(Eagle(m)).drafter(2)),
    "eagle, stopped": (TINY, lambda m: wild(Eagle(m)).drafter(Unsure(2))),
    "gemma2 eagle": (TINY_GEMMA, lambda m: wild(Eagle(m)).drafter(2)),
    "m2r2": (TINY, lambda m: wild(M2R2(m, 2, 3)).drafter(2)),
    "m2r2, stopped": (TINY, lambda m: foreseeing(M2R2(m, 1, 2), 2)),
    "gemma2 m2r2": (TINY_GEMMA, lambda m: wild(M2R2(m, 2, 2)).drafter(2)),
    "medusa": (TINY, lambda m: wild(Medusa(m, 2)).drafter(2)),
    "medusa, tree": (TINY, lambda m: wild(Medusa(m, 2)).drafter(2, SMALL_TREE)),
    "gemma2 medusa": (TINY_GEMMA, lambda m: wild(Medusa(m, 2)).drafter(2)),
    "gemma2 medusa, tree": (TINY_GEMMA, lambda m: wild(Medusa(m, 2, True)).drafter(2, SMALL_TREE)),
    "transfer": (TINY, lambda m: wild(Transfer(m, 1, 2)).drafter(2)),
    "gemma2 transfer, tree": (TINY_GEMMA, lambda m: wild(Transfer(m, 2, 2)).drafter(2, SMALL_TREE)),
    "prophet": (TINY, lambda m: wild(Prophet(m, 1)).drafter(2)),
    "gemma2 prophet": (TINY_GEMMA, lambda m: wild(Prophet(m, 2)).drafter(2)),
}
test_exact_law = promises.exact_law(LAWS, count=2)


# --- drafting says what training trained


def checked(head, rule, far):
    """A head's drafter, compared with training's forward over the whole text."""
    def by_hand(text, tokens):
        m, ids, last = head.model, [*text, *tokens, *[0] * 9], len(text) - 1
        if last == 0:
            return None
        cache = KVCache(m.c, 1, len(ids), torch.float64)
        with torch.no_grad():
            if isinstance(head, Eagle):
                return by_steps(head, text, tokens)
            laws = dict(head.predict(torch.tensor([ids]), read(m, ids, head.taps, cache)[1], cache))
        # an exit says the same wherever a draft began
        said = [laws[0][0, last + k] if 0 in laws else laws[k + 1][0, last - 1] for k in range(len(tokens))]
        return torch.stack(said).softmax(-1)
    return compared(head.drafter(rule), by_hand, far)


def by_steps(head, text, tokens):
    """q (K, V) of an Eagle's draft, by hand: the whole text again for each token."""
    (last,) = read(head.model, text[:-1], head.taps)[1].values()
    before = torch.cat([torch.zeros(1, 1, head.model.c.dim), last], 1)
    q = []
    for k in range(len(tokens)):
        said = head.own.run(head.join(torch.tensor([[*text, *tokens[:k]]]), before), slice(0, len(text) + k))
        q.append(head.own.unembed(said)[0, -1].softmax(-1))
        before = torch.cat([before, said[:, -1:]], 1)
    return torch.stack(q)


HEADS = {
    "kangaroo": lambda m: Kangaroo(m, 2), "exit block": lambda m: ExitBlock(m, 3), "eagle": Eagle,
    "m2r2": lambda m: M2R2(m, 3, 4), "m2r2 of all blocks": lambda m: M2R2(m, 6, 2),
    "medusa": lambda m: Medusa(m, 4), "own head": lambda m: Medusa(m, 3, own_head=True),
    "transfer": lambda m: Transfer(m, 3, 3), "from the embedding": lambda m: Transfer(m, 0, 3),
    "from the end": lambda m: Transfer(m, 6, 3),
    "prophet": lambda m: Prophet(m, 1), "two blocks": lambda m: Prophet(m, 2),
}


def restless(head):
    return head.drafter(Says(lambda state: known(state) % 4))


test_poison = promises.poison({
    name: lambda m, name=name: restless(wild(HEADS[name](m))) for name in HEADS})


def alone(m, head, far):
    return checked(wild(head), Says(lambda state: (3, 0, 2)[len(state.known[0]) % 3]), far)


def in_turns(m, head, far):
    """Thrice in turn, as the rows of a transfer ride along with its own rounds only."""
    drafter = alone(m, head, far)
    others = Siblings(SelfDraft(m, range(8), 3), [3, 2]), NGram(2, 1)
    return Turns(drafter, Siblings(drafter, [3, 2]), drafter, *others)


# also after refusals, accepted siblings, rounds without a draft and rounds in which another drafter drafted
test_drafts_are_what_training_sees = promises.right_drafts({
    f"{name}-{way}": lambda m, far, name=name, draft=draft: draft(m, HEADS[name](m), far)
    for name in HEADS for way, draft in (("alone", alone), ("in turns", in_turns))})


@pytest.mark.parametrize("name", ["kangaroo", "eagle", "m2r2", "medusa", "transfer", "prophet"])
def test_a_head_goes_on_after_a_tail(models, name):
    """`Then` tells a head of its own part only; its next draft must start after what was accepted of the
    tail, here a model that is always right."""
    m, far, tails = models["llama"], [], 0
    drafter = checked(wild(HEADS[name](m)), Says(lambda state: len(state.known[0]) % 2), far)
    for _, r in rounds(m, PROMPTS, 30, Then(drafter, ModelDraft(m, 2)), warm, Coins(5)):
        tails += int((r.accepted > 1).sum())
    assert tails > 10 and len(far) > 10 and max(far) < 1e-9


@each_family
def test_a_head_starts_as_a_part_of_the_model(models, family):
    """An adapter that changes nothing is the bare exit, and after the last block the model itself, accepted
    to its end. But it starts as a copy of what follows the exit."""
    m = models[family]
    heads_and_drafts = [(still(Kangaroo(m, 2)), range(4)), (still(ExitBlock(m, 2)), range(4)),
                        (M2R2(m, 2), range(4)), (wild(M2R2(m, 2, rank=0)), range(4)),
                        (Kangaroo(m, 1), range(3)), (ExitBlock(m, 1), range(4))]
    for head, subs in heads_and_drafts:
        runs = [[(r.new, r.accepted.tolist()) for _, r in rounds(m, PROMPTS, 20, drafter)]
                for drafter in (head.drafter(3), SelfDraft(m, subs, 3))]
        assert runs[0] == runs[1]
    for head in (still(Kangaroo(m, 6)), still(ExitBlock(m, 6)), M2R2(m, 6)):
        assert generate(m, PROMPTS, 24, head.drafter(3))[1] == 6
    tokens, (_, trace) = torch.tensor([PROMPTS[0]]), read(m, PROMPTS[0], [11])
    for k, said in Medusa(m, 2).predict(tokens, trace, None):
        assert (said - m.unembed(trace[11])[:, :-k]).abs().max() < 1e-3, "a head starts as the model's own"
    for k, said in Transfer(m, 6, 2).predict(tokens, trace, KVCache(m.c, 1, 8, torch.float64)):
        assert (said - m.unembed(trace[11])[:, :-k]).abs().max() < 1e-9, "a pseudo state starts as a copy"


@torch.no_grad()
@each_family
def test_an_eagle_learns_the_first_token_of_a_draft_and_the_second(models, family):
    """After each token of a text: what it says there while it drafts, and later where that is judged."""
    m = models[family]
    head, text = wild(Eagle(m)), PROMPTS[0]
    cache = KVCache(m.c, 1, len(text), torch.float64)
    assert head.reach == 2
    head.reach = 4
    laws = dict(head.predict(torch.tensor([text]), read(m, text, head.taps, cache)[1], cache))
    assert [k for k in laws] == [1, 2, 3, 4]
    for n in range(2, len(text)):
        q = by_steps(head, text[:n], text[n:])
        for k in range(min(4, len(q))):
            assert (laws[k + 1][0, n - 2].softmax(-1) - q[k]).abs().max() < 1e-9


def test_a_prompt_of_one_token_drafts_from_its_own_state(models):
    m, drafts = models["llama"], []
    short, long = min(PROMPTS, key=len), max(PROMPTS, key=len)
    for prompts in ([short], [short, long]):
        _, r = next(rounds(m, prompts, 9, Medusa(m, 3).drafter(3)))
        drafts.append(r.draft.tokens[0].tolist())
    assert len(short) == 1 and drafts[0] == drafts[1]


def knowing(head, m, answers):
    """The head, told the truth: it looks the final state up in the texts and says what comes later."""
    table, ids = [], []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        table.append(read(m, prompt + answer, head.taps)[1][head.taps[0]][0])
        ids.append([*prompt, *answer, *[0] * 9])

    def after(x, k):
        rows = []
        for b, state in enumerate(x[:, 0]):
            at = int((table[b] - state).norm(dim=-1).argmin())
            assert (table[b][at] - state).norm() < 1e-6
            rows.append(10.0 * torch.nn.functional.one_hot(torch.tensor([ids[b][at + 2 + k]]), 17).double())
        return torch.stack(rows)

    head.after = after
    return head


@each_family
def test_perfect_heads_are_accepted_to_their_end(models, truth, family):
    m = models[family]
    long = generate(m, PROMPTS, 48)[0]
    trees = (None, 4), (GROVE, 4), ([0, 0, 0, 1, 1, 4], 3)
    for kind, (shape, levels) in itertools.product((Medusa(m, 4), Transfer(m, 6, 4)), trees):
        head, left = knowing(kind, m, long), 25
        for b, (state, r) in enumerate(rounds(m, PROMPTS, left, head.drafter(levels, shape))):
            # the first draft is empty, or after a prompt of one token a guess; near the end a tree is cut
            if left > len(GROVE) and b > 0:
                assert r.accepted.tolist() == [levels] * 4 and r.proposed.tolist() == [levels] * 4
            left = state.left_cpu[0] if state.left_cpu[0] else 0
        assert [t[len(p) :] for t, p in zip(state.known, PROMPTS, strict=True)] == [
            t[:25] for t in truth[family]]


def test_the_second_most_likely_hides_in_the_tree(models, truth):
    """A head whose second guess is right: a tree with two children accepts it, a chain does not."""
    m = models["llama"]
    head = knowing(Medusa(m, 3), m, generate(m, PROMPTS, 48)[0])
    certain = head.after

    def after(x, k):    # the token after the right one comes first
        right = certain(x, k)
        return right + 1.5 * right.roll(1, -1)

    head.after = after
    seen = {}
    for name, shape in (("chain", None), ("tree", [0, 0, 2, 2, 4, 4])):
        runs = [r for _, r in rounds(m, PROMPTS[:1], 24, head.drafter(3, shape))]
        seen[name] = [int(r.accepted) for r in runs]
    assert set(seen["chain"]) == {0} and seen["tree"][:5] == [3] * 5


GOLDEN = {
    "llama": {"kangaroo": [199, 88, 20], "exit block": [219, 81, 22], "m2r2": [187, 93, 17],
              "eagle": [429, 9, 38], "medusa": [402, 18, 38], "tree": [444, 29, 34],
              "prophet": [422, 13, 40], "transfer": [406, 13, 39]},
    "gemma2": {"kangaroo": [250, 73, 25], "exit block": [237, 79, 23], "m2r2": [244, 76, 26],
               "eagle": [384, 28, 37], "medusa": [351, 38, 32], "tree": [373, 48, 30],
               "prophet": [402, 18, 37], "transfer": [390, 20, 38]},
}


@each_family
def test_golden_acceptance_counts(models, family):
    """[proposed, accepted, passes], greedy, 40 tokens of each prompt."""
    m = models[family]
    drafters = {
        "kangaroo": wild(Kangaroo(m, 5)).drafter(3), "exit block": wild(ExitBlock(m, 5)).drafter(3),
        "m2r2": wild(M2R2(m, 5), 0.1).drafter(3), "eagle": wild(Eagle(m), 0.1).drafter(3),
        "medusa": wild(Medusa(m, 3), 0.1).drafter(3), "tree": wild(Medusa(m, 4), 0.1).drafter(4, GROVE),
        "prophet": wild(Prophet(m, 1), 0.1).drafter(3), "transfer": wild(Transfer(m, 4, 3), 0.1).drafter(3),
    }
    for name, drafter in drafters.items():
        run = [r for _, r in rounds(m, PROMPTS, 40, drafter)]
        counts = [sum(int(r.proposed.sum()) for r in run), sum(int(r.accepted.sum()) for r in run), len(run)]
        assert counts == GOLDEN[family][name]


def test_judged_compares_the_same_tokens(models):
    """Training's pairs: a head that says what the model will say is told that it is right."""
    m, tokens = models["llama"], torch.tensor([PROMPTS[0], PROMPTS[3]])
    for said, target in heads.judged(still(Kangaroo(m, 6)), tokens):
        assert said.shape == (2, 8, 17) and (said - target).abs().max() < 1e-9 and not target.requires_grad
    head, truth = Medusa(m, 3), m(tokens)
    head.after = lambda x, k: truth[:, k + 1 :]
    pairs = list(heads.judged(head, tokens))
    assert [said.shape[1] for said, _ in pairs] == [7, 6, 5]
    assert all((said - target).abs().max() < 1e-9 for said, target in pairs)
    head = wild(Prophet(m, 1))
    for k, (said, target) in enumerate(heads.judged(head, tokens), 1):
        assert said.shape == (2, 4, 17) and torch.equal(target, truth[:, k : k + 4])


@pytest.mark.parametrize("name", HEADS)
def test_a_text_that_comes_again_costs_no_pass(models, monkeypatch, name):
    """And gives the very same pairs, whatever is read beside it. A head that reads the cache has none."""
    m, memory, passes, run = models["gemma2"], {}, [], models["gemma2"].run
    head = wild(HEADS[name](m))
    texts = torch.tensor([PROMPTS[0], PROMPTS[3], PROMPTS[0][::-1]])

    def pairs(rows):
        passes.clear()
        found = [(said.detach(), target) for said, target in heads.judged(head, texts[rows], memory)]
        return found, len(passes)

    def watched(x, positions, cache, *args, **kwargs):
        passes.extend([0] * (not args and "span" not in kwargs))    # of the whole model
        return run(x, positions, cache, *args, **kwargs)

    monkeypatch.setattr(m, "run", watched)
    want = {b: pairs([b])[0] for b in range(3)}
    memory.clear()
    for rows, count in ([0, 1], 2), ([1, 0], 0), ([2, 0, 1], 1):
        found, passed = pairs(rows)
        assert passed == (1 if head.reads_cache else count) and bool(memory) != head.reads_cache
        for k, (said, target) in enumerate(found):
            for i, b in enumerate(rows):
                assert (said[i] - want[b][k][0][0]).abs().max() < 1e-9
                assert (target[i] - want[b][k][1][0]).abs().max() < 1e-9
    memory.clear()
    monkeypatch.setattr(heads, "MEMORY", 2 * 8 * 32 * 8 * len({*head.taps, 11}))    # of two texts
    pairs([0, 1, 2])
    assert len(memory) == (0 if head.reads_cache else 2)
    assert pairs([0, 1, 2])[1] == 1


def test_the_models_pass_has_no_gradients():
    m = make(LIVELY["llama"]).requires_grad_(True)
    for said, target in heads.judged(Medusa(m, 2), torch.tensor([PROMPTS[0]])):
        assert said.requires_grad and not target.requires_grad


def test_an_adapter_sees_the_whole_text():
    """Also one of Gemma's, whose even layers have a window of five."""
    m, far = make(LIVELY["gemma2"]), []
    head = wild(ExitBlock(m, 1))
    for first in (1, 2):
        x = torch.zeros(1, 12, 32, dtype=torch.float64)
        x[0, 0] = first * torch.arange(32) % 7
        far.append(next(iter(head.predict(torch.zeros(1, 12), {1: x}, None)))[1][0, -1])
    assert (far[0] - far[1]).abs().max() > 1e-6


def test_the_mlps_of_a_prophet_are_half_as_wide(models):
    m = models["gemma2"]
    own, half = Prophet(m, 2).own, m.c.hidden_dim // 2
    assert {b.mlp.down.shape[1] for b in own.blocks} == {half}
    x = torch.randn(1, 3, m.c.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate, up = (w @ x[0].T for w in m.blocks[1].mlp.gate_up.chunk(2))
    some = m.blocks[1].mlp.act(gate[:half]) * up[:half]
    assert torch.allclose(own.blocks[1].mlp(x)[0].T, m.blocks[1].mlp.down[:, :half] @ some), "the same units"
    assert ExitBlock(m, 1).own.c.hidden_dim == m.c.hidden_dim


# --- a second row


@torch.inference_mode()
@each_family
@devices
@pytest.mark.parametrize("rows", [1, 4])
def test_the_accelerated_row_changes_neither_the_ordinary_one_nor_the_cache(family, device, rows):
    """Bit by bit, whatever its adapters are; and what is handed over is what the blocks compute alone."""
    m = make(LIVELY[family], device=device)
    state, _ = next(rounds(m, PROMPTS[:rows], 9))
    token, at, span = state.read(state.at(0)), state.at(0), state.span(0, 1)
    found = []
    for size in (0.3, 30.0, None):
        head, cache = wild(M2R2(m, 3), size) if size else m, fork(state.cache)
        trace = dict.fromkeys((1, 4))
        x = head.run(m.embed(token), at, cache, range(6), trace=trace, span=span)
        found.append((x, *trace.values(), cache.k, cache.v))
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True)), "the ordinary row saw the other"
    assert all(a.shape == b.shape and (a - b).abs().max() < 1e-11 for a, b in zip(*found[1:], strict=True))
    assert not torch.equal(found[0][3], state.cache.k), "the ordinary row is kept"


@pytest.mark.parametrize("E, taps", [(2, [5, 11]), (3, [3, 7, 11]), (4, [3, 5, 9, 11]),
                                     (6, [1, 3, 5, 7, 9, 11])])
def test_an_accelerated_row_is_to_be_as_many_times_further_up_as_the_exit_is(models, E, taps):
    assert M2R2(models["llama"], E).taps == taps


@each_family
def test_a_rank_is_chosen_by_the_number_of_weights(models, family):
    m = models[family]
    for E in (1, 2, 5):
        adapter, block = Kangaroo(m, E), ExitBlock(m, E)
        assert abs(heads.count(M2R2(m, E)) - heads.count(adapter)) <= 32 * E
        assert abs(heads.count(M2R2(m, E, heads.like_rank(block))) - heads.count(block)) <= 32 * E
    assert heads.count(M2R2(m, 2, 3)) == 2 * 2 * 3 * 32 + 2 * 32


def test_what_counts_besides_by_hand(models):
    """The distance, of vectors of one size, and the gate's cross-entropy; the gate bends no adapter."""
    m, tokens = models["llama"], torch.tensor([PROMPTS[0]])
    unit = lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()  # noqa: E731
    overlap = torch.linspace(0, 1, 8, dtype=torch.float64)[None]
    for align in (0.0, 2.0):
        head = wild(M2R2(m, 3, 4, align))
        (said, _), (_, trace) = *heads.judged(head, tokens), read(m, PROMPTS[0], (3, 7, 11))
        assert (m.unembed(head.states[:, :, 2]) - said).abs().max() < 1e-9
        far = [float((unit(head.states[0, n, i].detach()) - unit(trace[tap][0, n])).pow(2).sum())
               for n in range(8) for i, tap in enumerate((3, 7, 11))]
        p = head.gate().sigmoid().detach()
        wrong = -(overlap * p.log() + (1 - overlap) * (1 - p).log()).mean()
        got = head.besides(overlap)
        assert float(got.detach()) == pytest.approx(align * sum(far) / 8 / 3 / 32 + float(wrong), rel=1e-9)
        got.backward()
        w = head.weights
        assert w.ask.grad.abs().max() > 0 and w.judge.grad.abs().max() > 0
        assert (w.up.grad is not None and w.up.grad.abs().max() > 0) == (align > 0)


@each_family
def test_the_gate_says_while_drafting_what_training_sees(models, family):
    """And a rule stops right after a token that is foreseen to be refused, which is still proposed."""
    m = models[family]
    head, seen = wild(M2R2(m, 3)), []
    rule = Foreseen(lambda: seen.append(head.foresee()) or seen[-1], 0.5, 5)
    for state, r in rounds(m, PROMPTS[:1], 30, head.drafter(rule), warm, Coins(4)):
        K, room = r.draft.tokens.shape[1], state.left_cpu[0] + len(r.new[0])
        text = state.known[0][: len(state.known[0]) - len(r.new[0])] + r.draft.tokens[0].tolist()
        foreseen, seen[:] = [float(p) for p in seen], []
        list(heads.judged(head, torch.tensor([text])))
        want = head.gate()[0].sigmoid()[len(text) - K - 1 :]
        assert foreseen == pytest.approx(want[: len(foreseen)].tolist(), abs=1e-9)
        stopped = next((k + 1 for k, p in enumerate(foreseen) if p < 0.5), 5)
        assert K == min(stopped, room - 1)
    for bar, most in ((2, 1), (-1, 4)):
        _, r = next(rounds(m, PROMPTS, 24, head.drafter(Foreseen(head.foresee, bar, 4))))
        assert r.draft.length.tolist() == [most] * 4


# --- rows that ride along


class Riding(Drafter):
    """A fixed chain or tree, with rows of future tokens or without."""

    def __init__(self, head, parents):
        super().__init__()
        self.head, self.parents = head, parents

    def propose(self, state):
        K = len(self.parents)
        known = torch.tensor([[len(text)] for text in state.known])
        tokens = (3 * known + 5 * torch.arange(K)) % 17
        chain = self.parents == list(range(K))
        extra = self.head and (2 * self.head.shape["inject_layer"], self.head.spread)
        return Draft(tokens, parents=None if chain else torch.tensor([self.parents]), extra=extra)


@each_family
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("t", [0, 3])
@pytest.mark.parametrize("parents", [[0, 1, 2], [0, 0, 1, 2], []], ids=str)
def test_the_block_sees_no_pseudo_row_and_the_cache_keeps_none(models, family, rows, t, parents):
    """Logits, traces and cache, dead slots included: bit-equal whatever the rows hold, and without them what
    they are in a pass of another width."""
    m, runs = models[family], []
    kinds = [wild(Transfer(m, t, 2)), wild(Transfer(m, t, 2), 30.0), wild(Transfer(m, t, 3)), None]
    for head in kinds:
        drafter = Riding(head, parents)
        drafter.taps = (1, 7, 11)
        runs.append([(r.logits, *(r.trace[tap] for tap in drafter.taps), state.cache.k.clone(),
                      state.cache.v.clone()) for state, r in rounds(m, PROMPTS[:rows], 12, drafter)])
    assert len({len(run) for run in runs}) == 1 and len(runs[0]) > 3
    for a, b, c, bare in zip(*runs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "the block saw pseudo rows"
        for x, y in itertools.chain(zip(a, bare, strict=True), zip(c, bare, strict=True)):
            assert x.shape == y.shape and (x - y).abs().max() < 1e-11


def test_ahead_by_hand():
    tree = ancestors(torch.tensor([[0, 0]]))    # a token and its two children, two rows for each
    assert ["".join(".x"[int(v)] for v in row) for row in ahead(tree, 2)[0]] == [
        "x..x.....", "x..xx....", "xx...x...", "xx...xx..", "x.x....x.", "x.x....xx"]


@torch.no_grad()
def test_rows_that_rode_along_are_those_of_each_node(models):
    """After a tree they lie in the order of the accepted path: each is what its token, at the end of a chain,
    gives."""
    m = models["gemma2"]
    head = wild(Transfer(m, 2, 3))
    for state, r in rounds(m, PROMPTS, 20, Riding(head, [0, 0, 1, 2, 2])):
        for b, (text, new) in enumerate(zip(state.known, r.new, strict=True)):
            n = len(text) - len(new)
            for k in range(len(new)):
                assert (r.trace["extra"][b, k] - pseudo(head, text[: n + k])).abs().max() < 1e-9


def pseudo(head, ids):
    """The final pseudo states of the last token, (steps, dim), by hand: one more token after another."""
    m, n = head.model, len(ids)
    cache = KVCache(m.c, 1, n + head.steps, torch.float64)
    rows = head.spread(read(m, ids, head.taps, cache)[1][head.taps[0]])[:, -1]
    first = 2 * head.shape["inject_layer"]
    return m.run(rows, slice(n, n + head.steps), cache, range(first, 2 * m.c.n_layers))[0]


def test_a_transfer_drafts_nothing_where_no_rows_rode_along(models):
    """In its first round and after one of another drafter; and wrapped by others it drafts all the same."""
    m = models["llama"]
    proposed = lambda drafter: [int(r.proposed[0]) for _, r in rounds(m, PROMPTS[:1], 24, drafter)]  # noqa: E731
    inner = wild(Transfer(m, 3, 3)).drafter(3)
    assert proposed(inner)[0] == 0 and set(proposed(inner)[1:-3]) == {3}
    other = SelfDraft(m, range(2), 1)
    assert proposed(Turns(inner, other))[:6] == [1, 0, 1, 0, 1, 0], "the rows of an earlier round are stale"
    assert proposed(Turns(inner, inner, other))[:7] == [0, 1, 0, 3, 1, 0, 3]
    assert min(proposed(Siblings(inner, [1, 1]))[1:-3]) >= 1
    assert min(proposed(Then(inner, NGram(1, 1)))[1:-3]) >= 3


def test_rows_have_as_many_levels_as_the_rule_says(models):
    m, seen = models["llama"], []

    def look(state, draft):
        seen.append((draft.parents.tolist(), draft.length.tolist()))

    drafter = Medusa(m, 3).drafter(Says([2, 1, 0, 2]), [0, 0, 1, 1, 2, 3])
    next(rounds(m, PROMPTS, 20, Watched(drafter, look)))
    assert seen == [([[0, 0, 1, 1, 2]], [5, 2, 0, 5])], "the third level is not drawn"


def test_a_long_prompt_is_read_in_parts():
    """Longer than what a cache takes at a time: the adapter holds all of it."""
    m, far = make(replace(LIVELY["llama"], max_len=400)), []
    text = [i * i % 17 for i in range(300)]
    next(rounds(m, [text], 5, checked(wild(Kangaroo(m, 2)), 2, far), warm))
    assert len(far) == 2 and max(far) < 1e-9


# --- files


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_saved_and_loaded(tmp_path, models, name):
    m = models["gemma2"]
    head = wild(HEADS[name](m))
    for p in head.weights.parameters():
        p.data.copy_(p.bfloat16())
    head.ranks = [0.5, 0.25]
    heads.save(head, tmp_path)
    twin = heads.load(tmp_path, m)
    assert twin.ranks == [0.5, 0.25] and twin.shape == head.shape and type(twin) is type(head)
    assert [p.name for p in tmp_path.iterdir()] == ["heads.safetensors"]
    pairs = zip(head.weights.named_parameters(), twin.weights.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)
    one, two = ([(r.new, r.accepted.tolist()) for _, r in rounds(m, PROMPTS, 12, h.drafter(3))]
                for h in (head, twin))
    assert one == two


def test_heads_of_other_weights_draft_and_of_another_shape_do_not(tmp_path, models):
    m, other = models["llama"], make(LIVELY["llama"])
    other.blocks[3].mlp.down.data[5, 7] += 0.5
    for head in (Medusa(m, 2), Kangaroo(m, 2), M2R2(m, 2)):
        with pytest.raises(ValueError, match="give it the model that decodes"):
            generate(other, PROMPTS, 9, head.drafter(2))
        heads.save(wild(head), tmp_path)
        assert not heads.load(tmp_path, m).strange
        found = heads.load(tmp_path, other)
        assert found.strange
        assert generate(other, PROMPTS, 9, found.drafter(2))[0] == generate(other, PROMPTS, 9)[0]
        for change in ({"vocab_size": 18}, {"n_layers": 7}, {"hidden_dim": 50}):
            with pytest.raises(ValueError, match="another shape or vocabulary"):
                heads.load(tmp_path, make(replace(LIVELY["llama"], **change)))


def test_damaged_files_are_refused(tmp_path, models):
    m = models["llama"]
    heads.save(Medusa(m, 2), tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        heads.load(tmp_path / "none", m)
    file = tmp_path / heads.FILE
    whole = file.read_bytes()
    for broken in (b"", whole[:40], whole[:-9], whole.replace(b"medusa", b"magics"),
                   whole.replace(b'\\"heads\\": 2', b'\\"heads\\": 3')):
        assert broken != whole
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="not a file of trained heads, or damaged"):
            heads.load(tmp_path, m)


def test_the_fingerprint_does_not_depend_on_the_dtype():
    m = make(LIVELY["llama"]).bfloat16()
    m.blocks[0].mlp.down.data[0, 0] = 1e-9      # float16 has no such number
    prints = {heads.fingerprint(m.to(dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float16)}
    assert len(prints) == 1
    m.norm.weight.data[0] *= 2
    assert heads.fingerprint(m) not in prints


def test_heads_add_nothing_to_the_model(models):
    """What is trained and kept is their own, and the model's share is the model's own object."""
    m = models["llama"]
    for make_head in HEADS.values():
        head = make_head(m)
        mine = {p.data_ptr() for p in head.weights.parameters()}
        assert not mine & {p.data_ptr() for p in m.parameters()}
        assert all(p.requires_grad for p in head.weights.parameters())
        if hasattr(head, "own"):
            assert head.own.tok is m.tok and head.own.head is m.head and head.own.norm is m.norm
    assert {name.split(".")[1] for name in Kangaroo(m, 2).weights.state_dict()} == {"attn", "attn_norm"}


@pytest.mark.parametrize("build, message", [
    (lambda m: Kangaroo(m, 7), "exit layer must lie between 1 and 6"),
    (lambda m: ExitBlock(m, 0), "exit layer must lie between 1 and 6"),
    (lambda m: M2R2(m, 7), "exit layer must lie between 1 and 6"),
    (lambda m: M2R2(m, 2, -1), "rank must be at least 0, got -1"),
    (lambda m: Medusa(m, 0), "heads must be at least 1, got 0"),
    (lambda m: Prophet(m, -1), "blocks must be at least 1, got -1"),
    (lambda m: Transfer(m, 7, 2), "the inject layer must lie between 0 and 6"),
    (lambda m: Transfer(m, 3, 0), "steps must be at least 1, got 0"),
    (lambda m: Transfer(m, 3, 2).drafter(3), "2 heads draft that many tokens, not 3"),
    (lambda m: Medusa(m, 2).drafter(3), "2 heads draft that many tokens, not 3"),
    (lambda m: Medusa(m, 2).drafter(2, [0, 1, 2]), "2 heads draft that many tokens, not 3"),
    (lambda m: Medusa(m, 3).drafter(3, [0, 1, 1]), "a tree of 2 levels has no place for gamma 3"),
    (lambda m: Medusa(m, 3).drafter(2, [0, 1, 0]), "a tree must be given level by level"),
])
def test_what_makes_no_sense_is_refused(models, build, message):
    with pytest.raises(ValueError, match=message):
        build(models["llama"])
