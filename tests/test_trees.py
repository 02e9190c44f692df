"""Trees: recursive rejection, the loop, the shapes, and drafts with siblings."""
import itertools
from collections import Counter

import promises
import pytest
import tiny
import torch
from promises import Watched, reader
from test_speculative import dice
from tiny import PROMPTS, TINY, each_family, read, small, warm

from drafter import Draft, Drafter, ModelDraft
from kvcache import KVCache
from lab.then import Then
from layerskip import SelfDraft
from methods import trees
from methods.lookup import NGram
from methods.trees import Siblings, Tree, rank_acceptance, tree_tokens, verify_tree
from sampling import Coins, to_probs
from search import Teacher
from speculative import generate, rounds
from verification import verify

# --- recursive rejection


def random_laws(*shape, seed=0):
    p = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("copied", [False, True])
def test_on_chains_it_is_verify_coin_for_coin(copied):
    B, K, V = 3, 4, 5
    for seed in range(20):
        torch.manual_seed(seed)
        p, q = random_laws(B, K + 1, V, seed=seed), random_laws(B, K, V, seed=99 + seed)
        tokens, length = torch.randint(V, (B, K)), torch.randint(K + 1, (B,))
        q[torch.arange(K) >= length[:, None]] = torch.nan   # dead drafts have no law
        q = None if copied else q
        for parents in (torch.arange(K)[None], torch.arange(K).expand(B, K)):
            coins = Coins(seed), Coins(seed)
            want = verify(p, q, tokens, coins[0], length)
            got = verify_tree(p, tokens, parents, coins[1], q, length)
            assert all(map(torch.equal, got, want)) and coins[0].index == coins[1].index


# --- the loop


class Grove(Drafter):
    """Trees of these shapes, one for all rows or one for each, drawn from AFTER[the token before].
    certain: without q, as if their tokens were copied."""

    def __init__(self, shapes, certain=False):
        super().__init__(9)
        self.shapes, self.certain = shapes, certain

    def propose(self, state):
        rows, parents, device = [], (self.shapes * 4)[: len(state.known)], state.n.device
        laws = AFTER[:, : state.model.c.vocab_size]
        for text, shape in zip(state.known, parents, strict=True):
            coins = Coins(len(text)) if self.certain else state.coins
            rows.append(tiny.plant(shape, lambda way, text=text: laws[[*text, *way][-1]], coins))
        tokens = torch.tensor([tokens for tokens, _, _ in rows], device=device)
        q = torch.stack([torch.stack(q) for _, q, _ in rows]).to(device)
        parents = torch.tensor(self.shapes[:1] if len(self.shapes) == 1 else parents, device=device)
        return Tree(tokens, None if self.certain else q, parents=parents)


AFTER = random_laws(17, 17, seed=3)
TREES = {
    "exit": lambda m: Siblings(SelfDraft(m, range(8), 4), [4, 2, 1]),
    "model": lambda m: Siblings(ModelDraft(small(m), 4), [3, 2]),
    "exit, stopped": lambda m: Siblings(SelfDraft(m, range(8), tiny.Unsure(5)), [5, 2]),
    "exit, then n-gram": lambda m: Siblings(Then(SelfDraft(m, range(8), 2), NGram(2, 1)), [2, 1]),
    "long": lambda m: Siblings(SelfDraft(m, range(10), 12), [12, 12]),
    "drawn": lambda m: Grove([[0, 0, 1, 2, 2, 0, 5]]),
    "certain": lambda m: Grove([[0, 0, 1, 2, 2, 0, 5], [0, 1, 2, 3, 1, 1, 0]], certain=True)}


test_greedy_identity = promises.greedy_identity(TREES, on=["cpu"])
test_poison = promises.poison(TREES, ["exit, stopped", "model"])
test_end_of_text_at_every_position = promises.end_of_text(TREES, ["exit", "certain"], range(6))
test_context_limit = promises.context_limit(TREES, ["exit", "model", "drawn", "long"])
test_one_wait_a_round = promises.one_wait_a_round(
    TREES, ["exit", "model", "exit, stopped", "exit, then n-gram"],
    extra={"exit, stopped": 5, "exit, then n-gram": 1})


@each_family
def test_a_round_of_a_tree_is_a_chain(models, family):
    """A Round holds what belongs to the accepted path, and the cache is what a pass over the text
    leaves."""
    m, seen, drafter = models[family], Counter(), Grove([[0, 0, 1, 2, 2, 0, 5]])
    drafter.taps = (3, 11)
    near = lambda a, b: (a - b).abs().max() < 1e-9  # noqa: E731
    runs = (rounds(m, PROMPTS, 30, drafter, warm, Coins(seed)) for seed in (0, 1))
    for state, r in itertools.chain.from_iterable(runs):
        assert type(r.draft) is Draft and r.draft.reuse is None
        for b, (text, new) in enumerate(zip(state.known, r.new, strict=True)):
            if not new:
                continue    # it has finished
            a, K, held, left = len(new) - 1, int(r.proposed[b]), len(text) - 1, state.left[b]
            assert int(r.accepted[b]) == a <= K == int(r.draft.length[b])
            assert r.draft.tokens[b, :a].tolist() == new[:a]
            fresh, path = KVCache(m.c, 1, 60, torch.float64), slice(held - a - 1, held)
            x, trace = read(m, text, drafter.taps, fresh)
            logits = m.unembed(x)[0, path]
            assert near(r.logits[b, : a + 1], logits) and near(r.p[b, : a + 1], warm(logits))
            assert all(near(r.trace[t][b, : a + 1], trace[t][0, path]) for t in drafter.taps)
            for ours, theirs in ((state.cache.k, fresh.k), (state.cache.v, fresh.v)):
                assert near(ours[:, b, :, :held], theirs[:, 0, :, :held])
            if a < K:       # the first that was refused is the first child there
                assert near(r.draft.q[b, a], AFTER[text[-2]])
            seen[a, K] += left + len(new) > 7
    assert {(0, 3), (1, 1), (1, 2), (2, 3)} <= set(+seen)


# --- siblings


# also after a sibling was accepted, which it never drafted from, and a round without a draft
test_a_draft_model_reads_the_siblings_that_were_accepted = promises.right_drafts({
    "model": lambda m, far: Siblings(reader(small(m), dice(4, False), far), [4, 4, 4])})


def drafts(m, drafter, room):
    """The first draft of a round."""
    seen = []
    next(rounds(m, PROMPTS, room, Watched(drafter, lambda state, draft: seen.append(draft))))
    return seen[0]


def test_the_last_siblings_go_first(models):
    m = models["llama"]
    for room, want in ((9, [0, 1, 2, 0, 1, 2, 0]), (7, [0, 1, 2, 0, 1, 2]), (6, [0, 1, 2, 0, 1])):
        draft = drafts(m, Siblings(SelfDraft(m, range(8), 3), [3, 1]), room)
        assert draft.parents[0].tolist() == want
    assert type(drafts(m, Siblings(SelfDraft(m, range(8), 3), [3, 1]), 4)) is Draft


def test_rows_with_short_chains_have_no_siblings(models):
    m = models["llama"]
    draft = drafts(m, Siblings(SelfDraft(m, range(8), tiny.Says([3, 1, 3, 0])), [2, 1]), 20)
    assert draft.length.tolist() == [6, 1, 6, 0]
    assert type(drafts(m, Siblings(NGram(4, 2), [4, 4]), 20)) is Draft, "a copy has no siblings"


test_exact_law = promises.exact_law({
    "exit, top-p": (TINY, lambda m: Siblings(SelfDraft(m, range(4), 2), [1])),
    "gemma2 skip": (tiny.TINY_GEMMA, lambda m: Siblings(SelfDraft(m, [0, 2, 3, 5], 2), [1])),
    "certain": (TINY, lambda m: Grove([[0, 0, 2]], certain=True)),
}, room=4)


# --- shapes


def all_trees(nodes):
    """The parents of every tree of at most `nodes` nodes, level by level."""
    found, new = [[]], [[]]
    for _ in range(nodes):
        new = [[*t, u] for t in new for u in range(t[-1] if t else 0, len(t) + 1)]
        found += new
    return found


@pytest.mark.parametrize("acceptance, depth_cost, node_cost", [
    ([0.6, 0.2, 0.1], 0.1, 0.02), ([0.3, 0.35], 0.05, 0.05), ([0.9], 0.1, 0.1), ([], 0.0, 0.0)])
def test_the_best_tree_is_the_best_of_all(acceptance, depth_cost, node_cost):
    def speed(parents):
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        cost = 1 + max(depths) * depth_cost + len(parents) * node_cost
        return tree_tokens(parents, acceptance) / cost

    def of_siblings(parents):
        return all(u == 0 or parents[: u - 1].count(parents[u - 1]) == 0 for u in parents)

    every = [t for t in all_trees(5) if max(map(t.count, t), default=0) <= len(acceptance)]
    for branches, some in ((True, every), (False, [t for t in every if of_siblings(t)])):
        best = trees.best_tree(acceptance, 5, depth_cost, node_cost, branches)
        assert best in some and speed(best) == pytest.approx(max(map(speed, some)))


def test_measured_ranks_are_what_first_families_accept(models):
    m, text = models["llama"], [1, 5, 3, 2, 9, 4, 4, 7, 0, 16, 8, 8, 2, 11, 3, 3, 5]
    teacher = Teacher(m, text, warm)
    ranks = rank_acceptance(to_probs(teacher.p.log()), teacher.q(range(8)), 3)
    prefixes = [text[: i + 1] for i in range(len(text))]
    for widths in [], [1], [1, 1]:
        _, r = next(rounds(m, prefixes, 4, Siblings(SelfDraft(m, range(8), 1), widths)))
        found = r.accepted.double().mean()
        assert found == pytest.approx(sum(ranks[: 1 + len(widths)]))
    assert all(rank > 0 for rank in ranks)


def test_what_makes_no_sense_is_refused(models):
    m = models["llama"]
    with pytest.raises(ValueError, match="a tree has several ends"):
        generate(m, PROMPTS, 20, Then(TREES["exit"](m), NGram(2, 1)))
