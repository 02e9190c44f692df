"""What every notebook begins with. It finds the repository and the packages, makes the pictures sharp, and
imports what every notebook uses: torch, checkpoint, plots."""
import importlib.util
import sys
from pathlib import Path

ROOT = next((p for p in (Path.cwd(), *Path.cwd().parents) if (p / "minimal.py").is_file()), None)
if ROOT is None:
    sys.exit("Start Jupyter in the repository, or in one of its folders.")
for name in ("torch", "safetensors", "tokenizers", "matplotlib"):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{name} is missing: python -m pip install -r {ROOT / 'requirements.txt'}")
sys.path.insert(0, str(ROOT))
get_ipython().run_line_magic("matplotlib", "inline")
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['retina']")

import torch  # noqa: F401

import checkpoint  # noqa: F401
from notebooks import plots  # noqa: F401
