"""Where there is no GPU, a test that asks for the device "cuda" runs on a simulated one. And the
models and texts that most tests of drafters share."""
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from paper_gpu import PaperGPU

# trap: `tiny` imports the library, so fixtures import it:
# what cannot be imported fails a test, not pytest
pytest.register_assert_rewrite("promises")    # their asserts tell as much as those of tests


def pytest_configure():
    if "PYTEST_XDIST_WORKER" in os.environ:
        # one of several that share the cores: their threads, and those of the programs they
        # start, would wait for each other
        torch.set_num_threads(1)
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    paper = not torch.cuda.is_available() and any(isinstance(p, str) and p == "cuda"
                                                  for p in params)
    with PaperGPU() if paper else nullcontext():
        return (yield)


@pytest.fixture(scope="module")
def models():
    from tiny import LIVELY, make

    return {family: make(c) for family, c in LIVELY.items()}


@pytest.fixture(scope="session")
def truth():
    """What each of these models says after the prompts, by the oracle; the same on every device."""
    from tiny import LIVELY, PROMPTS, make, oracle

    models = {family: make(c) for family, c in LIVELY.items()}
    rows = {family: [oracle(m, p, 40) for p in PROMPTS] for family, m in models.items()}
    assert min(len(set(row)) for row in rows["llama"] + rows["gemma2"]) > 8, (
        "dull texts prove little")
    return rows


@pytest.fixture(scope="session")
def stories():
    """(model, tokenizer) of the shipped Llama, in float32. It stays as it is."""
    import checkpoint

    folder = Path(__file__).parents[1] / "weights" / "stories-llama"
    return checkpoint.load(folder, "cpu", torch.float32)
