"""The doctor's verdicts on what users of other engines posted in public."""
import doctest

import pytest
from tiny import command

from lab import doctor

call = command(doctor.main)
AEON_7 = ("SpecDecoding metrics: Mean acceptance length: 2.37, Per-position acceptance rate: "
          "0.600, 0.385, 0.215, 0.108, 0.062, " + 10 * "0.000, " + "Avg acceptance rate: 9.1%")
LLAMA_CPP = ("draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance "
             "length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)")


def test_a_long_draft_of_dflash(call):
    """In AEON-7's issue 6 nothing is accepted after five of fifteen positions."""
    rates, mean = doctor.read_line(AEON_7)
    assert len(rates) == 15 and 1 + sum(rates) == pytest.approx(mean)
    assert doctor.alphas(rates)[:6] == pytest.approx([0.60, 0.64, 0.56, 0.50, 0.57, 0], abs=0.005)
    out = call(AEON_7, "--cost", "0.3")[1]
    assert "Best K: 2. It brings 1.985 of the 2.370 tokens per round that K 15 brings" in out


def test_the_limit(call):
    """A line of llama.cpp, read with different costs."""
    status, out, _ = call(LLAMA_CPP)
    assert status == 0 and "The limit is alpha." in out and "Longer drafts than 3" in out
    assert "The limit is c." in call(LLAMA_CPP, "--cost", 0.9)[1]
    out = call(LLAMA_CPP, "--passes", *"1:8.47 2:13.49 3:15.64 5:20.67 8:28.13".split())[1]
    assert "The limit is v." in out
    assert "Best K: 0." in call(LLAMA_CPP, "--cost", 2)[1]


def test_the_worked_examples():
    assert doctest.testmod(doctor) == (0, 1)


def test_what_is_no_line_is_refused(call, tmp_path):
    call.refuses(["acceptance was bad"], tmp_path, "no acceptance rates found")
    call.refuses(["acceptance rate per position = (0.3, 0.4)"], tmp_path, "fall from position")
    call.refuses([LLAMA_CPP, "--passes", "2:1.5"], tmp_path, "--passes needs", "one token")
    call.refuses([LLAMA_CPP, "--passes", "two"], tmp_path, "--passes", "two")
    call.refuses([LLAMA_CPP, "--cost", "-1"], tmp_path, "must not be negative")
