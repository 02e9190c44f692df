"""Trees: the mask, the move, recursive rejection, the loop, the shapes, and drafts with siblings.

One thing to remember: after its verification a tree is a chain, so that most tests are those of chains."""
import itertools
from collections import Counter
from dataclasses import replace

import promises
import pytest
import torch
from promises import Watched, reader
from teach import picture
from test_sampling import Ledger
from test_speculative import Shifting, gate, known, on_and_off
from tiny import (
    LIVELY,
    LLAMA,
    PROMPTS,
    TINY,
    TINY_GEMMA,
    Fixed,
    Says,
    Unsure,
    devices,
    each_family,
    fork,
    law,
    make,
    plant,
    read,
    small,
    warm,
)

from control import Schedule, expected_tokens
from kvcache import KVCache
from layerskip import SelfDraft, Teacher, without
from methods.trees import Siblings, best_tree, chain_with_siblings, rank_acceptance, tree_tokens, widths_of
from model import visible
from sampling import Coins, to_probs
from speculative import Draft, Drafter, ModelDraft, NGram, Then, ancestors, generate, prefill, rounds
from verification import verify, verify_tree

# --- masks of trees that grow


def test_visible_where_a_tree_grows():
    """Slots 2 to 6 hold a root at position 2, two children at 3, and, the block, a child of each at 4."""
    tree = ancestors(torch.tensor([[0, 0, 1, 2]]))
    positions, slots = torch.tensor([[2, 3, 3, 4, 4]]), torch.arange(2, 7)[None]
    assert picture(visible(positions, slots, 8, tree[:, 3:])[0]) == ["xxxx.x..", "xxx.x.x."]
    assert picture(visible(positions, slots, 8, tree[:, 3:], window=2)[0]) == ["...x.x..", "....x.x."], (
        "the window is a distance of positions, also to slots of earlier levels")
    assert picture(visible(positions, slots, 8, tree[:, 3:], window=3)[0]) == ["..xx.x..", "..x.x.x."]
    whole = visible(positions, slots, 8, tree)
    assert torch.equal(whole[:, 3:], visible(positions, slots, 8, tree[:, 3:])), "as in a square"


def test_visible_where_each_row_has_its_own_tree():
    parents = torch.tensor([[0, 1, 0], [0, 0, 2]])
    at = torch.tensor([[1], [0]]) + torch.arange(4)
    depth = ancestors(parents).sum(-1) - 1
    mask = visible(at[:, :1] + depth, at, 5, ancestors(parents)[:, 2:])
    assert picture(mask[0]) == ["xxxx.", "xx..x"] and picture(mask[1]) == ["x.x..", "x.xx."]


def paths(parents):
    """The nodes from the root to each node, as lists."""
    found = [[0]]
    for k, parent in enumerate(parents, 1):
        found.append([*found[parent], k])
    return found


@devices
@each_family
def test_a_tree_that_grows_equals_one_block_and_its_paths_equal_chains(family, device):
    """Two rows at different places, each with a tree of its own; what is dead holds garbage."""
    m, n, K = make(LIVELY[family], device=device), [9, 4], 6
    parents = [[0, 0, 1, 1, 2, 5], [0, 1, 2, 0, 4, 0]]
    generator = torch.Generator().manual_seed(1)
    texts, nodes = (torch.randint(17, (2, T), generator=generator).to(device) for T in (9, K + 1))
    cache = KVCache(m.c, 2, 24, torch.float64, device)
    prefill(m, texts, cache)
    for row, length in enumerate(n):
        cache.k[:, row, :, length:], cache.v[:, row, :, length:] = 1e3, -1e3
    tree = ancestors(torch.tensor(parents, device=device))
    first = torch.tensor(n, device=device)[:, None]
    slots, positions = first + torch.arange(K + 1, device=device), first + tree.sum(-1) - 1
    x = m.embed(nodes)
    whole = m.run(x, positions, fork(cache), slots=slots, tree=tree, span=slice(4, 20))
    grown, parts = fork(cache), []
    for a, b in ((0, 1), (1, 3), (3, 4), (4, 7)):
        parts.append(m.run(x[:, a:b], positions[:, :b], grown, None, slots[:, :b], tree[:, a:b, :b],
                           span=slice(4, 20)))
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-11
    for row, text in enumerate(texts):
        for path in paths(parents[row]):
            ids = torch.cat([text[: n[row]], nodes[row, torch.tensor(path, device=device)]])[None]
            want = m.run(m.embed(ids), slice(0, ids.shape[1]))[0, n[row] :]
            assert (whole[row, torch.tensor(path, device=device)] - want).abs().max() < 1e-11


@each_family
def test_a_tree_of_one_row_by_slices(family):
    """Also a level of one token, which sees not all that lies before it."""
    m, text = make(LIVELY[family]), torch.tensor([PROMPTS[0]])
    cache, nodes, tree = KVCache(m.c, 1, 16, torch.float64), torch.tensor([[3, 5, 11]]), torch.eye(3).bool()
    tree[:, 0] = True       # a root with two children; the second's slot is not its position
    prefill(m, text, cache)
    x, other = m.embed(nodes), fork(cache)
    m.run(x[:, :2], slice(8, 10), cache)
    got = m.run(x[:, 2:], torch.tensor([[8, 9, 9]]), cache, slots=slice(8, 11), tree=tree[2:])
    want = m.run(x[:, [0, 2]], slice(8, 10), other)[:, 1:]
    assert (got - want).abs().max() < 1e-12
    alone = torch.tensor([[False, False, True]])    # sees itself and the text only, in its own place
    got = m.run(x[:, 2:], slice(8, 11), cache, slots=slice(8, 11), tree=alone)
    assert (got - m.run(x[:, 2:], slice(10, 11), cache)).abs().max() > 1e-3, "the tree is ignored"


# --- the move


def test_a_move_by_hand():
    """Each row moves its own slots, in all layers, keys and values. Overlaps are read first."""
    src, dst = torch.tensor([[2, 4, 5], [3, 2, 7]]), torch.tensor([[2, 3, 4], [2, 3, 4]])
    cache = KVCache(LLAMA, 2, 8, torch.float64)
    cache.k.copy_(torch.arange(cache.k.numel()).view(cache.k.shape))
    cache.v.copy_(-cache.k)
    before, views = fork(cache), cache.layers[1][0]
    cache.move(src, dst)
    for now, old in ((cache.k, before.k), (cache.v, before.v)):
        for row in range(2):
            assert torch.equal(now[:, row, :, dst[row]], old[:, row, :, src[row]])
            others = [s for s in range(8) if s not in dst[row]]
            assert torch.equal(now[:, row, :, others], old[:, row, :, others])
    assert torch.equal(views, cache.k[1]), "a write goes through views of the layers: they must stay views"


# --- recursive rejection


def random_laws(*shape, seed=0):
    p = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return p / p.sum(-1, keepdim=True)


def test_nothing_left_and_dead_nans():
    """Where rounding has refused a draft though p = q, the token comes from p, as in `verify`."""
    p, zeros = torch.tensor([[[0.5, 0.3, 0.2]] * 3]), torch.zeros(1, 2, dtype=torch.long)
    same, nan = p[:, :2], p[:, :2] * torch.nan
    for q, length, uniforms in ((same, None, (1.0, 1.0, 0.7)), (nan, torch.tensor([0]), (0.0, 0.0, 0.6))):
        node, token = verify_tree(p, torch.tensor([[1, 2]]), zeros, Fixed(*uniforms), q, length)
        assert (int(node), int(token)) == (0, 1)


def test_on_chains_it_is_verify_coin_for_coin():
    B, K, V = 3, 4, 5
    for seed in range(40):
        p, q = random_laws(B, K + 1, V, seed=seed), random_laws(B, K, V, seed=99 + seed)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(V, (B, K), generator=generator)
        length = torch.randint(K + 1, (B,), generator=generator)
        for parents in (torch.arange(K)[None], torch.arange(K).expand(B, K)):
            for law_of_draft, some in itertools.product((q, None), (length, None)):
                coins = Coins(seed), Coins(seed)
                want = verify(p, law_of_draft, tokens, coins[0], some)
                got = verify_tree(p, tokens, parents, coins[1], law_of_draft, some)
                assert all(map(torch.equal, got, want)) and coins[0].index == coins[1].index


@pytest.mark.parametrize("shape", [[0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 0, 1, 1], [0, 1, 2],
                                   [0, 0, 0, 2, 4]], ids=str)
def test_what_a_tree_yields_is_what_the_formula_says(shape):
    """Where all places are alike and the children are p's tokens in order, child i is accepted with p[i]."""
    p, ranks = torch.tensor([0.5, 0.3, 0.15, 0.05]), [shape[:k].count(u) for k, u in enumerate(shape)]
    depth = [len(path) - 1 for path in paths(shape)]

    def run(coins):
        node, _ = verify_tree(p.expand(1, len(shape) + 1, 4).double(), torch.tensor([ranks]),
                              torch.tensor([shape]), coins)
        return depth[int(node)]

    mean = sum(w * (accepted + 1) for accepted, w in law(run).items())
    assert mean == pytest.approx(tree_tokens(shape, [0.5, 0.3, 0.15]), abs=1e-6)
    if shape == [0, 1, 2]:
        assert mean == pytest.approx(expected_tokens(0.5, 3), abs=1e-6)


# --- the loop


class Grove(Drafter):
    """Trees of one shape, or of one for each row, whose tokens are drawn from laws that are random, but fixed
    for each last token. certain: they are the most likely ones instead, and no q is handed over."""

    def __init__(self, shapes, certain=False, seed=3):
        super().__init__(9)
        self.shapes, self.certain, self.seed = shapes, certain, seed

    def propose(self, state):
        V = state.model.c.vocab_size
        after, rows = random_laws(V, V, seed=self.seed), len(state.known)
        shapes = [self.shapes[b % len(self.shapes)] for b in range(rows)]
        trees = []
        for text, shape in zip(state.known, shapes, strict=True):
            def law_at(way, last=text[-1]):
                return after[way[-1] if way else last]

            tokens, q, _ = plant(shape, law_at, Coins(len(text)) if self.certain else state.coins)
            trees.append((torch.tensor(tokens), torch.stack(q)))
        tokens, q = (torch.stack(parts).to(state.n.device) for parts in zip(*trees, strict=True))
        parents = torch.tensor(shapes[: len(self.shapes)] if len(self.shapes) == 1 else shapes)
        return Draft(tokens, None if self.certain else q, parents=parents.to(state.n.device))


class Planted(Drafter):
    """Trees that hold the target's own continuation on one of their branches, with wrong tokens elsewhere."""

    def __init__(self, shape, branch, answers):
        super().__init__()
        self.shape, self.branch, self.answers = shape, branch, answers

    def propose(self, state):
        tokens = []
        for text, prompt, answer in zip(state.known, PROMPTS, self.answers, strict=True):
            rest = [*answer[len(text) - len(prompt) :], *[0] * 9]
            depth = [len(path) - 2 for path in paths(self.shape)[1:]]
            tokens.append([rest[d] if k + 1 in self.branch else (rest[d] + 1 + k) % 17
                           for k, d in enumerate(depth)])
        send = lambda rows: torch.tensor(rows, device=state.n.device)  # noqa: E731
        return Draft(send(tokens), parents=send([self.shape]))


class Swaying(Siblings):
    """Other widths in every round."""

    def propose(self, state):
        count = known(state) % 5
        self.widths = [count, count // 2]
        return super().propose(state)


TREES = {
    "exit": lambda m: Siblings(SelfDraft(m, range(8), 4), [4, 2, 1]),
    "skip": lambda m: Siblings(SelfDraft(m, without(6, attn=[1, 4], mlp=[2]), 3), [3, 3]),
    "skip first": lambda m: Siblings(SelfDraft(m, range(1, 12), 3), [2, 1]),
    "model": lambda m: Siblings(ModelDraft(small(m), 4), [3, 2]),
    "another model's exit": lambda m: Siblings(SelfDraft(make(m.c, 9, m.tok.device), range(8), 3), [2]),
    "exit, stopped": lambda m: Siblings(SelfDraft(m, range(8), Unsure(5)), [5, 2]),
    "exit, schedule": lambda m: Siblings(SelfDraft(m, range(8), Schedule(2)), [9, 1]),
    "model, gated": lambda m: Siblings(ModelDraft(small(m), gate()), [2, 2, 2]),
    "exit, then model": lambda m: Siblings(Then(SelfDraft(m, range(8), 2), ModelDraft(small(m), 2)), [4, 1]),
    "exit, then n-gram": lambda m: Siblings(Then(SelfDraft(m, range(8), 2), NGram(2, 1)), [2, 1]),
    "long": lambda m: Siblings(SelfDraft(m, range(10), 12), [12, 12]),
    "drawn": lambda m: Grove([[0, 0, 1, 2, 2, 0, 5]]),
    "certain": lambda m: Grove([[0, 0, 1, 2, 2, 0, 5], [0, 1, 2, 3, 1, 1, 0]], certain=True),
    "wide": lambda m: Grove([[0] * 6 + [2] * 6 + [8] * 12 + [20] * 6], certain=True),
}


test_greedy_identity = promises.greedy_identity(TREES)
test_rows_equal_solo_runs = promises.rows_equal_solo_runs(TREES)
test_poison = promises.poison({"shifting": lambda m: Swaying(Shifting(m), []), "model": TREES["model"]})
test_end_of_text_at_every_position = promises.end_of_text(
    TREES, ["exit", "model", "certain"])
test_context_limit = promises.context_limit(TREES)
test_short_answers = promises.short_answers(TREES, ["exit", "model", "drawn", "long", "wide"])
test_one_wait_a_round = promises.one_wait_a_round(
    TREES, [name for name in TREES if name not in ("drawn", "certain", "wide")],
    extra={"exit, stopped": 5, "exit, then n-gram": 1, "exit, then model": 1})


@each_family
@pytest.mark.parametrize("shape, branch", [([0, 0, 1, 2, 2, 5], {2, 5, 6}), ([0, 1, 0, 3, 3, 5], {3, 5, 6}),
                                           ([0, 0, 0, 3, 4, 5], {3, 4, 5, 6})], ids=str)
def test_a_perfect_tree_is_accepted_to_its_end(models, truth, family, shape, branch):
    """The target's own continuation hides on a branch that is not the first."""
    m, left = models[family], 25
    for state, r in rounds(m, PROMPTS, left, Planted(shape, branch, truth[family])):
        if left > len(shape):
            assert r.accepted.tolist() == r.proposed.tolist() == [len(branch)] * 4
            assert [len(row) for row in r.new] == [len(branch) + 1] * 4
        left = state.left_cpu[0]
    assert [t[len(p) :] for t, p in zip(state.known, PROMPTS, strict=True)] == [t[:25] for t in truth[family]]


@each_family
def test_siblings_are_accepted_and_save_passes(models, family):
    """Else the identities above would prove little."""
    m, seen = models[family], Counter()
    for drafter in (SelfDraft(m, range(6), 4), ModelDraft(small(m), 3)):
        alone = generate(m, PROMPTS, 40, drafter)[1]
        for widths in ([], [4, 4, 4, 4, 4]):
            passes = generate(m, PROMPTS, 40, Siblings(drafter, widths))[1]
            seen[passes < alone] += 1
            assert passes <= alone and (widths or passes == alone)
    assert seen[True] == 2


@each_family
def test_a_round_of_a_tree_is_a_chain(models, family):
    """Whoever reads a Round finds the accepted path: tokens, p, q, logits and trace at the right places, and
    a cache that holds what a pass over the text gives."""
    m, lengths, shape, coins = models[family], Counter(), [0, 0, 1, 2, 2, 0, 5], Coins(0)

    def near(a, b):
        return (a - b).abs().max() < 1e-9

    for _ in range(3):
        drafter = Grove([shape])
        drafter.taps = (3, 11)
        for state, r in rounds(m, PROMPTS, 30, drafter, warm, coins):
            assert r.draft.parents is None and r.draft.reuse is None
            for b, (text, new) in enumerate(zip(state.known, r.new, strict=True)):
                if not new:
                    continue    # it has finished
                a, n, K = int(r.accepted[b]), len(text) - len(new), int(r.draft.length[b])
                assert r.draft.tokens[b, :a].tolist() == new[:a] and len(new) == a + 1
                assert int(r.proposed[b]) == K >= a
                fresh, path = KVCache(m.c, 1, 60, torch.float64), slice(n - 1, n + a)
                x, trace = read(m, text, drafter.taps, fresh)
                want, held = m.unembed(x)[0, path], len(text) - 1
                assert near(r.logits[b, : a + 1], want) and near(r.p[b, : a + 1], warm(want))
                sure = want.softmax(-1)[range(a + 1), new].tolist()
                assert r.sure[b] == pytest.approx(sure, abs=1e-9)
                assert all(near(r.trace[tap][b, : a + 1], trace[tap][0, path]) for tap in drafter.taps)
                assert near(state.cache.k[:, b, :, :held], fresh.k[:, 0, :, :held])
                assert near(state.cache.v[:, b, :, :held], fresh.v[:, 0, :, :held])
                for k in range(K):
                    assert 0 < float(r.draft.q[b, k, r.draft.tokens[b, k]]) <= 1
                if a < K:       # the first that was refused is the first child there
                    assert near(r.draft.q[b, a], random_laws(17, 17, seed=3)[text[n + a - 1]])
                if state.left_cpu[b] + len(new) > len(shape):
                    lengths[a, K] += 1
    assert set(lengths) <= {(0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)} and len(lengths) >= 5


# also after a sibling was accepted, which it never drafted from, and a round without a draft
test_a_draft_model_reads_the_siblings_that_were_accepted = promises.right_drafts({
    "model": lambda m, far: Siblings(reader(small(m), on_and_off(), far), [4, 4, 4])})


def test_siblings_reuse_what_is_shared(models):
    """The states handed over, and the traces, are those of each path, run by hand."""
    m, far = models["llama"], []

    def look(state, draft):
        if draft.parents is None:
            return
        first, x, trace = draft.reuse
        assert first == 8 and set(trace) == {0, 3} and x.shape[1] == draft.tokens.shape[1] + 1
        for b, text in enumerate(state.known):
            block = [text[-1], *draft.tokens[b].tolist()]
            for k, path in enumerate(paths(draft.parents[0].tolist())[: state.left_cpu[b]]):
                last, want = read(m, text[:-1] + [block[i] for i in path], (0, 3), None, range(8))
                for got, state_of in ((x, last), (trace[0], want[0]), (trace[3], want[3])):
                    far.append(float((got[b, k] - state_of[0, -1]).abs().max()))

    draft = SelfDraft(m, range(8), 3)
    draft.taps = (0, 3)
    for prompts in (PROMPTS, PROMPTS[:1]):
        generate(m, prompts, 16, Watched(Siblings(draft, [3, 2]), look))
    assert len(far) > 200 and max(far) < 1e-9


# --- where answers end


@each_family
def test_an_end_of_text_inside_a_branch(models, truth, family):
    """It ends the text after two of three accepted, and the third was never tested."""
    m, shape, branch = models[family], [0, 0, 1, 2, 2, 5], {2, 5, 6}
    for i in range(4):
        answers, eos = truth[family], truth[family][i][1]
        _, r = next(rounds(m, PROMPTS, 20, Planted(shape, branch, answers), eos=[eos]))
        first = answers[i].index(eos) + 1
        assert r.new[i] == answers[i][:first]
        assert (int(r.accepted[i]), int(r.proposed[i])) == (first, first)


def test_a_tree_that_is_cut_stays_a_tree():
    whole = Draft(torch.tensor([[7, 8, 9, 5]]), parents=torch.tensor([[0, 0, 1, 2]]))
    assert whole.cut(9) is whole and whole.cut(3).parents.tolist() == [[0, 0, 1]]


def test_rows_near_their_limit_propose_less():
    """Beside rows with more room: the nodes beyond a row's own are dead, and so are branches that they are
    on."""
    m, least = make(replace(LLAMA, max_len=20)), 9
    left = [20 - len(prompt) for prompt in PROMPTS]
    for state, r in rounds(m, PROMPTS, 99, Grove([[0, 1, 2, 3, 0, 0]])):
        for room, new, length in zip(left, r.new, r.draft.length.tolist(), strict=True):
            assert length <= max(0, room - 1) and len(new) <= room
            least = min(least, room) if new and max(left) > 6 else least
        left = list(state.left_cpu)
    assert least < 4, "a row should come near its limit before the others"


def test_the_last_siblings_go_first(models):
    """With room for 6 nodes, 5 and so on: the chain stays, and of the siblings the first."""
    m, seen = models["llama"], []
    drafter = Watched(Siblings(SelfDraft(m, range(8), 3), [3, 1]), lambda state, draft: seen.append(draft))
    for n in (9, 7, 6, 5, 4, 2):
        next(rounds(m, PROMPTS, n, drafter))
    shapes = [None if draft.parents is None else draft.parents[0].tolist() for draft in seen]
    assert shapes == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1], [0, 1, 2, 0], None, None]


def test_rows_with_short_chains_have_no_siblings(models):
    m, seen = models["llama"], []
    drafter = Siblings(SelfDraft(m, range(8), Says([3, 1, 3, 0])), [2, 1])
    next(rounds(m, PROMPTS, 20, Watched(drafter, lambda state, draft: seen.append(draft.length.tolist()))))
    assert seen == [[6, 1, 6, 0]]


# --- the exact law of the loop


LAWS = {
    "exit": (TINY, lambda m: Siblings(SelfDraft(m, range(4), 2), [1]), dict(temperature=2.0)),
    "exit, top-p": (TINY, lambda m: Siblings(SelfDraft(m, range(4), 2), [1])),
    "exit, two siblings": (replace(TINY, vocab_size=4), lambda m: Siblings(SelfDraft(m, range(4), 1), [1, 1]),
                           dict(temperature=1.5)),
    "model": (TINY, lambda m: Siblings(ModelDraft(make(replace(TINY, n_layers=1), 7), 2), [1])),
    "gemma2 skip": (TINY_GEMMA, lambda m: Siblings(SelfDraft(m, [0, 2, 3, 5], 2), [1]),
                    dict(temperature=2.0, top_p=0.8)),
    "drawn": (TINY, lambda m: Grove([[0, 0, 2]])),
    "certain": (TINY, lambda m: Grove([[0, 0, 2]], certain=True)),
    "gemma2 certain": (TINY_GEMMA, lambda m: Grove([[0, 0, 2]], certain=True)),
}


test_exact_law = promises.exact_law(LAWS, count=2, room=4)


def test_coins_are_spent_in_the_documented_order(models):
    """Chain, siblings rank by rank, a flip for each of them, and one choice, for every row."""
    m = models["llama"]
    for probs in (to_probs, warm):
        coins = Ledger(0)
        next(rounds(m, PROMPTS, 20, Siblings(SelfDraft(m, range(8), 3), [3, 1]), probs, coins))
        siblings = [("choose", 12), ("choose", 4)]
        assert coins.spent == [("choose", 4)] * 3 + siblings + [("flip", 4, 7), ("choose", 4)]
    assert Coins.version == 1


# --- shapes


def test_widths_and_parents():
    for gamma, widths in ((0, []), (1, []), (4, []), (3, [3, 2]), (4, [2, 1, 1])):
        parents = chain_with_siblings(gamma, widths)
        assert widths_of(parents) == (gamma, widths) and len(parents) == gamma + sum(widths)
        assert all(parent <= k for k, parent in enumerate(parents))
    assert chain_with_siblings(4, [2, 1]) == [0, 1, 2, 3, 0, 1, 0]


def all_trees(nodes, ranks):
    """The parents of every tree of at most `nodes` nodes, level by level, with families up to `ranks`."""
    found, new = [[]], [[]]
    for _ in range(nodes):
        new = [[*t, u] for t in new for u in range(t[-1] if t else 0, len(t) + 1) if t.count(u) < ranks]
        found += new
    return found


@pytest.mark.parametrize("acceptance, depth_cost, node_cost", [
    ([0.6, 0.2, 0.1], 0.1, 0.02), ([0.8, 0.1], 0.05, 0.05), ([0.5, 0.3, 0.15], 0.4, 0.01),
    ([0.3, 0.35], 0.05, 0.05), ([0.9], 0.1, 0.1), ([0.3, 0.1], 0.9, 0.3)])
def test_the_best_tree_is_the_best_of_all(acceptance, depth_cost, node_cost):
    def speed(parents):
        depth = max(map(len, paths(parents))) - 1
        return tree_tokens(parents, acceptance) / (1 + depth * depth_cost + len(parents) * node_cost)

    trees = all_trees(5, len(acceptance))
    assert len(trees) > (5 if len(acceptance) == 1 else 20)
    for branches in (True, False):
        some = [t for t in trees if branches or all(
            u == 0 or t[: u - 1].count(t[u - 1]) == 0 for u in t)]
        best = best_tree(acceptance, 5, depth_cost, node_cost, branches)
        assert best in some and speed(best) == pytest.approx(max(map(speed, some)))


def test_best_trees_by_hand():
    assert best_tree([0.5, 0.3], 0, 0.1, 0.1) == [] == best_tree([], 4, 0.0, 0.0)
    assert best_tree([0.1, 0.05], 6, 0.2, 0.05) == [], "nothing gains: do not draft"
    assert best_tree([1.0], 3, 0.1, 0.0) == [0, 1, 2]
    assert best_tree([0.4, 0.3, 0.2], 3, 0.5, 0.0) == [0, 0, 0], "wide where levels are dear"
    assert best_tree([0.9, 0.05], 3, 0.01, 0.01) == [0, 1, 2], "deep where the first guess is good"


def test_rank_acceptance_by_hand():
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    q = torch.tensor([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.5, 0.3]])
    assert rank_acceptance(p, q, 3) == [0.5, 0.25, 0.25]
    assert rank_acceptance(p[None], q[None], 2) == [0.5, 0.25]


def test_measured_ranks_are_what_first_families_accept(models):
    """Teacher and loop agree, position by position: the first drafted token and its siblings."""
    m, text = models["llama"], [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]
    teacher = Teacher(m, text, warm)
    ranks = rank_acceptance(to_probs(teacher.p.log()), teacher.draft(range(8)), 3)
    prefixes = [text[: i + 1] for i in range(len(text))]
    _, r = next(rounds(m, prefixes, 4, Siblings(SelfDraft(m, range(8), 1), [1, 1])))
    assert r.accepted.double().mean() == pytest.approx(sum(ranks)) and 0 < ranks[1] + ranks[2]


@pytest.mark.parametrize("widths", [[1, 2], [-1], [2, -1], [3, 1, 2]])
def test_widths_that_make_no_sense_are_refused(models, widths):
    with pytest.raises(ValueError, match="must not rise, nor be negative"):
        Siblings(SelfDraft(models["llama"], range(4), 3), widths)


def test_a_tail_after_a_tree_is_refused(models):
    m = models["llama"]
    with pytest.raises(ValueError, match="a tree has several ends"):
        generate(m, PROMPTS, 20, Then(TREES["exit"](m), NGram(2, 1)))


def test_drafters_that_draw_nothing_get_no_siblings(models, truth):
    m = models["llama"]
    steps = rounds(m, PROMPTS, 40, Siblings(NGram(4, 2), [4, 4]))
    assert [r.new for _, r in steps] == [r.new for _, r in rounds(m, PROMPTS, 40, NGram(4, 2))]
