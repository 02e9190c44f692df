"""The benchmark of trained heads: its rules are exact or known not to be, and what it predicts is counted
otherwise, too. Nothing here depends on how fast anything is."""
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from matplotlib import image
from test_heads import still, wild
from tiny import PROMPTS, command, each_family, foreseeable, law, oracle, story_tokenizer, warm

import bench
import checkpoint
from benchmarks import heads as measured
from benchmarks import rules, sweep
from benchmarks.drafters import Method, Sample
from benchmarks.heads import Exit, Way, along, family, followed, head_ways, skipping
from benchmarks.shared import WEIGHTS
from control import expected_tokens, weight_costs
from layerskip import Teacher
from methods import heads
from methods.heads import Kangaroo, Medusa, Prophet, Transfer
from methods.trees import tree_tokens
from sampling import Coins, to_probs
from speculative import generate, rounds
from verification import verify_tree

DRAFT = WEIGHTS / "stories-draft"
call = command(bench.main)


def laws_of(V, count, T=1.0, seed=0):
    """Random pairs (p, q) of float64, sharp where T is small."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(count, 2, V, generator=g, dtype=torch.float64) * 1.5
    return [tuple(to_probs(pair, T)) for pair in z]


HARD = [torch.tensor(pair, dtype=torch.float64) for pair in (
    [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]],     # the same
    [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]],     # nothing in common
    [[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]],     # a certain target
    [[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]],     # a certain draft
    [[0.7, 0.3, 0.0], [0.4, 0.0, 0.6]])]
PAIRS = [*laws_of(3, 3), *laws_of(4, 2, 0.4, 7), *map(tuple, HARD)]
each_pair = pytest.mark.parametrize("p, q", PAIRS, ids=range(len(PAIRS)))
GUESSES = [(pair, k) for i, pair in enumerate(PAIRS) for k in (1, 2, 3) if k < 3 or i in (0, 5, 9)]
each_case = pytest.mark.parametrize("pair, k", GUESSES, ids=range(len(GUESSES)))


# --- verification rules


def test_ways_to_draw_by_hand():
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    tokens, drawn, chance = rules.draws(q, 2, again=False)
    found = {tuple(t): c for t, c in zip(tokens.tolist(), chance.tolist(), strict=True)}
    assert found == pytest.approx({(0, 1): 0.3, (0, 2): 0.2, (1, 0): 0.3 * 5 / 7, (1, 2): 0.3 * 2 / 7,
                                   (2, 0): 0.2 * 5 / 8, (2, 1): 0.2 * 3 / 8})
    assert drawn[0, 1].tolist() == pytest.approx([0, 0.6, 0.4])
    tokens, drawn, chance = rules.draws(q, 2, again=True)
    assert len(tokens) == 9 and float(chance.sum()) == pytest.approx(1)
    assert float(chance[tokens.tolist().index([2, 2])]) == pytest.approx(0.04)
    assert (drawn == q).all()
    tokens, drawn, chance = rules.draws(torch.tensor([0.0, 1.0, 0.0]), 3, again=False)
    assert tokens.tolist() == [[1, 0, 2]] and chance.tolist() == [1], "nothing is left: the lowest other ids"
    assert drawn[0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    tokens, drawn, chance = rules.certain(q, 2)
    assert tokens.tolist() == [[0, 1]] and drawn[0].tolist() == [[1, 0, 0], [0, 1, 0]] and chance == 1


def enumerated(rule, ways, p, q):
    """The distribution of a rule's token over all draws and all of its coins. (V,)"""
    found = torch.zeros_like(p)
    for tokens, drawn, chance in zip(*ways, strict=True):
        outcomes = law(lambda coins, t=tokens, d=drawn: int(rule(p, q, t[None], d[None], coins)))
        for token, weight in outcomes.items():
            found[token] += chance * weight
    return found


@each_case
def test_exact_law_of_several_guesses(pair, k):
    """Over all draws and coins the token is distributed like p: of SpecTr's k-sequential selection, and of
    recursive rejection, whether or not siblings are drawn again."""
    p, q = pair
    for rule, again in ((rules.k_sequential, True), (rules.recursive, True), (rules.recursive, False)):
        assert (enumerated(rule, rules.draws(q, k, again), p, q) - p).abs().max() < 1e-12


@each_case
def test_acceptance_is_what_the_coins_do(pair, k):
    """What is computed from chances is what an enumeration of the rule itself counts."""
    p, q = pair
    for again in (True, False):
        tokens, drawn, chance = rules.draws(q, k, again)
        each = rules.tried(p.expand(len(tokens), -1), tokens, drawn)            # (M, k)

        def node(coins, t, d):
            node, _ = verify_tree(p.expand(1, k + 1, -1), t[None], t.new_zeros(1, k), coins, d[None])
            return int(node)

        for i, (t, d) in enumerate(zip(tokens, drawn, strict=True)):
            counted = law(lambda coins, t=t, d=d: node(coins, t, d))
            assert each[i].tolist() == pytest.approx([counted.get(j + 1, 0.0) for j in range(k)], abs=1e-12)
    tokens, _, chance = rules.draws(q, k, True)
    part, rho = rules.shared_part(p, q, k)
    passed = (p / (rho * q))[tokens].clamp(max=1)                               # (M, k)
    kept = float((1 - (1 - passed).prod(1)) @ chance)
    assert rules.k_sequential_acceptance(p, q, k) == pytest.approx(kept, abs=1e-9)
    if k == 1:
        assert rho == pytest.approx(1) and kept == pytest.approx(float(torch.minimum(p, q).sum()))


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


@each_pair
def test_the_optimum_is_the_cut(p, q):
    """Of draws without replacement it is that of `optimum`, which enumerates otherwise; of independent
    ones the sets that matter are those of the tokens with the smallest p / q."""
    for k in (1, 2, 3):
        tokens, _, chance = rules.draws(q, k, True)
        order = (p / q).nan_to_num(math.inf).argsort()
        first = [order[:i] for i in range(len(p) + 1)]
        least = min(float(p[H].sum() + 1 - q[H].sum() ** k) for H in first)
        assert rules.optimum(p, tokens, chance) == pytest.approx(least, abs=1e-12)
        if (q > 0).all():
            tokens, _, chance = rules.draws(q, k, False)
            assert rules.optimum(p, tokens, chance) == pytest.approx(optimum(p, q, k), abs=1e-12)


@pytest.mark.parametrize("T", [1.0, 0.3])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_no_exact_rule_exceeds_the_optimum(T, k):
    """And the order that theory gives: SpecTr keeps at least 1 - 1/e of what can be kept."""
    means = {}
    for p, q in laws_of(5, 12, T, seed=3):
        r = rules.judge(p, q, k)
        for name, most in (("recursive, drawn again", "optimum of these"), ("SpecTr", "optimum of these"),
                           ("recursive, not again", "optimum"), ("the k best", "optimum")):
            bound = rules.optimum(p, *itertools.compress(rules.certain(q, k), (1, 0, 1))) if (
                name == "the k best") else r[most]
            assert r[name] <= bound + 1e-9, name
        assert r["SpecTr"] >= (1 - 1 / math.e) * r["optimum of these"] - 1e-9
        assert r["the k best"] == pytest.approx(float(p[q.topk(k).indices].sum())), "all that it can"
        for name, x in r.items():
            means[name] = means.get(name, 0.0) + x / 12
    chain = sum(float(torch.minimum(p, q).sum()) for p, q in laws_of(5, 12, T, seed=3)) / 12
    if k == 1:
        assert means["recursive, drawn again"] == pytest.approx(chain) == pytest.approx(means["SpecTr"])
    else:
        assert chain < means["recursive, drawn again"] < means["SpecTr"] < means["optimum of these"]
        assert means["recursive, not again"] > means["optimum of these"], "drawing anew wastes guesses"


def test_typical_acceptance_is_not_exact():
    """Whatever it is given, it flips no coin: the law of its token is far from p, unless p is certain."""
    far = []
    for p, q in laws_of(5, 8, 1.0, seed=5):
        ways = rules.draws(q, 2, False)
        found = enumerated(rules.typical, ways, p, q)
        assert (found - rules.law_of_typical(p, ways[0], ways[2])).abs().max() < 1e-12
        far.append(float((found - p).abs().sum() / 2))
        assert rules.judge(p, q, 2)["its bias"] == pytest.approx(far[-1])
    assert min(far) > 0.05 and sum(far) / len(far) > 0.2
    sure = torch.tensor([0.0, 1.0, 0.0])
    assert rules.law_of_typical(sure, torch.tensor([[0, 1], [2, 0]]), torch.tensor([0.5, 0.5])).tolist() == [
        0, 1, 0]


def test_typical_acceptance_by_hand():
    """p's entropy is 1.5 bits, so that .3 exp(-H) = .106: the bound is .09."""
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert rules.passes(p, torch.tensor([[0, 3, 1]])).tolist() == [[True, False, True]]
    flat = torch.full((16,), 1 / 16, dtype=torch.float64)
    assert rules.passes(flat, torch.tensor([[3]])).all(), "1/16 > .3 / 16"
    tokens = torch.tensor([[1, 0], [3, 1], [3, 3]])
    assert rules.typical(p, None, tokens, None, None).tolist() == [0, 1, 0], "the likeliest; or the best of p"


def test_the_table_holds_the_means_over_all_places():
    logits = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lines, data = rules.compare(logits)
    assert set(data) == {f"{T}, {k}" for T in (0.3, 0.7, 1.0) for k in (1, 2, 4)}
    for key, r in data.items():
        T, k = float(key.split(",")[0]), int(key[-1])
        found = [rules.judge(*to_probs(z, T), k) for z in logits]
        assert r == pytest.approx({name: sum(f[name] for f in found) / 6 for name in found[0]})
        assert f"| {T} | {k} | " + " | ".join(f"{x:.3f}" for x in r.values()) + " |" in lines
        assert r["its bias"] > 0.01


def test_the_tokens_of_a_place_are_those_that_matter(models):
    teacher = Teacher(models["llama"], PROMPTS[0], lambda z: z)
    both = rules.pairs(teacher, range(4), 3)
    assert both.shape == (3, 2, rules.TOKENS)
    p, q = teacher.p[0, -1], teacher.draft(range(4))[0, -1]
    order = (p.softmax(-1) + q.softmax(-1)).argsort(descending=True)[: rules.TOKENS]
    assert torch.equal(both[-1], torch.stack([p[order], q[order]]))


# --- what is predicted


def test_chains_are_followed_as_the_formula_follows_them():
    """Of an exit, which accepts a token alike wherever a draft begins."""
    g = torch.Generator().manual_seed(0)
    texts = [torch.rand(n, generator=g, dtype=torch.float64) for n in (9, 4, 30)]
    for gamma in (1, 2, 4):
        series = [t.unfold(0, gamma, 1)[..., None] for t in texts]
        assert followed(series, range(gamma)) == pytest.approx(expected_tokens(texts, gamma))
    assert followed(series, []) == 1
    with pytest.raises(ValueError, match="^no text is as long as a draft of 2 tokens$"):
        followed([torch.zeros(0, 2, 1)], [0, 1])


def test_trees_are_followed_as_all_places_alike():
    """Where they are alike it is Sequoia's formula, whatever the shape."""
    ranks = [0.5, 0.25, 0.125]
    series = [torch.tensor(ranks).expand(50, 3, 3)]
    for parents in ([0], [0, 1, 0], [0, 0, 0, 1, 1, 4], [0, 1, 2, 1, 2]):
        assert followed(series, parents) == pytest.approx(tree_tokens(parents, ranks))


def test_a_tree_is_followed_by_hand():
    """Levels differ: a first child is always right, its child never, but its second child is. So each round
    writes two tokens and the one after, and starts three places on."""
    A = torch.zeros(7, 2, 2)
    A[:, 0, 0] = 1
    A[:, 1, 1] = 1
    assert followed([A], [0, 1, 1]) == 3 and followed([A], [0, 1]) == 2
    A[0, 0, 0] = 0          # the round at the first place fails at once, and the next one begins at place 1
    assert followed([A], [0, 1, 1]) == pytest.approx((1 + 3 + 3) / 3)


TREE = [0, 0, 0, 1, 1, 2, 4, 4]


@each_family
@pytest.mark.parametrize("make_head", [lambda m: Medusa(m, 3), lambda m: Transfer(m, 3, 3),
                                       lambda m: Kangaroo(m, 4), lambda m: Prophet(m, 1)],
                         ids=["medusa", "transfer", "kangaroo", "prophet"])
def test_greedy_tau_is_foretold_exactly(models, family, make_head):
    """Along plain decoding's own text a greedy round can be foretold without any doubt: so the prediction is
    what the loop counts, but for rounds near the end of the text."""
    m, prompt = models[family], PROMPTS[0]
    head = wild(make_head(m), 0.05)
    text = prompt + oracle(m, prompt, 40)
    A = along(head, text, len(prompt) - 1, to_probs, Coins(0))
    assert A.shape[1:] == (min(measured.LEVELS, measured.farthest(head)), heads.RANKS)
    assert set(A.unique().tolist()) <= {0.0, 1.0}
    parents = TREE if head.kind in ("medusa", "transfer") else range(3)
    drafter = head.drafter(3, TREE if head.branches else None)
    taken = [len(r.new[0]) for _, r in rounds(m, [prompt], 40, drafter)]
    if head.kind == "transfer":     # in its first round nothing has ridden along yet
        A, taken = A[1:], taken[1:]
    told, at = [], 0
    while at < len(A) - 9:          # near its end a text has no room for the whole tree
        told.append(round(followed([A[at : at + 1]], parents)))
        at += told[-1]
    assert told == taken[: len(told)] and len(told) > 4


def test_ranks_are_those_of_real_draws(models):
    """When sampling: on average over many draws the chances of the first rank are the sum of min(p, q), and
    no more than certainty is given away."""
    g = torch.Generator().manual_seed(1)
    z = torch.randn(2, 1, 9, generator=g, dtype=torch.float64)
    warm = lambda logits: to_probs(logits, 0.8)  # noqa: E731
    p, logits = warm(z[0]).expand(4000, -1), z[1].expand(4000, -1)
    found = family(p, logits, warm, Coins(0))
    assert found.shape == (4000, heads.RANKS) and float(found.sum(1).max()) <= 1 + 1e-9
    alpha = float(torch.minimum(p, warm(logits))[0].sum())
    assert float(found[:, 0].mean()) == pytest.approx(alpha, abs=0.02)
    tokens, drawn, chance = rules.draws(warm(z[1, 0]), 3, False)
    exact = chance @ rules.tried(p[: len(tokens)], tokens, drawn)
    assert found.mean(0)[:3].tolist() == pytest.approx(exact.tolist(), abs=0.02)
    sure = family(p[:1], logits[:1], to_probs, Coins(0))[0]     # a greedy draft offers its best tokens
    assert sure.tolist() == pytest.approx(p[0, logits[0].topk(heads.RANKS).indices].tolist())


def test_a_text_too_short_is_left_out(models):
    m = models["llama"]
    for head in (Medusa(m, 3), Kangaroo(m, 2), Prophet(m, 1)):
        A = along(head, PROMPTS[0][:4], 2, to_probs, Coins(0))
        assert len(A) == 0 and A.shape[2] == heads.RANKS
    assert along(Kangaroo(m, 2), PROMPTS[0] * 2, 7, to_probs, Coins(0)).shape == (2, 8, heads.RANKS)


def test_an_exit_along_a_text_is_the_teacher(models):
    """An adapter that changes nothing."""
    m = models["gemma2"]
    text = PROMPTS[0] + oracle(m, PROMPTS[0], 20)
    teacher = Teacher(m, text, warm)
    way = skipping(m, range(4), 3, [(teacher, 7)])
    a = teacher.acceptance(range(4))[7:]
    assert torch.equal(way.series[0][:, :, 0], a.unfold(0, 3, 1)) and way.levels == 3
    greedy = Teacher(m, text).acceptance(range(4))[7:]
    for head in (still(Kangaroo(m, 2)), Exit(m, 2)):
        A = along(head, text, 7, to_probs, Coins(0))[:, :, 0]
        assert torch.equal(A, greedy.unfold(0, measured.LEVELS, 1))


def test_a_bare_exit_is_measured_as_a_head_is(models):
    """Chains and trees; but it is none, and costs what a self-draft costs."""
    m = models["gemma2"]
    bare, A = Exit(m, 2), torch.full((9, 4, heads.RANKS), 0.2, dtype=torch.float64)
    assert heads.step_cost(bare) == pytest.approx(weight_costs(m.c).step(range(4)))
    ways = head_ways("exit 2", {torch.float64: bare}, [A], 0.1, (6,))
    assert list(ways) == ["exit 2, gamma 1", "exit 2, tree of 6"]
    for way in ways.values():
        assert way.head is None
        assert generate(m, PROMPTS, 8, way.make(m))[0] == [oracle(m, p, 8) for p in PROMPTS]


def test_the_ways_of_a_head(models):
    """The gamma that promises most, and trees as large as asked for."""
    m = models["llama"]
    head, A = Medusa(m, 3), torch.zeros(30, 3, heads.RANKS, dtype=torch.float64)
    A[:, 0, 0], A[:, 1, 0], A[:, 2, 0], A[:, :, 1] = 0.9, 0.8, 0.05, 0.05
    ways = head_ways("medusa", {torch.float64: head}, [A], 0.1, (4, 8))
    assert list(ways) == ["medusa, gamma 2", "medusa, tree of 4", "medusa, tree of 8"]
    chain, small, large = ways.values()
    assert chain.parents == [0, 1] and chain.ranks is None and chain.step == heads.step_cost(head)
    assert len(small.parents) == 4 and len(large.parents) == 8
    assert small.ranks == pytest.approx([1.75 / 3, 0.05, 0, 0, 0])
    assert followed([A], large.parents) > followed([A], small.parents) > followed([A], [0, 1])
    for way in ways.values():
        assert generate(m, PROMPTS, 8, way.make(m))[0] == [oracle(m, p, 8) for p in PROMPTS]


def test_what_a_head_is_worth_by_hand():
    """Plain decoding takes 1 s a round, the head 2 s, and writes 3 tokens."""
    plain = Method(samples={0: [Sample([1] * 6, 0.0, 6.0, 6)]})
    m = Method(samples={0: [Sample([1] * 6, 0.0, 4.0, 2)]})
    A = torch.tensor([[0.5, 1.0]] * 9)[..., None]
    way = Way(None, [0, 1], 0.25, [A], None, "it", [(2, 2), (0, 2), (1, 2)])
    got = measured.widen({"tau": 3.0}, way, m, plain)
    assert got["alpha"] == 0.5 and got["positions"] == pytest.approx([2 / 3, 1 / 2])
    assert got["tau_predicted"] == 2 and got["predicted"] == 1 and got["by_weights"] == 2
    assert "sequoia" not in got
    way.ranks = [0.5]
    assert measured.widen({"tau": 3.0}, way, m, plain)["sequoia"] == 1.75


# --- small heads, and the whole


def test_small_heads_learn(tmp_path):
    """A Transfer trained for a few steps on the model's own text says it better than before."""
    a, m = SimpleNamespace(model=tmp_path, quick=True, minutes=None), foreseeable()
    flags, text = sweep.prepare(a, m, story_tokenizer(), 2)
    assert flags.minutes == 0.05 and flags.context == 64 and len(text.valid) == 1
    flags.minutes, flags.tokens, flags.lr, flags.warmup = None, 25 * 128, 0.01, 3
    head = Transfer(m, 3, 2)
    before = sweep.train_heads.evaluate(head, text.valid["own text"], 64, 4096)["overlap"]
    told = sweep.train(head, flags, text)
    after = told["overlap"]
    assert told["trained"] == flags.tokens == 25 * 128
    assert after[0] > before[0] + 0.2, (before, after)
    flags.minutes, flags.tokens = 1e-9, 1e12
    assert sweep.train(head, flags, text)["overlap"] != after, "a step, and the time is over"
    tau, positions = sweep.drafted(m, [[0, 3], [0, 5]], 12, lambda: still(Kangaroo(m, 6)).drafter(3))
    assert tau == 4 and positions == [1, 1, 1], "after the last block all is accepted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with untrained heads beside its weights."""
    out = shutil.copytree(DRAFT, tmp_path_factory.mktemp("heads") / "model")
    m, _ = checkpoint.load(out, "cpu", torch.bfloat16)
    for head in (Kangaroo(m, 1), Medusa(m, 2), Transfer(m, 1, 2), Prophet(m, 1)):
        (out / "heads" / head.kind).mkdir(parents=True)
        heads.save(head, out / "heads" / head.kind)
    return out


def test_which_heads_are_measured(folder, tmp_path):
    a = SimpleNamespace(model=folder, heads=None)
    kinds = ["kangaroo", "medusa", "prophet", "transfer"]
    assert list(measured.folders(a)) == kinds
    a.heads = [folder / "heads" / "medusa"]
    assert measured.folders(a) == {"medusa": a.heads[0]}
    shutil.copytree(folder / "heads" / "medusa", tmp_path / "more" / "medusa")
    a.heads = [tmp_path / "more", folder / "heads"]
    assert set(measured.folders(a)) == {"kangaroo", "prophet", "transfer", str(tmp_path / "more" / "medusa"),
                                        str(folder / "heads" / "medusa")}
    assert measured.folders(SimpleNamespace(model=DRAFT, heads=None)) == {}
    a.heads = [tmp_path]
    with pytest.raises(FileNotFoundError, match="no trained heads, as train_heads.py writes them"):
        measured.folders(a)


def test_the_whole_benchmark(call, folder, tmp_path):
    argv = "heads", "--model", folder, "--quick", "--new", "8", "--minutes", "0.01"
    status, out, err = call(*argv, "--out", tmp_path / "made")
    assert (status, err) == (0, ""), err
    assert (tmp_path / "made.md").read_text() == out
    assert image.imread(tmp_path / "made.png").std() > 0.05
    data = json.loads((tmp_path / "made.json").read_text())
    assert list(data["results"]) == ["stories, T 0", "stories, T 0.8"] and data["what"] == "heads"
    kinds = {"kangaroo", "medusa", "prophet", "transfer"}
    assert set(data["heads"]) == set(data["said"]["stories, T 0"]) == kinds
    for rows in data["results"].values():
        heads_of = {name: r for name, r in rows.items() if r.get("head")}
        assert {r["head"] for r in heads_of.values()} == kinds and len(heads_of) == 14
        assert rows["plain"]["ratio"] == 1 and rows["plain"]["tau"] == 1
        assert {"do no harm, n-gram tail", "exit 1, tree of 8"} <= {*rows}
        assert any(name.startswith("exit 1, gamma") for name in rows)
        for name, r in heads_of.items():
            assert 1 <= r["tau"] and f"| {name} | " in out
            assert ("sequoia" in r) == ("tree of 8" in name)
            if "do no harm" not in name:
                assert 1 <= r["tau_predicted"] and r["predicted"] > 0 and r["by_weights"] > 0
    assert out.count(" is the fastest, and its tau is off by ") == 2
    assert out.count("Best: ") == 2 and f"{data['model']}" in out.splitlines()[0]
    for name, r in data["heads"].items():
        assert f"| {name} | {name} | {r['parameters']} |" in out
    assert list(data["sweep"]["transfer"]) == ["0", "1", "2"], "two blocks: their quarters coincide"
    assert [r["rows"] for r in data["sweep"]["transfer"].values()] == [3, 1.5, 0]
    assert all(r["trained"] >= 128 for r in data["sweep"]["transfer"].values()), "at least one step each"
    assert list(data["sweep"]["lucidrains"]) == ["exit 1", "extra block", "recycling (eagle)", "prophet"]
    assert data["rules"]["1.0, 2"]["its bias"] > 0.01


def test_without_heads_the_rest_is_measured(call, tmp_path):
    status, out, err = call("heads", "--model", DRAFT, "--quick", "--new", "8", "--minutes", "0.01")
    assert (status, err) == (0, "")
    assert "No trained heads beside these weights: python train_heads.py KIND" in out
    assert "Without training" in out and "tree of 8 is the fastest" in out and "**Hidden Transfer" in out
