"""Trees: the mask, the move, recursive rejection, the loop, the shapes, and drafts with siblings.

One thing to remember: after its verification a tree is a chain, so that most tests are those of chains."""
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from paper_gpu import PaperGPU
from test_speculative import (
    TINY,
    TINY_GEMMA,
    TOP_P,
    Fixed,
    Says,
    Unsure,
    assert_same_law,
    gate,
    small,
    target_law,
)
from tiny import DEVICES, LIVELY, LLAMA, PROMPTS, devices, each_family, law, make, oracle

from control import Schedule, expected_tokens
from kvcache import KVCache
from layerskip import SelfDraft, Teacher, keep
from methods.trees import (
    Siblings,
    best_tree,
    chain_with_siblings,
    rank_acceptance,
    tree_tokens,
    widths_of,
)
from model import visible
from sampling import Coins, to_probs
from speculative import (
    Draft,
    Drafter,
    ModelDraft,
    NGram,
    Then,
    ancestors,
    generate,
    prefill,
    rounds,
    verify,
    verify_tree,
)


def picture(mask):
    return ["".join(".x"[bool(v)] for v in row) for row in mask]


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
    whole = m.run(x, positions, cache.fork(), slots=slots, tree=tree, end=20)
    grown, parts = cache.fork(), []
    for a, b in ((0, 1), (1, 3), (3, 4), (4, 7)):
        parts.append(m.run(x[:, a:b], positions[:, :b], grown, None, slots[:, :b], tree[:, a:b, :b], end=20))
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
    x, other = m.embed(nodes), cache.fork()
    m.run(x[:, :2], slice(8, 10), cache)
    got = m.run(x[:, 2:], torch.tensor([[8, 9, 9]]), cache, slots=slice(8, 11), tree=tree[2:])
    want = m.run(x[:, [0, 2]], slice(8, 10), other)[:, 1:]
    assert (got - want).abs().max() < 1e-12
    alone = torch.tensor([[False, False, True]])    # sees itself and the text only, in its own place
    got = m.run(x[:, 2:], slice(8, 11), cache, slots=slice(8, 11), tree=alone)
    assert (got - m.run(x[:, 2:], slice(10, 11), cache)).abs().max() > 1e-3, "the tree is ignored"


# --- the move


def numbered(B=2, S=8):
    cache = KVCache(replace(LLAMA, n_layers=2), B, S, torch.float64)
    cache.k.copy_(torch.arange(cache.k.numel()).view(cache.k.shape))
    cache.v.copy_(-cache.k)
    return cache


def test_a_move_by_hand():
    """Each row moves its own slots, in all layers, keys and values. Overlaps are read first."""
    cache, src, dst = numbered(), torch.tensor([[2, 4, 5], [3, 2, 7]]), torch.tensor([[2, 3, 4], [2, 3, 4]])
    before, views = cache.fork(), cache.layers[1][0]
    cache.move(src, dst)
    for now, old in ((cache.k, before.k), (cache.v, before.v)):
        for row in range(2):
            assert torch.equal(now[:, row, :, dst[row]], old[:, row, :, src[row]])
            others = [s for s in range(8) if s not in dst[row]]
            assert torch.equal(now[:, row, :, others], old[:, row, :, others])
    assert torch.equal(views, cache.k[1]), "a write goes through views of the layers: they must stay views"


@each_family
def test_after_the_move_a_path_is_a_chain(family):
    m, text = make(LIVELY[family]), torch.tensor([PROMPTS[0]])
    nodes, parents = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 2]])
    cache, tree, slots = KVCache(m.c, 1, 16, torch.float64), ancestors(parents), torch.arange(8, 13)[None]
    prefill(m, text, cache)
    m.run(m.embed(nodes), 8 + tree.sum(-1) - 1, cache, slots=slots, tree=tree)
    cache.move(torch.tensor([[8, 10, 12]]), torch.tensor([[8, 9, 10]]))
    got = m.run(m.embed(torch.tensor([[3]])), slice(11, 12), cache)
    ids = torch.cat([text, torch.tensor([[5, 7, 9, 3]])], 1)
    assert (got - m.run(m.embed(ids), slice(0, 12))[:, -1:]).abs().max() < 1e-12


@each_family
@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
def test_neither_trees_nor_moves_wait_for_the_device(family, device):
    m = make(LIVELY[family], device=device)
    cache = KVCache(m.c, 2, 24, torch.float64, m.tok.device)
    parents = torch.tensor([[0, 0, 2]]).to(device)
    x, at = torch.zeros(2, 4, 32, dtype=torch.float64).to(device), torch.arange(4).expand(2, 4).to(device)
    p = torch.rand(2, 4, 17, dtype=torch.float64).to(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        tree = ancestors(parents)
        m.run(x, at, cache, slots=at + 8, tree=tree, end=16)
        m.run(x[:, 2:], at, cache, slots=at + 8, tree=tree[:, 2:], end=16)
        cache.move(at + 1, at)
        if device == "cuda":
            verify_tree(p, at[:, :3], parents, Coins(0))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# --- recursive rejection


def random_laws(*shape, seed=0):
    p = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return p / p.sum(-1, keepdim=True)


def one(p, q, tokens, parents, *uniforms, length=None):
    p, q, tokens, parents, length = (
        None if t is None else torch.tensor([t]) for t in (p, q, tokens, parents, length))
    return [int(t) for t in verify_tree(p, tokens, parents, Fixed(*uniforms), q, length)]


P = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]
Q = [[0.1, 0.6, 0.3], [0.25, 0.0, 0.75]]    # tokens 1 and 2 drawn without replacement from (.1, .6, .3)


def test_siblings_by_hand():
    assert one(P, Q, [1, 2], [0, 0], 0.49, 0.9, 0.05) == [1, 0], "the first is accepted with p/q = .3/.6"
    assert one(P, Q, [1, 2], [0, 0], 0.51, 0.0, 0.85) == [0, 0], (
        "then max(p - q, 0) is left, here only token 0, and the second is refused for certain")
    p = [[0.2, 0.3, 0.5], *P[1:]]       # left: (.1, 0, .2) / .3, and of it token 2 has 2/3 < .75
    assert one(p, Q, [1, 2], [0, 0], 0.51, 0.88, 0.91) == [2, 2], "2/3 / .75 = .89; bonus from node 2's p"
    assert one(p, Q, [1, 2], [0, 0], 0.51, 0.90, 0.99) == [0, 0], "(1/3, 0, 2/3) - (1/4, 0, 3/4) leaves 0"
    assert one(p, Q, [1, 2], [0, 0], 0.51, 0.0, 0.5, length=1) == [0, 2], "what is dead is not tried"
    assert one(p, Q, [1, 2], [0, 0], 0.0, 0.0, 0.45, length=0) == [0, 1]


def test_certain_siblings_by_hand():
    assert one(P, None, [1, 2], [0, 0], 0.29, 0.0, 0.75) == [1, 2]
    assert one(P, None, [1, 2], [0, 0], 0.31, 0.28, 0.55) == [2, 0], "of .5, 0, .2 the second has 2/7"
    assert one(P, None, [1, 2], [0, 0], 0.31, 0.29, 0.99) == [0, 0]
    assert one(P, None, [1, 1], [0, 0], 0.31, 0.0, 0.99) == [0, 2], "the same token again has nothing left"


def test_only_children_of_the_accepted_are_accepted():
    p = [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert one(p, None, [0, 1, 2], [0, 0, 1], 0.6, 0.9, 0.0, 0.5) == [2, 2], "node 3 hangs on 1, not on 2"
    assert one(p, None, [0, 1, 1], [0, 0, 1], 0.4, 0.0, 0.0, 0.5) == [3, 0], "node 3 is tried after node 1"
    assert one(p, None, [0, 1], [0, 0], 0.4, 0.0, 0.5) == [1, 1], "the first that passes, not the last"


def test_nothing_left_and_dead_nans():
    nan = float("nan")
    assert one(P, [P[0], [0, 0, 1.0]], [1, 2], [0, 0], 1.0, 0.3, 0.7) == [0, 1], "where p = q: as in `verify`"
    assert one(P, [[nan] * 3] * 2, [1, 2], [0, 0], 0.0, 0.0, 0.6, length=0) == [0, 1]


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


def draw(shape, law_at, coins):
    """Tokens and the laws they were drawn from: the children of a node without replacement from law_at(tokens
    on the way to it)."""
    tokens, q, way = [], [], [()]
    for k, parent in enumerate(shape):
        left = law_at(way[parent]).clone()
        for other, other_parent in enumerate(shape[:k]):
            if other_parent == parent:
                left[tokens[other]] = 0
        q.append(left / left.sum())
        tokens.append(int(coins.choose(q[-1])))
        way.append((*way[parent], tokens[-1]))
    return torch.tensor([tokens]), torch.stack(q)[None], way


SHAPES = [[0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_exact_law_of_recursive_rejection(shape, certain):
    """Three tokens of a Markov chain: those that a tree yields, and more from p."""
    V = 3
    p_after, q_after = random_laws(V + 1, V, seed=4), random_laws(V + 1, V, seed=5)

    def run(coins):
        tokens, q, way = draw(shape, lambda way: q_after[way[-1] if way else V], coins)
        p = torch.stack([p_after[path[-1] if path else V] for path in way])[None]
        node, token = verify_tree(p, tokens, torch.tensor([shape]), coins, None if certain else q)
        out = [*way[int(node)], int(token)]
        while len(out) < 3:
            out.append(int(coins.choose(p_after[out[-1]])))
        return tuple(out[:3])

    def fixed(coins):   # certain: whatever is proposed, so here one fixed choice of the proposals
        kept = Coins(7)
        both = replace_choices(coins, kept, len(shape))
        return run(both)

    want = {(a, b, c): float(p_after[V, a] * p_after[a, b] * p_after[b, c])
            for a in range(V) for b in range(V) for c in range(V)}
    assert_same_law(law(fixed if certain else run), want)


class replace_choices(Coins):
    """Takes the first `count` choices from other coins, and all else from the given ones."""

    def __init__(self, coins, other, count):
        self.coins, self.other, self.count = coins, other, count

    def flip(self, prob):
        return self.coins.flip(prob)

    def choose(self, weights):
        self.count -= 1
        return (self.other if self.count >= 0 else self.coins).choose(weights)


def optimum(p, q, count):
    """The most often that one of `count` drafts, drawn without replacement from q, can be accepted: by
    min-cut, the least over all sets H of tokens of p(H) + 1 - Pr(all drafts lie in H) (Sun et al. 2023)."""
    V, least = len(p), 1.0

    def all_inside(H, left, count):
        if count == 0:
            return 1.0
        total = sum(left.values())
        return sum(w / total * all_inside(H, {u: x for u, x in left.items() if u != t}, count - 1)
                   for t, w in left.items() if t in H)

    for size in range(V + 1):
        for H in itertools.combinations(range(V), size):
            inside = all_inside(H, dict(enumerate(q.tolist())), count)
            least = min(least, sum(float(p[t]) for t in H) + 1 - inside)
    return least


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_is_accepted_than_can_be(count):
    rates = []
    for seed in range(3):
        p, q = random_laws(4, seed=seed), random_laws(4, seed=50 + seed)

        def run(coins, p=p, q=q):
            tokens, drawn, _ = draw([0] * count, lambda way: q, coins)
            everywhere = p.expand(1, count + 1, 4)
            return int(verify_tree(everywhere, tokens, torch.zeros(1, count).long(), coins, drawn)[0]) > 0

        rate, most = law(run).get(True, 0.0), optimum(p, q, count)
        assert rate <= most + 1e-12
        rates.append((rate, most, float(torch.minimum(p, q).sum())))
    for rate, most, chain in rates:
        if count == 1:
            assert rate == pytest.approx(most) == pytest.approx(chain)
        else:
            assert rate > chain + 0.02 and rate > most - 0.12, "a sibling gains, and is near the optimum"


@pytest.mark.parametrize("shape", [*SHAPES, [0, 1, 2], [0, 0, 0, 2, 4]], ids=str)
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

            tokens, q, _ = draw(shape, law_at, Coins(len(text)) if self.certain else state.coins)
            trees.append((tokens, q))
        tokens, q = (torch.cat(parts).to(state.n.device) for parts in zip(*trees, strict=True))
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


TREES = {
    "exit": lambda m: Siblings(SelfDraft(m, range(8), 4), [4, 2, 1]),
    "skip": lambda m: Siblings(SelfDraft(m, keep(6, attn=[1, 4], mlp=[2]), 3), [3, 3]),
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
}
each_tree = pytest.mark.parametrize("name", TREES)


@devices
@each_family
@each_tree
def test_greedy_identity(truth, family, name, device):
    m, count = make(LIVELY[family], device=device), 40 if device == "cpu" else 16
    assert generate(m, PROMPTS, count, TREES[name](m))[0] == [row[:count] for row in truth[family]]


@each_family
@each_tree
def test_rows_equal_solo_runs(models, truth, family, name):
    m = models[family]
    for prompt, want in zip(PROMPTS, truth[family], strict=True):
        assert generate(m, [prompt], 24, TREES[name](m))[0] == [want[:24]]


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
    class Tapped(Grove):
        taps = (3, 11)

    m, warm, lengths = models[family], lambda x: to_probs(x, 1.0), Counter()
    shape = [0, 0, 1, 2, 2, 0, 5]
    for _ in range(3):
        coins = Coins(len(lengths))
        for state, r in rounds(m, PROMPTS, 30, Tapped([shape]), warm, coins):
            assert r.draft.parents is None and r.draft.reuse is None
            for b, (text, new) in enumerate(zip(state.known, r.new, strict=True)):
                if not new:
                    continue    # it has finished
                a, n = int(r.accepted[b]), len(text) - len(new)
                assert r.draft.tokens[b, :a].tolist() == new[:a] and len(new) == a + 1
                assert int(r.proposed[b]) == int(r.draft.length[b]) >= a
                ids, trace = torch.tensor([text]), dict.fromkeys(Tapped.taps)
                fresh = KVCache(m.c, 1, 60, torch.float64)
                want = m.unembed(m.run(m.embed(ids), slice(0, len(text)), fresh, trace=trace))[0]
                assert (r.logits[b, : a + 1] - want[n - 1 : n + a]).abs().max() < 1e-9
                assert (r.p[b, : a + 1] - warm(want[n - 1 : n + a])).abs().max() < 1e-9
                for tap in Tapped.taps:
                    assert (r.trace[tap][b, : a + 1] - trace[tap][0, n - 1 : n + a]).abs().max() < 1e-9
                held = len(text) - 1
                assert (state.cache.k[:, b, :, :held] - fresh.k[:, 0, :, :held]).abs().max() < 1e-9
                assert (state.cache.v[:, b, :, :held] - fresh.v[:, 0, :, :held]).abs().max() < 1e-9
                for k in range(int(r.draft.length[b])):
                    assert 0 < float(r.draft.q[b, k, r.draft.tokens[b, k]]) <= 1
                if a < int(r.draft.length[b]):  # the first that was refused is the first child there
                    law_there = random_laws(17, 17, seed=3)[text[n + a - 1]]
                    assert (r.draft.q[b, a] - law_there).abs().max() < 1e-12
                if state.left_cpu[b] + len(new) > len(shape):
                    lengths[a, int(r.draft.length[b])] += 1
    assert set(lengths) <= {(0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)} and len(lengths) >= 5


def test_a_chain_as_a_tree_is_the_chain():
    """Every field of every round, with a seed, by each of the two ways."""
    class AsTree(SelfDraft):
        def propose(self, state):
            draft = super().propose(state)
            K = draft.tokens.shape[1]
            return replace(draft, parents=torch.arange(K)[None]) if K else draft

    for m in (make(LLAMA), make(LIVELY["gemma2"])):
        for rule in (3, Unsure(5)):
            runs = [[], []]
            for kind, run in zip((SelfDraft, AsTree), runs, strict=True):
                drafter = kind(m, range(8), rule)
                drafter.taps = (2, 11)
                run += [r for _, r in rounds(m, PROMPTS, 20, drafter, lambda x: to_probs(x, 0.9), Coins(4))]
            assert len(runs[0]) == len(runs[1]) > 5
            for chain, tree in zip(*runs, strict=True):
                assert chain.new == tree.new and torch.equal(chain.draft.tokens, tree.draft.tokens)
                for name in ("accepted", "proposed"):
                    assert torch.equal(getattr(chain, name), getattr(tree, name))
                assert torch.equal(chain.draft.length, tree.draft.length)
                near = [(chain.p, tree.p), (chain.logits, tree.logits)]
                near += [(chain.trace[tap], tree.trace[tap]) for tap in (2, 11)]
                near += [(chain.draft.q, tree.draft.q)] if chain.draft.q is not None else []
                assert all((a - b).abs().max() < 1e-9 for a, b in near)
                assert sum(map(sum, chain.sure)) == pytest.approx(sum(map(sum, tree.sure)))


@each_family
def test_poison(models, truth, family):
    """Nothing after the last known token is ever read: fill it with garbage after each round, in tokens and
    cache, while shape, gamma and skip set change at random."""
    class Poisoned(Siblings):
        def observe(self, state, r):
            for b, text in enumerate(state.known):
                n = len(text)
                state.cache.k[:, b, :, n - 1 :] = state.cache.v[:, b, :, n - 1 :] = 1e4
                state.tokens[b, n:] = 16
            count = sum(map(len, state.known))
            self.drafters[0].rule = Says(lambda state: count % 6)
            self.drafters[0].sublayers = [i for i in range(12) if count >> i % 5 & 1 or i == count % 12]
            self.widths = [count % 5, count % 5 // 2]

    class PoisonedModel(ModelDraft):
        def observe(self, state, r):
            super().observe(state, r)
            for b, held in enumerate(self.held):
                self.cache.k[:, b, :, held:] = self.cache.v[:, b, :, held:] = 1e4

    m = models[family]
    assert generate(m, PROMPTS, 40, Poisoned(SelfDraft(m, range(6), 5), [3]))[0] == truth[family]
    assert generate(m, PROMPTS, 40, Siblings(PoisonedModel(small(m), 4), [4, 4]))[0] == truth[family]


@each_family
def test_the_draft_model_has_read_every_token(models, family):
    """Also after a sibling was accepted, which it never drafted from, and a round without a draft."""
    m, seen = models[family], []

    class Watched(ModelDraft):
        def propose(self, state):
            draft = super().propose(state)
            for b, text in enumerate(state.known):
                if draft.q is not None and state.left_cpu[b]:
                    want = self.model(torch.tensor([text]))[0, -1].softmax(-1)
                    seen.append(float((draft.q[b, 0] - want).abs().max()))
            return draft

    drafter = Watched(small(m), Says(lambda state: (4, 0, 0, 0, 2)[sum(map(len, state.known)) % 5]))
    generate(m, PROMPTS, 40, Siblings(drafter, [4, 4, 4]), lambda logits: to_probs(logits, 1.0), Coins(2))
    assert len(seen) > 20 and max(seen) < 1e-9


def test_siblings_reuse_what_is_shared(models):
    """The states handed over, and the traces, are those of each path, run by hand."""
    m = models["llama"]

    class Tapped(SelfDraft):
        taps = (0, 3)

    class Watched(Siblings):
        def propose(self, state):
            draft = super().propose(state)
            if draft.parents is None:
                return draft
            first, x, trace = draft.reuse
            assert first == 8 and set(trace) == {0, 3} and x.shape[1] == draft.tokens.shape[1] + 1
            for b, text in enumerate(state.known):
                block = [text[-1], *draft.tokens[b].tolist()]
                for k, path in enumerate(paths(draft.parents[0].tolist())[: state.left_cpu[b]]):
                    ids = torch.tensor([text[:-1] + [block[i] for i in path]])
                    want = dict.fromkeys((0, 3, 7))
                    m.run(m.embed(ids), slice(0, ids.shape[1]), sublayers=range(8), trace=want)
                    for got, state_of in ((x, want[7]), (trace[0], want[0]), (trace[3], want[3])):
                        far.append(float((got[b, k] - state_of[0, -1]).abs().max()))
            return draft

    far, drafter = [], Watched(Tapped(m, range(8), 3), [3, 2])
    generate(m, PROMPTS, 16, drafter)
    generate(m, PROMPTS[:1], 16, drafter)
    assert len(far) > 200 and max(far) < 1e-9


# --- where answers end


@pytest.mark.parametrize("name", ["exit", "model", "certain"])
@each_family
def test_end_of_text_at_every_position(models, truth, family, name):
    m = models[family]
    for i in range(12):
        for eos in ({truth[family][0][i]}, {truth[family][0][i], truth[family][1][0]}):
            want = [row[: next((j + 1 for j, t in enumerate(row[:12]) if t in eos), 12)]
                    for row in truth[family]]
            assert generate(m, PROMPTS, 12, TREES[name](m), eos=eos)[0] == want


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


@pytest.mark.parametrize("name", TREES)
@each_family
def test_context_limit(family, name):
    """Rows reach the limit one by one; the siblings' slots end where the cache does."""
    m = make(replace(LIVELY[family], max_len=20))
    want = [oracle(m, p, 20 - len(p)) for p in PROMPTS]
    assert generate(m, PROMPTS, 99, TREES[name](m))[0] == want
    assert generate(m, PROMPTS[:1], 99, TREES[name](m))[0] == want[:1]


@pytest.mark.parametrize("name", ["exit", "model", "drawn", "long"])
def test_max_new_inside_a_tree(models, truth, name):
    m = models["llama"]
    for n in range(10):
        assert generate(m, PROMPTS, n, TREES[name](m))[0] == [row[:n] for row in truth["llama"]]
        for _, r in rounds(m, PROMPTS[:1], n, TREES[name](m)):
            assert r.draft.tokens.shape[1] < n, "no more nodes than tokens may still be emitted"


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
    m, shapes = models["llama"], []

    class Watched(Siblings):
        def propose(self, state):
            draft = super().propose(state)
            shapes.append(None if draft.parents is None else draft.parents[0].tolist())
            return draft

    for n in (9, 7, 6, 5, 4, 2):
        next(rounds(m, PROMPTS, n, Watched(SelfDraft(m, range(8), 3), [3, 1])))
    assert shapes == [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1], [0, 1, 2, 0], None, None]


def test_rows_with_short_chains_have_no_siblings(models):
    m, seen = models["llama"], []

    class Watched(Siblings):
        def propose(self, state):
            draft = super().propose(state)
            seen.append(draft.length.tolist())
            return draft

    next(rounds(m, PROMPTS, 20, Watched(SelfDraft(m, range(8), Says(lambda state: [3, 1, 3, 0])), [2, 1])))
    assert seen == [[6, 1, 6, 0]]


# --- the exact law of the loop


LAWS = {
    "exit": (TINY, lambda m: Siblings(SelfDraft(m, range(4), 2), [1]), dict(temperature=2.0)),
    "exit, top-p": (TINY, lambda m: Siblings(SelfDraft(m, range(4), 2), [1]), TOP_P),
    "exit, two siblings": (replace(TINY, vocab_size=4), lambda m: Siblings(SelfDraft(m, range(4), 1), [1, 1]),
                           dict(temperature=1.5)),
    "model": (TINY, lambda m: Siblings(ModelDraft(make(replace(TINY, n_layers=1), 7), 2), [1]), TOP_P),
    "gemma2 skip": (TINY_GEMMA, lambda m: Siblings(SelfDraft(m, [0, 2, 3, 5], 2), [1]),
                    dict(temperature=2.0, top_p=0.8)),
    "drawn": (TINY, lambda m: Grove([[0, 0, 2]]), TOP_P),
    "certain": (TINY, lambda m: Grove([[0, 0, 2]], certain=True), TOP_P),
    "gemma2 certain": (TINY_GEMMA, lambda m: Grove([[0, 0, 2]], certain=True), TOP_P),
}


@pytest.mark.parametrize("name", LAWS)
def test_exact_law(name):
    """The first two tokens, after however many rounds."""
    c, make_drafter, settings = LAWS[name]
    m, probs, shapes = make(c, 3), lambda x: to_probs(x, **settings), Counter()

    def run(coins):
        out = []
        for _, r in rounds(m, [[1, 2, 1]], 4, make_drafter(m), probs, coins):
            out += r.new[0]
            shapes[int(r.accepted), int(r.proposed)] += 1
            if len(out) >= 2:
                return tuple(out[:2])

    assert_same_law(law(run), target_law(m, [1, 2, 1], probs, 2))
    assert len(shapes) > 1, "accepted and refused"


def test_coins_are_spent_in_the_documented_order(models):
    """Chain, siblings rank by rank, a flip for each of them, and one choice, for every row."""
    class Noted(Coins):
        def take(self, count, device):
            spent.append(count)
            return super().take(count, device)

    m, spent = models["llama"], []
    for probs in (to_probs, lambda x: to_probs(x, 1.0)):
        next(rounds(m, PROMPTS, 20, Siblings(SelfDraft(m, range(8), 3), [3, 1]), probs, Noted(0)))
        assert spent == [4, 4, 4, 12, 4, 28, 4]
        spent.clear()
    assert Coins.version == 1


# --- on a GPU of paper


@pytest.mark.parametrize("name", [name for name in TREES if name not in ("drawn", "certain")])
@pytest.mark.parametrize("family, rows", [("llama", 1), ("gemma2", 4)])
def test_one_wait_a_round(family, rows, name):
    """And the text of the CPU, with a seed. What else waits is what waits without siblings."""
    warm, texts = (lambda x: to_probs(x, temperature=0.8, top_p=0.95)), {}
    with PaperGPU() as gpu:
        for device in ("cpu", "cuda"):
            m = make(LIVELY[family], device=device)
            drafter, texts[device], waits = TREES[name](m), [], []
            for _, r in rounds(m, PROMPTS[:rows], 9, drafter, warm, Coins(3)):
                texts[device].append(r.new)
                waits, gpu.waits = gpu.waits, []
                extra = {"exit, stopped": 5, "exit, then n-gram": 1, "exit, then model": 1}.get(name, 0)
                if device == "cuda" and len(texts["cuda"]) > 1:     # not the sending of the prompts
                    assert 1 <= len(waits) <= 1 + extra, waits
    assert texts["cuda"] == texts["cpu"]


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
    assert best_tree([0.4, 0.3, 0.2], 3, 9.0, 0.0) == [], "a level that costs nine passes"
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
    raw = lambda logits: to_probs(logits, 1.0)  # noqa: E731
    teacher = Teacher(m, text, raw)
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


def test_trees_never_overrun_even_if_they_ignore_what_is_left(models, truth):
    m = models["llama"]
    for rows in (4, 1):
        for n in (1, 3, 7):
            wide = Grove([[0] * 6 + [2] * 6 + [8] * 12 + [20] * 6], certain=True)
            assert generate(m, PROMPTS[:rows], n, wide)[0] == [row[:n] for row in truth["llama"][:rows]]
