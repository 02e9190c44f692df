"""The doctor's verdicts on what users of other engines posted in public."""
import pytest
from tiny import command

from lab import doctor, logs

call = command(doctor.main)
AEON_7 = ("SpecDecoding metrics: Mean acceptance length: 2.37, Per-position acceptance rate: "
          "0.600, 0.385, 0.215, 0.108, 0.062, " + 10 * "0.000, " + "Avg acceptance rate: 9.1%")
LLAMA_CPP = ("draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance "
             "length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)")
WRITTEN = "       eval time =    2296.72 ms /   256 tokens (    8.97 ms per token)"
PROMPT = "prompt eval time =     300.11 ms /    20 tokens (   15.01 ms per token)"
EAGLE_TOTALS = (
    "statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, #acc "
    "drafts =    70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, #acc "
    "rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) = 0.005, 325.555, 0.114 ms")
OLD_TOTALS = (
    "statistics        draft-mtp: #calls(b,g,a) =    2   3220   2477, #gen drafts =   2477, #acc "
    "drafts =  2301, #gen tokens =   4304, #acc tokens =  3858, dur(b,g,a) = 0.002, 17227.157, "
    "1.162 ms")
LOOKUP = (
    "statistics        ngram-mod: #calls(b,g,a) =   11    800      4, #gen drafts =      4, #acc "
    "drafts =     4, #gen tokens =    256, #acc tokens =    47, #mean acc len = 12.75, #acc "
    f"rate/pos = ({11 * '1.000, '}0.500, 0.250), dur(b,g,a) = 0.340, 2.107, 1.102 ms")
STOPPED = (
    "statistics draft-simple: #calls(b,g,a) = 1 100 100, #gen drafts = 100, #acc drafts = 90, #gen "
    "tokens = 260, #acc tokens = 230, #mean acc len = 3.30, #acc rate/pos = (0.900, 0.600, 0.400, "
    "0.200, 0.100, 0.050, 0.030, 0.020), dur(b,g,a) = 0.1, 100.0, 0.1 ms")
VLLM = """Engine 000: Avg prompt throughput: 5.8 tokens/s, Avg generation throughput: 30.0 \
tokens/s, Running: 1 reqs, Waiting: 0 reqs
SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 10.00 tokens/s, Drafted \
throughput: 15.00 tokens/s, Accepted: 100 tokens, Drafted: 150 tokens, Per-position acceptance \
rate: 0.800, 0.700, 0.500, Avg Draft acceptance rate: 66.7%
Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 25.0 tokens/s
SpecDecoding metrics: Mean acceptance length: 1.50, Accepted throughput: 5.00 tokens/s, Drafted \
throughput: 30.00 tokens/s, Accepted: 50 tokens, Drafted: 300 tokens, Per-position acceptance \
rate: 0.300, 0.200, 0.000, Avg Draft acceptance rate: 16.7%"""
SGLANG = """Decode batch. #running-req: 1, #token: 90, accept len: 4.00, cuda graph: True
Decode batch. #running-req: 3, #token: 90, token usage: 0.71, accept len: 2.00, accept rate: 0.84"""
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
    [log] = logs.read(AEON_7)
    assert len(log.rates) == 15 and 1 + log.accepted == pytest.approx(log.mean)
    assert round(log.length()) == 15, "1.37 accepted tokens are 9.1 % of a draft"
    out = call(AEON_7, "--cost", "0.3")[1]
    assert "Best K: 2. It brings 1.985 of the 2.370 tokens per round that K 15 brings" in out
    assert "does not count the rounds without a draft" in out


@pytest.mark.parametrize("text, drafts, drafted, accepted, rounds", [
    (EAGLE_TOTALS, 87, 259, 167, 87), (OLD_TOTALS, 2477, 4304, 3858, 3220),
    (LOOKUP, 4, 256, 47, 800), (STOPPED, 100, 260, 230, 100),
    ("\n".join([STOPPED, EAGLE_TOTALS.replace("eagle3", "simple")]), 87, 259, 167, 87),
    (LLAMA_CPP, 87, 259, 167, None),
    # 256 tokens: one of the prompt's pass, 167 accepted ones, and one of each round
    ("\n".join([PROMPT, WRITTEN, LLAMA_CPP]), 87, 259, 167, 88),
    ("\n".join(2 * [PROMPT, WRITTEN, LLAMA_CPP]), 174, 518, 334, 176),
    # ten seconds each: 300 tokens, 200 of which were not drafted, and 250, of which 200 were not
    (VLLM, 150, 450, 150, 400), (VLLM.replace("25.0", "0.0"), 150, 450, 150, 300),
    (SGLANG, 4, None, 6, 4)])
def test_the_counts_of_a_log(text, drafts, drafted, accepted, rounds):
    """Totals: the last line counts. Requests and intervals are added up."""
    [log] = logs.read(text)
    assert log.drafts == pytest.approx(drafts, rel=1e-3)
    assert (log.drafted, log.accepted, log.rounds) == (drafted, accepted, rounds)


def test_rounds_without_a_draft_count(call):
    """A lookup that drafts in 4 of 800 rounds accepts 11.75 tokens each time: (800 + 47) / 800."""
    status, out, _ = call(LOOKUP)
    assert status == 0 and "0.5 % of the rounds had a draft of 64.0 tokens" in out
    assert "As logged: 1.059 tokens per round" in out and "and 1.06 times plain decoding." in out
    out = call(LOOKUP, "--passes", "1:1", "65:5")[1]
    assert "As logged: 1.059 tokens per round, which costs 1.02 passes: 1.04 times" in out
    assert "0.5 % of the rounds" in call(LOOKUP + "\n" + LOOKUP)[1]
    assert "figures are for rounds with one" in call(LOOKUP.replace("800", "3"))[1]


def test_drafts_that_stop_early_are_no_rejections(call):
    """3.30 / (2.6 * 0.2 + 1) = 2.17. How many drafts reached the second position is not known."""
    out = call(STOPPED, "--cost", "0.2")[1]
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[0] == ["1", "0.900", "0.90", "1.900", "1.20", "1.58"]
    assert rows[1] == ["2", "0.600", "-", "2.500", "-", "-"]
    assert rows[7] == ["8", "0.020", "-", "3.300", "1.52", "2.17"]
    assert "Some drafts were shorter" in out and "Best K" not in out and "limit" not in out
    # the cost of a pass over 3.6 tokens lies between those over 3 and 4
    out = call(STOPPED, "--passes", "1:1", "3:1.1", "4:1.6")[1]
    assert "costs 1.40 passes" in out


def test_each_drafter_of_a_log_has_its_own_figures(call):
    """The second one is called in the rounds in which the first one has no draft: together
    (800 + 47 + 380) / (796 + 4 * 1 + 400 * 0.1)."""
    second = EAGLE_TOTALS.replace("    87     87, #gen drafts =     87", "796 4, #gen drafts = 400")
    second = second.replace("259, #acc tokens =   167", "400, #acc tokens = 380")
    second = second.replace("0.805, 0.632, 0.483", "0.95").replace("2.92", "1.95")
    out = call(f"{LOOKUP}\n{second}", "--plain", "8.13888")[1]       # 325.555 / 400 / 8.13888 = 0.1
    assert "ngram-mod: 0.5 % of the rounds" in out and "draft-eagle3: 50.3 % of the rounds" in out
    assert "All drafters: 1.534 tokens per round, which costs 1.05 passes: 1.46 times" in out
    idle = LOOKUP.replace("#gen drafts =      4", "#gen drafts = 0")
    assert "ngram-mod: no drafts." in call(idle)[1]


def test_a_log_without_lengths_or_rates_promises_nothing(call):
    out = call(SGLANG)[1]
    assert "As logged: 2.500 tokens per round.\n" in out and "times plain" not in out
    assert "2.50 tokens per round" not in out and "no rates by position" in out
    out = call(SGLANG, "--gamma", "3", "--cost", "0.1")[1]
    assert "which costs 1.30 passes: 1.92 times plain decoding." in out
    line = "Per-position acceptance rate: 0.600, 0.385, 0.215"
    out = call(line)[1]
    assert "add --gamma 3" in out and "times plain" not in out and "Best K" not in out
    assert "Best K: 3." in call(line, "--gamma", "3")[1]
    assert "shorter than others" in call(line, "--gamma", "2")[1]


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


def test_what_is_no_line_is_refused(call, tmp_path):
    for text in ("acceptance was bad", LOOKUP.partition(", #gen tokens")[0]):
        call.refuses([text], tmp_path, "no acceptance rates found")
    call.refuses(["acceptance rate per position = (0.3, 0.4)"], tmp_path, "fall from position")
    call.refuses([LLAMA_CPP.partition(", mean")[0]], tmp_path, "no mean acceptance length")
    call.refuses([LLAMA_CPP, "--plain", "7"], tmp_path, "a log with durations")
    for passes in (["2:1.5"], ["1:1", "1:2"]):
        call.refuses([LLAMA_CPP, "--passes", *passes], tmp_path, "--passes needs", "one token")
    for wrong in ("two", "1:nan", "1:inf", "1:0", "1:-1", "0:1"):
        call.refuses([LLAMA_CPP, "--passes", wrong], tmp_path, "--passes")
    for wrong in ("nan", "inf", "-0.1"):
        call.refuses([LLAMA_CPP, f"--cost={wrong}"], tmp_path, "--cost", wrong)
    call.refuses(["--plain", "7", "--runs", "2:2.1:4"], tmp_path, "at least two runs")
    call.refuses(["--plain", "7", "--runs", "2:0.1:4", "3:2:5"], tmp_path, "at least 1")
    call.refuses(["--plain", "7", "--runs", "2:2:nan", "3:2:5"], tmp_path, "--runs")
    call.refuses(["--plain", "7", "--runs", "2:1:1", "3:4:9"], tmp_path, "less than nothing")
    call.refuses(["--runs", "2:2.1:4"], tmp_path, "belong together")
