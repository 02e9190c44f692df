"""The exercises: a table of functions of the library, with their tests, and what a student reads of each.

The one thing to remember: neither solutions nor stubs stand here. `splice` cuts them out of the library.
"""
from typing import NamedTuple


class Task(NamedTuple):
    number: int
    name: str
    module: str
    functions: tuple[str, ...]
    minutes: int
    stars: int              # difficulty, 1 to 3
    tests: tuple[str, ...]  # node ids below tests/; the first that fails is reported, so clear ones stand first
    text: str               # what is wanted, in words and a picture

    @property
    def sitting(self):
        return 1 + (self.number - 1) // 3


def by_outcomes(*names):
    return tuple(f"test_by_outcomes.py::test_{name}" for name in names)


TASKS = [
    Task(9, "verify", "speculative.py", ("verify",), 45, 3,
         by_outcomes("verify_drawn_drafts", "verify_copied_drafts", "verify_greedy", "verify_nothing_proposed",
                     "verify_rows_stand_for_themselves", "verify_where_nothing_is_left", "verify_dead_drafts"),
         "x"),
    Task(10, "chain", "speculative.py", ("chain",), 40, 2,
         by_outcomes("chain_draws_each_token_after_the_one_before", "chain_returns_the_q_that_it_drew_from",
                     "chain_keeps_the_token_that_stops_it", "chain_rows_end_one_by_one", "chain_lengths",
                     "chain_of_nothing", "chain_ends_where_all_rows_have"),
         "x"),
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
