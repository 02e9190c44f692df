"""Training on a GPU of paper ends in the weights of the CPU."""
from types import SimpleNamespace

import expected
import pytest
import torch
from paper_gpu import PaperGPU

from lab import train

FLAGS = ("--layers 3 --dim 32 --heads 4 --kv-heads 2 --head-dim 8 --hidden 48 --context 16 "
         "--window 5 --batch 2 --tokens 320")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_of_training_end_in_the_weights_of_the_cpu(family):
    a = train.parse(["--out", "nowhere", "--family", family, *FLAGS.split()])
    tokens = torch.randint(64, (10, 2, 17), generator=torch.Generator().manual_seed(0))
    text = SimpleNamespace(tokenizer=expected.byte_tokenizer(), hash=str,
                           batch=lambda seed, step, batch, context: tokens[step])
    with PaperGPU():
        runs = [train.Run(a, text, torch.device(device)) for device in ("cpu", "cuda")]
        for run in runs:
            for _ in range(3):
                run.train_step()
        assert runs[0].losses == runs[1].losses and len({loss for loss, *_ in runs[0].losses}) == 3
        for ours, theirs in zip(*(run.model.parameters() for run in runs), strict=True):
            assert theirs.is_cuda and torch.equal(theirs.cpu(), ours)
