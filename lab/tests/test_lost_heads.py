"""Trained heads that lose by the project's own tables (M2R2, Hidden Transfer, prophets): the text
stays the target's, and drafting says what training trained."""
import promises
import pytest
import torch
from teach import picture
from test_heads import GROVE, both_ways, wild
from tiny import PROMPTS, TINY_GEMMA, Unsure, each_family, fork, read, warm

from kvcache import KVCache
from lab.m2r2 import M2R2, Foreseen
from lab.train_heads import judged
from lab.transfer import Transfer, ahead
from layerskip import SelfDraft
from methods.heads import Prophet
from methods.then import Then
from methods.trees import Siblings
from sampling import Coins
from speculative import NGram, ancestors, rounds

DRAFTERS = {
    "m2r2": lambda m: wild(M2R2(m, 3)).drafter(4),
    "m2r2, siblings": lambda m: Siblings(wild(M2R2(m, 5, 4)).drafter(3), [3, 1]),
    "transfer": lambda m: wild(Transfer(m, 0, 4)).drafter(Unsure(4)),
    "transfer, tree": lambda m: wild(Transfer(m, 4, 4)).drafter(4, GROVE),
    "prophet": lambda m: Then(wild(Prophet(m, 2)).drafter(3), NGram(2, 1)),
}
LAWS = {
    "gemma2 m2r2": (TINY_GEMMA, lambda m: wild(M2R2(m, 2, 2)).drafter(2)),
    "gemma2 transfer": (TINY_GEMMA, lambda m: wild(Transfer(m, 2, 2)).drafter(2, [0, 0, 1])),
}
HEADS = {"m2r2": lambda m: M2R2(m, 3, 4), "transfer": lambda m: Transfer(m, 3, 3),
         "from the embedding": lambda m: Transfer(m, 0, 3), "prophet": lambda m: Prophet(m, 2)}
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_exact_law = promises.exact_law(LAWS, count=2)
test_drafts_are_what_training_sees = promises.right_drafts(both_ways(HEADS))
test_one_wait_a_round = promises.one_wait_a_round(DRAFTERS, ["m2r2", "transfer, tree"])


@each_family
def test_heads_start_as_the_model_itself(models, family):
    m, ids = models[family], PROMPTS[0]
    row, bare = ([r.accepted.tolist() for _, r in rounds(m, PROMPTS, 20, drafter)]
                 for drafter in (M2R2(m, 2).drafter(3), SelfDraft(m, range(4), 3)))
    assert row == bare, "an untrained second row is the first one"
    cache = KVCache(m.c, 1, 8, torch.float64)
    _, trace = read(m, ids, [11], cache)
    for k, said in Transfer(m, 6, 2).predict(torch.tensor([ids]), trace, cache):
        assert (said - m.unembed(trace[11])[:, :-k]).abs().max() < 1e-9
    prophet, half = Prophet(m, 2).own.blocks[1].mlp, m.c.hidden_dim // 2
    x = torch.linspace(-1, 1, m.c.dim, dtype=torch.float64)
    gate, up = (w @ x for w in m.blocks[1].mlp.gate_up.chunk(2))
    some = m.blocks[1].mlp.act(gate[:half]) * up[:half]
    assert torch.allclose(prophet(x[None])[0], m.blocks[1].mlp.down[:, :half] @ some)


@torch.inference_mode()
@each_family
def test_an_accelerated_row_changes_neither_the_ordinary_one_nor_the_cache(models, family):
    m = models[family]
    state, _ = next(rounds(m, PROMPTS, 9))
    found = []
    for head in wild(M2R2(m, 3)), wild(M2R2(m, 3), 30.0), m:
        cache, trace = fork(state.cache), dict.fromkeys((1, 4))
        x, at = m.embed(state.last()), state.at(0)
        head.run(x, at, cache, range(6), trace)
        found.append((*trace.values(), cache.k, cache.v))
    for row, other, bare in zip(*found, strict=True):
        assert torch.equal(row, other), "the ordinary row saw the other"
        assert row.shape == bare.shape and (row - bare).abs().max() < 1e-11


def test_what_counts_besides_by_hand(models):
    """The distance of vectors of one size, and the gate's cross-entropy, which bends no adapter."""
    m, unit = models["llama"], lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()
    overlap = torch.linspace(0, 1, 8, dtype=torch.float64)[None]
    assert M2R2(m, 4).taps == [3, 5, 9, 11], "as many times further up as the exit is"
    for align in (0.0, 2.0):
        head = wild(M2R2(m, 3, 4, align))
        list(judged(head, torch.tensor([PROMPTS[0]])))
        _, trace = read(m, PROMPTS[0], (3, 7, 11))
        far = (unit(head.states.detach()) - unit(torch.stack([*trace.values()], 2))).pow(2).mean()
        p = head.gate().sigmoid().detach()
        wrong = -(overlap * p.log() + (1 - overlap) * (1 - p).log()).mean()
        got, w = head.besides(overlap), head.weights
        got.backward()
        assert got.item() == pytest.approx(float(align * far + wrong), rel=1e-9)
        assert w.judge.grad.any() and (w.up.grad is not None and w.up.grad.any()) == (align > 0)


def test_the_gate_stops_right_after_a_token_that_it_foresees_to_be_refused(models):
    m = models["llama"]
    head, seen = wild(M2R2(m, 3)), []
    drafter = head.drafter(Foreseen(lambda: seen.append(head.foresee()) or seen[-1], 0.5, 5))
    for state, r in rounds(m, PROMPTS[:1], 30, drafter, warm, Coins(4)):
        K, room = r.draft.tokens.shape[1], state.left_cpu[0] + len(r.new[0])
        text = state.known[0][: len(state.known[0]) - len(r.new[0])] + r.draft.tokens[0].tolist()
        foreseen, seen[:] = [float(p) for p in seen], []
        list(judged(head, torch.tensor([text])))
        want = head.gate()[0].sigmoid()[len(text) - K - 1 :].tolist()
        assert foreseen == pytest.approx(want[: len(foreseen)])
        assert K == min(next((k + 1 for k, p in enumerate(foreseen) if p < 0.5), 5), room - 1)


def test_pseudo_states_by_hand():
    tree = ancestors(torch.tensor([[0, 0]]))    # a token and its two children, two rows for each
    assert picture(ahead(tree, 2)[0]) == [
        "x..x.....", "x..xx....", "xx...x...", "xx...xx..", "x.x....x.", "x.x....xx"]
