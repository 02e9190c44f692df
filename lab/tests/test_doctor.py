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
# vLLM issue 20780: Llama 3.1 8B on an H100, 7.07 ms per token without a draft
EAGLE = "2:2.10:4.37 3:2.29:4.29 4:2.39:4.48 5:2.43:4.71 6:2.45:4.94 7:2.47:5.20".split()
EAGLE_3 = "2:2.36:4.32 3:2.79:4.09 4:3.08:4.05 5:3.32:4.13 6:3.46:4.20 7:3.54:4.29".split()


@pytest.mark.parametrize("runs, c, v, K", [(EAGLE, 0.105, 1.087, 3), (EAGLE_3, 0.144, 1.181, 4)])
def test_eagle_in_vllm(call, runs, c, v, K):
    """Why do 29 % more accepted tokens make EAGLE-3 only 5 % faster? (Issue 20780.)"""
    status, out, _ = call("--plain", 7.07, "--runs", *runs)
    assert status == 0 and out.startswith(f"c {c}, v {v}: ") and f"Best K: {K}." in out


def test_a_long_draft_of_dflash(call):
    """In AEON-7's issue 6 nothing is accepted after five of fifteen positions."""
    rates, mean = doctor.read_line(AEON_7)
    assert len(rates) == 15 and 1 + sum(rates) == pytest.approx(mean)
    assert doctor.alphas(rates)[:6] == pytest.approx([0.60, 0.64, 0.56, 0.50, 0.57, 0], abs=0.005)
    out = call(AEON_7, "--cost", "0.3")[1]
    assert "Best K: 2. It brings 1.985 of the 2.370 tokens per round that K 15 brings" in out


def test_the_limit_and_the_break_even_point(call):
    """A line of llama.cpp, read with different costs."""
    status, out, _ = call(LLAMA_CPP)
    assert status == 0 and "The limit is alpha." in out and "Longer drafts than 3" in out
    assert "The limit is c." in call(LLAMA_CPP, "--cost", 0.9)[1]
    out = call(LLAMA_CPP, "--passes", *"1:8.47 2:13.49 3:15.64 5:20.67 8:28.13".split())[1]
    # with two drafted tokens: 1 + a + a ** 2 > 15.64 / 8.47
    assert "The limit is v." in out and "where alpha exceeds 0.55" in out
    out = call(LLAMA_CPP, "--cost", 2)[1]
    assert "Best K: 0." in out and "No alpha breaks even" in out


def test_the_worked_examples():
    assert doctest.testmod(doctor) == (0, 5)


def test_what_is_no_line_is_refused(call, tmp_path):
    call.refuses(["acceptance was bad"], tmp_path, "no acceptance rates found")
    call.refuses(["acceptance rate per position = (0.3, 0.4)"], tmp_path, "fall from position")
    call.refuses([LLAMA_CPP, "--passes", "2:1.5"], tmp_path, "--passes needs", "one token")
    call.refuses([LLAMA_CPP, "--passes", "two"], tmp_path, "--passes", "two")
    call.refuses(["--plain", "7", "--runs", "2:2.1:4"], tmp_path, "at least two runs")
    call.refuses(["--runs", "2:2.1:4"], tmp_path, "belong together")
