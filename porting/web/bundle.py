"""Writes the live page as one file, with the engine and a model inside, that opens by double click.

    python -m porting.web.bundle live.html

The model is weights/stories-llama with its matrices in int8: each row is whole numbers from -127 to
127, times one scale. So the file has some 16 MB.
"""
import base64
import sys
from pathlib import Path

import safetensors.torch
import torch

from machine.quant import Int8
from support import cli
from support.files import write_file

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "weights" / "stories-llama"
MARK = "<!-- bundle -->"


def in_int8(tensors):
    """The matrices of a checkpoint as whole numbers, each beside its scales; the vectors as they
    are, in float32."""
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            matrix = Int8(tensor.float())
            stored[name] = matrix.codes[:, : matrix.columns].contiguous()
            stored[f"{name}.scale"] = matrix.scale
        else:
            stored[name] = tensor.float()
    return stored


def bundle():
    """The page, as text."""
    page = (ROOT / "docs" / "live.html").read_text(encoding="utf-8")
    tensors = safetensors.torch.load_file(MODEL / "model.safetensors")
    files = {"config": (MODEL / "config.json").read_bytes(),
             "tokens": (MODEL / "tokenizer.json").read_bytes(),
             "weights": safetensors.torch.save(in_int8(tensors))}
    parts = [f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode()}</script>'
             for name, data in files.items()]
    engine = (ROOT / "porting" / "web" / "engine.js").read_text(encoding="utf-8")
    parts.append(f'<script type="text/plain" id="engine">\n{engine}</script>')
    before, after = page.split(MARK)
    return before + "\n".join(parts) + after


@torch.inference_mode()
def main(argv=None):
    def run(argv):
        p = cli.Parser(description="Write the live page, with engine and weights, as one file.")
        p.add_argument("out", type=Path, help="the file to write, such as live.html")
        out = p.parse_args(argv).out
        write_file(out, bundle())
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser")
    return cli.main(run, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
