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
    old: str        # a piece of code that the function has exactly once
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
    source, path = (Path(root, m.file) for root in (ROOT, folder))
    path.parent.mkdir(exist_ok=True)
    path.write_text(change(source.read_text(encoding="utf-8"), m.scope, m.old, m.new), encoding="utf-8")


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
        ("frequencies", "low, high =", "high, low =", "llama3 rope: low and high swapped",
         "model::frequencies_of_llama3_by_hand"),
        ("frequencies", "0, 1)", "max=1)", "llama3 rope: slow pairs are extrapolated",
         "model::frequencies_of_llama3_by_hand"),
        ("rope", "-sin, sin]", "sin, -sin]", "rope turns the other way",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("visible", "tril(", "tril(1", "a token of the block sees the next one",
         "model::visible_in_the_first_block"),
        ("Transformer.build_masks", "at.tree", "None", "the tree is not handed on: the mask ignores it",
         "trees::a_tree_that_grows_equals_one_block_and_its_paths_equal_chains[llama]"),
        ("Transformer.run", "== 0", "== 1", "sliding on odd layers",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.run", "window if layer % 2 == 0 else None", "window", "sliding on every layer",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.run", "1 - c", "2 - c", "the first token of a block misses the end of its window",
         "model::sliding_layers_read_their_window_only[rows]"),
        ("Transformer.build_masks", "first:", ": at.end - first", "the mask is that of the first slots",
         "model::sliding_layers_read_their_window_only[slice]"),
        ("visible", "M - T:", ":T", "a level stands where the root does",
         "properties::visible_is_its_definition"),
        ("Attention.__init__", ") if c.query_scale is None else c.query_scale", ")", "query_scale ignored",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Attention.forward", "self.c.attn_softcap", "None", "no soft-cap on the scores",
         "by_hand::an_attention_after_a_filled_cache"),
        ("Attention.forward", "mask)", "mask).copy_(softcap(scores, self.c.attn_softcap).view(B, Hkv, G, T, "
         "-1))", "soft-cap behind the mask: -inf becomes -50", "by_hand::an_attention_after_a_filled_cache"),
        ("Attention.forward", ", 1, 2", ", 2, 1", "heads leave attention in another order",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("Attention.project", "qkv + self.bias", "qkv", "the bias of Qwen2 is left out",
         "checkpoint::saving_and_loading_loses_nothing[qwen2-dtype2]"),
        ("Attention.project", "self.k_norm(k)", "k", "the keys of Qwen3 are not normed",
         "checkpoint::saving_and_loading_loses_nothing[qwen3-dtype3]"),
        ("RMSNorm.forward", "offset + self.", "", "w instead of 1 + w",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("MLP.__init__", "tanh", "none", "the exact gelu instead of the tanh one",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("MLP.forward", "self.act(gate) * up", "gate * self.act(up)", "gate and up swapped in the MLP",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("Transformer.run", "x + b.mlp_post", "b.mlp_post", "the residual of the MLP is missing",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("Transformer.run", "x + b.mlp_post(b", "b.mlp_post(x + b", "the post-norm stands behind the sum",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.run", "attn_post(b.attn(b.attn_norm(x), cos, sin, masks[window], store)",
         "attn(b.attn_norm(x), cos, sin, masks[window], store", "the post-norm of attention is missing",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.embed", ") * self.scale", ")", "embed_scale missing",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.unembed", "softcap(F.linear(self.norm(x), rows), self.c.final_softcap",
         "F.linear(self.norm(x), rows",
         "no soft-cap on the logits", "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("Transformer.unembed", "self.norm(x)", "x", "no norm before the head",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("Transformer.angles", "= device or (t[0].shape[0] < end)", "= device", "the table is never regrown",
         "model::only_distances_matter[llama]"),
        ("Transformer.embed", "scale", "c.embed_scale", "the embedding scale is not rounded",
         "model::embeddings_are_scaled_by_the_rounded_scale"),
        ("Transformer.angles", "with torch.inference_mode(False)", "if True", "a table made while generating "
         "cannot be trained with", "speculative::a_model_that_has_generated_can_still_be_trained")],
    "minimal.py": [
        ("rounds_with_cache", "before += len(new)", "before += len(drafted) + 1",
         "the text goes on after the rejected tokens", "minimal::it_is_the_loop_at_batch_1"),
        ("rounds_with_cache", "span(before, before + len", "span(before + 1, before + 1 + len",
         "the other blocks read one position too late", "minimal::it_is_the_loop_at_batch_1")],
    "kvcache.py": [
        ("KVCache.write", "keys[:, :, start", "keys[:, :, max(0, start - 1)", "a single token reads W + 1 "
         "slots", "by_hand::a_write[start]"),
        ("KVCache.write", "slots, v)", "slots, k)", "copied and pasted: ragged rows store keys as values",
         "by_hand::a_write[rows]"),
        ("KVCache.move", ", self.v", ",", "a move leaves the values behind",
         "trees::greedy_identity[exit-llama-cpu]"),
        ("KVCache.move", "target, t.gather(3, source", "source, t.gather(3, target",
         "a move goes the other way", "trees::greedy_identity[exit-llama-cpu]")],
    "sampling.py": [
        ("to_probs", "ids = order.indices[..., :top_k]", "top_k = top_k and top_k + 1\n"
         "ids = order.indices[..., :top_k]", "top-k keeps one too many",
         "by_hand::probabilities[top-k]"),
        ("Coins.flip", "< prob", "<= prob", "what has probability 0 can happen",
         "sampling::flips_are_true_where_u_is_below_prob"),
        ("shift", ".bitwise_and_((1 << 64 - bits) - 1)", "", "the sign bit is shifted in",
         "sampling::the_published_values_of_splitmix64"),
        ("uniform", "(i + 1)", "i", "the stream begins one number early",
         "sampling::the_published_values_of_splitmix64"),
        ("to_probs", "= top_p", "= top_p * p.masked_fill(p < (min_p or 0) * p[..., :1], 0).sum(-1, "
         "keepdim=True)", "min_p before top_p", "sampling::random_logits_give_what_transformers_gives"),
        ("to_probs", "(logits - logits.amax(-1, keepdim=True)) /", "logits /", "the maximum is not taken off "
         "first", "sampling::a_tiny_temperature_is_no_nan[{}-1e-30]"),
        ("Coins.take", "= count", "= max(4096, count)", "the numbers computed ahead are skipped",
         "properties::coins_are_splitmix64_in_purchases_of_any_size")],
    "verification.py": [
        ("verify", "cumprod(1).", "", "count acceptances after a rejection",
         "by_outcomes::verify_drawn_drafts[2-None]"),
        ("verify", "(max=K - 1)] * rejected[:, None]", "(max=K - 1)]", "unproposed places keep their q",
         "by_outcomes::verify_drawn_drafts[1-None]"),
        ("verify", "q[row, accepted.clamp(max=K - 1)]", "q[:, 0]",
         "the residual of every place takes the first q", "speculative::exact_law[exit]"),
        ("verify", "torch.where(some, residual, p)", "residual",
         "no fallback to p where nothing is left", "by_outcomes::where_nothing_is_left"),
        ("verify_block", "(passed * (place + 1)).amax(1)", "passed.cumprod(1).sum(1)",
         "blocks end at the first failure, not after the last success", "verify_block::drawn_drafts[2-None]"),
        ("verify_block", "weight[:, :K, None] * p[:, :K]", "p[:, :K]",
         "the residual of a block without its weight", "verify_block::drawn_drafts[2-None]"),
        ("verify_block", "torch.where(whole, weight[:, 1:], mass / (mass + 1 - weight[:, 1:]))",
         "mass / (mass + 1 - weight[:, 1:])", "the whole block is judged by the formula of its parts",
         "verify_block::drawn_drafts[1-None]"),
        ("verify_block", ".clamp(max=1)", "", "the weight of a prefix exceeds 1",
         "verify_block::drawn_drafts[2-None]"),
        ("verify_block", "one_hot(tokens, p)", "torch.ones_like(p[:, :K])",
         "the q of copies is 1 everywhere", "verify_block::copied_drafts")],
    "speculative.py": [
        ("chain", "k - 1)", "k)", "the draft runs the race of the next place",
         "exact::a_draft_by_the_model_itself_wins_every_race"),
        ("State.span", "(first - 1, stop - 1", "(first, stop", "State.span off by one, ragged rows",
         "speculative::greedy_identity[none-llama-cpu]"),
        ("State.after", "(self.n[:, None] + steps).clamp_(max=self.tokens.shape[1] - 1)",
         "self.n[:, None] + steps", "positions beyond the limit are not clamped",
         "speculative::context_limit[llama-long]"),
        ("prefill", "i * chunk", "i", "prefill: chunks in the wrong slots",
         "model::cached_blocks_equal_the_full_pass[3-llama]"),
        ("prefill", "chunk, 1)", "chunk, 1)[:-1] or [tokens]", "prefill skips the short last chunk",
         "model::cached_blocks_equal_the_full_pass[1-llama]"),
        ("chain", "state.coins.choose(q", "q.argmax(-1", "an argmax draw with a soft q",
         "speculative::exact_law[exit]"),
        ("chain", "append(q", "append(logits.softmax(-1)", "the q handed over is not the one drawn from",
         "speculative::exact_law[exit]"),
        ("chain", "state.probs(logits", "logits.softmax(-1", "drafts ignore the temperature",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("chain", "min(lengths[b], k + 1)", "min(lengths[b], k + 2)", "drafting stops one step late",
         "control::no_step_is_computed_once_all_rows_have_ended"),
        ("commit", "1, K + 2", "0, K + 1", "commit writes one slot too early",
         "speculative::greedy_identity[none-llama-cpu]"),
        ("commit", "out.scatter_(1, accepted[:, None], next_token[:, None]",
         "torch.cat([draft.tokens, next_token[:, None]], 1", "the next token is put after the whole draft",
         "speculative::greedy_identity[ngram-llama-cpu]"),
        ("commit", " if state.left[b] else []", "", "finished rows do not freeze",
         "speculative::greedy_identity[ngram-llama-cpu]"),
        ("until", "in eos", "in eos and i == len(tokens) - 1", "only the last token of a round can end it",
         "speculative::end_of_text_at_every_position[llama-skip]"),
        ("until", "enumerate(tokens", "reversed([*enumerate(tokens)]", "the latest end-of-text ends, not the "
         "earliest", "speculative::end_of_text_at_every_position[gemma2-skip]"),
        ("rounds", "set(eos)", "set(list(eos)[:1])", "only one end-of-text id counts",
         "speculative::end_of_text_at_every_position[llama-ngram]"),
        ("commit", "min(int(yes), len(new)", "int(yes", "accepted counts what end-of-text cut off",
         "speculative::what_an_end_of_text_cuts_off_was_never_tested[0-llama]"),
        ("Draft.fit", "min(K, left - 1)", "min(K, left)", "max_new overshoots: no room for the token "
         "behind", "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("rounds", "min(max_new, model.c.max_len - len(text))", "max_new", "the context limit is ignored",
         "speculative::context_limit[llama-none]"),
        ("Draft.fit", "torch.minimum(length, draft.length)", "length",
         "the drafter's length is ignored", "golden::golden_counts[stories-llama]"),
        ("one_round", "Pass(logits,", "Pass(logits if logits.isfinite().all() else None,",
         "a check that waits for the device each round", "paper_gpu::one_wait_a_round[llama-1-plain]"),
        ("NGram.enter", "[tuple(text[i:i + self.n])] = i + self.n", ".setdefault(tuple(text[i:i + self.n]), "
         "i + self.n)", "copies what followed the first time, not the last",
         "speculative::ngram_copies_the_latest_continuation[once]"),
        ("ModelDraft.propose", "min(max(lengths), max(2, *unread))", "1",
         "the draft model reads one token only: it misses its own last draft",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("ModelDraft.propose", "pick(self.run(state.read(at.slots), at), last)",
         "self.run(state.read(at.slots), at)[:, -1:]", "short rows draft from a dead slot",
         "speculative::empty_skip_set_needs_the_fewest_passes[1-llama]"),
        ("ModelDraft.observe", "list(map(min, self.held, agree))", "self.held",
         "refused drafts stay in the draft model's cache", "speculative::drafts_are_right[model-llama]"),
        ("ModelDraft.propose", "span(k, k", "span(k - 1, k - 1", "the draft model's position off by one",
         "speculative::empty_skip_set_needs_the_fewest_passes[4-llama]"),
        ("Draft.fit", "self.cut(max(state.left) - 1)", "self", "a drafter may overrun the answer",
         "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("Draft.cut", "cut(K + 1", "cut(K", "cut: the last known token forgotten",
         "speculative::drafts_never_overrun_even_if_they_ignore_what_is_left[4]"),
        ("commit", " if len(new) > yes else kept[b]", "", "what an end of text cut off counts as refused",
         "speculative::what_an_end_of_text_cuts_off_was_never_tested[0-llama]"),
        ("one_round", " | ran.trace", "", "a trace begins where the verifier does",
         "heads::drafts_are_what_training_sees[kangaroo-in_turns-llama]"),
        ("wanted", "left - 1", "left", "gamma clipped one too late",
         "sampling::a_round_spends_drafts_then_flips_then_one_choice"),
        ("NGram.enter", "= i + self.n", "= i + self.n + 1", "copies from one token too late",
         "speculative::ngram_copies_the_latest_continuation[once]")],
    "methods/standin.py": [
        ("Padded.unembed", "-math.inf", "0.0", "an id that the draft model lacks is drafted",
         "speculative::ids_that_only_one_model_has_are_never_drafted[12]"),
        ("ShortHead.unembed", "-math.inf", "0.0", "tokens outside the draft vocabulary are drawn",
         "layerskip::a_short_head_knows_its_tokens_and_no_other")],
    "layerskip.py": [
        ("without", "for i in attn] + [2 * i + 1", "+ 1 for i in attn] + [2 * i", "attention and MLP swapped",
         "layerskip::skip_sets_by_hand"),
        ("SelfDraft.propose", "shared_prefix(subs)", "shared_prefix(subs) + 1", "hands over one sub-layer "
         "too many", "speculative::greedy_identity"),
        ("SelfDraft.propose", "[shared:]", "", "the shared sub-layers run twice",
         "speculative::greedy_identity"),
        ("SelfDraft.propose", "if self.is_target and xs:", "if xs:", "what other weights computed is reused",
         "speculative::a_stand_in_with_the_same_blocks_shares_and_a_copy_does_not"),
        ("SelfDraft.propose", "shared_prefix(subs", "max(0, shared_prefix(subs) - 1",
         "hands over one sub-layer too few", "speculative::what_is_shared_is_handed_over_and_not_run_again"),
        ("same_model", "model.blocks is not state.model.blocks", "False", "what a stranger computes is "
         "trusted", "pace::what_makes_no_sense")],
    "control.py": [
        ("expected_tokens", "(gamma + 1", "(gamma", "the token behind the draft is forgotten",
         "by_hand::expected_tokens_of_a_number"),
        ("expected_tokens_along", "starts[i]", "1.0",
         "the mean run over all positions: the paradox of inspection",
         "control::expected_tokens_along_a_series_by_trying_every_outcome"),
        ("round_cost", "gamma *", "(gamma + 1) *", "the token after the draft costs a drafted step",
         "control::best_gamma_by_brute_force"),
        ("round_cost", "cost + verify_cost", "cost + 1", "a block costs as much as one token",
         "control::best_gamma_by_brute_force"),
        ("weight_costs", "head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)", "head_dim * 4 * c.n_heads",
         "each query head is taken to have its own key", "control::weight_costs_count_what_a_pass_reads"),
        ("Confidence.stop", "confidence(logits, token", "logits.softmax(-1).amax(-1",
         "the confidence in another token than the drawn one",
         "control::confidence_is_that_in_the_drawn_token_in_float32")],
    "search.py": [
        ("Teacher.draft", ", spare,", ", here,", "a scored draft takes the slots of the text",
         "layerskip::acceptance_is_that_of_the_loop[llama-whole]"),
        ("Teacher.draft", "eye(T, dtype=torch.bool, device=self.p.device", "ones(T, T, dtype=torch.bool, "
         "device=self.p.device).tril(", "a scored draft reads the drafts before it",
         "layerskip::acceptance_is_that_of_the_loop[llama-whole]"),
        ("Teacher.overlap", "torch.minimum(self.p,", "(self.p *", "how likely two draws agree, not that a "
         "draft is accepted", "layerskip::acceptance_is_that_of_the_loop[llama-whole]"),
        ("distances", "(groups", "(1 - groups", "attention and MLP swapped", "gaussian::the_kernel_by_hand"),
        ("kernel", "] * d", "] * d.square()", "squared distances, as in a smooth kernel",
         "gaussian::the_kernel_by_hand"),
        ("GaussianProcess.__init__", "(y - self.mean) / self.std", "y - self.mean", "values are not scaled",
         "gaussian::predictions_by_the_dense_formula"),
        ("speedup", ", pass_cost=costs.pass_cost", "", "the best gamma forgets the block",
         "search::speedup_by_hand[gemma2-probs1-9.0]"),
        ("speedup", ", calibration.share", "", "sets are scored with the cost of the whole head",
         "search::a_run_finds_the_best_set_at_the_costs_of_a_file"),
        ("Space.sublayers", "bit}", "not bit}", "a bit is taken for a sub-layer that stays",
         "search::sets_that_may_be_tried"),
        ("propose", "torch.cdist(z, zs, p=1).min(1).values > 0.5", "z[:, 0] >= 0", "a set is tried twice",
         "search::it_finds_the_optimum_within_sixty_trials")],
    "checkpoint.py": [
        ("layout", "'mlp_norm.weight': ['post_att", "'attn_norm.weight': ['post_att",
         "Llama's post_attention_layernorm taken by its name",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("split", ":-2]", ":-2].transpose(0, 1)", "query heads dealt out in turn to the key heads",
         "checkpoint::saving_and_loading_loses_nothing[llama-dtype0]"),
        ("load", "c.embed_scale", "1.0", "the embeddings are not scaled",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("check_tensors", ") | have.keys()", ")", "left-over tensors are ignored",
         "checkpoint::tensors_that_are_missing_left_over_or_misshapen_are_named")],
    "families.py": [
        ("gemma2", "s.number('query_pre_attn_scalar'", "s.number('head_dim'",
         "query_pre_attn_scalar is not read",
         "checkpoint::saving_and_loading_loses_nothing[gemma2-dtype1]"),
        ("read_eos", "'eos_token_id' not in settings", "given.get('eos_token_id') is not None",
         "end-of-text from config.json first", "checkpoint::end_of_text_ids_come_in_every_form"),
        ("read_eos", "eos is None", "not eos", "end-of-text id 0 counts as none",
         "checkpoint::end_of_text_ids_come_in_every_form")],
    "methods/suffix.py": [
        ("Suffix.follow", "chance *= ", "chance = ", "a path is as likely as its last token",
         "suffix::the_most_promising_continuation[drafter9-text9-want9]"),
        ("Suffix.best", "score > best[0]", "not best[0]", "the longest ending wins, whatever followed it",
         "suffix::the_most_promising_continuation[drafter2-text2-want2]")],
    "methods/then.py": [
        ("Then.propose", ".clone()", "", "the draft is written into the text",
         "control::each_row_goes_on_where_its_own_draft_ends"),
        ("Then.propose", "[:m]", "", "the tail goes on after dead slots",
         "control::each_row_goes_on_where_its_own_draft_ends"),
        ("Then.observe", "accepted=first, proposed=", "proposed=", "the tail's acceptances are the first "
         "one's", "control::each_rule_learns_of_its_own_part")],
    "methods/trees.py": [
        ("verify_tree", "ratio = left.gather(1, token) / q[:, k", "ratio = left.gather(1, token) / q[:, 0",
         "in a tree the q of another node",
         "trees::on_chains_it_is_verify_coin_for_coin[False]"),
        ("verify_tree", "less / mass", "left", "later siblings of a tree are tried against p itself",
         "by_outcomes::verify_tree_drawn_siblings[[0]-small-None]"),
        ("verify_tree", " & (parents[:, k] == node)", "", "in a tree a cousin is accepted",
         "trees::on_chains_it_is_verify_coin_for_coin[False]"),
        ("verify_tree", "live[:, k, None] & (mass > 0)", "mass > 0", "dead siblings of a tree take their "
         "part of p", "trees::on_chains_it_is_verify_coin_for_coin[True]"),
        ("straighten", "state.cache.move(slots.gather(1, path), slots)", "pass",
         "the accepted path of a tree is not moved", "trees::a_round_of_a_tree_is_a_chain[llama]"),
        ("straighten", "t[row[:, None], path]", "t", "after a tree logits and traces stay in its order",
         "trees::a_round_of_a_tree_is_a_chain[llama]"),
        ("ancestors", "] |= tree[row, parents[:, k - 1]]", ", :k] = True", "siblings see each other's keys "
         "in a tree", "trees::greedy_identity[exit-llama-cpu]"),
        ("Tree.place", "state.after(depth - 1)", "super().place(state).slots",
         "in a tree the slot is taken for the position", "trees::greedy_identity[exit-llama-cpu]"),
        ("Tree.cut", "self.parents[:, :K]", "self.parents", "a tree is cut, and its parents are not",
         "trees::context_limit[llama-drawn]"),
        ("siblings", ".scatter(2, last, 0.0)", "", "the same guess twice: drawn with replacement",
         "trees::measured_ranks_are_what_first_families_accept"),
        ("siblings", "coins.choose(q[-1]", "q[-1].argmax(-1", "the next best token, not a drawn one",
         "trees::exact_law[exit, top-p]"),
        ("best_tree", "* (1 + inside) +", "+ inside +", "a subtree counts though its root is refused",
         "trees::the_best_tree_is_the_best_of_all[acceptance0-0.1-0.02]"),
        ("Siblings.propose", "torch.where(whole, K + sum(widths), draft.length)",
         "draft.length + sum(widths)",
         "the dead end of a short chain is proposed", "trees::rows_with_short_chains_have_no_siblings"),
        ("branch", "q[:, columns", "q[:, :len(nodes)", "q is not in the order of the tree",
         "heads::a_tree_has_as_many_levels_as_the_rule_says")],
    "machine/quant.py": [
        ("Int8.__init__", "torch.maximum(-low, high)", "high", "the largest weight, not the largest "
         "magnitude", "quant::int8_by_hand"),
        ("Int4.full", "offset + codes * step", "codes * step", "the least weight of a group is taken for 0",
         "quant::int4_by_hand"),
        ("unpack_nibbles", "[steps & 15, steps >> 4]", "[steps >> 4, steps & 15]", "the first 32 of a step "
         "stand in the high bits", "quant::int4_by_hand")],
    "machine/few.py": [
        ("FewRows.floats", "norm.offset + ", "", "1 + w is taken for w",
         "rows::a_pass_is_the_eager_one_with_the_same_bits[gemma2-torch.float32]"),
        ("FewRows.block", "if i % 2 == 0 else None", "", "every attention has a window",
         "rows::a_pass_is_the_eager_one_with_the_same_bits[gemma2-torch.float32]"),
        ("FewRows.masks", "[None, self.c.window]", "[None, None]", "in a tree no attention has a window",
         "rows::a_tree_also_while_it_grows[gemma2]"),
        ("FewRows.listed", "i in traced or ", "", "a head reads the state at the end of the pass",
         "rows::a_pass_is_the_eager_one_with_the_same_bits[llama-torch.float32]")],
    "machine/rows.py": [
        ("check", "torch.equal(call(lib, rows[:count], describe(w), torch.float32), y[:count])", "True",
         "rows are not compared", "rows::what_is_compiled_wrongly_is_not_kept")],
    "methods/within.py": [
        ("Within.propose", "r.p[b, :len(r.new[b])]", "r.p[b, 1:1 + len(r.new[b])]", "each q is that of the "
         "next token", "within::exact_law[lookup]"),
        ("Within.propose", "(state, model=self.model", "(state, model=state.model", "the target drafts",
         "within::q_is_the_copys[llama]"),
        ("Within.propose", "inner = inner.ahead(", "self.inner = inner = inner.ahead(", "what was rejected "
         "inside is not forgotten",
         "within::inside_a_drafter_forgets_what_the_target_did_not_judge[small model-llama]"),
        ("Within.observe", "self.inner.observe(state, r)", "pass", "inside, a head keeps the copy's states",
         "within::inside_a_drafter_forgets_what_the_target_did_not_judge[eagle-llama]")],
    "machine/parallel.py": [
        ("Added.product", "talk(dist.all_reduce, y)", "pass", "nothing is added up",
         "parallel::several_processes_write_the_text_of_one"),
        ("agreed_draft", "agreed(moved(", "(moved(", "each process verifies its own draft",
         "parallel::every_source_drafts_in_two_processes_or_says_why_not")],
    "methods/drafting.py": [
        ("Reader.observe", "len(state.known[0]) - lengths[0]", "len(state.known[0])",
         "states are noted where the next round begins",
         "heads::drafts_are_what_training_sees[kangaroo-alone-llama]"),
        ("Reader.begin", "0, T, 256)", "1)", "only the beginning of a long prompt is read",
         "heads::a_long_prompt_is_read_in_parts"),
        ("Reader.catch_up", "self.late - self.unread", "self.late - 1", "only the last token is read",
         "heads::drafts_are_what_training_sees[eagle-alone-llama]"),
        ("Reader.catch_up", "(stop - start, stop", "(stop - start, self.late", "each part is the last one",
         "heads::drafts_are_what_training_sees[eagle-in_turns-llama]")],
    "methods/heads.py": [
        ("graft", "min(i, last)", "0", "the head starts as the first block",
         "heads::a_head_starts_as_a_part_of_the_model[llama]"),
        ("pricing", "step.weights", "count(head)", "a head of several steps counts as a whole for each token",
         "pace::trained_heads_and_their_prices[llama]")],
    "methods/dynamic.py": [
        ("DEL.score", "self.omega * self.counts", "self.counts", "old counts do not fade",
         "dynamic::counts_fade_by_hand")],
    "methods/pace.py": [
        ("Pace.covered", "cost - 1", "cost - 99", "overdrawn balance", "pace::it_costs_no_more_than_it_may"),
        ("Pace.observe", "self.choice.late + ", "", "what an arm reads first costs nothing",
         "pace::it_costs_no_more_than_it_may"),
        ("Pace.observe", "min(", "max(", "one row pays for another", "pace::it_costs_no_more_than_it_may"),
        ("Pace.promise", "best * (cost + self.thinking)", "best * cost", "to choose costs nothing",
         "pace::promises_of_blocks_by_hand"),
        ("Pace.propose", "self.thinking / REST", "0", "it never sleeps", "pace::it_sleeps_if_nothing_gains")],
    "methods/arms.py": [
        ("Calibrated.stop", "bars[k", "bars[0", "a wider block is taken to cost nothing",
         "pace::one_more_is_drafted_while_its_chance_exceeds_its_price"),
        ("Calibrated.learn", "kept + 1", "kept", "the rejected token is not counted",
         "pace::outcomes_are_counted_by_hand")],
    "machine/tapes.py": [
        ("Tape.__call__", ".clone()", "", "the output is overwritten by the next replay",
         "recorded::texts_of_batches_of_several_sizes"),
        ("Home.move_in", "there.copy_(kept)", "kept.copy_(kept)", "a cache in use loses its keys",
         "recorded::new_caches_replay_what_was_recorded_with_others[skip-llama]")],
    "machine/recorded.py": [
        ("Recorded.record", "all((d <= most for d in off))", "not max(off) > most", "NaN passes the check",
         "recorded::a_wrong_recording_is_refused")],
    "machine/fused.py": [
        ("Fused.forward", "mask[:, 0]", "None", "each token sees those after it", "fused::a_prompt[7-llama]"),
        ("Fused.forward", ", scale=self.scale", "", "query_scale ignored", "fused::a_prompt[20-llama]"),
        ("Fused.forward", "T < LONG", "T < 0", "short blocks round in another way, too",
         "fused::a_short_block_has_the_very_bits_of_explicit_attention")],
    "machine/blocks.py": [
        ("Piece.__call__", "self.traced)", "self.traced[1:])", "a head reads another state than it asked for",
         "recorded::a_traced_pass_is_that_of_an_eager_pass[llama]"),
        ("Piece.unpack", ".clamp(max=len(cos) - 1)", "", "padding is written beyond what is read",
         "recorded::a_replayed_block_is_the_eager_one[False-llama]"),
        ("widen", "tree[:, -dead:, -dead:] = itself", "pass", "a dead token sees nothing, and is NaN",
         "recorded::a_tree_is_replayed_also_while_it_grows[llama]"),
        ("shell", "layer % 2", "0", "every attention is compiled as one with a window",
         "recorded::joined_blocks_are_the_blocks[gemma2]")],
    "machine/exact.py": [
        ("Exact.read", "pad(x, ROWS)", "x", "a short piece is not padded",
         "exact::every_pass_has_one_shape"),
        ("Exact.read", "cache.k.shape[3]", "int(slots.max()) + ROWS", "the slots that are read vary",
         "exact::every_pass_has_one_shape"),
        ("Exact.run", "part(cache, b) for b", "part(cache, 0) for b",
         "texts of a batch change their caches",
         "exact::recorded_passes_are_exact_too[torch.float32-llama]")],
    "lab/rules.py": [
        ("DoNoHarm.begin", "replace(self.past)", "self.past", "all rows share one estimate",
         "no_harm::do_no_harm_estimates_by_hand"),
        ("DoNoHarm.how_far", "self.saved[b] -= self.cost", "pass",
         "a try is not paid for", "no_harm::do_no_harm_tries_a_useless_draft_as_often_as_was_saved_for")],
}
MISTAKES = [Mistake(file, *row[:-1], node_id(row[-1])) for file, rows in TABLE.items() for row in rows]


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.exit(main(sys.argv[1:]))
