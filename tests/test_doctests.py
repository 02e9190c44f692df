"""The worked examples in the docstrings say what the functions return."""
import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", [
    "model", "sampling", "verification", "speculative", "layerskip", "control", "checkpoint",
    "porting.check", "porting.engine", "porting.web.assemble", "machine.quant", "methods.trees"])
def test_examples(name):
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted and not failed
