"""Where there is no GPU, a test that asks for the device "cuda" runs on the one of paper."""
from contextlib import nullcontext

import pytest
import torch
from paper_gpu import PaperGPU


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    paper = not torch.cuda.is_available() and any(isinstance(p, str) and p == "cuda" for p in params)
    with PaperGPU() if paper else nullcontext():
        return (yield)
