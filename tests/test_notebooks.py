"""The notebooks: each runs from top to bottom, its two files hold the same cells, and its form is what
readers were promised."""
import ast
import base64
import io
import re
import runpy
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from PIL import Image

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
NAMES = [path.stem for path in SOURCES]
execute = runpy.run_path(str(FOLDER / "execute.py"))


def cells(path, kind="code"):
    """The sources of one kind of cells. path: a .py or an .ipynb."""
    notebook = jupytext.read(path) if path.suffix == ".py" else nbformat.read(path, 4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_the_notebooks_are_numbered_and_each_has_both_files():
    assert [name[:2] for name in NAMES] == [f"{i:02}" for i in range(1, len(NAMES) + 1)]
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES
    assert execute["sources"]() == SOURCES
    assert [path.stem[:2] for path in execute["sources"]("01", "03")] == ["01", "03"]


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_runs_from_top_to_bottom(path):
    """From the repository's root; `make notebooks` runs them from their own folder."""
    notebook = execute["execute"](path, ROOT)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    told = [o for cell in notebook.cells for o in cell.get("outputs", ()) if o.get("name") == "stderr"]
    assert not told, "warnings, which a reader would see"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_what_is_committed_was_made_from_its_source(path):
    made = path.with_suffix(".ipynb")
    for kind in ("code", "markdown"):
        assert cells(made, kind) == cells(path, kind), "run `make notebooks`"
    assert made.stat().st_size < 400e3
    outputs = [o for cell in nbformat.read(made, 4).cells for o in cell.get("outputs", ())]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 5, "a picture every few cells"
    assert not [o for o in outputs if o.output_type == "error"]
    (best,) = (c for c in nbformat.read(made, 4).cells if "gallery" in c.metadata.get("tags", ()))
    assert base64.b64decode(best.outputs[-1].data["image/png"]) == path.with_suffix(".png").read_bytes()


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_cells_are_short_and_questions_are_checked(path):
    code, text = cells(path), cells(path, "markdown")
    assert max(len(cell.splitlines()) for cell in code) <= 15
    questions = sum(len(re.findall(r"^\*\*\d\.\*\*", cell, re.M)) for cell in text)
    answers = "\n".join(text).count("<details><summary>Answer</summary>")
    assert 3 <= questions <= 5 and questions == answers
    assert sum("assert" in cell for cell in code) >= questions
    assert "**Predict:**" in "\n".join(text)
    for target in re.findall(r"\]\((\w+\.ipynb)\)", "\n".join(text)):
        assert (FOLDER / target).is_file(), target


def test_all_begin_alike_and_the_model_is_one_line():
    first = {cells(path)[0] for path in SOURCES}
    assert len(first) == 1
    assert len([line for line in first.pop().splitlines() if line.startswith("MODEL = ")]) == 1


def begin(folder, monkeypatch, missing=()):
    """Run a first cell from `folder`, without its two lines of magic. Returns its variables."""
    code = "\n".join(line for line in cells(SOURCES[0])[0].splitlines() if not line.startswith("%"))
    monkeypatch.chdir(folder)
    for name in missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda asked, name=name: None if asked == name else 1)
    variables = {}
    exec(compile(code, "first cell", "exec"), variables)
    return variables


@pytest.mark.parametrize("folder", [ROOT, FOLDER])
def test_the_first_cell_finds_the_repository(folder, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    assert begin(folder, monkeypatch)["MODEL"] == ROOT / "weights" / "stories-llama"


def test_the_first_cell_says_what_is_missing_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(SystemExit, match="^tokenizers is missing: .*requirements.txt$"):
        begin(ROOT, monkeypatch, ["tokenizers"])
    with pytest.raises(SystemExit, match="^Start Jupyter in the repository's root"):
        begin(tmp_path, monkeypatch)


def test_nothing_is_defined_that_a_module_has():
    """A naive version may stand in a notebook under another name, and must be compared with the library's."""
    library = {node.name for path in [*ROOT.glob("*.py"), *(ROOT / "support").glob("*.py")]
               for node in ast.parse(path.read_text(encoding="utf-8")).body
               if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        mine = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        assert not mine & library, path.name


def test_main_writes_the_outputs(tmp_path, monkeypatch, capsys):
    one = ("# %%\n# %matplotlib inline\nprint(6 * 7)\n\n# %% [markdown]\n# words\n"
           "# %% tags=[\"gallery\"]\nfrom matplotlib.figure import Figure\nfigure = Figure()\n"
           "figure.subplots()\nfigure\n")
    (tmp_path / "01_one.py").write_text(one, encoding="utf-8")
    (tmp_path / "02_two.py").write_text("# %%\n1 / 0\n", encoding="utf-8")
    monkeypatch.setitem(execute["main"].__globals__, "HERE", tmp_path)
    made = []
    for _ in range(2):
        execute["main"](("01",))
        made.append((tmp_path / "01_one.ipynb").read_text(encoding="utf-8"))
    assert made[0] == made[1], "a run changes nothing but what has changed"
    code, text, picture = nbformat.reads(made[0], 4).cells
    assert code.outputs[0].text == "42\n" and text.source == "words"
    shown = base64.b64decode(picture.outputs[0].data["image/png"])
    assert (tmp_path / "01_one.png").read_bytes() == shown
    assert capsys.readouterr().out.startswith("01_one.ipynb: ")


def test_pictures_become_smaller_and_keep_their_hues(tmp_path):
    drawn = tmp_path / "01_drawn.py"
    drawn.write_text("# %%\n# %matplotlib inline\nfrom matplotlib.figure import Figure\nfigure = Figure()\n"
                     "side = figure.subplots()\n"
                     "side.imshow([[i * j for i in range(99)] for j in range(99)])\n"
                     "side.plot([5, 90], [5, 90], color='#ff0000', lw=4)\nfigure\n", encoding="utf-8")
    (cell,) = execute["execute"](drawn, tmp_path).cells
    image = Image.open(io.BytesIO(base64.b64decode(cell.outputs[-1].data["image/png"])))
    assert image.mode == "P" and len(image.getcolors()) <= 128
    assert min(abs(r - 255) + g + b for _, (r, g, b) in image.convert("RGB").getcolors()) < 40


def test_a_cell_that_fails_fails_the_run(tmp_path):
    broken = tmp_path / "99_broken.py"
    broken.write_text("# %%\nassert 1 + 1 == 3\n", encoding="utf-8")
    with pytest.raises(CellExecutionError, match="assert 1 . 1 == 3"):
        execute["execute"](broken, tmp_path)
