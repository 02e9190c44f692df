"""The worked examples in the docstrings say what the functions return."""
import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ".", "methods", "machine", "support", "porting", "porting/web"
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts)
           for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))
           if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted and not failed
