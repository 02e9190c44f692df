"""What every notebook begins with, after `find.py` has found the repository. It checks the
packages, makes the pictures sharp, and imports what every notebook uses: torch, checkpoint, plots.
"""
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for name in ("torch", "safetensors", "tokenizers", "matplotlib"):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{name} is missing: python -m pip install -r {ROOT / 'requirements.txt'}")
sys.path.insert(0, str(ROOT))
get_ipython().run_line_magic("matplotlib", "inline")
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['retina']")

import torch  # noqa: F401

import checkpoint  # noqa: F401
from notebooks import plots  # noqa: F401
