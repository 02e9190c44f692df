"""The exercises are a table of functions of the library, each with its tests and what a student
reads about it.

There are no solutions and no stubs here, because `splice` cuts them out of the library. The texts
are in texts.md.
"""
import importlib
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("texts.md").read_text(encoding="utf-8")
TEXTS = dict(part.split("\n\n", 1) for part in PAGE.split("\n## ")[1:])  # {exercise: its text}


class Task(NamedTuple):
    number: int
    name: str
    module: str
    functions: tuple[str, ...]
    sitting: int            # see SITTINGS
    minutes: int
    stars: int              # difficulty, 1 to 3
    tests: tuple[str, ...] = ()     # node ids, the clear ones first, before those of its domains

    @property
    def text(self):
        """What is wanted, in words and a picture."""
        return TEXTS[self.name]

    @property
    def library(self):
        """Its module, imported."""
        return importlib.import_module(self.module.removesuffix(".py").replace("/", "."))

    @property
    def all_tests(self):
        """The node ids, and last the domains of its functions."""
        return self.tests + tuple(f"exercises/tests/test_domains.py::test_domain[{name}]"
                                  for name in self.functions if f"    domain of {name}\n" in PAGE)


SITTINGS = (  # what each is about, and what to read before it
    ("1: numbers into angles and lengths", "`minimal.py`, `notebooks/01_forward_pass.ipynb`"),
    ("2: attention and its memory", "`notebooks/02_kv_cache.ipynb`"),
    ("3: chance", "`notebooks/03_sampling.ipynb`, `notebooks/04_speculative_decoding.ipynb`"),
    ("4: drafts and their worth", "`notebooks/06_layer_skipping.ipynb`"),
    ("5: search, trees and races",
     "`notebooks/05_the_same_text.ipynb`, `notebooks/07_search.ipynb`, `methods/trees.py`"),
    ("6: drafts that are trained", "`notebooks/09_trained_heads.ipynb`"))


def tests(**names):
    """The node ids of {file: names of its tests}. What the library itself needs is in tests/, and
    what only an answer needs in exercises/tests/."""
    course = Path(__file__).with_name("tests")
    folders = {file: "exercises/tests" if (course / f"test_{file}.py").exists() else "tests"
               for file in names}
    return tuple(f"{folders[file]}/test_{file}.py::test_{name}" for file, row in names.items()
                 for name in row.split())


TASKS = [
    Task(1, "softcap, rotate", "model.py", ("softcap", "rotate"), 1, 10, 1, tests(
        model="softcap_by_hand rotate_by_hand",
        properties="rotation_keeps_lengths_and_knows_distances_only")),
    Task(2, "frequencies", "model.py", ("frequencies",), 1, 30, 2, tests(
        model="frequencies_by_hand frequencies_of_linear_scaling_by_hand "
              "frequencies_of_llama3_by_hand")),
    Task(3, "RMSNorm.forward", "model.py", ("RMSNorm.forward",), 1, 20, 1),
    Task(4, "visible", "model.py", ("visible",), 2, 40, 2, tests(
        visible="visible_by_hand",
        properties="visible_is_its_definition")),
    Task(5, "Attention.forward", "model.py", ("Attention.forward",), 2, 45, 3),
    Task(6, "KVCache.write", "kvcache.py", ("KVCache.write",), 2, 25, 2),
    Task(7, "to_probs", "sampling.py", ("to_probs",), 3, 35, 2, tests(
        by_hand="probabilities",
        sampling="a_tiny_temperature_is_no_nan each_row_stands_for_itself")),
    Task(8, "Coins.choose", "sampling.py", ("Coins.choose",), 3, 20, 1),
    Task(9, "verify", "verification.py", ("verify",), 3, 45, 3, tests(
        by_outcomes="verify_drawn_drafts verify_copied_drafts verify_a_rare_token "
                    "where_nothing_is_left[one_row] verify_rows_stand_for_themselves "
                    "a_batch_without_a_draft[verify] where_p_is_almost_q[verify] "
                    "verify_refuses_another_vocabulary")),
    Task(10, "chain", "drafter.py", ("chain",), 4, 40, 2),
    Task(11, "SelfDraft.propose", "layerskip.py", ("SelfDraft.propose",), 4, 45, 3),
    Task(12, "expected_tokens, best_gamma", "control.py",
         ("expected_tokens", "expected_tokens_along", "best_gamma"), 4, 40, 2),
    Task(13, "predict, expected_improvement", "search.py",
         ("GaussianProcess.predict", "expected_improvement"), 5, 40, 2, tests(
        gaussian="predictions_by_the_dense_formula improvements_by_hand "
                 "a_single_observation_is_enough a_variance_that_rounding_made_negative "
                 "expected_improvement_is_exact_far_below_the_best_and_never_negative")),
    Task(14, "climb", "search.py", ("climb",), 5, 35, 2, tests(
        gaussian="a_climb_by_hand a_climb_ends_where_no_allowed_flip_is_better",
        by_hand="a_climb_that_takes_back_what_it_did")),
    Task(15, "verify_tree", "methods/trees.py", ("verify_tree",), 5, 60, 3, tests(
        by_outcomes="verify_tree_drawn_siblings verify_tree_copied_siblings "
                    "where_nothing_is_left[one_walk] verify_tree_rows_stand_for_themselves "
                    "a_batch_without_a_draft[verify_tree] where_p_is_almost_q[verify_tree] "
                    "where_p_is_almost_q[siblings]")),
    Task(16, "alpha", "support/stats.py", ("Counts.alpha",), 4, 10, 1),
    Task(17, "counterexample", "exercises/published.py", ("counterexample",), 5, 25, 2, tests(
        published="a_counterexample_to_the_first_failure")),
    Task(18, "draft_cost, speed, break_even", "exercises/published.py",
         ("draft_cost", "speed", "break_even"), 4, 20, 2),
    Task(19, "Race.settle", "machine/exact.py", ("Race.settle",), 5, 25, 2),
    Task(20, "cost_in_bits, best_bits", "exercises/economics.py",
         ("cost_in_bits", "best_bits"), 4, 25, 2),
    Task(21, "pass_seconds, largest_batch", "exercises/economics.py",
         ("pass_seconds", "largest_batch"), 4, 20, 2),
    Task(22, "head_loss", "exercises/exits.py", ("head_loss",), 6, 20, 2),
    Task(23, "enabled_exits, exit_loss", "exercises/exits.py",
         ("enabled_exits", "exit_loss"), 6, 25, 2),
    Task(24, "draw_at_exit", "exercises/exits.py", ("draw_at_exit",), 6, 20, 2),
    Task(25, "constrain", "exercises/serving.py", ("constrain",), 3, 25, 2),
    Task(26, "ring_mask, ring_size, ring_counterexample", "exercises/serving.py",
         ("ring_mask", "ring_size", "ring_counterexample"), 2, 30, 3, tests(
        serving="the_size_of_a_ring")),
    Task(27, "PagedCache.write, keep", "exercises/paged.py", ("PagedCache.write", "keep"), 2, 40,
         3, tests(paged="a_table_for_each_text what_was_rejected_goes_back "
                     "a_text_in_pages_is_the_same_to_the_bit")),
    Task(28, "learn", "exercises/learning.py", ("learn",), 6, 30, 2, tests(
        learning="a_head_that_learns_changes_no_law a_head_that_learns_changes_no_greedy_text")),
]


def file_name(task):
    return f"{task.number:02}_{task.name.replace(', ', '_').replace('.', '_')}.py"


def choose(word):
    """The task with this number or name, or with a function of this name."""
    for task in TASKS:
        if word in (str(task.number), f"{task.number:02}", task.name, *task.functions):
            return task
    raise KeyError(f"there is no exercise {word!r}; there are: " + "; ".join(
        f"{task.number} {task.name}" for task in TASKS))
