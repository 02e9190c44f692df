"""The notebooks: each runs from top to bottom without a warning, and its two files hold the same cells."""
import base64
import io
import runpy
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from PIL import Image

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
execute = runpy.run_path(str(FOLDER / "execute.py"))
SOURCES = execute["sources"]()
each = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


@each
def test_runs_from_top_to_bottom(path):
    """From its own folder, as Jupyter does."""
    notebook = execute["execute"](path, path.parent)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert not [o for o in outputs if o.get("name") == "stderr"], "warnings, which a reader would see"


@each
def test_what_is_committed_was_made_from_its_source(path):
    made = nbformat.read(path.with_suffix(".ipynb"), 4).cells
    cells, source = ([(c.cell_type, c.source) for c in part] for part in (made, jupytext.read(path).cells))
    assert cells == source, "run `make notebooks`"
    assert not [o for c in made for o in c.get("outputs", ()) if o.output_type == "error"]
    (best,) = (c for c in made if "gallery" in c.metadata.get("tags", ()))
    picture = base64.b64decode(best.outputs[-1].data["image/png"])
    assert picture == path.with_suffix(".png").read_bytes()


def test_main_writes_the_outputs(tmp_path, monkeypatch):
    """A run changes nothing but what has changed; pictures have few colours, and keep their hues."""
    (tmp_path / "01_one.py").write_text(
        "# %%\n# %matplotlib inline\nprint(6 * 7)\n\n# %% [markdown]\n# words\n"
        "# %% tags=[\"gallery\"]\nfrom matplotlib.figure import Figure\nfigure = Figure()\n"
        "side = figure.subplots()\nside.imshow([[i * j for i in range(99)] for j in range(99)])\n"
        "side.plot([5, 90], [5, 90], color='#ff0000', lw=4)\nfigure\n", encoding="utf-8")
    (tmp_path / "02_two.py").write_text("# %%\n1 / 0\n", encoding="utf-8")
    monkeypatch.setitem(execute["main"].__globals__, "HERE", tmp_path)
    made = []
    for _ in range(2):
        execute["main"](("01",))
        made.append((tmp_path / "01_one.ipynb").read_text(encoding="utf-8"))
    assert made[0] == made[1]
    code, text, picture = nbformat.reads(made[0], 4).cells
    assert code.outputs[0].text == "42\n" and text.source == "words"
    shown = base64.b64decode(picture.outputs[0].data["image/png"])
    assert (tmp_path / "01_one.png").read_bytes() == shown
    image = Image.open(io.BytesIO(shown))
    assert image.mode == "P" and len(image.getcolors()) <= 128
    assert min(abs(r - 255) + g + b for _, (r, g, b) in image.convert("RGB").getcolors()) < 40
    with pytest.raises(CellExecutionError):
        execute["main"](("02",))
