"""Plausible mistakes, each with the test that must notice it: a test of the tests.

    python tests/mistakes.py [WORDS]    plant one mistake at a time in a copy of its file and run only its
                                        test; with words, only rows with one of them in their file,
                                        function or reason

`change` is the one engine that plants mistakes in source text; exercises and ports use it, too. It works on
the code of one function as `ast.unparse` writes it, without docstring, so that comments, line breaks and the
place of a function in its file break no row. Mistakes in functions that are exercises stand in
exercises/answers.py, where a message must also name each of them.
"""
import ast
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORKERS, LIMIT = min(2, os.cpu_count() or 1), 120     # seconds for one mistake


class Mistake(NamedTuple):
    file: str
    scope: str      # `function` or `Class.method`
    old: str        # an expression or statement that the function has exactly once
    new: str
    why: str        # what its author was thinking, or what breaks
    test: str       # that must fail: its node id below tests/


def node_id(short):
    """`file::name[case]` of the table as pytest has it: test_file.py::test_name[case]"""
    file, name = short.split("::")
    return f"test_{file}.py::test_{name}"


class Stale(Exception):
    """A row that no longer fits the code."""


# --- the engine


def find(tree, scope):
    """The function or class `scope` in a parsed file: the last one of that name, as in Python."""
    node = tree
    for part in filter(None, scope.split(".")):
        kinds = ast.FunctionDef, ast.ClassDef
        node = next((n for n in reversed(node.body) if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            raise Stale(f"there is no {scope}")
    return node


def bare(node):
    """The code of a function, class or file as `ast.unparse` writes it, without docstrings."""
    tree = ast.parse(ast.unparse(node))
    for n in ast.walk(tree):
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(n) is not None:
            n.body = n.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def normal(fragment):
    """A fragment as `ast.unparse` writes it; one that is not Python by itself stays as it is."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(fragment).strip()))
    except SyntaxError:
        return fragment


def change(source, scope, old, new):
    """The source with `new` in place of `old` inside `scope` ("": the whole file). Raises Stale unless `old`
    stands there exactly once."""
    node = find(ast.parse(source), scope)
    code, old, new = bare(node), normal(old), normal(new)
    depths = [" " * n for n in range(0, 40, 4)] if "\n" in old else [""]
    found = [(pad, code.count(textwrap.indent(old, pad).lstrip())) for pad in depths]
    hits = [pad for pad, count in found if count == 1]
    if not hits or len(hits) < len([count for _, count in found if count]):
        count = max(count for _, count in found)
        raise Stale(f"found {count} times in {scope or 'the file'}: {old!r}\n{code}")
    pad = hits[0] if "\n" in old else line_indent(code, old)
    code = code.replace(textwrap.indent(old, hits[0]).lstrip(), textwrap.indent(new, pad).lstrip())
    if not scope:
        return code + "\n"
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    lines = source.splitlines()
    lines[first : node.end_lineno] = textwrap.indent(code, " " * node.col_offset).splitlines()
    return "\n".join(lines) + "\n"


def line_indent(code, old):
    """The indentation of the line in which `old` begins."""
    line = code[code.rfind("\n", 0, code.index(old)) + 1 :]
    return line[: len(line) - len(line.lstrip())]


# --- trying them


def pytest_in(argv, out):
    """What each process does; it is forked from one that holds torch, whose import outlasts most tests."""
    import pytest

    os.chdir(ROOT)
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    for fd in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    sys.exit(int(pytest.main(["-x", "-p", "no:cacheprovider", "--color=no", *argv])))


def run_tests(tests, before="", limit=None, options=("--tb=no",), out=os.devnull):
    """pytest's exit status; None: out of time. before: a folder whose modules come before the library's."""
    argv = [*options, "-o", f"pythonpath={before} . tests", *(f"tests/{test}" for test in tests)]
    process = multiprocessing.get_context("fork").Process(target=pytest_in, args=(argv, out))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def plant(m, folder):
    """Write the file of a mistake, with the mistake in it, below `folder`."""
    text = change((ROOT / m.file).read_text(encoding="utf-8"), m.scope, m.old, m.new)
    path = Path(folder, m.file)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def check(tests):
    """What is wrong with tests that should pass without any mistake."""
    with tempfile.TemporaryDirectory() as folder:
        status = run_tests(tests, options=("--tb=no", "-rfE"), out=f"{folder}/out") if tests else 0
        return Path(folder, "out").read_text(encoding="utf-8") if status else ""


def attempt(m):
    """(what became of a mistake, seconds): KILLED where its test fails."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            plant(m, folder)
        except Stale as e:
            return f"STALE: {e}", 0.0
        status = run_tests([m.test], folder, LIMIT)
    says = {0: "SURVIVED", 1: "KILLED", None: "OUT OF TIME"}
    return says.get(status, f"BROKEN: pytest's status {status}"), time.perf_counter() - start


def main(words):
    chosen = [m for m in MISTAKES
              if not words or any(word in f"{m.file} {m.scope} {m.why}" for word in words)]
    context, failed = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["torch", "tokenizers", "pytest"])       # imported once, not for every row
    with ProcessPoolExecutor(WORKERS, context) as pool:
        failed += [why for why in pool.map(check, [sorted({m.test for m in chosen})[i::WORKERS]
                                                   for i in range(WORKERS)]) if why]
        for m, (verdict, seconds) in zip(chosen, pool.map(attempt, chosen), strict=True):
            line = f"{verdict:8} {seconds:5.1f} s  {m.file}, {m.scope}: {m.why} ({m.test})"
            print(line, flush=True)
            failed += [line] * (verdict != "KILLED")
    print(*failed, f"{len(chosen)} mistakes, {len(failed)} failed", sep="\n")
    return int(bool(failed) or not chosen)


# --- the mistakes


TABLE = {
    # file: [(function, what stands there once, what instead, why, what must fail: "file::test")]
    "model.py": [
        ("frequencies", "return slow", "return freqs", "linear rope scaling is not applied",
         "model::frequencies_of_linear_scaling_by_hand"),
        ("frequencies", "low, high = (scaling['low_freq_factor'], scaling['high_freq_factor'])",
         "high, low = (scaling['low_freq_factor'], scaling['high_freq_factor'])",
         "llama3 rope: low and high swapped", "model::frequencies_of_llama3_by_hand"),
        ("frequencies", "((turns - low) / (high - low)).clamp(0, 1)",
         "((turns - low) / (high - low)).clamp(max=1)", "llama3 rope: slow pairs are extrapolated",
         "model::frequencies_of_llama3_by_hand"),
        ("rope", "[-sin, sin]", "[sin, -sin]", "rope turns the other way",
         "model::logits_are_those_of_transformers[llama]"),
        ("visible", "torch.ones(M, M, dtype=torch.bool, device=slots.device).tril()",
         "torch.ones(M, M, dtype=torch.bool, device=slots.device).tril(1)",
         "a token of the block sees the next one", "model::visible_in_the_first_block"),
        ("Transformer.masks", "visible(at, slots, end, tree, w)[:, None, None, :, end - S:]",
         "visible(at, slots, end, None, w)[:, None, None, :, end - S:]",
         "the tree is not handed on: the mask ignores it",
         "trees::a_tree_that_grows_equals_one_block_and_its_paths_equal_chains[llama]"),
        ("Transformer.run", "2 == 0", "2 == 1", "sliding on odd layers",
         "model::an_attention_by_hand[gemma2-0]"),
        ("Transformer.run", "c.window if layer % 2 == 0 else None", "c.window",
         "sliding on every layer", "model::an_attention_by_hand[gemma2-1]"),
        ("Transformer.run", "1 - c.window", "2 - c.window",
         "the first token of a block misses the end of its window",
         "model::sliding_layers_read_their_window_only[rows]"),
        ("Transformer.masks", "visible(at, slots, end, tree, w)[:, None, None, :, end - S:]",
         "visible(at, slots, end, tree, w)[:, None, None, :, :S]",
         "the mask is that of the first slots",
         "model::sliding_layers_read_their_window_only[slice]"),
        ("visible", "positions[:, M - T:]", "positions[:, :T]",
         "a level stands where the root does", "trees::visible_where_a_tree_grows"),
        ("Attention.__init__", "c.head_dim ** (-0.5) if c.query_scale is None else c.query_scale",
         "c.head_dim ** (-0.5)", "query_scale ignored", "model::an_attention_by_hand[gemma2-0]"),
        ("Attention.forward", "self.c.attn_softcap", "None", "no soft-cap on the scores",
         "model::an_attention_by_hand[gemma2-0]"),
        ("Attention.forward", "scores.view(B, Hkv, G, T, -1).add_(mask)",
         "scores.view(B, Hkv, G, T, -1).add_(mask).copy_(softcap(scores, "
         "self.c.attn_softcap).view(B, Hkv, G, T, -1))",
         "soft-cap behind the mask: -inf becomes -50", "model::an_attention_by_hand[gemma2-0]"),
        ("Attention.forward", "y.view(B, Hkv, G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, -1)",
         "y.view(B, Hkv, G, T, D).permute(0, 3, 2, 1, 4).reshape(B, T, -1)",
         "heads leave attention in another order", "model::an_attention_by_hand[llama-0]"),
        ("RMSNorm.forward", "self.offset + self.weight.to(wide)", "self.weight.to(wide)",
         "w instead of 1 + w", "model::logits_are_those_of_transformers[gemma2]"),
        ("MLP.__init__", "tanh", "none", "the exact gelu instead of the tanh one",
         "model::logits_are_those_of_transformers[gemma2]"),
        ("MLP.forward", "self.act(gate) * up", "gate * self.act(up)",
         "gate and up swapped in the MLP", "model::logits_are_those_of_transformers[llama]"),
        ("Transformer.run", "x + b.mlp_post(b.mlp(b.mlp_norm(x)))",
         "b.mlp_post(b.mlp(b.mlp_norm(x)))", "the residual of the MLP is missing",
         "model::logits_are_those_of_transformers[llama]"),
        ("Transformer.run", "x + b.mlp_post(b.mlp(b.mlp_norm(x)))",
         "b.mlp_post(x + b.mlp(b.mlp_norm(x)))", "the post-norm stands behind the sum",
         "model::logits_are_those_of_transformers[gemma2]"),
        ("Transformer.run", "b.attn_post(b.attn(b.attn_norm(x), cos, sin, masks[window], store))",
         "b.attn(b.attn_norm(x), cos, sin, masks[window], store)",
         "the post-norm of attention is missing", "model::an_attention_by_hand[gemma2-0]"),
        ("Transformer.embed", "F.embedding(tokens, self.tok) * self.scale",
         "F.embedding(tokens, self.tok)", "embed_scale missing",
         "model::logits_are_those_of_transformers[gemma2]"),
        ("Transformer.unembed",
         "softcap(F.linear(self.norm(x), head if rows is None else rows), self.c.final_softcap)",
         "F.linear(self.norm(x), head if rows is None else rows)", "no soft-cap on the logits",
         "model::logits_are_those_of_transformers[gemma2]"),
        ("Transformer.unembed", "self.norm(x)", "x", "no norm before the head",
         "model::logits_are_those_of_transformers[llama]"),
        ("Transformer.angles",
         "None or t[0].dtype != dtype or t[0].device != device or (t[0].shape[0] < end)",
         "None or t[0].dtype != dtype or t[0].device != device", "the table is never regrown",
         "model::only_distances_matter_without_a_cache[llama]"),
        ("Transformer.embed", "self.scale", "self.c.embed_scale",
         "the embedding scale is not rounded", "model::embeddings_are_scaled_by_the_rounded_scale"),
        ("Transformer.angles", "with torch.inference_mode(False):", "if True:",
         "a table made while generating cannot be trained with",
         "speculative::a_model_that_has_generated_can_still_be_trained"),
    ],
    "kvcache.py": [
        ("KVCache.write", "end - recent", "end - recent - 1", "a single token reads W + 1 slots",
         "by_hand::a_write[recent]"),
        ("KVCache.write", "values.scatter_(2, at, v)", "values.scatter_(2, at, k)",
         "copied and pasted: ragged rows store keys as values",
         "by_hand::a_write[rows]"),
        ("KVCache.move", "(self.k, self.v)", "(self.k,)", "a move leaves the values behind",
         "trees::greedy_identity[exit-llama-cpu]"),
        ("KVCache.move", "t.scatter_(3, target, t.gather(3, source))",
         "t.scatter_(3, source, t.gather(3, target))", "a move goes the other way",
         "trees::greedy_identity[exit-llama-cpu]"),
        ("KVCache.write", "max(0, end - recent)", "max(0, end - recent + 1)",
         "a window without the token itself", "model::cached_blocks_equal_the_full_pass[1-gemma2]"),
    ],
    "sampling.py": [
        ("to_probs", "(order.values[..., :top_k].softmax(-1), order.indices[..., :top_k])",
         "(order.values[..., :top_k and top_k + 1].softmax(-1), order.indices[..., :top_k and "
         "top_k + 1])", "top-k keeps one too many", "by_hand::probabilities[top-k]"),
        ("Coins.flip", "self.take(prob.numel(), prob.device).view(prob.shape) < prob",
         "self.take(prob.numel(), prob.device).view(prob.shape) <= prob",
         "what has probability 0 can happen", "sampling::flips_are_true_where_u_is_below_prob"),
        ("shift", "bits & (1 << 64 - bits) - 1", "bits", "the sign bit is shifted in",
         "sampling::the_published_values_of_splitmix64"),
        ("uniforms", "torch.arange(first + 1, first + 1 + count, device=device)",
         "torch.arange(first, first + count, device=device)", "the stream begins one number early",
         "sampling::the_published_values_of_splitmix64"),
        ("to_probs", "p >= top_p",
         "p >= top_p * p.masked_fill(p < (min_p or 0) * p[..., :1], 0).sum(-1, keepdim=True)",
         "min_p before top_p", "sampling::random_logits_give_what_transformers_gives"),
        ("to_probs", "(logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)",
         "logits / max(temperature, 1e-30)", "the maximum is not taken off first",
         "sampling::a_tiny_temperature_is_no_nan[{}-1e-30]"),
        ("Coins.take", "self.index += count", "self.index += max(4096, count)",
         "the numbers computed ahead are skipped",
         "properties::coins_are_splitmix64_in_purchases_of_any_size"),
    ],
    "verification.py": [
        ("verify", "passed.cumprod(1).sum(1)", "passed.sum(1)",
         "count acceptances after a rejection", "by_outcomes::verify_drawn_drafts[2-None]"),
        ("verify", "q * refused", "q", "unproposed places keep their q",
         "by_outcomes::verify_drawn_drafts[1-None]"),
        ("verify", "q[row, at]", "q[:, 0]", "the residual of every place takes the first q",
         "speculative::exact_law[exit]"),
        ("verify", "torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)", "residual",
         "no fallback to p where nothing is left", "by_outcomes::verify_where_nothing_is_left"),
        ("verify_tree", "q[:, k]", "q[:, 0]", "in a tree the q of another node",
         "trees::on_chains_it_is_verify_coin_for_coin[False]"),
        ("verify_tree", "less / mass", "left",
         "later siblings of a tree are tried against p itself",
         "by_outcomes::verify_tree_drawn_siblings[[0]]"),
        ("verify_tree", "passed[:, k] & (parents[:, k] == node)", "passed[:, k]",
         "in a tree a cousin is accepted", "trees::on_chains_it_is_verify_coin_for_coin[False]"),
        ("verify_tree", "live[:, k, None] & (mass > 0)", "mass > 0",
         "dead siblings of a tree take their part of p",
         "trees::on_chains_it_is_verify_coin_for_coin[True]"),
    ],
    "speculative.py": [
        ("State.at", "torch.arange(first - 1, stop - 1, device=self.n.device)",
         "torch.arange(first, stop, device=self.n.device)", "State.at off by one, ragged rows",
         "speculative::greedy_identity[none-llama-cpu]"),
        ("State.after", "(self.n[:, None] + steps).clamp_(max=self.tokens.shape[1] - 1)",
         "self.n[:, None] + steps", "positions beyond the limit are not clamped",
         "speculative::context_limit[llama-long]"),
        ("prefill", "slice(i * block, i * block + part.shape[1])", "slice(i, i + part.shape[1])",
         "prefill: blocks in the wrong slots", "model::cached_blocks_equal_the_full_pass[3-llama]"),
        ("prefill", "tokens.split(block, 1)", "tokens.split(block, 1)[:-1] or [tokens]",
         "prefill skips the short last block", "model::cached_blocks_equal_the_full_pass[1-llama]"),
        ("chain", "state.coins.choose(q)", "q.argmax(-1)", "an argmax draw with a soft q",
         "speculative::exact_law[exit]"),
        ("chain", "qs.append(q)", "qs.append(logits.softmax(-1))",
         "the q handed over is not the one drawn from", "speculative::exact_law[exit]"),
        ("chain", "state.probs(logits)", "logits.softmax(-1)", "drafts ignore the temperature",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("chain", "K and (not going.any())", "K and length.max() <= k",
         "drafting stops one step late", "control::no_step_is_computed_once_all_rows_have_ended"),
        ("commit", "state.at(1, K + 2)", "state.at(0, K + 1)", "commit writes one slot too early",
         "speculative::greedy_identity[none-llama-cpu]"),
        ("commit",
         "F.pad(draft.tokens, (0, 1)).scatter_(1, accepted[:, None], next_token[:, None])",
         "torch.cat([draft.tokens, next_token[:, None]], 1)",
         "the next token is put after the whole draft",
         "speculative::greedy_identity[ngram-llama-cpu]"),
        ("commit", "[int(t) for t in values[K + 1:][:int(yes) + 1]] if state.left_cpu[b] else []",
         "[int(t) for t in values[K + 1:][:int(yes) + 1]]", "finished rows do not freeze",
         "speculative::greedy_identity[ngram-llama-cpu]"),
        ("commit", "t in eos", "t in eos and i == len(row) - 1",
         "only the last token of a round can end it",
         "speculative::end_of_text_at_every_position[llama-skip]"),
        ("commit", "enumerate(row)", "reversed([*enumerate(row)])",
         "the latest end-of-text ends, not the earliest",
         "speculative::end_of_text_at_every_position[gemma2-skip]"),
        ("rounds", "set(eos)", "set(list(eos)[:1])", "only one end-of-text id counts",
         "speculative::end_of_text_at_every_position[llama-ngram]"),
        ("commit", "min(int(yes), len(row))", "int(yes)",
         "accepted counts what end-of-text cut off",
         "speculative::what_an_end_of_text_cuts_off_was_never_tested[0-llama]"),
        ("loop", "(state.left - 1).clamp_(0, K)", "state.left.clamp(0, K)",
         "max_new overshoots: no room for the token behind",
         "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("rounds", "min(max_new, model.c.max_len - len(row))", "max_new",
         "the context limit is ignored", "speculative::context_limit[llama-none]"),
        ("rounds", "model.c.max_len - len(row)", "model.c.max_len - len(row) - 1",
         "the last slot of the context stays empty", "speculative::context_limit[llama-none]"),
        ("loop", "length if draft.length is None else torch.minimum(draft.length, length)",
         "length", "the drafter's length is ignored", "golden::golden_counts[stories-llama]"),
        ("loop", "state.probs(logits)", "state.probs(logits) if logits.isfinite().all() else None",
         "a check that waits for the device each round",
         "paper_gpu::one_wait_a_round_and_few_operations"),
        ("NGram.enter", "self.index[b][tuple(text[i:i + self.n])] = i + self.n",
         "self.index[b].setdefault(tuple(text[i:i + self.n]), i + self.n)",
         "copies what followed the first time, not the last",
         "speculative::ngram_copies_the_latest_continuation[once]"),
        ("NGram.enter", "self.index[b][tuple(text[i:i + self.n])] = i + self.n",
         "self.index[b][tuple(text[i:i + self.n])] = i + self.n + 1",
         "copies from one token too late",
         "speculative::ngram_copies_the_latest_continuation[once]"),
        ("NGram.enter", "len(text) - self.n", "len(text) - self.n + 1",
         "finds the final n-gram itself",
         "speculative::ngram_copies_the_latest_continuation[once]"),
        ("NGram.begin", "[{} for _ in state.known]",
         "getattr(self, 'index', [{} for _ in state.known])", "n-grams of the text before are kept",
         "control::an_n_gram_knows_nothing_of_the_text_before"),
        ("ModelDraft.propose",
         "min(max(n), max(2, *(b - held for b, held in zip(n, self.held, strict=True))))", "1",
         "the draft model reads one token only: it misses its own last draft",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("ModelDraft.propose", "x.gather(1, (T - 1 + short)[..., None].expand(-1, 1, x.shape[-1]))",
         "x[:, -1:]", "short rows draft from a dead slot",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("ModelDraft.observe", "min(held, len(text) - len(new) + kept - 1)", "held",
         "refused drafts stay in the draft model's cache",
         "speculative::drafts_are_right[model-llama]"),
        ("ModelDraft.propose", "self.run(token, state.at(k), state.span(k, k + 1))",
         "self.run(token, state.at(k - 1), state.span(k - 1, k + 1))",
         "the draft model's position off by one",
         "speculative::empty_skip_set_needs_the_fewest_passes[4-llama]"),
        ("loop", "drafter.propose(state).cut(max(state.left_cpu) - 1)", "drafter.propose(state)",
         "a drafter may overrun the answer",
         "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("Draft.cut", "x[:, :K + 1]", "x[:, :K]", "cut: the last known token forgotten",
         "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("commit", "int(offered) if len(row) > yes else kept[b]", "int(offered)",
         "what an end of text cut off counts as refused",
         "speculative::what_an_end_of_text_cuts_off_was_never_tested[0-llama]"),
        ("loop", "dict.fromkeys(state.taps) | before", "dict.fromkeys(state.taps)",
         "a trace begins where the verifier does",
         "speculative::what_is_shared_is_handed_over_and_not_run_again[sublayers0-8]"),
        ("Then.propose", "state.tokens.clone()", "state.tokens",
         "the draft is written into the text",
         "control::each_row_goes_on_where_its_own_draft_ends"),
        ("Then.propose", "drafts[:m]", "drafts", "the tail goes on after dead slots",
         "control::each_row_goes_on_where_its_own_draft_ends"),
        ("join", "after < 0", "at < A", "gaps are closed for the longest row only",
         "control::each_row_goes_on_where_its_own_draft_ends"),
        ("Then.observe", "replace(r, accepted=first, proposed=r.proposed.minimum(drafted))",
         "replace(r, proposed=r.proposed.minimum(drafted))",
         "the tail's acceptances are the first one's", "control::each_rule_learns_of_its_own_part"),
        ("straighten", "state.cache.move(slots.gather(1, path), slots)", "pass",
         "the accepted path of a tree is not moved", "trees::a_round_of_a_tree_is_a_chain[llama]"),
        ("straighten", "t[row[:, None], path]", "t",
         "after a tree logits and traces stay in its order",
         "trees::a_round_of_a_tree_is_a_chain[llama]"),
        ("ancestors", "tree[:, k] |= tree[row, parents[:, k - 1]]", "tree[:, k, :k] = True",
         "siblings see each other's keys in a tree", "trees::greedy_identity[exit-llama-cpu]"),
        ("layout", "state.after(tree.sum(-1) - 2)", "slots",
         "in a tree the slot is taken for the position", "trees::greedy_identity[exit-llama-cpu]"),
        ("wanted", "left - 1", "left", "gamma clipped one too late",
         "sampling::a_round_spends_drafts_then_flips_then_one_choice"),
    ],
    "layerskip.py": [
        ("Teacher.draft", "slice(T, 2 * T)", "slice(0, T)",
         "a scored draft takes the slots of the text", "search::speedup_and_matchness_by_hand"),
        ("Teacher.draft", "torch.eye(T, dtype=torch.bool, device=self.p.device)",
         "torch.ones(T, T, dtype=torch.bool, device=self.p.device).tril()",
         "a scored draft reads the drafts before it", "search::speedup_and_matchness_by_hand"),
        ("Teacher.overlap", "torch.minimum(self.p, q).double().sum(-1)",
         "(self.p * q).double().sum(-1)",
         "how likely two draws agree, not that a draft is accepted",
         "search::speedup_and_matchness_by_hand"),
        ("ShortHead.unembed", "-math.inf", "0.0", "tokens outside the draft vocabulary are drawn",
         "layerskip::a_short_head_knows_its_tokens_and_no_other"),
        ("without", "{2 * i for i in attn} | {2 * i + 1 for i in mlp}",
         "{2 * i + 1 for i in attn} | {2 * i for i in mlp}", "attention and MLP swapped",
         "properties::without_and_skipped_are_inverse"),
        ("SelfDraft.propose", "shared_prefix(subs)", "shared_prefix(subs) + 1",
         "hands over one sub-layer too many", "speculative::greedy_identity"),
        ("SelfDraft.propose", "subs[shared:]", "subs", "the shared sub-layers run twice",
         "speculative::greedy_identity"),
        ("SelfDraft.propose", "shared_prefix(subs)", "max(0, shared_prefix(subs) - 1)",
         "hands over one sub-layer too few",
         "speculative::what_is_shared_is_handed_over_and_not_run_again"),
        ("SelfDraft.begin", "self.model.blocks is not state.model.blocks", "False",
         "what a stranger computes is trusted", "speculative::greedy_identity"),
    ],
    "control.py": [
        ("plan", "reach * later", "reach * first", "later drafts are like the first",
         "control::plan_by_brute_force"),
        ("expected_tokens", "range(gamma + 1)", "range(gamma)",
         "the token behind the draft is forgotten", "by_hand::expected_tokens_of_a_number"),
        ("expected_tokens", "starts[i]", "1.0",
         "the mean run over all positions: the paradox of inspection",
         "control::expected_tokens_along_a_series_by_trying_every_outcome"),
        ("expected_tokens", "reach *= a[k]", "reach = a[k]", "acceptances behind a refusal count",
         "control::expected_tokens_along_a_series_by_trying_every_outcome"),
        ("expected_speedup", "gamma * cost", "(gamma + 1) * cost",
         "the token after the draft costs a drafted step", "control::best_gamma_by_brute_force"),
        ("expected_speedup", "cost + block", "cost + 1", "a block costs as much as one token",
         "control::best_gamma_by_brute_force"),
        ("Costs.block", "(after - before) / (high - low)", "(after - before) / high",
         "no straight line between widths", "control::costs_by_hand"),
        ("Costs.pricing", "share * self.head", "self.head", "a shorter head costs as much",
         "control::costs_by_hand"),
        ("weight_costs", "c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)",
         "c.head_dim * 4 * c.n_heads", "each query head is taken to have its own key",
         "control::weight_costs_count_what_a_pass_reads"),
        ("weight_costs", "3", "2", "the gate of the MLP is not counted",
         "control::weight_costs_count_what_a_pass_reads"),
        ("Confidence.stop", "confidence(logits, token)", "logits.softmax(-1).amax(-1)",
         "the confidence in another token than the drawn one",
         "control::confidence_is_that_in_the_drawn_token_in_float32"),
        ("AdaptiveExit.learn", "self.epsilon if up else 0 if full else -self.epsilon",
         "-self.epsilon if up else 0 if full else self.epsilon",
         "the threshold moves the wrong way", "control::adaptive_exit_by_hand"),
        ("DoNoHarm.begin", "replace(self.past)", "self.past", "all rows share one estimate",
         "control::do_no_harm_estimates_by_hand"),
        ("DoNoHarm.gamma", "gamma, self.saved[b] = (1, self.saved[b] - self.cost)", "gamma = 1",
         "a try is not paid for",
         "control::do_no_harm_tries_a_useless_draft_as_often_as_was_saved_for"),
    ],
    "gaussian.py": [
        ("distances", "2 * a", "a", "bits that are set in both count as different",
         "gaussian::the_kernel_by_hand"),
        ("distances", "F.one_hot(groups).T.to(a.dtype)", "F.one_hot(1 - groups).T.to(a.dtype)",
         "attention and MLP swapped", "gaussian::the_kernel_by_hand"),
        ("kernel", "theta[:-2].exp()[:, None, None] * d",
         "theta[:-2].exp()[:, None, None] * d.square()", "squared distances, as in a smooth kernel",
         "gaussian::the_kernel_by_hand"),
        ("GaussianProcess.__init__", "(y - self.mean) / self.std", "y - self.mean",
         "values are not scaled", "gaussian::predictions_by_the_dense_formula"),
        ("GaussianProcess.loss", "L.diagonal().log().sum()", "2 * L.diagonal().log().sum()",
         "the determinant counts twice", "gaussian::the_loss_is_the_dense_formula"),
        ("GaussianProcess.predict", "self.mean + self.std", "self.std", "the mean is not put back",
         "gaussian::predictions_by_the_dense_formula"),
        ("GaussianProcess.predict", "self.std * variance.sqrt()", "variance.sqrt()",
         "the deviation is not scaled back", "gaussian::predictions_by_the_dense_formula"),
    ],
    "search.py": [
        ("speedup", "best_gamma(series, cost, least=1, block=costs.block)",
         "best_gamma(series, cost, least=1)", "the best gamma forgets the block",
         "search::the_best_gamma_is_at_least_1_and_knows_what_a_block_costs[series1-0.1-4.0]"),
        ("speedup", "costs.step(sublayers, calibration.share)", "costs.step(sublayers)",
         "sets are scored with the cost of the whole head",
         "search::a_run_finds_the_best_set_by_its_objective"),
        ("speedup", "torch.cat(series).mean()", "sum((a.mean() for a in series)) / len(series)",
         "short documents weigh as much as long ones",
         "search::speedup_and_matchness_by_hand[llama-to_probs]"),
        ("Space.sublayers", "{sub for sub, bit in zip(self.skippable, z, strict=True) if bit}",
         "{sub for sub, bit in zip(self.skippable, z, strict=True) if not bit}",
         "a bit is taken for a sub-layer that stays",
         "search::sets_within_the_bounds[0-1000000000]"),
        ("Space.counts", "min(self.most, len(self.skippable)) + 1",
         "min(self.most, len(self.skippable))", "one skip less than allowed",
         "search::sets_within_the_bounds[0-1000000000]"),
        ("propose", "torch.cdist(z, zs, p=1).min(1).values > 0.5", "z[:, 0] >= 0",
         "a set is tried twice", "search::it_finds_the_optimum_within_sixty_trials[10-2]"),
        ("propose", "ys.argsort(descending=True, stable=True)[:8]", "ys.argsort(stable=True)[:8]",
         "it climbs from the worst", "search::it_climbs_from_the_best_sets_and_from_anywhere"),
        ("run_trials", "file.truncate(whole)", "pass", "half a line stays",
         "search::a_search_that_was_killed_goes_on_where_it_was"),
        ("describe", "entry['gamma'] if entry['speedup'] > 1 else 0", "entry['gamma']",
         "it advises a draft that loses",
         "search::where_nothing_is_gained_the_advice_is_not_to_draft[1.0-0]"),
        ("front", "e['alpha'] > best", "e['alpha'] >= best",
         "a dearer set of the same acceptance on the front",
         "search::the_front_is_what_no_trial_beats"),
    ],
    "checkpoint.py": [
        ("parts", "{'post_attention_layernorm': b.mlp_norm.weight}",
         "{'post_attention_layernorm': b.attn_norm.weight}",
         "Llama's post_attention_layernorm taken by its name",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("parts", "wqkv[:, :-2]", "wqkv[:, :-2].transpose(0, 1)",
         "query heads dealt out in turn to the key heads",
         "checkpoint::transformers_loads_what_was_saved_and_agrees[llama]"),
        ("load", "c.embed_scale", "1.0", "the embeddings are not scaled",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("check_tensors", "tuple(stored.get_shape()) != want",
         "math.prod(stored.get_shape()) != math.prod(want)", "sizes are checked, shapes are not",
         "checkpoint::tensors_that_are_missing_left_over_or_misshapen_are_named"),
        ("check_tensors", "if extra:", "if False:", "left-over tensors are ignored",
         "checkpoint::tensors_that_are_missing_left_over_or_misshapen_are_named"),
        ("read_gemma2", "number('query_pre_attn_scalar', float)", "head_dim",
         "query_pre_attn_scalar is not read",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("read_special", "generation.get('eos_token_id', raw.get('eos_token_id'))",
         "raw.get('eos_token_id', generation.get('eos_token_id'))",
         "end-of-text from config.json first", "checkpoint::end_of_text_ids_come_in_every_form"),
        ("read_special", "eos is None", "not eos", "end-of-text id 0 counts as none",
         "checkpoint::end_of_text_ids_come_in_every_form"),
        ("read_tensor", "min(rank * own, whole - own)", "0", "all processes read the first slice",
         "checkpoint::loading_takes_little_more_memory_than_the_model"),
    ],
    "methods/trees.py": [
        ("siblings", "left[:, :width].scatter(2, last, 0.0)", "left[:, :width]",
         "the same guess twice: drawn with replacement",
         "trees::measured_ranks_are_what_first_families_accept"),
        ("siblings", "torch.where(mass > 0, left / mass, top)", "torch.where(mass > 0, left, top)",
         "a sibling's q does not sum to 1", "trees::exact_law[exit, top-p]"),
        ("siblings", "last = coins.choose(q[-1])", "last = q[-1].argmax(-1)",
         "the next best token, not a drawn one", "trees::exact_law[exit, top-p]"),
        ("best_tree", "rank_acceptance[rank] * (1 + inside) + later",
         "rank_acceptance[rank] + inside + later", "a subtree counts though its root is refused",
         "trees::the_best_tree_is_the_best_of_all[acceptance0-0.1-0.02]"),
        ("Siblings.propose", "torch.where(length == K, K + sum(widths), length)",
         "length + sum(widths)", "the dead end of a short chain is proposed",
         "trees::rows_with_short_chains_have_no_siblings"),
    ],
    "machine/quant.py": [
        ("Int8.__init__", "torch.maximum(-low, high) / 127", "high / 127",
         "the largest weight, not the largest magnitude", "quant::int8_by_hand"),
        ("NF4.__init__", "16 * nearest[..., ::2] + nearest[..., 1::2]",
         "nearest[..., ::2] + 16 * nearest[..., 1::2]", "the two halves of a byte change places",
         "quant::nf4_by_hand"),
    ],
    "machine/parallel.py": [
        ("Added.product", "talk(dist.all_reduce, y)", "pass", "nothing is added up",
         "parallel::several_processes_write_the_text_of_one"),
    ],
}
MISTAKES = [Mistake(file, *row[:-1], node_id(row[-1])) for file, rows in TABLE.items() for row in rows]


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.exit(main(sys.argv[1:]))
