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


@pytest.mark.parametrize("module", [
    model, sampling, verification, speculative, layerskip, control, checkpoint, check, quant, trees],
    ids=lambda module: module.__name__)
def test_examples(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
