"""The forecasts for quantised models of acceptances and bytes, and the tables by bytes alone."""
from dataclasses import replace

import pytest
import torch
from test_quant import dense
from tiny import FAMILIES, PROMPTS, each_family, make, warm

from lab.bench import __main__ as bench
from lab.bench import quant as bench_quant
from machine.quant import KINDS, byte_costs, quantise
from search import Teacher


@each_family
def test_the_acceptance_of_a_draft_is_that_of_its_first_tokens(family):
    """Of the target's own exit it is the Teacher's; of a copy, or of a model of another size, what
    a pass over the text says."""
    m, text = make(FAMILIES[family]), torch.tensor([PROMPTS[0]])
    t, small = quantise(m, "nf4"), make(replace(FAMILIES[family], dim=24, n_layers=2))
    teacher = Teacher(m, PROMPTS[0], warm)
    assert bench_quant.acceptance(teacher, m, range(8)).tolist() == pytest.approx(
        teacher.acceptance(range(8)).tolist())
    for draft, same, subs in ((t, dense(t), range(12)), (small, small, range(4))):
        assert bench_quant.acceptance(teacher, draft, subs).tolist() == pytest.approx(
            torch.minimum(warm(m(text)), warm(same(text)))[0].sum(-1).tolist())


def test_bytes_on_paper():
    """As large as the checkpoints on Hugging Face are, and as bitsandbytes makes them."""
    shapes = bench_quant.SHAPES.items()
    gigabytes = {name: bench_quant.paper_bytes(c)[2] / 1e9 for name, c in shapes}
    known = {"TinyLlama 1.1B": 2.2, "Llama 3.2 1B": 2.5, "Llama 3.2 3B": 6.4, "Llama 3.1 8B": 16.1,
             "Gemma-2 2B": 5.2, "Gemma-2 9B": 18.5, "Llama 2 13B": 26.0}
    assert gigabytes == pytest.approx(known, abs=0.06)
    assert bench_quant.paper_bytes(bench_quant.LARGE)[2] == pytest.approx(141.1e9, rel=0.001)
    c = replace(FAMILIES["llama"], n_layers=2, dim=256, hidden_dim=512)
    for kind in KINDS:
        own = byte_costs(quantise(make(c).bfloat16(), kind))
        blocks, head, whole = bench_quant.paper_bytes(c, kind)
        assert blocks == pytest.approx(sum(own.sublayers), rel=0.07) and head == own.head
        assert whole == blocks + 2 * head


def test_known_shapes_on_paper():
    """By hand, 40 blocks of 317.2 M weights and a head of 163.8 M, which stays in bfloat16. At
    alpha 0.9 and c = 6.87 / 25.7 5 drafts bring (1 - 0.9^6) / 0.1 = 4.69 tokens for 2.34 passes,
    with int4's c = 8.26 / 25.7 for 2.60."""
    want = ("| Llama 2 13B | 26.0 | 13.3 | 8.6 | 7.2 | 0.51 | 3 | 1.37 | 0.32 | 5 | 1.80 | 0.27 | "
            "5 | 2.00 |")
    assert want in bench_quant.paper_table()


def test_the_benchmark_runs():
    draft = bench_quant.WEIGHTS / "stories-draft"
    argv = ["quant", "--model", str(draft), "--quick", "--new", "8", "--repeats", "1"]
    _, data = bench_quant.run(bench.parse(argv))
    whole, *_, nf4 = data["models"].values()
    for row in (row for rows in data["models"].values() for row in rows.values()):
        assert 0 <= row["alpha"] <= 1 <= row["tau"] <= 4 and 0 < row["c_clock"] and row["speed"] > 0
        assert row["speed_bytes"] == pytest.approx(row["tau_predicted"] / (3 * row["c_bytes"] + 1))
    exits, int8, four = (whole[name] for name in ("exit 1", "int8", "nf4"))
    assert exits["megabytes"] == 0 < four["megabytes"] < int8["megabytes"]
    assert four["c_bytes"] < int8["c_bytes"] < 1 and int8["alpha"] > exits["alpha"]
    assert nf4["stories-draft"]["c_bytes"] > 1, "only the target has few bits"
