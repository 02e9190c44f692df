"""What drafting gains on a machine: exercises 20 and 21, exercises/economics.py."""
import random

import pytest
from teach import compare, fail, short
from tiny import wide

from control import expected_tokens
from exercises.economics import best_bits, cost_in_bits, largest_batch, pass_seconds

# --- few bits

SETTINGS = [(4, 1e9, 1e11, 0.0), (4, 1e9, 1e11, 0.005), (8, 2e9, 5e10, 0.01),
            (16, 1e9, 1e11, 0.001),
            (4, 1e9, 1e11, 0.0, 128)]


def costs(scale=True, whole_scale=False, byte=8, draft_call=1, target_call=1, divided=True):
    """The cost in each setting by its definition, or with a mistake that a student might make."""
    found = []
    for bits, size, bandwidth, call, *group in SETTINGS:
        if scale and (bits < 16 or whole_scale):
            bits += 16 / (group or [32])[0]
        draft = size * bits / byte / bandwidth + draft_call * call
        target = size * 16 / byte / bandwidth + target_call * call
        found.append(draft / target if divided else draft)
    return found


def test_the_cost_of_few_bits():
    """By hand: a billion weights at 100 GB/s take 20 ms in 16 bits, and 5.625 ms in 4.5."""
    got = [cost_in_bits(*row) for row in SETTINGS]
    compare(wide(got), costs(), {
        "each group of weights has a scale of 16 bits, too: "
        "4.5 bits per weight, not 4": costs(scale=False),
        "at 16 bits there are no groups, and so no scales": costs(whole_scale=True),
        "the bandwidth counts bytes, and a byte has 8 bits": costs(byte=1),
        "`call` is left out: it does not shrink with the bits": costs(draft_call=0, target_call=0),
        "the draft's pass takes `call` seconds, too": costs(draft_call=0),
        "the target's pass takes `call` seconds, too": costs(target_call=0),
        "these are seconds: divide by those of a pass of the target": costs(divided=False)},
        f"(bits, size, bandwidth, call, maybe group) = {SETTINGS}", 1e-9)
    compare(wide(got[:2]), [0.28125, 10.625 / 25], {}, "the first two settings, by hand", 1e-9)


FAST = (1e9, 1e12, 0.0)     # size, bandwidth, call: c = 0.15625, 0.28125, 0.53125 in 2, 4, 8 bits
SLOW = (1e9, 1e12, 0.01)    # most of a pass is `call`: drafts cost nearly as much as they bring


def once(T):
    return 1.0


def dear(T):
    """A pass over T tokens on a machine that has little to compute with."""
    return 1 + 0.25 * (T - 1)


CHOICES = {
    "fewest bits lose": ({2: 0.1, 4: 0.8, 8: 0.9}, FAST, once, 8, (4, 3)),
    "more bits win": ({4: 0.4, 8: 0.95}, (4e9, 1e12, 0.0), once, 8, (8, 5)),
    "wide passes are dear": ({4: 0.8, 8: 0.9}, FAST, dear, 8, (4, 2)),
    "long drafts are cut": ({2: 0.9, 4: 0.95}, FAST, once, 3, (2, 3)),
    "long drafts are right": ({2: 0.97}, FAST, once, 30, (2, 16)),
    "one token at a time": ({4: 0.5, 8: 0.55}, (3e9, 5e11, 0.004), once, 8, (4, 1)),
    "no draft pays": ({4: 0.6, 8: 0.8}, SLOW, dear, 8, (16, 0))}


def fastest(alphas, machine, pass_cost, most, mistake=None):
    """The best of all pairs, or that of a mistake: (bits, gamma)."""
    speeds = {(16, 0): 1.0}
    for bits, alpha in alphas.items():
        cost = cost_in_bits(bits, *machine)
        for gamma in range(1, most + 1):
            width = gamma if mistake == "width" else gamma + 1
            verify_cost = 1.0 if mistake == "one" else pass_cost(width)
            price = 1.0 if mistake == "tokens" else gamma * cost + verify_cost
            speeds[bits, gamma] = expected_tokens(alpha, gamma) / price
    if mistake == "forced":
        del speeds[16, 0]
    return max(speeds, key=speeds.get)


PICKS = {"the most tokens are not the best speed: "
         "divide by gamma c + pass_cost(gamma + 1)": "tokens",
         "`pass_cost` is ignored: "
         "the pass that verifies gamma + 1 tokens can cost more than 1": "one",
         "pass_cost(T) is asked for T = gamma; the last known token is read, too": "width",
         "plain decoding, (16, 0, 1.0), is a choice, too, and here it is the fastest": "forced"}


def check_bits(alphas, machine, pass_cost, most, want):
    costs = [round(cost_in_bits(bits, *machine), 4) for bits in alphas]
    given = (f"alphas = {alphas}, which cost {costs}, "
             f"a pass over 2 tokens {pass_cost(2)} and over 4 "
             f"{pass_cost(4)}, most = {most}")
    got = best_bits(dict(alphas), *machine, pass_cost, most)
    if not isinstance(got, tuple) or len(got) != 3:
        fail(given, "(bits, gamma, speed)", f"{got!r:.100}")
    if got[:2] != want:
        why = [why for why, mistake in PICKS.items()
               if fastest(alphas, machine, pass_cost, most, mistake) == got[:2] != want]
        if got[0] != want[0] and got[0] == max(alphas, key=alphas.get):
            why.append("the highest alpha is not the best draft: its bits cost more")
        fail(given, f"{want[0]} bits and gamma = {want[1]}", f"{got[0]} bits and gamma = {got[1]}",
             why[0] if why else "try every pair of bits and gamma")
    bits, gamma = want
    alpha, cost = alphas.get(bits, 0.0), cost_in_bits(bits, *machine)
    speed = expected_tokens(alpha, gamma) / (gamma * cost + pass_cost(gamma + 1))
    compare(wide([got[2]]), [speed], {"this is the number of tokens: divide by the price": [
        expected_tokens(alpha, gamma)]}, given, 1e-9)


@pytest.mark.parametrize("name", CHOICES)
def test_the_best_bits(name):
    check_bits(*CHOICES[name])


def test_the_best_bits_on_drawn_machines():
    """Passes that get dearer or cheaper anyhow, drafts that always pass, and long ones."""
    draw = random.Random(0)
    for _ in range(80):
        alphas = {bits: draw.choice([0.0, 1.0, *[draw.random() for _ in range(6)]])
                  for bits in draw.sample([2, 3, 4, 5, 6, 8], draw.randint(1, 4))}
        machine = (draw.uniform(1e8, 1e10), draw.uniform(1e10, 3e12),
                   draw.choice([0.0, draw.uniform(0, 0.01)]))
        most = draw.randint(1, 30)
        table = [1.0, *(draw.uniform(0.8, 1 + 0.2 * T) for T in range(max(4, most)))]
        given = alphas, machine, lambda T, table=table: table[T - 1], most
        check_bits(*given, fastest(*given))


# --- a batch

PASSES = [(1, 1, 1e9, 1e6, 1e11, 1e13), (8, 5, 1e9, 1e6, 1e11, 1e13), (64, 5, 1e9, 1e6, 1e11, 1e13),
          (64, 5, 1e9, 1e9, 1e11, 1e13), (200, 1, 1e9, 1e6, 1e11, 1e13),
          (1, 2000, 3e9, 1e6, 2e11, 5e12), (2, 1, 3e9, 1e7, 2e11, 5e12)]


def times(join=max, operations=2, rows_read=False, rows_cached=True, rows_computed=True,
          bytes_each=2):
    """The time of each pass by its definition, or with a mistake."""
    found = []
    for rows, width, size, cache, bandwidth, flops in PASSES:
        weights = bytes_each * size * (rows if rows_read else 1)
        read = (weights + cache * (rows if rows_cached else 1)) / bandwidth
        computed = operations * size * width * (rows if rows_computed else 1) / flops
        found.append(join((read, computed)))
    return found


def test_the_time_of_a_pass():
    """By hand: 2 GB at 100 GB/s take 20 ms, and 64 times 5 tokens 2e9 operations each at 10 TFLOPS
    64 ms."""
    compare(wide([pass_seconds(*row) for row in PASSES]), times(), {
        "it reads and computes at the same time: "
        "the longer one counts, not their sum": times(join=sum),
        "the longer of the two counts, not the shorter": times(join=min),
        "a product and a sum: two operations per weight and token": times(operations=1),
        "the weights are read once for all rows: "
        "that is what a batch is for": times(rows_read=True),
        "each text has keys and values of its own": times(rows_cached=False),
        "each row is computed": times(rows_computed=False),
        "a weight has two bytes": times(bytes_each=1),
        "nothing but reading: "
        "a wide pass over many rows computes longer": times(join=lambda pair: pair[0]),
        "nothing but computing: "
        "a pass over few rows reads longer": times(join=lambda pair: pair[1])},
        f"(rows, width, size, cache, bandwidth, flops) = {PASSES}", 1e-9)
    compare(wide(times()[1:3]), [0.02008, 0.064], {}, "by hand", 1e-9)


def roofline(cache):
    """A pass over a billion weights, at 100 GB/s and 10 TFLOPS."""
    def seconds(rows, width):
        return max((2e9 + rows * cache) / 1e11, 2e9 * rows * width / 1e13)
    return seconds


def bumpy(rows, width):
    """Seven rows fill the machine's tiles badly: a pass over more of them is faster again."""
    return rows * width if rows == 7 else 10 + rows


BATCHES = {     # alpha, gamma, cost, seconds, most; the largest batch
    "short texts": (0.7, 3, 0.1, roofline(1e6), 500, 57),
    "long texts": (0.7, 3, 0.1, roofline(1e9), 500, 500),
    "the largest, not the first that loses": (0.7, 3, 0.1, bumpy, 12, 12),
    "one text alone": (0.6, 2, 0.1, lambda rows, width: 10 + 5 * rows * width, 9, 1),
    "a draft too dear": (0.3, 2, 0.5, roofline(1e6), 500, 0),
    "long drafts": (0.8, 6, 0.05, roofline(1e6), 500, 53)}


def check_batch(alpha, gamma, cost, seconds, most, want, otherwise=None):
    """otherwise: what to say where a mistake would be named by chance."""
    def gains(rows, width=gamma + 1, base=None, price=0.0):
        verify_cost = seconds(rows, width) / seconds(base or rows, 1)
        return expected_tokens(alpha, gamma) / ((gamma + price) * cost + verify_cost) > 1

    def top(test):
        return max([rows for rows in range(1, most + 1) if test(rows)], default=0)

    first_loss = next(rows for rows in range(1, most + 2) if rows > most or not gains(rows)) - 1
    mistakes = {
        "the pass that verifies reads gamma drafted tokens and the last known one": top(
            lambda rows: gains(rows, gamma)),
        "compare with a plain pass over the same batch, not over one text": top(
            lambda rows: gains(rows, base=1)),
        "larger batches may gain again: look for the largest that does": first_loss,
        "the first batch that loses is one too many": top(gains) + 1,
        "`most` is the largest batch to look at": max(want, 1000)}
    got = largest_batch(alpha, gamma, cost, seconds, most)
    if got != want:
        fail(f"alpha = {alpha}, gamma = {gamma}, cost = {cost}, most = {most}; "
             "a plain pass over 1, 8 and 64 "
             f"rows takes {short([seconds(rows, 1) for rows in (1, 8, 64)])} s, one that verifies "
             f"{short([seconds(rows, gamma + 1) for rows in (1, 8, 64)])} s",
             f"{want} texts", f"{got!r:.60}",
             otherwise or next((why for why, wrong in mistakes.items() if wrong == got), None))


@pytest.mark.parametrize("name", BATCHES)
def test_the_largest_batch(name):
    check_batch(*BATCHES[name])


def test_the_largest_batch_of_drawn_machines():
    """Passes that take any time: a batch that loses says nothing about a larger one."""
    draw = random.Random(0)
    for number in range(80):
        alpha, gamma = draw.choice([1.0, draw.random()]), draw.randint(1, 9)
        cost, most = draw.uniform(0.01, 0.3), draw.randint(1, 40)

        def seconds(rows, width, number=number):
            return 1 + 4 * width**0.5 * random.Random(f"{number} {rows} {width}").random()

        gains = [rows for rows in range(1, most + 1) if expected_tokens(alpha, gamma)
                 > gamma * cost + seconds(rows, gamma + 1) / seconds(rows, 1)]
        check_batch(alpha, gamma, cost, seconds, most, max(gains, default=0),
                    "a batch that loses says nothing about a larger one: look at each")
