"""A draft head that learns while it writes: exercise 28, which exercises/tests/test_learning.py
grades. DVI (arXiv 2510.05421) trains the draft from what the verifier decides; this is the smallest
form of it."""
import torch
import torch.nn.functional as F

from drafter import Drafter, chain


def learn(weight, x, p, accepted, length, rate):
    """One step of gradient descent of a draft head on what was rejected; returns the new weight.

    weight (V, dim): the head gives the logits weight @ x. x (B, K, dim): the states from which the
    K drafts of each row were drawn. p (B, K+1, V): the target's distributions, row k about draft k.
    Row b had length[b] drafts, of which accepted[b] were accepted; its first rejected draft, if
    there is one, is an example. The loss is the mean over these examples of the cross-entropy
    -(p log softmax(weight @ x)), summed over V. Without an example the weight stays.
    """
    rows = torch.arange(len(x), device=x.device)[accepted < length]
    if len(rows) == 0:
        return weight.clone()
    place = accepted[rows]
    state = x[rows, place].to(weight.dtype)                                     # (N, dim)
    q = F.linear(state, weight).softmax(-1)                                     # (N, V)
    # the gradient of the cross-entropy by the logits is q - p
    return weight - rate * (q - p[rows, place].to(q.dtype)).T @ state / len(rows)


class Learner(Drafter):
    """Drafts with the first blocks of the target and a head of its own, which takes a step after
    each round. The q that it hands over are those that the tokens were drawn from."""

    def __init__(self, model, exit_layer, rule, rate):
        super().__init__(rule)
        self.model = model
        self.sublayers = range(2 * exit_layer)
        self.rate = rate
        with torch.inference_mode(False):
            self.weight = (model.tok if model.head is None else model.head).detach().clone()

    def propose(self, state):
        m = self.model
        xs = []

        def step(token, k):
            x = m.run(m.embed(token), state.span(k, k + 1), state.cache, self.sublayers)
            xs.append(m.norm(x))                                                # (B, 1, dim)
            return F.linear(xs[-1], self.weight)

        draft = chain(state, step, self.rule)
        self.x = torch.cat(xs, 1) if xs else None
        return draft

    def observe(self, state, r):
        super().observe(state, r)
        if self.x is None:
            return
        # trap: the loop runs in inference mode, in which nothing can be trained
        with torch.inference_mode(False), torch.enable_grad():
            self.weight = learn(self.weight, self.x.clone(), r.p.clone(), r.accepted.clone(),
                                r.proposed.clone(), self.rate).detach()
