"""What few bits cost a target: how far its distributions are from those of the whole model, for
each kind of weights and each form in which a product may take x."""
import copy
from pathlib import Path

import torch

import checkpoint
from kvcache import KVCache, prefill
from lab.bench.shared import figures, load, page
from machine.exact import exactly
from machine.quant import quantise

LENGTH = 128        # tokens of a piece of text
FORMS = {           # how a product takes x: the dtype of the model, whether x is rounded to int8
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "int8": (torch.bfloat16, True)}


def log_probs(model, pieces):
    """For each piece, the log-probabilities of the token after each of its tokens."""
    model = exactly(model)
    for ids in pieces:
        cache = KVCache(model.c, 1, LENGTH, model.attention_dtype())
        yield model.unembed(prefill(model, ids[None], cache))[0].float().log_softmax(-1)


@torch.inference_mode()
def compare(want, twin, pieces):
    """The twin's KL divergence, in nats per token, from the model whose log-probabilities are
    `want`, its perplexity, and how often both find the same token most likely."""
    sums = torch.zeros(3, dtype=torch.float64)
    for ids, p, q in zip(pieces, want, log_probs(twin, pieces), strict=True):
        loss = -q[:-1].gather(1, ids[1:, None]).mean()
        kl = (p.exp() * (p - q)).sum(-1).mean()
        sums += torch.stack([kl, loss, (p.argmax(-1) == q.argmax(-1)).float().mean()])
    kl, loss, same = (sums / len(pieces)).tolist()
    return {"kl": kl, "perplexity": torch.tensor(loss).exp().item(), "same": same}


def run(a):
    model, tokenizer = load(a, "bfloat16")
    text = Path(a.text).read_text(encoding="utf-8")
    pieces = []
    for part in range(a.pieces):        # spread over the file
        first = len(text) * part // a.pieces
        ids = checkpoint.encode(tokenizer, text[first : first + 8 * LENGTH], model.c.bos)[:LENGTH]
        if len(ids) == LENGTH:
            pieces.append(torch.tensor(ids))
    if not pieces:
        raise ValueError(f"{a.text}: too short for a piece of {LENGTH} tokens")
    want = list(log_probs(model, pieces))
    rows = {"bfloat16": compare(want, model, pieces)}
    for kind in ("int8", "int4"):
        for head in dict.fromkeys((None, "int8", kind)):
            for form, (dtype, rounds) in FORMS.items():
                twin = quantise(copy.deepcopy(model).to(dtype), kind, head, rounds)
                name = f"{kind}, the head in {head or 'bfloat16'}; x in {form}"
                rows[name] = compare(want, twin, pieces)
    words = (f"{a.model}, {len(pieces)} pieces of {LENGTH} tokens of {Path(a.text).name}; KL from "
             "the model in bfloat16")
    columns = {"KL (nats per token)": "{kl:.5f}", "perplexity": "{perplexity:.3f}",
               "same most likely token": "{same:.4f}"}
    return page([words, "", *figures(rows.items(), columns, "weights")]), {"rows": rows}
