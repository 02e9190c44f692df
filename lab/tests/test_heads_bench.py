"""The benchmark of trained heads: its rules are exact, and what it predicts is counted, too."""
import itertools
import json
import shutil

import pytest
import torch
from tiny import command, law

import checkpoint
from lab.bench import __main__ as bench
from lab.bench import heads as measured
from lab.bench import rules
from lab.bench.shared import WEIGHTS
from methods import heads
from methods.heads import Kangaroo, Medusa
from sampling import to_probs
from verification import verify_tree

call = command(bench.main)


def laws_of(V, count, T=1.0, seed=0):
    """Random pairs (p, q) of float64, sharp where T is small."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(count, 2, V, generator=g, dtype=torch.float64) * 1.5
    return [tuple(to_probs(pair, T)) for pair in z]


HARD = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]],        # nothing in common
                     [[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]],        # a certain target
                     [[0.7, 0.3, 0.0], [0.4, 0.0, 0.6]]], dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("p, q", [*laws_of(3, 2), *laws_of(4, 1, 0.4, 7), *HARD])
def test_what_the_library_accepts_is_computed(p, q, k):
    """Over all draws, as enumerated coins say of each."""
    tokens, drawn, _ = rules.draws(q, k, False)
    parents, each = torch.zeros(1, k).long(), rules.tried(p.expand(len(tokens), -1), tokens, drawn)
    for i, (t, d) in enumerate(zip(tokens, drawn, strict=True)):
        counted = law(lambda coins, t=t, d=d: int(verify_tree(
            p.expand(1, k + 1, -1), t[None], parents, coins, d[None])[0]))
        assert each[i].tolist() == pytest.approx([counted.get(j + 1, 0.0) for j in range(k)])


def test_no_exact_rule_exceeds_the_optimum():
    """The least of p(H) + 1 - Pr(all drafts lie in H) over all sets H (Sun et al. 2023)."""
    sets = [set(H) for n in range(6) for H in itertools.combinations(range(5), n)]
    for p, q in laws_of(5, 12, seed=3):
        r = rules.judge(p, q, 2)
        for again, name in ((True, "optimum of these"), (False, "optimum")):
            tokens, _, chance = rules.draws(q, 2, again)
            ways = [*zip(map(set, tokens.tolist()), chance.tolist(), strict=True)]
            cut = min(float(p[[*H]].sum()) + 1 - sum(c for t, c in ways if t <= H) for H in sets)
            assert r[name] == pytest.approx(cut)
        assert r["recursive, drawn again"] <= r["optimum of these"] + 1e-9
        assert r["recursive, not again"] <= r["optimum"] + 1e-9


def test_typical_acceptance_by_hand():
    """p's entropy is 1.5 bits, so that 0.3 exp(-H) = 0.106: the bound is 0.09."""
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    assert rules.passes(p, torch.tensor([[0, 3, 1]])).tolist() == [[True, False, True]]
    assert rules.passes(torch.full((16,), 1 / 16), torch.tensor([[3]])).all(), "1/16 > 0.3 / 16"
    tokens = torch.tensor([[1, 0], [3, 1], [3, 3]])
    assert rules.typical(p, tokens).tolist() == [0, 1, 0]


def test_the_shapes_of_a_head_are_those_that_promise_most(models, monkeypatch):
    head = Kangaroo(models["llama"], 2)
    head.ranks = [0.8, 0.1]
    monkeypatch.setattr(measured, "NODES", 4)
    chain, tree = measured.shapes(head, 0.3).values()
    assert chain == [0, 1, 2], "2.95 tokens for 1.9 passes"
    assert tree == [0, 0, 1, 1], "2.62 tokens for 1.6 passes"


def test_the_whole_benchmark(call, tmp_path):
    """With untrained heads beside the weights."""
    folder = shutil.copytree(WEIGHTS / "stories-draft", tmp_path / "model")
    m, _ = checkpoint.load(folder, "cpu", torch.bfloat16)
    for head in (Kangaroo(m, 1), Medusa(m, 2)):
        (folder / "heads" / head.kind).mkdir(parents=True)
        heads.save(head, folder / "heads" / head.kind)
    status, out, err = call("heads", "--model", folder, "--quick", "--new", "8", "--repeats", "1",
                            "--prompts", "code", "--out", tmp_path / "made")
    assert (status, err) == (0, "")
    data = json.loads((tmp_path / "made.json").read_text())
    for rows in data["results"].values():
        assert {"do no harm, n-gram tail", "medusa, tree of 8", "kangaroo, do no harm"} <= {*rows}
        assert all(r["tau"] >= 1 and f"| {name} | " in out for name, r in rows.items())
