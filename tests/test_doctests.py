"""The worked examples in the docstrings say what the functions return."""
import doctest

import pytest

import checkpoint
import control
import layerskip
import model
import sampling
import speculative
import verification
from machine import quant
from methods import trees
from porting import check

EXAMPLES = {model: ["visible"], sampling: ["to_probs", "uniforms"],
            verification: ["verify", "verify_tree"], speculative: ["ancestors"],
            layerskip: ["without", "skipped", "shared_prefix"], control: ["expected_tokens", "best_gamma"],
            checkpoint: ["parts"], check: ["fingerprint"], quant: ["codebook"],
            trees: ["chain_with_siblings", "tree_tokens", "best_tree"]}


@pytest.mark.parametrize("module, name", [(m, name) for m, names in EXAMPLES.items() for name in names],
                         ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_examples(module, name):
    found = [t for t in doctest.DocTestFinder().find(module) if t.name == f"{module.__name__}.{name}"]
    assert len(found) == 1 and found[0].examples, f"{name} has no worked example"
    runner = doctest.DocTestRunner()
    runner.run(found[0])
    assert runner.failures == 0
