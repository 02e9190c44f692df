"""How much drafting gains on a machine of which a few numbers are known. These are exercises 20 and
21, which exercises/tests/test_domains.py grades."""
from control import expected_speedup


def cost_in_bits(bits, size, bandwidth, call, group=32):
    """The cost of a drafted token, in passes of the target over one token (the paper's c), if the
    target drafts for itself with its weights quantised to `bits` bits. A pass reads all `size`
    weights at `bandwidth` bytes per second and takes another `call` seconds. The target's own
    weights have 16 bits. Below 16 bits, every `group` of weights also has a scale of 16 bits.

    >>> cost_in_bits(4, 8e9, 1e12, 0.0)     # 4.5 bits instead of 16
    0.28125
    """
    def seconds(bits_per_weight):
        return size * bits_per_weight / 8 / bandwidth + call

    scale = 16 / group if bits < 16 else 0.0
    return seconds(bits + scale) / seconds(16)


def best_bits(alphas, size, bandwidth, call, pass_cost, most=8):
    """(bits, gamma, speed relative to plain decoding) of the fastest draft, or (16, 0, 1.0), which
    is plain decoding, if no draft is faster. alphas: {bits: acceptance rate}. pass_cost(T): the
    cost of a verifying pass over T tokens, in passes over one token. most: the largest gamma."""
    best = (16, 0, 1.0)
    for bits, alpha in alphas.items():
        cost = cost_in_bits(bits, size, bandwidth, call)
        for gamma in range(1, most + 1):
            speed = expected_speedup(alpha, gamma, cost, pass_cost(gamma + 1))
            if speed > best[2]:
                best = (bits, gamma, speed)
    return best


def pass_seconds(rows, width, size, cache, bandwidth, flops):
    """The time of a pass over `width` tokens of each of `rows` texts. It reads `size` weights of
    two bytes each, once for all texts, and `cache` bytes of keys and values of each text; it
    computes two operations per weight and token. `bandwidth` bytes and `flops` operations per
    second. The machine reads and computes at the same time, so the longer of the two counts."""
    read = (2 * size + rows * cache) / bandwidth
    computed = 2 * size * rows * width / flops
    return max(read, computed)


def largest_batch(alpha, gamma, cost, seconds, most):
    """The largest batch, of at most `most` texts, that is written faster with drafts than without;
    0 if there is none. Each text drafts gamma tokens per round. A drafted step takes `cost` times
    as long as a plain pass over the same batch. seconds(rows, width): the time of a pass of the
    target."""
    for rows in range(most, 0, -1):
        verify_cost = seconds(rows, gamma + 1) / seconds(rows, 1)
        if expected_speedup(alpha, gamma, cost, verify_cost) > 1:
            return rows
    return 0
