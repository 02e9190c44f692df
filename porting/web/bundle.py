"""Writes the live page as one file, with the engine and a model inside, that opens by double click.

    python -m porting.web.bundle live.html

The model is weights/stories-llama with its matrices in int8: each row is whole numbers from -127 to
127, times one scale. So the file has some 16 MB. The page shows how much of them has arrived, and
refuses a file that is cut off or damaged.
"""
import base64
import sys
import zlib
from pathlib import Path

import safetensors.torch
import torch

from machine.files import write_file
from machine.quant import Int8
from support import cli

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "weights" / "stories-llama"
WEB = ROOT / "porting" / "web"
MARK = "<!-- bundle -->"
PIECE = 2**18   # characters of base64 in a script, a multiple of 4


def in_int8(tensors):
    """The matrices of a checkpoint as whole numbers, each beside its scales; the vectors as they
    are, in float32."""
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            codes, scale = Int8(tensor.float()).numbers()
            stored[name] = codes.contiguous()
            stored[f"{name}.scale"] = scale.flatten().contiguous()
        else:
            stored[name] = tensor.float()
    return stored


def pieces(name, data):
    """A file as scripts that hold base64, with its checksum."""
    text = base64.b64encode(data).decode()
    for first in range(0, len(text), PIECE):
        yield (f'<script type="text/plain" data-file="{name}" data-sum="{zlib.adler32(data)}">'
               f"{text[first:first + PIECE]}</script>")


def bundle():
    """The page, as text."""
    page = (ROOT / "docs" / "live.html").read_text(encoding="utf-8")
    tensors = safetensors.torch.load_file(MODEL / "model.safetensors")
    files = {"kernels": (WEB / "kernels.wasm").read_bytes(),
             "fused": (WEB / "fused.wasm").read_bytes(),
             "config": (MODEL / "config.json").read_bytes(),
             "tokens": (MODEL / "tokenizer.json").read_bytes(),
             "weights": safetensors.torch.save(in_int8(tensors))}
    engine = (WEB / "engine.js").read_text(encoding="utf-8")
    parts = [f'<script type="text/plain" data-file="engine">\n{engine}</script>']
    parts += [piece for name, data in files.items() for piece in pieces(name, data)]
    before, after = page.split(MARK)
    before = before.replace("<html ", f'<html data-pieces="{len(parts)}" ', 1)
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
