"""Plausible mistakes, each with the test that must notice it: a test of the tests.

`python tests/mutants.py` copies the repository, makes one mistake at a time and runs only the test beside it;
with words behind it, only the rows whose module or phrase contains one of them. A row fails if its mistake
survives, if its text is not found exactly once, or if its test does not pass without the mistake.
"""

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORKERS = min(2, os.cpu_count() or 1)
LIMIT, HANGS = 60, 15  # seconds; only where a row ends with HANGS is running out of time a kill


class Mutant(NamedTuple):
    file: str
    old: str  # stands exactly once in the file
    new: str
    phrase: str  # what somebody might have been thinking, or what breaks
    test: str  # the node id, below tests/, of the test that must fail
    limit: int = LIMIT


MODEL = [
    # pure functions
    ("torch.tanh(x / cap) * cap", "torch.tanh(x) * cap",
     "soft-cap forgets to divide first", "test_model.py::test_softcap_by_hand"),
    ("torch.arange(0, head_dim, 2,", "torch.arange(0, head_dim // 2, 1,",
     "rope: exponent i / D instead of 2i / D", "test_model.py::test_frequencies_by_hand"),
    ("        return slow\n", "        return freqs\n",
     "linear rope scaling is not applied", "test_model.py::test_frequencies_of_linear_scaling_by_hand"),
    ('low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]',
     'high, low = scaling["low_freq_factor"], scaling["high_freq_factor"]',
     "llama3 rope: low and high swapped", "test_model.py::test_frequencies_of_llama3_by_hand"),
    (".clamp(0, 1)\n    return keep", ".clamp(max=1)\n    return keep",
     "llama3 rope: slow pairs are extrapolated", "test_model.py::test_frequencies_of_llama3_by_hand"),
    ("torch.cat([-sin, sin], -1)", "torch.cat([sin, -sin], -1)",
     "rope turns the other way", "test_model.py::test_rope_by_hand"),
    ("x.roll(x.shape[-1] // 2, -1)", "x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)",
     "rope pairs neighbours, as in Meta's own files", "test_model.py::test_rotate_by_hand"),
    # who sees what
    ("< window)", "<= window)",
     "window off by one", "test_model.py::test_visible_within_a_window"),
    (".tril()", ".tril(1)",
     "a token of the block sees the next one", "test_model.py::test_visible_in_the_first_block"),
    ("torch.minimum(slots[:, :1], positions)", "slots[:, :1].expand(B, T)",
     "a scored token sees its own first copy and its future",
     "test_model.py::test_visible_where_slots_are_not_positions"),
    ("slot.expand(B, end).scatter(1, slots, positions)", "slot.expand(B, end)",
     "the window measures slots, not positions", "test_model.py::test_visible_where_slots_are_not_positions"),
    ("visible(at, slots, end, tree, w)", "visible(at, slots, end, None, w)",
     "the tree is not handed on: the mask ignores it",
     "test_model.py::test_each_path_of_a_tree_equals_the_same_tokens_in_a_chain[llama]"),
    ("window = c.window if layer % 2 == 0 else None", "window = c.window if layer % 2 == 1 else None",
     "sliding on odd layers", "test_model.py::test_an_attention_by_hand[gemma2-0]"),
    ("window = c.window if layer % 2 == 0 else None", "window = c.window",
     "sliding on every layer", "test_model.py::test_an_attention_by_hand[gemma2-1]"),
    ("recent = window if masks[window] is None else None", "recent = None",
     "a single token of a sliding layer reads all slots",
     "test_model.py::test_a_single_token_needs_no_mask[gemma2]"),
    (" and slots == positions", "",
     "a single token at another slot gets no mask",
     "test_model.py::test_one_scoring_pass_equals_each_token_on_its_own[all-llama-cpu]"),
    # attention
    ("= c.head_dim ** -0.5 if c.query_scale is None else c.query_scale", "= c.head_dim ** -0.5",
     "query_scale ignored", "test_model.py::test_an_attention_by_hand[gemma2-1]"),
    ("scores = softcap(scores, self.c.attn_softcap)", "scores = softcap(scores, None)",
     "no soft-cap on the scores", "test_model.py::test_an_attention_by_hand[gemma2-1]"),
    ("(scores.view(B, Hkv, G, T, -1) + mask).view_as(scores)",
     "softcap(scores.view(B, Hkv, G, T, -1) + mask, self.c.attn_softcap).view_as(scores)",
     "soft-cap behind the mask: -inf becomes -50", "test_model.py::test_an_attention_by_hand[gemma2-1]"),
    ("y.view(B, Hkv, G, T, D).permute(0, 3, 1, 2, 4)", "y.view(B, Hkv, G, T, D).permute(0, 3, 2, 1, 4)",
     "heads leave attention in another order", "test_model.py::test_an_attention_by_hand[llama-0]"),
    ("store(qk[..., -1, :].transpose(1, 2)", "store(qkv[..., -2, :].transpose(1, 2)",
     "keys are stored before they are turned", "test_model.py::test_an_attention_by_hand[llama-0]"),
    # norms, MLP, residual stream
    ("w = self.offset + self.weight.to(wide)", "w = self.weight.to(wide)",
     "w instead of 1 + w", "test_model.py::test_an_mlp_of_gemma2_by_hand"),
    ("wide = torch.promote_types(x.dtype, torch.float32)", "wide = x.dtype",
     "Gemma's norm in bfloat16", "test_model.py::test_the_norm_of_gemma2_works_in_float32"),
    ('approximate="tanh"', 'approximate="none"',
     "the exact gelu instead of the tanh one", "test_model.py::test_an_mlp_of_gemma2_by_hand"),
    ("self.act(gate) * up", "gate * self.act(up)",
     "gate and up swapped in the MLP", "test_model.py::test_an_mlp_of_gemma2_by_hand"),
    ("x = x + b.mlp_post(b.mlp(b.mlp_norm(x)))", "x = b.mlp_post(b.mlp(b.mlp_norm(x)))",
     "the residual of the MLP is missing", "test_model.py::test_an_mlp_of_gemma2_by_hand"),
    ("x = x + b.mlp_post(b.mlp(b.mlp_norm(x)))", "x = b.mlp_post(x + b.mlp(b.mlp_norm(x)))",
     "the post-norm stands behind the sum", "test_model.py::test_an_mlp_of_gemma2_by_hand"),
    ("b.attn_post(b.attn(b.attn_norm(x), cos, sin, masks[window], store))",
     "b.attn(b.attn_norm(x), cos, sin, masks[window], store)",
     "the post-norm of attention is missing", "test_model.py::test_an_attention_by_hand[gemma2-1]"),
    ("F.embedding(tokens, self.tok) * self.scale", "F.embedding(tokens, self.tok)",
     "embed_scale missing", "test_model.py::test_logits_are_the_committed_ones[gemma2]"),
    ("F.linear(self.norm(x), head)", "F.linear(x, head)",
     "no norm before the head", "test_model.py::test_logits_are_the_committed_ones[llama]"),
    ("softcap(F.linear(self.norm(x), head), self.c.final_softcap)", "F.linear(self.norm(x), head)",
     "no soft-cap on the logits", "test_model.py::test_logits_are_the_committed_ones[gemma2]"),
    # the cos/sin table
    (" or len(t[0]) < end:", ":",
     "the table is never regrown", "test_model.py::test_only_distances_matter_without_a_cache[llama]"),
    ("t[0].dtype != dtype or ", "",
     "the table keeps its first type", "test_model.py::test_the_angles_follow_the_type_of_the_weights"),
    ("F.embedding(tokens, self.tok) * self.scale",
     "F.embedding(tokens, self.tok) * self.c.embed_scale",
     "the embedding scale is not rounded", "test_model.py::test_embeddings_are_scaled_by_the_rounded_scale"),
    ("with torch.inference_mode(False):",
     "if True:",
     "a table made while generating cannot be trained with",
     "test_speculative.py::test_a_model_that_has_generated_can_still_be_trained"),
]

KVCACHE = [
    ("max(0, end - recent)", "max(0, end - recent - 1)",
     "a single token reads W + 1 slots", "test_model.py::test_a_single_token_needs_no_mask[gemma2]"),
    ("max(0, end - recent)", "max(0, end - recent + 1)",
     "a single token reads W - 1 slots", "test_model.py::test_a_single_token_needs_no_mask[gemma2]"),
    ("max(0, end - recent)", "end - recent",
     "in a short text the window starts at a negative slot",
     "test_model.py::test_a_write_returns_the_last_slots_only_where_it_is_asked_to"),
    ("max(0, end - recent), end)", "max(0, end - recent), end - 1)",
     "a block does not read its own last slot",
     "test_model.py::test_slots_as_a_slice_and_as_a_tensor_write_the_same[cpu]"),
    ("values.scatter_(2, at, v)", "values.scatter_(2, at, k)",
     "copied and pasted: ragged rows store keys as values",
     "test_model.py::test_rows_of_a_block_go_to_their_own_slots"),
    ("twin.k, twin.v = self.k.repeat_interleave(rows, 1), self.v.repeat_interleave(rows, 1)",
     "twin.k, twin.v = (t.repeat_interleave(rows, 1) if rows > 1 else t for t in (self.k, self.v))",
     "a fork of one row shares its storage", "test_model.py::test_a_fork_is_a_copy"),
    ("twin.k, twin.v = self.k.repeat_interleave(rows, 1), self.v.repeat_interleave(rows, 1)",
     "twin.k, twin.v = self.k.repeat(1, rows, 1, 1, 1), self.v.repeat(1, rows, 1, 1, 1)",
     "a fork repeats the batch instead of each row", "test_model.py::test_a_fork_is_a_copy"),
    ("twin.layers = list(zip(twin.k, twin.v, strict=True))", "twin.layers = self.layers",
     "a fork writes into the original", "test_model.py::test_a_fork_is_a_copy"),
    ("torch.zeros(c.n_layers", "torch.empty(c.n_layers",
     "empty instead of zeros", "test_model.py::test_a_new_cache_is_all_zeros[cpu]"),
]

SAMPLING = [
    # to_probs
    (" / max(temperature, 1e-30)", "",
     "temperature ignored", "test_sampling.py::test_temperature_by_hand"),
    ("wide = torch.promote_types(logits.dtype, torch.float32)", "wide = logits.dtype",
     "half types stay half", "test_sampling.py::test_half_types_are_raised_and_float64_stays"),
    ("order.values[..., :top_k].softmax(-1), order.indices[..., :top_k]",
     "order.values[..., : top_k and top_k + 1].softmax(-1), order.indices[..., : top_k and top_k + 1]",
     "top-k keeps one too many",
     "test_sampling.py::test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id"),
    ("order.values[..., :top_k].softmax(-1), order.indices[..., :top_k]",
     "order.values.masked_fill(order.values < order.values[..., :top_k][..., -1:], -torch.inf).softmax(-1), "
     "order.indices",
     "top-k keeps all that tie with the last",
     "test_sampling.py::test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id"),
    ("stable=True", "stable=False",
     "an unstable sort: ties go anywhere",
     "test_sampling.py::test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id"),
    ("p.cumsum(-1) - p >= top_p", "p.cumsum(-1) >= top_p",
     "top_p drops the token that crosses", "test_sampling.py::test_top_p_keeps_the_token_that_crosses"),
    ("p.cumsum(-1) - p >= top_p", "p.cumsum(-1) - p > top_p",
     "top_p goes on where it is reached exactly", "test_sampling.py::test_top_p_stops_where_it_is_reached"),
    ("    if top_p not in (None, 1):", "    if top_p is not None:",
     "top_p = 1 cuts the tail", "test_sampling.py::test_top_p_1_does_nothing_even_to_a_long_tail"),
    ("p < min_p * p[..., :1]", "p < min_p",
     "min_p relative to 1", "test_sampling.py::test_min_p_by_hand"),
    ("- p >= top_p", "- p >= top_p * p.masked_fill(p < (min_p or 0) * p[..., :1], 0).sum(-1, keepdim=True)",
     "min_p before top_p", "test_sampling.py::test_top_p_comes_before_min_p"),
    ("p / p.sum(-1, keepdim=True)", "p",
     "no renormalisation", "test_sampling.py::test_top_p_keeps_the_token_that_crosses"),
    ("max(temperature, 1e-30)", "temperature",
     "the smallest temperatures divide by zero", "test_sampling.py::test_a_tiny_temperature_is_no_nan"),
    # coins
    ("< prob\n", "<= prob\n",
     "what has probability 0 can happen", "test_sampling.py::test_flips_of_certain_things"),
    ("u * cdf[..., -1:]", "u",
     "choose forgets to normalise", "test_sampling.py::test_choices_by_hand"),
    ("right=True", "right=False",
     "u = 0 chooses a token of weight zero", "test_sampling.py::test_a_token_of_weight_zero_is_never_chosen"),
    ("generator=self.generator, dtype=torch.float64)", "generator=self.generator).double()",
     "uniforms bought in float32", "test_sampling.py::test_the_stream_does_not_depend_on_the_purchases[cpu]"),
    ("torch.cat([self.pool.to(device), fresh])", "fresh",
     "the rest of a purchase is thrown away",
     "test_sampling.py::test_the_stream_does_not_depend_on_the_purchases[cpu]"),
    ("(logits - logits.amax(-1, keepdim=True)) /",
     "logits /",
     "the maximum is not taken off first", "test_sampling.py::test_huge_logits_at_a_tiny_temperature"),
]

CHECKPOINT = [
    # which tensor goes where
    ('{"post_attention_layernorm": b.mlp_norm.weight}', '{"post_attention_layernorm": b.attn_norm.weight}',
     "Llama's post_attention_layernorm taken by its name",
     "test_model.py::test_logits_are_the_committed_ones[llama]"),
    ('"post_attention_layernorm": b.attn_post.weight,\n                       "pre_feedforward_layernorm": '
     'b.mlp_norm.weight',
     '"post_attention_layernorm": b.mlp_norm.weight, "pre_feedforward_layernorm": b.attn_post.weight',
     "Gemma's post_attention_layernorm mapped as in Llama",
     "test_model.py::test_logits_are_the_committed_ones[gemma2]"),
    ('wqkv[:, -2],\n                  "self_attn.v_proj": wqkv[:, -1]',
     'wqkv[:, -1], "self_attn.v_proj": wqkv[:, -2]',
     "keys and values swapped", "test_model.py::test_logits_are_the_committed_ones[llama]"),
    ('"self_attn.q_proj": wqkv[:, :-2]', '"self_attn.q_proj": wqkv[:, :-2].transpose(0, 1)',
     "query heads dealt out in turn to the key heads",
     "test_model.py::test_logits_are_the_committed_ones[llama]"),
    ("gate, up = b.mlp.gate_up.chunk(2)", "up, gate = b.mlp.gate_up.chunk(2)",
     "gate and up swapped in the file", "test_model.py::test_logits_are_the_committed_ones[llama]"),
    ("model.scale.fill_(c.embed_scale)", "pass",
     "the scale is not refilled after to_empty", "test_model.py::test_logits_are_the_committed_ones[gemma2]"),
    ("if tuple(stored.get_shape()) != want:", "if math.prod(stored.get_shape()) != math.prod(want):",
     "sizes are checked, shapes are not",
     "test_checkpoint.py::test_tensors_that_are_missing_left_over_or_misshapen_are_named"),
    ("    if extra:\n", "    if False:\n",
     "left-over tensors are ignored",
     "test_checkpoint.py::test_tensors_that_are_missing_left_over_or_misshapen_are_named"),
    ("for name in sorted(set(where.values()))}", "for name in sorted(set(where.values()))[:1]}",
     "only the first shard is opened", "test_checkpoint.py::test_shards_load_like_one_file[llama-cpu]"),
    (" or any(Path(str(file)).name != file for file in where.values())", "",
     "an index may name any file of the machine",
     "test_checkpoint.py::test_an_index_names_files_of_its_own_folder"),
    # config.json
    ("head_dim=None, rms_norm_eps=1e-6", "head_dim=None, rms_norm_eps=1e-5",
     "Llama's default of eps",
     "test_checkpoint.py::test_what_a_llama_config_leaves_out_takes_the_family_defaults"),
    ("rope_theta=1e4, tie_word_embeddings=True", "rope_theta=1e4, tie_word_embeddings=False",
     "Gemma is not tied by default",
     "test_checkpoint.py::test_what_a_gemma2_config_leaves_out_takes_the_family_defaults"),
    ('act = raw["hidden_activation"] if family == "gemma2" else raw["hidden_act"]',
     'act = raw.get("hidden_act", raw.get("hidden_activation"))',
     "hidden_act instead of hidden_activation",
     "test_checkpoint.py::test_what_a_gemma2_config_leaves_out_takes_the_family_defaults"),
    ('number("query_pre_attn_scalar", float) ** -0.5', "head_dim**-0.5",
     "query_pre_attn_scalar is not read", "test_model.py::test_logits_are_the_committed_ones[gemma2]"),
    ('raw.get("rope_parameters") or raw.get("rope_scaling")', 'raw.get("rope_scaling")',
     "rope_parameters ignored", "test_model.py::test_logits_are_the_committed_ones[llama3]"),
    ('spec.get("type", "default")', '"default"',
     "the old spelling of the rope type ignored",
     "test_checkpoint.py::test_both_spellings_of_a_config_mean_the_same[linear]"),
    # special tokens
    ('(read_json(path) if path.is_file() else {}).get("eos_token_id", raw.get("eos_token_id"))',
     'raw.get("eos_token_id", (read_json(path) if path.is_file() else {}).get("eos_token_id"))',
     "end-of-text from config.json first", "test_checkpoint.py::test_end_of_text_ids_come_in_every_form"),
    ("[] if eos is None else", "[] if not eos else",
     "end-of-text id 0 counts as none", "test_checkpoint.py::test_end_of_text_ids_come_in_every_form"),
    ("[bos, *ids[start:]]", "[bos, *ids]",
     "begin-of-text doubled", "test_checkpoint.py::test_a_prompt_gets_exactly_one_begin_of_text"),
]

SPECULATIVE = [
    # where things stand
    ("last = len(self.text[0]) - 1", "last = len(self.text[0])",
     "State.at off by one, one row", "test_speculative.py::test_rows_equal_solo_runs[cpu-exit-llama]"),
    ("torch.arange(first - 1, first - 1 + T", "torch.arange(first, first + T",
     "State.at off by one, ragged rows", "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    (".clamp_(max=self.tokens.shape[1] - 1)", "",
     "positions beyond the limit are not clamped", "test_speculative.py::test_context_limit[llama-long]"),
    ("end = max(map(len, self.text)) - 1 + T", "end = max(map(len, self.text)) - 2 + T",
     "State.end off by one", "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    # verify
    ("coins.flip(px / qx)", "coins.flip(0.5 * px / qx)",
     "accept too rarely", "test_speculative.py::test_verify_by_hand"),
    (" & (torch.arange(K, device=p.device) < length[:, None])", "",
     "verify ignores the length", "test_speculative.py::test_verify_by_hand"),
    ("fine.cumprod(1).sum(1)", "fine.sum(1)",
     "count acceptances after a rejection",
     "test_speculative.py::test_verify_counts_up_to_the_first_refusal"),
    ("rest = (p - q * refused).clamp_(min=0)", "rest = p",
     "resample from p, not the residual", "test_speculative.py::test_verify_by_hand"),
    ("(p - q * refused)", "(p - q)",
     "unproposed places keep their q", "test_speculative.py::test_verify_by_hand"),
    ("torch.zeros_like(p).scatter_(1, tokens[row, at, None], 1.0) if q is None",
     "torch.zeros_like(p) if q is None",
     "certain proposals: the one-hot q is forgotten",
     "test_speculative.py::test_verify_certain_proposals"),
    ("p = p[row, accepted]", "p = p[row, at]",
     "the bonus token comes from the place before",
     "test_speculative.py::test_verify_certain_proposals"),
    ("else q[row, at]", "else q[:, 0]",
     "the residual of every place takes the first q", "test_speculative.py::test_exact_law[exit]"),
    # prefill
    ("slice(i * block, i * block + part.shape[1])", "slice(i, i + part.shape[1])",
     "prefill: blocks in the wrong slots", "test_speculative.py::test_prefill_blocks_agree[cpu-3-llama]"),
    ("enumerate(tokens.split(block, 1))", "enumerate(tokens.split(block, 1)[:-1] or [tokens])",
     "prefill skips the short last block", "test_speculative.py::test_prefill_blocks_agree[cpu-3-llama]"),
    ("prefill(model, state.tokens[:, : max(map(len, state.text))]",
     "prefill(model, state.tokens[:, : min(map(len, state.text))]",
     "prefill as far as the shortest prompt", "test_speculative.py::test_greedy_identity[cpu-none-llama]"),
    # chain
    ("max(state.room) - 1)\n    token", "max(state.room))\n    token",
     "gamma clipped one too late",
     "test_sampling.py::test_a_speculative_round_spends_drafts_then_flips_then_one_choice[3]"),
    ("token = state.coins.choose(q)", "token = q.argmax(-1)",
     "an argmax draw with a soft q", "test_speculative.py::test_exact_law[exit]"),
    ("qs.append(q)", "qs.append(logits.softmax(-1))",
     "the q handed over is not the one drawn from", "test_speculative.py::test_exact_law[exit]"),
    ("q = state.probs(logits)", "q = logits.softmax(-1)",
     "drafts ignore the temperature",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("length = going.long() if length is None else length + going\n            "
     "going = going & ~stop(k, logits[:, 0], token[:, 0])",
     "going = going & ~stop(k, logits[:, 0], token[:, 0])\n            "
     "length = going.long() if length is None else length + going",
     "the token that stops is dropped",
     "test_speculative.py::test_chain_keeps_the_token_that_stops_it_and_computes_no_further_step"),
    ("if k + 1 < K and not going.any():", "if k + 1 < K and length.max() <= k:",
     "drafting stops one step late",
     "test_speculative.py::test_chain_keeps_the_token_that_stops_it_and_computes_no_further_step"),
    # commit
    ("state.at(*range(1, out.shape[1] + 1))", "state.at(*range(out.shape[1]))",
     "commit writes one slot too early", "test_speculative.py::test_greedy_identity[cpu-none-llama]"),
    ("F.pad(draft.tokens, (0, 1)).scatter_(1, accepted[:, None], last[:, None])",
     "torch.cat([draft.tokens, last[:, None]], 1)",
     "the token behind is put behind the whole draft",
     "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    ("if not finite:", "if False:",
     "logits that are not finite go unnoticed", "test_speculative.py::test_damaged_weights_are_noticed"),
    ("peak.isfinite()", "~peak.isnan()",
     "only NaN is noticed", "test_speculative.py::test_damaged_weights_are_noticed"),
    (" if state.room[b] else []", "",
     "finished rows do not freeze", "test_speculative.py::test_greedy_identity[cpu-exit-llama]", HANGS),
    ("for i, t in enumerate(row) if t in eos), row)",
     "for i, t in enumerate(row) if t in eos and i == len(row) - 1), row)",
     "only the last token of a round can end it",
     "test_speculative.py::test_end_of_text_at_every_position[cpu-llama-exit]"),
    ("for i, t in enumerate(row) if t in eos), row)",
     "for i, t in reversed([*enumerate(row)]) if t in eos), row)",
     "the latest end-of-text ends, not the earliest",
     "test_speculative.py::test_end_of_text_at_every_position[cpu-llama-exit]"),
    ("drafter or Drafter(), set(eos))", "drafter or Drafter(), set(list(eos)[:1]))",
     "only one end-of-text id counts",
     "test_speculative.py::test_end_of_text_at_every_position[cpu-llama-exit]"),
    ("0 if eos.intersection(row) else state.room[b] - len(row)", "state.room[b] - len(row)",
     "a row goes on behind end-of-text",
     "test_speculative.py::test_end_of_text_at_every_position[cpu-llama-none]"),
    ("kept.append(min(a, len(row)))", "kept.append(a)",
     "accepted counts what end-of-text cut off",
     "test_speculative.py::test_accepted_counts_only_what_was_kept"),
    # the loop
    ("(state.left - 1).clamp_(0, K)", "state.left.clamp(0, K)",
     "max_new overshoots: no room for the token behind",
     "test_speculative.py::test_greedy_identity[cpu-exit-llama]", HANGS),
    ("(state.left - 1).clamp_(0, K)", "(state.left - 1).clamp_(max=K)",
     "finished rows propose -1 tokens", "test_speculative.py::test_golden_acceptance_counts"),
    ("length if draft.length is None else torch.minimum(draft.length, length)", "length",
     "the drafter's length is ignored", "test_speculative.py::test_golden_acceptance_counts"),
    ("trace = [] if drafter.wants_trace else None", "trace = None",
     "a drafter that wants the trace gets none", "test_show.py::test_timed_forwards_what_the_loop_asks_for"),
    ("room = [min(max_new, model.c.max_len - len(t)) for t in text]", "room = [max_new for t in text]",
     "the context limit is ignored", "test_speculative.py::test_context_limit[llama-none]"),
    ("model.c.max_len - len(t))", "model.c.max_len - len(t) - 1)",
     "the last slot of the context stays empty", "test_speculative.py::test_context_limit[llama-none]"),
    (" p = state.probs(logits)", " p = state.probs(logits) if logits.isfinite().all() else None",
     "a check that waits for the device each round",
     "test_speculative.py::test_one_synchronisation_a_round_and_few_operations"),
    ("        if stop:\n", "        if stop and going.any():\n",
     "a stop rule that waits for the device twice",
     "test_speculative.py::test_one_synchronisation_a_round_and_few_operations"),
    ("        qs.append(q)", "        qs.append(q if int(token[0]) >= 0 else q)",
     "a drafted step that waits for the device",
     "test_speculative.py::test_one_synchronisation_a_round_and_few_operations"),
    # n-gram
    ("index[tuple(text[i : i + self.n])] = i + self.n",
     "index.setdefault(tuple(text[i : i + self.n]), i + self.n)",
     "copies what followed the first time, not the last",
     "test_speculative.py::test_ngram_copies_the_latest_continuation"),
    ("])] = i + self.n", "])] = i + self.n + 1",
     "copies from one token too late", "test_speculative.py::test_ngram_copies_the_latest_continuation"),
    ("range(done, len(text) - self.n)", "range(done, len(text) - self.n + 1)",
     "finds the final n-gram itself", "test_speculative.py::test_ngram_copies_the_latest_continuation"),
    ("text[at : at + max(0, most)]", "text[at:]",
     "the copy is not clipped", "test_speculative.py::test_ngram_copies_the_latest_continuation"),
    ("self.seen = [({}, 0) for _ in state.text]",
     'self.seen = getattr(self, "seen", None) or [({}, 0) for _ in state.text]',
     "n-grams of the answer before are kept", "test_speculative.py::test_exact_law[ngram]"),
    ("max(done, len(text) - self.n)", "len(text)",
     "n-grams across two rounds are never seen", "test_speculative.py::test_golden_acceptance_counts"),
    ("Draft(tokens, None, state.send([len(hit) for hit in hits]))", "Draft(tokens)",
     "the padding of short copies is proposed",
     "test_speculative.py::test_ngram_copies_the_latest_continuation"),
    # draft model
    ("T = min(max(n), max(2, *(b - held for b, held in zip(n, self.held, strict=True))))", "T = 1",
     "the draft model reads one token only: it misses its own last draft",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("T = min(max(n), max(2, *(b - held for b, held in zip(n, self.held, strict=True))))",
     "T = min(max(n), 2)",
     "the draft model reads two tokens: blind behind a gate",
     "test_speculative.py::test_perfect_draft_is_accepted_whole[cpu-model, gated-0-llama]"),
    ("*(b - held for", "*(b - held - 1 for",
     "the draft model reads one token too few behind a gate",
     "test_speculative.py::test_perfect_draft_is_accepted_whole[cpu-model, gated-0-llama]"),
    ("T = min(max(n), max(2, ", "T = max(0, max(2, ",
     "the draft model reads before the start of a one-token prompt",
     "test_speculative.py::test_rows_equal_solo_runs[cpu-model-llama]"),
    ("b + K - 1 for b in n", "b + K for b in n",
     "the draft model thinks it read its last draft",
     "test_speculative.py::test_perfect_draft_is_accepted_whole[cpu-model, gated-0-llama]"),
    ("short = at[:, :1].clamp(max=0)", "short = at[:, :1] * 0",
     "short rows are not shifted",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("x.gather(1, (T - 1 + short)[..., None].expand(-1, 1, x.shape[-1]))", "x[:, -1:]",
     "short rows draft from a dead slot",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("m.run(m.embed(token), state.at(k), self.cache, end=state.end(k + 1))",
     "m.run(m.embed(token), state.at(k - 1), self.cache, end=state.end(k + 1))",
     "the draft model's position off by one",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("prefill(self.model, state.tokens[:, : x.shape[1]], self.cache)", "pass",
     "the draft model never reads the prompt",
     "test_speculative.py::test_empty_skip_set_needs_the_fewest_passes[cpu-2-llama]"),
    ("torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)",
     "rest",
     "no fallback to p where nothing is left",
     "test_speculative.py::test_verify_takes_p_where_nothing_is_left"),
    ("torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)",
     "torch.where(rest.sum(-1, keepdim=True) == 0, p, rest)",
     "a NaN draft spoils the residual", "test_speculative.py::test_verify_ignores_dead_nan_drafts"),
    ("min(held, len(text) - 1) for",
     "held for",
     "refused drafts stay in the draft model's cache",
     "test_speculative.py::test_the_draft_model_has_read_every_token[cpu-llama]"),
    ("x, trace, start)",
     "x, trace, state.n)",
     "start is taken after the round",
     "test_speculative.py::test_what_is_shared_is_handed_over_and_not_run_again[cpu-sublayers0-8]"),
    (".cut(max(state.room) - 1)",
     "",
     "a drafter may overrun the answer",
     "test_speculative.py::test_drafts_never_overrun_even_if_they_ignore_what_is_left[cpu-1-llama]"),
    ("reuse[1][:, : K + 1]",
     "reuse[1][:, :K]",
     "cut: the last known token forgotten",
     "test_speculative.py::test_drafts_never_overrun_even_if_they_ignore_what_is_left[cpu-4-llama]"),
    ('torch.linalg.vector_norm(logits, float("inf"), dim=(1, 2))',
     "logits.amax((1, 2))",
     "minus infinity goes unnoticed", "test_speculative.py::test_minus_infinity_is_noticed"),
]

LAYERSKIP = [
    ("{2 * i for i in attn} | {2 * i + 1 for i in mlp}", "{2 * i + 1 for i in attn} | {2 * i for i in mlp}",
     "attention and MLP swapped", "test_checkpoint.py::test_skip_sets_by_hand"),
    ("range(2 * exit_layer)", "range(2 * exit_layer - 1)",
     "early exit without its last MLP", "test_checkpoint.py::test_skip_sets_by_hand"),
    ("if i != sub), len(subs))", "if i != sub), len(subs)) + 1",
     "hands over one sub-layer too many", "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    ("carry(tokens[:, -1:], K)", "pass",
     "the last draft is not carried to the verifier",
     "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    ("state.at(k), state.cache, subs[:shared], end=state.end(k + 1)",
     "state.at(k + 1), state.cache, subs[:shared], end=state.end(k + 2)",
     "drafts write into the next slot", "test_speculative.py::test_greedy_identity[cpu-exit-llama]"),
    ("state.at(k), state.cache, subs[shared:]", "state.at(k + 1), state.cache, subs[shared:]",
     "drafts write into the next slot behind the gap",
     "test_speculative.py::test_greedy_identity[cpu-skip-llama]"),
    ("subs[shared:], end", "subs, end",
     "the shared sub-layers run twice", "test_speculative.py::test_greedy_identity[cpu-skip-llama]"),
    ("next((i for i, sub in enumerate(subs) if i != sub), len(subs))",
     "max(0, next((i for i, sub in enumerate(subs) if i != sub), len(subs)) - 1)",
     "hands over one sub-layer too few",
     "test_speculative.py::test_what_is_shared_is_handed_over_and_not_run_again[cpu-sublayers0-8]"),
    ("state.at(k), state.cache, subs[shared:], end=state.end(k + 1)",
     "state.at(k + 1), state.cache, subs[shared:], end=state.end(k + 2)",
     "drafts behind the gap stand one slot too far",
     "test_speculative.py::test_self_drafts_are_what_their_sublayers_say[cpu-sublayers1-llama]"),
]

CHAT = [
    ("checkpoint.read_text(file) if file.is_file() else",
     "",
     "a template in a file of its own is ignored",
     "test_generate.py::test_chat_template_in_a_file_of_its_own_wins"),
]

SHOW = [
    ('if proposed == 0 else "bonus" if accepted == proposed',
     'if accepted == 0 else "bonus" if accepted == proposed',
     "a refused first draft is taken for no draft", "test_show.py::test_origins"),
    ("[behind] * (len(round.new[b]) - accepted)",
     "[behind]",
     "an end-of-text id inside an accepted draft gets a bonus",
     "test_show.py::test_end_of_text_inside_an_accepted_draft_is_no_bonus"),
    ('"bonus" if accepted == proposed else',
     '"bonus" if accepted == round.draft.tokens.shape[1] else',
     "full acceptance measured by the longest row", "test_show.py::test_origins_of_real_runs"),
    ("stream.isatty() and ",
     "",
     "colours are sent into files and pipes", "test_show.py::test_when_to_colour"),
    ('not os.environ.get("NO_COLOR")',
     '"NO_COLOR" not in os.environ',
     "an empty NO_COLOR counts", "test_show.py::test_when_to_colour"),
    ("    safe = ((text.translate(SIGNS), origin) for text, origin in pieces)",
     "    safe = pieces",
     "a model may steer the terminal", "test_show.py::test_control_characters_become_signs"),
    ("if colour and origin and text else",
     "if origin and text else",
     "plain text comes with escape sequences", "test_show.py::test_paint_and_legend"),
    ("html.escape(text.translate(SIGNS))",
     "text.translate(SIGNS)",
     "text from the model is HTML", "test_show.py::test_html_of_a_generation"),
    ("background:{hue}2b",
     "background:{hue}",
     "an opaque background suits one theme only", "test_show.py::test_html_suits_light_and_dark_pages"),
    ('whole = text.rstrip("\\ufffd")',
     "whole = text",
     "half characters are printed", "test_show.py::test_streamed_text_is_the_decoded_text"),
    ("text = self.decode(self.ids[self.first :])\n        whole",
     "text = self.decode(self.ids[-1:])\n        whole",
     "each token is decoded alone", "test_show.py::test_streamed_text_is_the_decoded_text"),
    ("round.p[b, i, token]",
     "round.p[b, -1, token]",
     "p read at the wrong position", "test_show.py::test_probability_of_each_token"),
    ("self.turns + bool(new)",
     "self.turns + 1",
     "a finished row counts as a pass", "test_show.py::test_counts_and_summary"),
    ("self.drafted + bool(proposed)",
     "self.drafted + bool(accepted)",
     "alpha over accepted drafts only", "test_show.py::test_counts_and_summary"),
    ("self.accepted / self.proposed:.0%",
     "self.accepted / n:.0%",
     "acceptance over tokens instead of drafts", "test_show.py::test_counts_and_summary"),
    ("if alpha <= c:",
     "if alpha <= draft:",
     "c is the cost of a whole draft", "test_show.py::test_limit"),
    ("for i in range(g + 1)) / (c",
     "for i in range(g)) / (c",
     "the token behind the draft is forgotten", "test_show.py::test_limit"),
    ('        draft = self.drafter.propose(state)\n        self.lap(state, "draft")',
     '        self.lap(state, "draft")\n        draft = self.drafter.propose(state)',
     "drafting counted as verifying", "test_show.py::test_timed_adds_up"),
    ("        return self.drafter.wants_trace",
     "        return False",
     "a timed drafter gets no trace", "test_show.py::test_timed_forwards_what_the_loop_asks_for"),
    ("        self.drafter.observe(state, round)\n",
     "",
     "a timed drafter never learns", "test_show.py::test_timed_adds_up"),
    ("torch.ones_like(p) if q is None",
     "torch.zeros_like(p) if q is None",
     "certain proposals shown with q = 0", "test_show.py::test_html_of_a_round"),
    ("if shell is not None:",
     'if "IPython" in sys.modules:',
     "IPython imported but not running", "test_show.py::test_registers_with_a_running_ipython"),
]

GENERATE = [
    ("prompts = [checkpoint.encode(tokenizer, prompt, model.c.bos) for prompt in prompts]",
     "prompts = [[0, *tokenizer.encode(prompt).ids] for prompt in prompts]",
     "a second begin-of-text", "test_generate.py::test_chat[llama-True]"),
    ("{*model.c.eos, *a.eos}",
     "set(model.c.eos)",
     "a chat goes on behind its turn", "test_generate.py::test_chat[gemma2-False]"),
    ('.removesuffix("\\n")',
     "",
     "the newline that ends the input is part of the prompt", "test_generate.py::test_standard_input[flag0]"),
    ("return 130 if seen.interrupted else int(different)",
     "return int(different)",
     "Ctrl-C looks like success", "test_generate.py::test_ctrl_c_prints_what_there_is"),
    ("    except KeyboardInterrupt:\n        seen.close()\n        seen.interrupted = True\n",
     "    except ZeroDivisionError:\n        pass\n",
     "Ctrl-C loses what there is", "test_generate.py::test_ctrl_c_prints_what_there_is"),
    ("if a.temperature == 0 else None",
     "if a.temperature >= 0 else None",
     "two sampled texts are called different",
     "test_generate.py::test_compare_while_sampling_says_why_identity_is_no_question"),
    ("other.get_vocab() != tokenizer.get_vocab()",
     "False",
     "a draft model with another tokenizer", "test_generate.py::test_draft_model_of_another_tokenizer"),
    ("prompts[b] + plain[b][:at]",
     "prompts[b] + plain[b][: at + 1]",
     "the gap is read one token late", "test_generate.py::test_compare_reports_a_divergence_and_its_gap"),
    ("        return 141\n",
     "        raise\n",
     "a reader that stops early sees a traceback", "test_generate.py::test_reader_that_stops_early"),
    ("Coins(a.seed)",
     "Coins()",
     "the seed is ignored", "test_generate.py::test_seed_repeats_a_sampled_run"),
]

TRAIN = [
    # which sub-layers and which exit a step trains
    ("2 ** torch.linspace(0, 1, 2 * n_layers", "2 ** torch.linspace(0, 1, n_layers",
     "drop rates for blocks, not for sub-layers", "test_train.py::test_drop_rates_by_hand"),
    ("dtype=torch.float64) - 1)", "dtype=torch.float64))",
     "the first sub-layer is dropped, too", "test_train.py::test_drop_rates_by_hand"),
    (">= drop_rates(n_layers, a.dropout)", "< drop_rates(n_layers, a.dropout)",
     "kept and dropped swapped", "test_train.py::test_sublayers_are_dropped_as_often_as_their_rate_says"),
    ("torch.rand(2 * n_layers, generator=g, dtype=torch.float64)",
     "torch.rand(1, generator=g, dtype=torch.float64)",
     "one draw for all sub-layers", "test_train.py::test_sublayers_are_dropped_as_often_as_their_rate_says"),
    ("u, v = torch.rand(2, generator=g, dtype=torch.float64)", "u, v = torch.rand(2, dtype=torch.float64)",
     "the exit comes from the global generator",
     "test_train.py::test_the_same_generator_makes_the_same_choice"),
    ("low, high = (1, n_layers) if early else", "low, high = (1, half + 1) if early else",
     "shallow exits from the start",
     "test_train.py::test_the_curriculum_has_all_exits_alike_labels_only_and_a_weight_of_3_tenths"),
    ("if u < a.shallow else", "if u > a.shallow else",
     "shallow and deep swapped", "test_train.py::test_afterwards_most_exits_lie_in_the_lower_half"),
    ("int(v * max(1, high - low))", "round(v * max(1, high - low))",
     "rounding draws the last exit too often",
     "test_train.py::test_the_curriculum_has_all_exits_alike_labels_only_and_a_weight_of_3_tenths"),
    ("max(1, n_layers - 1))\n    weight", "n_layers)\n    weight",
     "two blocks: the exit lies behind the last",
     "test_train.py::test_no_exit_lies_behind_the_last_block_but_one"),
    ("(0.3 * a.exit_weight, 0.0) if early", "(0.3, 0.0) if early",
     "the curriculum forgets --exit-weight",
     "test_train.py::test_the_curriculum_has_all_exits_alike_labels_only_and_a_weight_of_3_tenths"),
    ("(0.3 * a.exit_weight, 0.0) if early", "(0.3 * a.exit_weight, a.distil) if early",
     "distils from a model that knows nothing yet",
     "test_train.py::test_the_curriculum_has_all_exits_alike_labels_only_and_a_weight_of_3_tenths"),
    # the losses
    ("[i for i in sublayers if i < 2 * exit_layer]", "range(2 * exit_layer)",
     "what is dropped is run below the exit", "test_train.py::test_what_is_dropped_is_really_not_run"),
    ("sublayers=[i for i in sublayers if i < 2 * exit_layer]",
     "sublayers=[i for i in sublayers if i < 2 * exit_layer - 1]",
     "the exit leaves before its own MLP", "test_train.py::test_losses_by_hand"),
    ("[i for i in sublayers if i >= 2 * (exit_layer or 0)]", "sublayers",
     "the sub-layers below the exit run twice", "test_train.py::test_losses_by_hand"),
    ("batch[:, :-1].long(), batch[:, 1:].long()", "batch[:, :-1].long(), batch[:, :-1].long()",
     "the label is the token itself", "test_train.py::test_losses_by_hand"),
    ("target = logits.detach().softmax(-1)", "target = logits.softmax(-1)",
     "the final distribution learns to be as simple as its exit",
     "test_train.py::test_no_gradient_flows_into_what_is_imitated"),
    ("x = early = model.run(x, at,", "early = x = model.run(x.detach(), at,",
     "the exit does not train the embedding",
     "test_train.py::test_the_exit_loss_moves_what_lies_below_the_exit_and_what_all_exits_share"),
    ("logq, loss = model.unembed(early)", "logq, loss = model.unembed(early.detach())",
     "the exit trains nothing but the head",
     "test_train.py::test_the_exit_loss_moves_what_lies_below_the_exit_and_what_all_exits_share"),
    ("(1 - distil) * F.nll_loss", "F.nll_loss",
     "the labels' part is not weighted", "test_train.py::test_losses_by_hand"),
    ("(target * logq).sum(-1).mean()", "(target * logq).mean()",
     "a mean over the vocabulary as well", "test_train.py::test_losses_by_hand"),
    # measuring
    ("trace[1::2]", "trace[::2]",
     "exits are measured before their MLP", "test_train.py::test_each_exit_is_measured_as_a_truncated_model"),
    ("best == best[-1]", "best == labels",
     "agreement with the text instead of the last block",
     "test_train.py::test_each_exit_is_measured_as_a_truncated_model"),
    ("min(most, len(tokens) - 1) // context", "min(most, len(tokens)) // context",
     "the last token measured has no successor", "test_train.py::test_only_the_first_tokens_are_measured"),
    ("(logits.logsumexp(-1) - right)", "(right - logits.logsumexp(-1))",
     "log-likelihood for loss", "test_train.py::test_each_exit_is_measured_as_a_truncated_model"),
    ("cost = costs.c(early_exit(c.n_layers, exit_layer))",
     "cost = costs.c(early_exit(c.n_layers, exit_layer)) / c.n_layers",
     "a drafted step for next to nothing", "test_train.py::test_speedups_by_hand"),
    # fresh models and optimisers
    ("1 - c.norm_offset", "1.0",
     "Gemma's fresh norms multiply by two", "test_train.py::test_fresh_weights"),
    ("if p.dim() == 2]", "if p.dim() == 2][:-1]",
     "one matrix goes to AdamW", "test_train.py::test_matrices_go_to_muon_and_the_rest_to_adamw"),
    ("max(vocab.values()) + 1", "len(vocab)",
     "a tokenizer with gaps points beyond the embedding",
     "test_train.py::test_a_tokenizer_with_gaps_gets_a_row_for_its_last_id"),
    # a step
    ("(self.step + 1) / max(1, a.warmup)", "self.step / max(1, a.warmup)",
     "the first step is lost to the warm-up",
     "test_train.py::test_the_learning_rate_warms_up_stays_and_falls_to_2_percent"),
    ("max(0.02, (1 - progress)", "max(0.0, (1 - progress)",
     "the rate falls to nothing",
     "test_train.py::test_the_learning_rate_warms_up_stays_and_falls_to_2_percent"),
    ("(1 - progress) / max(a.decay, 1e-9)", "(1 - progress)",
     "the rate falls from the start",
     "test_train.py::test_the_learning_rate_warms_up_stays_and_falls_to_2_percent"),
    ("zip(self.optimisers, self.rates, strict=True)",
     "zip(self.optimisers[:1], self.rates[:1], strict=True)",
     "AdamW is never stepped",
     "test_train.py::test_the_learning_rate_warms_up_stays_and_falls_to_2_percent"),
    ("            optimiser.zero_grad()\n", "",
     "gradients add up over the steps", "test_train.py::test_a_step_starts_from_no_gradient"),
    ("        torch.nn.utils.clip_grad_norm_(self.model.parameters(), a.clip)\n", "",
     "no clipping", "test_train.py::test_the_gradient_is_clipped"),
    ("final + weight * early", "final + early",
     "the exit loss is not weighted", "test_train.py::test_the_exit_loss_is_weighted"),
    ("exit_layer if weight else None", "exit_layer",
     "plain training pays for an exit", "test_train.py::test_the_exit_loss_is_weighted"),
    ("manual_seed(a.seed * 1_000_003 + self.step + 2**40)", "manual_seed(a.seed * 1_000_003 + 2**40)",
     "every step makes the same choice",
     "test_train.py::test_steps_differ_and_seeds_differ_and_nothing_else_counts"),
    ("self.text.batch(a.seed, self.step,", "self.text.batch(a.seed, 0,",
     "every step sees the same batch", "test_train.py::test_every_step_asks_for_its_own_batch"),
    # the clock
    ("max(self.step / self.steps, clock)", "min(self.step / self.steps, clock)",
     "progress where both are behind",
     "test_train.py::test_progress_follows_the_steps_or_the_clock_whichever_is_ahead"),
    ("self.seconds / (60 * self.a.minutes)", "self.seconds / self.a.minutes",
     "--minutes are seconds", "test_train.py::test_minutes_end_a_run_and_count_what_was_before"),
    ("time.monotonic() - run.seconds, run.seconds\n", "time.monotonic(), run.seconds\n",
     "a resumed run forgets how long it took",
     "test_train.py::test_minutes_end_a_run_and_count_what_was_before"),
    ("run.seconds = saved = time.monotonic() - started", "run.seconds = time.monotonic() - started",
     "a checkpoint at every step behind the first",
     "test_train.py::test_a_checkpoint_every_few_minutes_and_one_at_the_end"),
    ('if run.evals[-1]["tokens"] != run.step * block:', "if True:",
     "the last step is measured twice",
     "test_train.py::test_what_was_measured_at_the_last_step_is_not_measured_again"),
    # interrupted runs
    ("yield from ((f\"{i}.{j}.{key}\", value) for key, value in state.items())", "pass",
     "the optimisers' state is not saved",
     "test_train.py::test_a_resumed_run_ends_like_one_that_was_never_interrupted"),
    ("            optimiser.load_state_dict(state)\n", "",
     "the optimisers' state is not restored",
     "test_train.py::test_a_resumed_run_ends_like_one_that_was_never_interrupted"),
    ('facts = {"step": self.step,', 'facts = {"step": self.step + 1,',
     "a resumed run leaves out a step",
     "test_train.py::test_a_resumed_run_ends_like_one_that_was_never_interrupted"),
    ('p.copy_(file.get_tensor(f"model.{name}"))', "pass",
     "a resumed run starts from fresh weights",
     "test_train.py::test_a_resumed_run_ends_like_one_that_was_never_interrupted"),
    ("with checkpoint.replacing(Path(self.a.out) / STATE) as path:",
     "for path in [Path(self.a.out) / STATE]:",
     "the checkpoint is overwritten in place", "test_train.py::test_a_full_disk_spoils_nothing"),
    ("- {STATE + checkpoint.PART}", "- set()",
     "a run killed at its first checkpoint locks its folder",
     "test_train.py::test_a_run_that_is_killed_while_it_saves_can_be_resumed"),
    ("            raise ValueError(f\"the loss is {final}", "            print(f\"the loss is {final}",
     "goes on with a loss that is no number", "test_train.py::test_a_loss_that_is_no_number_ends_the_run"),
    # refusals
    ("        run.check(settings)\n", "",
     "goes on with other settings", "test_train.py::test_another_setting_cannot_go_on_with_a_run"),
    ('"text": text.hash()}', '"text": 0}',
     "goes on with another text", "test_train.py::test_another_text_cannot_go_on_with_a_run"),
    ("        if not a.resume:\n", "        if False:\n",
     "goes on with a run without being asked",
     "test_train.py::test_a_folder_that_holds_anything_else_is_refused"),
    ("    elif there:\n", "    elif False:\n",
     "writes into a folder of other files",
     "test_train.py::test_a_folder_that_holds_anything_else_is_refused"),
    ("if not low <= getattr(a, name) <= high:", "if getattr(a, name) < low or getattr(a, name) > high:",
     "NaN passes for a share", "test_train.py::test_wrong_numbers_are_refused_by_name"),
    ("        with checkpoint.guarded(damaged):\n            run.restore(file, facts)",
     "        run.restore(file, facts)",
     "a tensor that is missing is a traceback", "test_train.py::test_a_damaged_checkpoint_is_refused"),
    (">= a.context:\n        raise", "> a.context:\n        raise",
     "a prompt that leaves no room for a single token",
     "test_train.py::test_a_prompt_leaves_room_for_one_token"),
    (" or not file.parent.is_dir() and file.parent.resolve() != out.resolve()", "",
     "hours of training before --twin cannot be written",
     "test_train.py::test_wrong_flags_are_refused[a twin in a folder that does not exist]"),
    # what stands there at the end
    ("copy.deepcopy(run.model).bfloat16()", "run.model.bfloat16()",
     "writing the model rounds the run", "test_train.py::test_writing_the_model_leaves_the_run_alone"),
    ("copy.deepcopy(run.model).bfloat16()", "run.model",
     "written in float32", "test_train.py::test_the_model_is_written_in_bfloat16"),
    ('"plain": {"dropout": 0.0, "exit_weight": 0.0}', '"plain": {"dropout": 0.0}',
     "the plain twin trains exits, too", "test_train.py::test_a_twin_writes_both_tables"),
]

CORPUS = [
    ("ByteLevel(add_prefix_space=False)", "ByteLevel(add_prefix_space=True)",
     "a space that nobody wrote", "test_corpus.py::test_any_text_comes_back_as_it_was"),
    ("initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())", "initial_alphabet=[]",
     "bytes that the text lacks have no token", "test_corpus.py::test_any_text_comes_back_as_it_was"),
    ('.strip("\\n"))]', ".strip())]",
     "documents lose their indentation",
     "test_corpus.py::test_documents_are_what_stands_between_two_separators"),
    ("add_special_tokens=False)\n    return", "add_special_tokens=True)\n    return",
     "two begin-of-text ids before each document",
     "test_corpus.py::test_a_stream_has_one_begin_of_text_before_each_document"),
    ("for t in (start, *row.ids)", "for t in (*row.ids, start)",
     "a document ends with the id, and none begins with it",
     "test_corpus.py::test_a_stream_has_one_begin_of_text_before_each_document"),
    ("train = {name: s[: cuts[name]] for name, s in train.items()}", "pass",
     "trains on what is held out", "test_corpus.py::test_the_end_of_each_file_is_held_out"),
    ("documents.values() for t in texts), vocab)", "(documents | held_out).values() for t in texts), vocab)",
     "the tokenizer has seen what is measured on",
     "test_corpus.py::test_files_to_measure_on_leave_the_training_text_alone"),
    ("int(u * (len(streams[file]) - length))", "int(u * (len(streams[file]) - length - 1))",
     "the last token of a file is never trained",
     "test_corpus.py::test_windows_are_whole_and_lie_within_one_file"),
    ("int(u * (len(streams[file]) - length))", "int(u * len(streams[file]))",
     "windows at the end of a file are short",
     "test_corpus.py::test_windows_are_whole_and_lie_within_one_file"),
    ("torch.multinomial(share, rows, replacement=True, generator=g)",
     "torch.multinomial(share, rows, replacement=True)",
     "the file comes from the global generator",
     "test_corpus.py::test_a_batch_depends_on_seed_and_step_only"),
    ("max(self.weights) * sizes", "max(self.weights)",
     "drawn by weight alone: short files too often",
     "test_corpus.py::test_files_are_drawn_by_weight_times_size"),
    (" / max(self.weights) * sizes", " * sizes",
     "large weights overflow", "test_corpus.py::test_only_ratios_of_weights_matter"),
    ("hashlib.sha256(repr(self.weights).encode())", "hashlib.sha256()",
     "other weights, same run", "test_corpus.py::test_the_hash_follows_texts_and_weights"),
    ("if not 0 < weights[-1] <", "if not 0 <= weights[-1] <",
     "a weight of zero", "test_corpus.py::test_a_weight_must_be_a_positive_number"),
    ("if Path(path).name in documents:", "if path in documents:",
     "a file takes the place of another of its name",
     "test_corpus.py::test_two_files_of_one_name_are_refused"),
    ("if len(s) <= length:", "if len(s) < length:",
     "the last label is missing", "test_corpus.py::test_text_for_one_window_is_enough_and_less_is_refused"),
    ("set(p.relative_to(root).parts)", "set(p.parts)",
     "a Python below a folder named test has no library",
     "test_corpus.py::test_the_standard_library_is_the_default"),
]

CLI = [
    ('"".join(c if c.isprintable() else "\\ufffd" for c in " ".join(message.split()))',
     '" ".join(message.split())',
     "a damaged file may steer the terminal", "test_cli.py::test_a_message_is_one_printable_line"),
    ("    if len(line) > 360:", "    if False:",
     "a message of a million characters", "test_cli.py::test_a_long_message_keeps_both_ends"),
    ('if isinstance(e, RuntimeError) and "memory" not in str(e):', "if False:",
     "a bug of ours passes for a lack of memory", "test_cli.py::test_our_own_bugs_are_not_hidden"),
    ("    except KeyboardInterrupt:\n        return 130", "    except KeyboardInterrupt:\n        return 0",
     "Ctrl-C looks like success", "test_cli.py::test_ctrl_c_is_status_130_without_a_word"),
    ("return run(argv) or 0", "return run(argv) and 0",
     "the program's own status is lost", "test_cli.py::test_a_program_ends_with_what_it_returns"),
    ('raise ValueError(f"{message}; see --help")', "super().error(message)",
     "argparse's many lines for a wrong flag", "test_cli.py::test_a_wrong_flag_is_bad_input"),
    ("        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())\n", "",
     "Python's last flush meets the closed pipe", "test_cli.py::test_a_reader_that_has_left_is_status_141"),
]

REPLACING = [
    ("    part = path.with_name(path.name + PART)\n", "    part = path\n",
     "the old file is overwritten in place",
     "test_train.py::test_a_failure_while_writing_leaves_the_old_file"),
    ("    finally:\n        part.unlink(missing_ok=True)\n", "",
     "a full disk stays full of parts", "test_train.py::test_a_failure_while_writing_leaves_the_old_file"),
    ("            os.fsync(file.fileno())\n", "            pass\n",
     "replaced before it is on the disk",
     "test_train.py::test_a_file_is_on_the_disk_before_it_replaces_the_old_one"),
    ("        os.replace(part, path)\n", "        path.unlink(missing_ok=True)\n        part.rename(path)\n",
     "for a moment neither file is there",
     "test_train.py::test_a_file_that_cannot_be_replaced_keeps_what_it_holds"),
    ("except (OSError, SafetensorError) as e:\n        raise OSError(f\"{path}: cannot",
     "except OSError as e:\n        raise OSError(f\"{path}: cannot",
     "a full disk while safetensors writes is a traceback",
     "test_train.py::test_a_failure_while_writing_leaves_the_old_file"),
]

CARD = [
    ("os.path.commonpath([f.parent for f in files])", "os.path.commonpath(files)",
     "of a single file DATA is the file itself", "test_train.py::test_commands_by_hand"),
    ("str(v).removesuffix(\".0\")", 'f"{v:.6g}"',
     "the card rounds what it repeats", "test_train.py::test_a_card_repeats_its_run"),
]

TABLE = {"model.py": MODEL, "kvcache.py": KVCACHE, "sampling.py": SAMPLING,
         "checkpoint.py": CHECKPOINT + REPLACING, "speculative.py": SPECULATIVE, "layerskip.py": LAYERSKIP,
         "chat.py": CHAT, "show.py": SHOW, "generate.py": GENERATE,
         "train.py": TRAIN, "corpus.py": CORPUS, "cli.py": CLI, "card.py": CARD}
MUTANTS = [Mutant(file, *row) for file, rows in TABLE.items() for row in rows]


def copy_repository(folder):
    """What the tests need; the weights, which are large, by a link."""
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(file, folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "weights").symlink_to(ROOT / "weights")


def pytest_in(folder, argv):
    """What each process does; it is forked from one that holds torch, whose import outlasts most tests."""
    import pytest

    os.chdir(folder)
    sys.path[:] = [p for p in sys.path if Path(p).resolve() != ROOT / "tests"]  # the copies are meant
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.exit(int(pytest.main(argv)))


def run_tests(folder, tests, *options, limit=None):
    """pytest's exit status (None: out of time) and what it printed."""
    argv = ["-p", "no:cacheprovider", f"--basetemp={folder}/made", "--tb=no", "--color=no", *options]
    process = FORK.Process(target=pytest_in, args=(folder, argv + [f"tests/{test}" for test in tests]))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None, ""
    return process.exitcode, (Path(folder) / "out.txt").read_text(encoding="utf-8", errors="replace")


def check_tests(tests):
    """{test: why it kills nothing} for tests that do not exist, do not run, or fail without any mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        status, out = run_tests(folder, tests, "-rpfE")
    if status == 4:  # pytest runs nothing if one of them is not found
        lost = {t: "does not exist" for t in tests if re.search(rf"not found: .*/{re.escape(t)}\n", out)}
        found = [test for test in tests if test not in lost]
        return lost | (check_tests(found) if lost and found else dict.fromkeys(found, f"does not run\n{out}"))
    seen = re.findall(r"^(PASSED|FAILED|ERROR) tests/(.*)$", out, re.MULTILINE)
    wrong = {}
    for test in tests:
        verdicts = {v for v, name in seen if name == test or name.startswith((test + "[", test + " - "))}
        if verdicts != {"PASSED"}:
            wrong[test] = "fails without any mutant" if verdicts else "selects nothing that runs"
    return wrong


def try_mutant(mutant, wrong):
    """One line for the table: KILLED, or what else happened."""
    start, text = time.perf_counter(), (ROOT / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"STALE ROW: found {text.count(mutant.old)} times in {mutant.file}: {mutant.old!r}", 0.0
    if mutant.test in wrong:
        return f"USELESS TEST: {mutant.test} {wrong[mutant.test]}", 0.0
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        (Path(folder) / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        status, out = run_tests(folder, [mutant.test], "-x", limit=mutant.limit)
    failed = status == 1 and f"tests/{mutant.test}" in out  # not: it could not even be imported
    killed = failed or status is None and mutant.limit == HANGS
    verdict = "KILLED" if killed else {0: "SURVIVED", None: "OUT OF TIME"}.get(status, f"BROKEN ROW\n{out}")
    return verdict, time.perf_counter() - start


def main(words):
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.file} {m.phrase}" for word in words)]
    tests, wrong, failed = sorted({m.test for m in chosen}), {}, 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for why in pool.map(check_tests, [tests[i::WORKERS] for i in range(min(WORKERS, len(tests)))]):
            wrong |= why
        for m, (verdict, seconds) in zip(chosen, pool.map(try_mutant, chosen, repeat(wrong)), strict=True):
            print(f"{verdict:8} {seconds:5.1f} s  {m.file[:-3]}: {m.phrase}", flush=True)
            failed += verdict != "KILLED"
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return int(failed > 0 or not chosen)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    FORK = multiprocessing.get_context("forkserver")
    FORK.set_forkserver_preload(["torch", "tokenizers", "pytest"])
    sys.exit(main(sys.argv[1:]))
