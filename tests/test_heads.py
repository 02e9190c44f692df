"""Trained heads: the loop stays exact, drafting says what training trained, and files."""
import json
from dataclasses import replace

import promises
import pytest
import torch
from promises import Turns, compared
from test_trees import drafts
from tiny import PROMPTS, TINY, TINY_GEMMA, Says, Unsure, each_family, make, opened, read, warm

from control import Confidence
from drafter import Drafter, ModelDraft
from kvcache import KVCache
from lab.save import save_head
from lab.then import Then
from layerskip import SelfDraft, without
from machine.quant import quantise
from machine.recorded import Recorded
from methods import heads
from methods.eagle import Eagle
from methods.jump import Jump
from methods.kangaroo import ExitBlock, Kangaroo
from methods.lookup import NGram
from methods.medusa import Medusa
from methods.prophet import Prophet
from methods.trees import Siblings
from model import Placement
from sampling import Coins
from speculative import generate, rounds


def wild(head, size=0.3):
    """The same head with random weights: it says something of its own from the start."""
    g = torch.Generator().manual_seed(1)
    for p in head.weights.parameters():
        middle = 0 if p.dim() > 1 else 1 - head.model.c.norm_offset
        p.data.copy_(middle + size * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return head


GROVE = [0, 0, 1, 1, 2, 3, 3, 5, 6]   # families of two, and four levels
DRAFTERS = {
    "kangaroo": lambda m: wild(Kangaroo(m, 2)).drafter(Confidence(0.4, 6)),
    "kangaroo and n-gram": lambda m: Then(wild(Kangaroo(m, 2)).drafter(2), NGram(2, 1)),
    "exit block, siblings": lambda m: Siblings(wild(ExitBlock(m, 3)).drafter(3), [3, 1]),
    "eagle": lambda m: wild(Eagle(m)).drafter(Unsure(5)),
    "eagle, siblings": lambda m: Siblings(wild(Eagle(m, fused=True)).drafter(3), [3, 1]),
    "jump": lambda m: wild(Jump(m, 3)).drafter(Unsure(5)),
    "jump, siblings": lambda m: Siblings(wild(Jump(m, 1, 2)).drafter(3), [3, 1]),
    "medusa, tree": lambda m: wild(Medusa(m, 4, markov=3)).drafter(4, GROVE),
    "medusa, uneven tree": lambda m: wild(Medusa(m, 3)).drafter(
        Says(lambda state: [3, 1, 2, 3][: len(state.known)]), [0, 0, 0, 1, 1, 3, 4, 4]),
    "in turns": lambda m: Turns(
        wild(Kangaroo(m, 2)).drafter(3), SelfDraft(m, without(6, [3], [4]), 2), NGram(3, 1),
        wild(Medusa(m, 3)).drafter(3), Siblings(SelfDraft(m, range(8), 3), [3, 2]),
        wild(Eagle(m)).drafter(3), wild(Prophet(m, 1)).drafter(2), wild(Jump(m, 2)).drafter(3))}
ENDS = ["eagle", "jump", "medusa, uneven tree", "in turns"]
test_greedy_identity = promises.greedy_identity(DRAFTERS, on=["cpu"])
test_poison = promises.poison(DRAFTERS, ["kangaroo", "eagle", "jump"])
test_context_limit = promises.context_limit(DRAFTERS, ENDS)
test_end_of_text = promises.end_of_text(DRAFTERS, ENDS, range(0, 12, 5))
test_one_wait_a_round = promises.one_wait_a_round(
    DRAFTERS, ["exit block, siblings", "eagle, siblings", "jump, siblings", "medusa, tree",
               "in turns"])
test_proposing_again = promises.proposing_again(
    DRAFTERS | {"prophet": lambda m: wild(Prophet(m, 1)).drafter(2)},
    ["kangaroo", "eagle", "jump", "medusa, tree", "eagle, siblings", "prophet"])
test_exact_law = promises.exact_law({
    "kangaroo": (TINY, lambda m: wild(Kangaroo(m, 1)).drafter(Unsure(2))),
    "gemma2 eagle": (TINY_GEMMA, lambda m: wild(Eagle(m)).drafter(2)),
    "jump": (TINY, lambda m: wild(Jump(m, 1)).drafter(Unsure(2))),
    "gemma2 jump": (TINY_GEMMA, lambda m: wild(Jump(m, 1)).drafter(2)),
    "medusa, tree": (TINY, lambda m: wild(Medusa(m, 2, 2)).drafter(2, [0, 0, 1])),
})


def test_a_head_of_a_quantised_model_starts_from_its_weights(models):
    """All that it drafts before the last block is accepted."""
    m = quantise(models["llama"])
    outputs, passes = generate(m, PROMPTS, 24, ExitBlock(m, 5).drafter(3))
    assert outputs == promises.write(m, None, 24) and passes == 6


def checked(head, rule, far):
    """A head's drafter, compared with training's forward over the whole text."""
    def by_hand(text, tokens):
        m, ids, last = head.model, [*text, *tokens, *[0] * 9], len(text) - 1
        if last == 0:
            return None
        cache = KVCache(m.c, 1, len(ids), torch.float64)
        with torch.no_grad():
            laws = dict(head.predict(torch.tensor([ids]), read(m, ids, head.taps, cache)[1], cache))
        said = [laws[0][0, last + k] if 0 in laws   # an exit says the same wherever a draft began
                else laws[k + 1][0, last - 1] for k in range(len(tokens))]
        return torch.stack(said).softmax(-1)
    return compared(head.drafter(rule), by_hand, far)


def alone(m, head, far):
    return checked(wild(head), Says(lambda state: (3, 0, 2)[len(state.known[0]) % 3]), far)


def in_turns(m, head, far):
    """Thrice in turn, and of what is unread it reads two tokens at once."""
    drafter = alone(m, head, far)
    if head.own:
        head.own.widest = 2
    others = Siblings(SelfDraft(m, range(8), 3), [3, 2]), NGram(2, 1)
    return Turns(drafter, Siblings(drafter, [3, 2]), drafter, *others)


def with_tail(m, head, far):
    """Its next draft begins behind what was accepted of the tail, here of a model that is always
    right."""
    return Then(checked(wild(head), Says(lambda state: len(state.known[0]) % 2), far),
                ModelDraft(m, 2))


def both_ways(kinds):
    """Also after refusals, accepted siblings, and rounds without a draft or of another drafter."""
    return {f"{name}-{way.__name__}": lambda m, far, name=name, way=way: way(m, kinds[name](m), far)
            for name in kinds for way in (alone, in_turns, with_tail)}


def far_ahead(head):
    head.reach = 4      # it is judged on every token of a draft, not only on those that it learns
    return head


HEADS = {"kangaroo": lambda m: Kangaroo(m, 2), "exit block": lambda m: ExitBlock(m, 3),
         "eagle": lambda m: far_ahead(Eagle(m)),
         "eagle, fused": lambda m: far_ahead(Eagle(m, True)),
         "jump": lambda m: far_ahead(Jump(m, 3)),
         "jump, two blocks": lambda m: far_ahead(Jump(m, 1, 2)),
         "medusa": lambda m: Medusa(m, 4),
         "medusa, markov": lambda m: Medusa(m, 4, markov=3)}
test_drafts_are_what_training_sees = promises.right_drafts(both_ways(HEADS))


@each_family
def test_a_head_starts_as_a_part_of_the_model(models, family):
    """An adapter is a copy of what follows the exit, and before the last block the model itself."""
    m = models[family]
    for head, subs in (Kangaroo(m, 1), range(3)), (ExitBlock(m, 1), range(4)):
        runs = [[(r.new, r.accepted.tolist()) for _, r in rounds(m, PROMPTS, 20, drafter)]
                for drafter in (head.drafter(3), SelfDraft(m, subs, 3))]
        assert runs[0] == runs[1]
    assert generate(m, PROMPTS, 24, ExitBlock(m, 5).drafter(3))[1] == 6, "all is accepted"
    _, trace = read(m, PROMPTS[0], [11])
    for k, said in Medusa(m, 2).predict(torch.tensor([PROMPTS[0]]), trace, None):
        assert (said - m.unembed(trace[11])[:, :-k]).abs().max() < 1e-3


@each_family
def test_a_jump_starts_near_the_state_that_it_predicts(models, family):
    """Before any training; and a copy of the last block leads to the final state itself."""
    m = models[family]
    tokens = torch.tensor([[(i * i + b) % 17 for i in range(40)] for b in range(8)])
    trace = dict.fromkeys([5, 7])
    m.run(m.embed(tokens), Placement.span(0, 40), trace=trace)
    head = Jump(m, 3)
    head.fit(tokens)
    found = head.land(tokens[:, 1:], trace[7][:, :-1])
    near, far = ((x - trace[5][:, 1:]).pow(2).mean() for x in (found, m.embed(tokens[:, 1:])))
    near.backward()
    assert near < far
    assert head.weights.matrix.grad.abs().max() < 1e-9 * near, "no other matrix leads nearer"
    last = Jump(m, 5)
    last.fit(tokens)
    assert last.weights.readout.abs().max() < 1e-9


def test_a_prompt_of_one_token_drafts_from_its_own_state(models):
    m = models["llama"]
    head, (_, trace) = wild(Medusa(m, 3)), read(m, [2], [11])
    want = head.after(trace[11], 0, None).argmax()
    for prompts in [[2]], [[2], PROMPTS[0]]:
        _, r = next(rounds(m, prompts, 9, head.drafter(3)))
        assert r.draft.tokens[0, 0] == want


def test_a_tree_has_as_many_levels_as_the_rule_says(models):
    m = models["llama"]
    draft = drafts(m, Medusa(m, 3).drafter(2, [0, 0, 1, 1, 2, 3]), 20)
    assert draft.parents.tolist() == [[0, 0, 1, 1, 2]], "the third level is not drawn"
    assert torch.equal(draft.q.argmax(-1), draft.tokens), "greedy, each token is what its q says"


# --- files


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_saved_and_loaded(tmp_path, models, name):
    """For the model, and for its recorded passes with a draft vocabulary."""
    saved = wild(HEADS[name](models["gemma2"]))
    for p in saved.weights.parameters():
        p.data.copy_(p.bfloat16())
    saved.ranks = [0.5, 0.25]
    save_head(saved, tmp_path)
    twin = heads.load(tmp_path, models["gemma2"])
    assert twin.ranks == [0.5, 0.25] and twin.arguments == saved.arguments
    assert type(twin) is type(saved)
    before, after = saved.weights.state_dict(), twin.weights.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fast, ids = Recorded(models["gemma2"], opened()), [4, 9, 0, 2, 16, 3]
    (tmp_path / "draft_vocab.json").write_text(json.dumps({"ids": ids}))
    head = heads.load(tmp_path, fast)
    assert (head.own or head.model).share == len(ids) / fast.c.vocab_size
    assert heads.shorter(head, [1]) is head, "its own vocabulary stays"
    assert promises.write(fast, head.drafter(2), 12) == promises.write(models["gemma2"], None, 12)
    for _, r in rounds(fast, PROMPTS[:1], 9, head.drafter(1), warm, Coins(1)):
        assert r.draft.q is None or r.draft.q[0, 0].nonzero()[:, 0].tolist() == sorted(ids), (
            "and no others")
    own = head.own and head.own.model       # what the ShortHead stands for
    assert own is None or isinstance(own, Recorded) and own.session is fast.session, (
        "they are rehearsed together")


@pytest.mark.parametrize("kind", [Medusa, Kangaroo])
def test_heads_of_other_weights_draft_and_of_another_shape_do_not(tmp_path, models, kind):
    m, other = models["llama"], make(models["llama"].c)
    other.blocks[3].mlp.down.data[5, 7] += 0.5
    with pytest.raises(ValueError, match="the same model that decodes"):
        generate(other, PROMPTS, 9, kind(m, 2).drafter(2))
    save_head(wild(kind(m, 2)), tmp_path)
    found = heads.load(tmp_path, other)
    assert generate(other, PROMPTS, 9, found.drafter(2))[0] == generate(other, PROMPTS, 9)[0]
    with pytest.raises(ValueError, match="another shape or vocabulary"):
        heads.load(tmp_path, make(replace(m.c, hidden_dim=50)))


def test_damaged_files_are_refused(tmp_path, models):
    with pytest.raises(FileNotFoundError, match="heads.safetensors"):
        heads.load(tmp_path, models["llama"])
    save_head(Medusa(models["llama"], 2), tmp_path)
    file = tmp_path / heads.FILE
    whole = file.read_bytes()
    for broken in (b"", whole[:-9], whole.replace(b"medusa", b"magics"),
                   whole.replace(rb'\"medusa\"', rb'[\"medu\"]'),
                   whole.replace(rb'\"shape\": {', rb'\"shape\":[{').replace(b"}, ", b"}],")):
        assert broken != whole
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="no trained heads for this model: "):
            heads.load(tmp_path, models["llama"])


def test_what_makes_no_sense_is_refused(models):
    with pytest.raises(ValueError, match="exit layer must lie between 1 and 6"):
        Kangaroo(models["llama"], 7)
    with pytest.raises(ValueError, match="over 5 blocks does not land before 2 more of 6"):
        Jump(models["llama"], 5, 2)
    with pytest.raises(ValueError, match="2 heads cannot draft 3 tokens"):
        Medusa(models["llama"], 2).drafter(3)


def test_what_a_kangaroo_missed_it_reads_at_once(models):
    """While others draft it reads nothing; before it drafts again, all of it in one pass."""
    m = models["gemma2"]
    head = wild(Kangaroo(m, 2))
    drafter, passes, run = head.drafter(2), [], head.own.run
    head.own.run = lambda x, *args, **kwargs: passes.append(x.shape[1]) or run(x, *args, **kwargs)
    steps = rounds(m, PROMPTS[:2], 14, Turns(drafter, *[Drafter()] * 7))
    for _ in range(7):
        next(steps)
    assert passes == [7] and drafter.follower.unread == 7, "the prompt, and seven tokens to come"
    next(steps)
    assert passes == [7, 7, 1, 1]
