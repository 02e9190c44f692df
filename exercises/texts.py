"""What a student reads of each exercise, in words and a picture, by its number.

The one thing to remember: a text says what is wanted and why, and never how the library does it.
"""
TEXTS = {
    1: """\
Two pure functions of the model. `softcap` bends large numbers so that they stay within (-cap, cap).
`rotate` turns pairs of numbers by an angle; that is how a query and a key know how far apart they
stand. The partner of x_i is x_(i + D/2), in the other half, and not its neighbour:

    x          x0  x1 | x2  x3         D = 4: the pairs are (x0, x2) and (x1, x3)
    partner    x2  x3 | x0  x1
    cos        c0  c1 | c0  c1
    sin       -s0 -s1 | s0  s1         the minus of the rotation is in `sin` already
    result     x0 c0 - x2 s0, x1 c1 - x3 s1, x2 c0 + x0 s0, x3 c1 + x1 s1
""",
    2: """\
How fast does each rotated pair turn from one position to the next? The first by 1 radian, the others
ever more slowly, like the hands of a clock:

    pair i             0       1        2         3            D = 8, theta = 10,000
    angle a position   1       .1       .01       .001         theta^(-2i/D)

A context longer than the trained one needs slower hands. "linear" divides all of them by `factor`.
"llama3" divides only the slow ones:

    turns within the original context     0 ...... low ............ high ...... many
    what becomes of the frequency         / factor    a blend of both   as it is

`scaling` is None or a dictionary: "rope_type" ("linear" or "llama3"), "factor", and for llama3
"low_freq_factor", "high_freq_factor" and "original_max_position_embeddings", the original context. A
pair turns context * frequency / (2 pi) times. From low to high the share that stays as it is grows from
0 to 1 on a straight line. Work in float64.
""",
    3: """\
Before each sub-layer the vector of each token is brought to about the same length: it is divided by the
root of the mean of its squares, and each number is multiplied by a weight that was learnt.

    x = 3 4, eps = .5     mean of squares 12.5     divided by sqrt(12.5 + .5)     times the weight

eps is `self.eps`. Llama's weight is `self.weight` itself. Gemma-2 stores it less 1: `self.offset` is 1
there, and 0 in Llama. It is added in float32 or wider, where the whole norm of Gemma-2 is computed,
since 1 + w rounded to bfloat16 is visibly wrong. What comes out has the type of x.
""",
    4: """\
Which slots of the cache may each token of a block read? The block below has two tokens in slots 2 and
3; slots 0 and 1 were filled before; slot 4 is not filled yet. x: may read.

    slot        0 1 2 3 4                    window = 2       0 1 2 3 4
    token at 2  x x x . .                    token at 2       . x x . .
    token at 3  x x x x .                    token at 3       . . x x .

The specification, slot by slot: a token at position i sees a slot s
- before the first slot of the block, if s < i (there slot and position are the same);
- of the block, if `tree` says so; without a tree it sees itself and those before it;
- and with a window only if i less the position of what is in s is smaller than `window`.
What is after the block is dead: nobody sees it.
""",
    5: """\
Attention over a block of tokens and all that the cache holds before it, H queries in groups of G that
share a key and a value:

    x -> wqkv -> for each group:  G queries | key | value        (B, T, Hkv, G + 2, D)
    rotate queries and key        not the value
    store(key, value)             gives the keys and values of *all* slots that may be read
    scores = query . key * scale, then the soft-cap, then the mask, then the softmax over the slots
    out = weights . values, all heads side by side -> wo

`store` wants (B, Hkv, T, D) and returns (B, Hkv, S, D). The mask is added: 0 where visible, -inf
elsewhere. `self.wqkv` ((G + 2) Hkv D, dim) and `self.wo` (dim, H D) are the two matrices;
`self.grouped` is (Hkv, G + 2, D), `self.scale` the scale and `self.c.attn_softcap` the cap. `softcap(x,
cap)` and `rotate(x, cos, sin)` stand beside it; cos and sin are (T, 1, 1, D) or (B, T, 1, 1, D).
Attention works in the type of cos, and what comes out has the type of x.
""",
    6: """\
A cache that does not know how full it is. The block says where it belongs, and whatever was there is
gone:

    slot              3   4   5   6
    this round        D   d1  d2  d3     d1 is accepted, d2 refused, and t is chosen in its place
    next round                t   e1     the block starts at t and overwrites what d2 and d3 left

D is the last token that was chosen, d1 to d3 are guesses, some of which turn out wrong: exercise 9.

Write a block's keys and values into `self.layers[layer]`, a pair of tensors (B, Hkv, S, D) that are there
already, and return what the block may read: all slots before `end`, which is at most S, or only the last
`recent` of them, if there are so many. `slots` is a slice where all rows stand at the same place, and else
a tensor (B, T): then the tokens of row b go to slots[b].
""",
    7: """\
From logits to the distribution that a token is drawn from. The settings come in this order, and each
sees what the one before it has left, scaled to sum to 1:

    temperature .5      .5  .25 .125 .125   ->   .73 .18 .05 .05     the likely get likelier; 0: only one
    top_k = 2           .5  .25 .125 .125   ->   .67 .33  0   0      the k most likely stay
    top_p = .6          .5  .25 .125 .125   ->   .67 .33  0   0      the fewest whose sum reaches .6
    min_p = .4          .5  .25 .125 .125   ->   .67 .33  0   0      those with at least .4 times the largest

`check` stands beside it already and refuses settings that make no sense: call it first, with all four.
A setting of None does nothing, and top_p = 1 neither, whatever rounded sums say. A temperature may be
tiny: subtract the largest logit first, and divide by 1e-30 at least.
""",
    8: """\
Draw an index in proportion to weights, with one uniform number u from [0, 1) each. The weights, laid
side by side, fill a line; u says where on it to look:

    weights .1 0 .2         0        .1                  .3
                            |  id 0   |       id 2        |        id 1 has no width: it must never come
    u times the sum, .3     ^ u = 0        ^ u = .7

`self.take(count, device)` gives the next `count` uniforms, float64 (count,). A running sum of many small
weights needs float64.
""",
    9: """\
The heart of it all. A draft's tokens were drawn from q; the target judges them by p. Which of them
stay, and which token comes after them, so that the text is distributed *as if p alone had written it*?

    row of p  0   1   2   3        K = 3 drafts have K + 1 rows of p:
    judges    d1  d2  d3  -        row k judges draft k + 1, and the last one is for a bonus token
    verdict   ok  no  dead         d1 is kept with probability min(1, p/q); d2 is refused, d3 does not count
    text      D   d1  t            t comes from max(p - q, 0), taken in row 1 and scaled to sum to 1

    token             0        1        2
    p                 #####    ##       ###
    q                 ##       #######  #
    min(p, q)         ##       ##       #          leaves as an accepted draft
    max(p - q, 0)     ###               ##         leaves as a replacement: together p again

`coins.flip(prob)` is True with probability min(1, prob), for a tensor of any shape.
`coins.choose(weights)` draws an index by weights (..., V), which need not sum to 1. Some drafts are
copied from the text instead of drawn: then `q` is None, which means 1 at the proposed token and 0
elsewhere. `length`, if it is not None, says for each row how many of its K drafts count: if all of them are
kept, the bonus token comes from row length[b] of p. Where p = q but for rounding, a refusal can leave
nothing of max(p - q, 0): then p itself is right.

What counts is the distribution of the text. A verifier that keeps fewer drafts than it could is right,
too; the grader then says what it misses.
""",
    10: """\
Draw a draft of several tokens, each after the one before:

    known ... D      step(D, 0) -> logits -> q1 -> d1
                     step(d1, 1) -> logits -> q2 -> d2      ... as far as the rule wants

`wanted(state, rule)` says how many tokens each row is to draft, and whether the rows differ.
`state.probs` turns logits into q, `state.coins.choose` draws from it, and `state.read(state.at(0))` is
the last known token. Return the very q that each token was drawn from. Where the rows differ, or a rule
may stop them, a tensor (B,) says how many tokens of each row count; the others draw on and are dead.
Nothing to draft: return (`state.tokens[:, :0]`, None, None).

A rule may stop a row after a token that looks bad: `rule.stop` is None or a function. That token is
kept and proposed all the same:

    the draft says        x  y  ?          the rule dislikes "?"
    proposed              x  y  ?          to drop "?" would make it rarer than p wants it
""",
    11: """\
The target drafts with some of its own sub-layers. What it computes before its first gap is just what
the verifier would compute, and is handed over; after the gap it is only a guess:

    sub-layers [0, 1, 3]     0    1    2    3          for two drafts d1, d2 after the last known token D:
    D                        x    x    gap  x   -> d1
    d1                       x    x    gap  x   -> d2
    d2                       x    x                    run, too: nobody drafts from it, but it is verified
                             ^ reuse = (2, the states of D, d1, d2 as they enter sub-layer 2, trace)

`self.model.run(x, state.at(k), state.cache, sublayers, span=state.span(k, k + 1))` runs some sub-layers
on the token at offset k and writes its keys and values; `embed` gives the x of a token, and `unembed` the
logits. `self.sublayers` are those to draft with, `shared_prefix` counts those before the first gap, and
`chain(state, step, self.rule)` draws: it asks for a step(token, k). trace: {sub-layer: states after
it}, of the sub-layers in `state.taps` that were handed over; `run` fills it. If nothing was drawn,
return `Draft.none(state)`. If `self.stranger` is set, the draft is by another model: let it propose.
""",
    12: """\
What is a draft worth? A round always brings one token, a second one if the first draft is accepted
(probability alpha), a third one if two are, and so on:

    tokens a round   1 + alpha + alpha^2 + ... + alpha^gamma
    its price        gamma c + block(gamma + 1)         in passes of the target over one token

Texts are not the same everywhere: easy and hard stretches alternate. So alpha may also be a series, one
number for each position (a tensor (T,), or a list of such tensors for several texts), and then rounds must
be followed along the text, since where one ends the next one begins:

    alpha            .9   .2   .5    gamma = 2: a round at 0 ends before position 1, 2 or 3
    a round starts   1    .1   -     at 1 if the first draft was refused; at 2 none would fit any more

A round must fit into the series. Of a list of texts add up all tokens and all rounds. For a series
`best_gamma` asks for no gamma beyond its length (of a list, beyond the longest). `MOST` is the largest gamma
that is tried, and `expected_speedup(alpha, gamma, cost, block)` is tokens a round over its price.
""",
    13: """\
The search for sub-layers to skip asks a Gaussian process where to look next. It has seen some sets and
their values, and says of a new one what it expects and how sure it is of that:

    value   |     o            o: seen. Near them it is sure, and far away it knows only the mean.
            |  o      . - .    expected improvement: how much better than the best so far is a value
            |       o      .   on average, where worse counts as 0? A sure small gain and an unsure
            +---------------   large one can be worth the same.

`self.L` is the Cholesky factor of the covariance of what was seen, K = L L^T, and `self.dual` (N, 1) is
K^-1 y. `kernel(distances(self.z, z.double(), self.groups), self.theta)` is the covariance k (N, M) with
the new sets. The mean is k^T K^-1 y, the variance exp(self.theta[-2]) - k^T K^-1 k. Inside, y has mean
0 and deviation 1: scale back by `self.mean` and `self.std`. Rounding can make a variance slightly
negative.

Far below the best the two terms of the improvement nearly cancel; `torch.special.log_ndtr(u).exp()` is
exact enough for that. A deviation may be 0.
""",
    14: """\
Which set has the highest score? From each start, flip the bit that raises the score most, again and
again, as long as a flip raises it. All starts walk at the same time, each on its own.

    000 (0)  ->  010 (3)  ->  011 (5)  ->  111 (6)   the weights 1 3 2: each time the best flip

Work in float64. A set that is not allowed may not be entered. Where two sets are worth the same, stay:
a walk that goes to and fro never ends.
""",
    15: """\
`verify` for a tree, which may propose several tokens for the same place:

    0 -- 1 -- 3       node 0 is the last known token; 1 and 2 are siblings, two guesses at the next one;
     \\                3 hangs on 1. parents = [0, 0, 1]: of nodes 1, 2, 3
      2

Siblings are tried in turn. If the first one is refused, what p has yet to give is max(p - q, 0), scaled
to sum to 1; this takes p's place when the second one is tried, and so on. From an accepted node the
walk goes on among its own children. At its end a token is drawn from what is left of p there.
`parents` has a row for each text, or one for all of them. As in `verify`, q is None for copied tokens,
and of row b the first length[b] nodes count.

`coins.flip(prob)` is True with probability min(1, prob), and `coins.choose(weights)` draws an index.

    p at node 0        refuse 1:  p' = max(p - q1, 0) / sum       refuse 2:  p'' = max(p' - q2, 0) / sum
    judges node 1      judges node 2                              gives the token
""",
    16: """\
A small one, which many handouts get wrong. `expected_tokens` wants alpha, the probability that a draft
is accepted *if all before it were*. Of a run we know these counts:

    rounds        1000   each drafted 5 tokens, and each was accepted with .8 if the ones before it were
    proposed      5000   accepted 2689: a token after a refusal counts here as refused, though nobody tried it
    drafted       1000   rounds that tested a draft; hits 800: those that accepted its first token

They are `self.turns`, `self.proposed`, `self.accepted`, `self.drafted` and `self.hits`, and all are 0
in the beginning. One of their ratios is alpha. Of a wrong one the formula makes 2.1 tokens a round,
where 3.7 came.
""",
}
