"""What a student's answer may get wrong although the worked examples come out right: gradients,
other shapes and types, and drawn inputs, which a table of those examples would not know. And the
worked examples of alpha, exercise 16."""
import math
from dataclasses import replace

import pytest
import torch
from teach import compare, short
from test_by_hand import PROBS, check_probabilities
from test_by_outcomes import LATER, mostly_sure, one_row, one_walk, writes_the_law
from test_model import some_x
from test_sampling import from_p
from tiny import LLAMA, wide

from model import RMSNorm, softcap
from search import climb
from support.stats import Counts


def test_softcap_leaves_its_input_and_type_alone():
    x = torch.tensor([2.0]).double()
    compare(softcap(x, None), x, {}, "softcap([2.0], None): no cap, x as it is")
    compare(softcap(torch.tensor([1e-12, 3e-7]).double(), 30.0), [1e-12, 3e-7], {},
            "softcap([1e-12, 3e-7], 30)")
    compare(softcap(torch.tensor([6e4, -6e4]).half(), 50.0), torch.tensor([50, -50]).half(), {},
            "softcap([60000, -60000], 50) in float16")
    for shape in ((), (0,), (2, 1, 3)):
        for cap in (0.3, 7.0, 60.0):
            x = 20 * some_x(1, 1).flatten()[: math.prod(shape)].reshape(shape)
            want = torch.tensor([cap * math.tanh(a / cap) for a in x.flatten().tolist()]).double()
            compare(softcap(x, cap), want.to(x).reshape(shape), {},
                    f"x of shape {shape}, cap = {cap}", 1e-6)
    softcap(torch.empty(3, device="meta"), 2.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_norm_of_any_shape_and_type(dtype, offset):
    """In float16 a square of 300 overflows, so that the norm needs a wider type."""
    norm = RMSNorm(replace(LLAMA, norm_offset=offset), 4).to(dtype).requires_grad_(False)
    norm.weight.copy_(wide([1.5, -0.5, 2.0, 0.25]))
    for shape in ((4,), (2, 1, 3, 4), (0, 4)):
        x = (torch.arange(math.prod(shape)) * 37.0 % 600 - 300).view(shape).to(dtype)
        wide_x = x.double()
        want = wide_x / (wide_x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        want = want * (offset + norm.weight.double())
        in_own = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (offset + norm.weight)
        compare(norm(x), want.to(dtype), {
            "the squares overflow in float16: compute in float32 or wider, "
            "and round at the end": in_own},
            f"x {shape} in {dtype}, numbers from -300 to 300, offset = {offset}",
            2 * torch.finfo(dtype).eps)
    norm.to("meta")(torch.empty(2, 4, dtype=dtype, device="meta"))


def among(row, V, other=0.0):
    """The numbers of a row, far apart in one of V, which is `other` elsewhere."""
    whole = torch.full((V,), other, dtype=torch.float64)
    step = V // len(row)
    whole[step - 1 : step * len(row) : step] = torch.as_tensor(row, dtype=torch.float64)
    return whole


@pytest.mark.parametrize("name", PROBS)
def test_probabilities_of_a_large_vocabulary(name):
    settings, p, want = PROBS[name]
    V = 16_384
    check_probabilities(among(from_p(*p), V, -1e4), settings, among(want, V),
                        f"{V:,} tokens, of which some have the logits log {short(p)} and all "
                        f"others -10,000; {settings}")


@pytest.mark.parametrize("length", [None, 9])
@pytest.mark.parametrize("verifier", [one_row, one_walk], ids=["verify", "verify_tree"])
def test_long_drafts_of_a_large_vocabulary(verifier, length):
    """Where p and q are sure of a token its rejection does not show: each of 12 is in doubt in
    turn."""
    for place in range(12):
        given = (f"12 drafts from q, {length or 12} proposed, "
                 f"of which number {place + 1} is in doubt")
        writes_the_law(verifier, given, range(12), 13, tables=mostly_sure(unsure=[place - 1]),
                       length=length, otherwise=LATER)


def test_a_climb_that_takes_back_what_it_did():
    """A way of seven flips through sets of four bits, of which each is next to no other of the
    way."""
    way, worth = [wide([0, 0, 0, 0])], {(0, 0, 0, 0): 1.0}
    for bit in (0, 1, 2, 0, 3, 1, 0):
        way.append((way[-1] - torch.eye(4).double()[bit]).abs())
        worth[tuple(way[-1].int().tolist())] = 1.0 + len(worth)
    score = lambda z: wide([worth.get(tuple(row), 0.0) for row in z.int().tolist()])    # noqa: E731
    ends, _ = climb(score, torch.stack([way[0], way[4]]), lambda z: z[:, 0] < 2)
    compare(ends.double(), torch.stack([way[-1]] * 2), {
        "it ends after as many flips as there are bits": torch.stack([way[4], way[-1]])},
        "scores that rise along 0000 1000 1100 1110 0110 0111 0011 1011 and are 0 elsewhere, "
        "from the first "
        "and from the fifth of these")


def test_alpha_is_no_share_of_drafted_tokens():
    """A thousand drafts of 5 tokens, each accepted with .8 if the ones before it were: 3.7 tokens
    a round."""
    counts = Counts(1000, 1000, 3689, drafted=1000, hits=800, proposed=5000, accepted=2689)
    compare(wide([counts.alpha]), [0.8], {
        "accepted / proposed is no alpha: it counts the tokens after a rejection, "
        "which were never tested; "
        "with it the formula predicts 2.1 tokens per round, where 3.7 came": [2689 / 5000],
        "accepted tokens per round: the gain, and no probability": [2.689]}, str(counts), rtol=1e-9)
    some = Counts(passes=20, turns=2000, tokens=3800, drafted=1000, hits=800, proposed=1500,
                  accepted=1000)
    compare(wide([some.alpha]), [0.8], {
        "rounds without a draft count as rejections: "
        "divide by the rounds that tested a draft": [0.4],
        "a pass of a batch tests a draft in many rows: divide by `drafted`": [40.0]},
        f"{some}, half of whose turns had no draft")
    for hits, drafted in ((3, 7), (0, 5), (11, 11)):
        counts = Counts(20, 25, 40, drafted, hits, 4 * drafted, hits + 2)
        compare(wide([counts.alpha]), [hits / drafted], {}, str(counts), rtol=1e-9)
    compare(wide([Counts().alpha]), [0.0], {}, "nothing drafted yet: no division by zero, but 0")
