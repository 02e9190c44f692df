"""The notebooks: each runs without a warning, and its two files hold the same cells."""
import base64
import html
import io
import re
import runpy
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image
from test_show import STORIES
from tiny import make_round

from machine import rows
from notebooks import plots
from support.show import Generation

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
execute = runpy.run_path(str(FOLDER / "execute.py"))
SOURCES = execute["sources"]()
each = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


@each
def test_runs_from_top_to_bottom(path):
    """From its own folder, as Jupyter does."""
    rows.library()      # what it says while it compiles, once per machine, is no warning
    notebook = execute["execute"](path, path.parent)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    warnings = [o for o in outputs if o.get("name") == "stderr"]
    assert not warnings, "a reader would see them"


def stated(path):
    """How many minutes a page says that it takes."""
    text = re.sub(r"\n# ", " ", path.read_text(encoding="utf-8"))
    return int(re.search(r"About (\d+) minutes", text)[1])


@each
def test_what_is_committed_was_made_from_its_source(path):
    notebook = nbformat.read(path.with_suffix(".ipynb"), 4)
    minutes = execute["minutes"](notebook)
    assert minutes <= 45, "too long for a sitting"
    made = notebook.cells
    assert stated(path) == 5 * round(minutes / 5), f"it takes {minutes:.0f} minutes"
    source = execute["read"](path).cells
    cells, source = ([(c.cell_type, c.source) for c in part] for part in (made, source))
    assert cells == source, "run `make notebooks`"
    assert not [o for c in made for o in c.get("outputs", ()) if o.output_type == "error"]
    (best,) = (c for c in made if "gallery" in c.metadata.get("tags", ()))
    picture = base64.b64decode(best.outputs[-1].data["image/png"])
    assert picture == path.with_suffix(".png").read_bytes()


def test_the_readme_says_how_long_the_pages_take():
    minutes = [stated(path) for path in SOURCES if path.parent == FOLDER]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Each takes {min(minutes)} to {max(minutes)} minutes" in readme


@each
def test_a_page_prints_the_present_code(path):
    """`python notebooks/execute.py --stale` also names what a page imports and has changed."""
    assert not execute["stale"](path, ["prints"]), "run `make notebooks`"


# decimals in text that nothing measured: settings, examples by hand, sections, published figures
GIVEN = {
    "02": "7.9 8.03 16.06", "03": "0.95", "04": "0.5 0.2 0.8 3.8 3.9 1.75 1.5 0.75",
    "05": "0.8 0.5 0.3 0.2 0.7 0.63 0.231", "06": "3.6 3.2 0.4057 24.08 29.65 48.82",
    "07": "2.25 2.26 2.78 1.96", "08": "3.1 0.05 0.09 0.3", "10": "0.95 0.49 0.04",
    "11": "1.005 0.2 0.6 2.4 1.6", "12": "3.35 3.1 0.7 0.1 2.13 7.8 3.2",
    "13": "1.00 0.03 1.2 0.2 0.5 1.6", "be": "0.05 0.3 0.5 3.1"}


@each
def test_a_figure_that_was_measured_is_printed_by_the_cell_that_measured_it(path):
    """A text cell holds none: the next run would contradict it."""
    text = "\n".join(c.source for c in execute["read"](path).cells if c.cell_type == "markdown")
    text = re.sub(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|\d{4}\.\d{5}", "", text)
    found = set(re.findall(r"(?<![\w.])\d+\.\d+(?!\.?\w)", text))     # 0.3.2 is a version
    assert found <= set(GIVEN.get(path.stem[:2], "").split())


def opened(where, repository="", file=None):
    """What the first cell prints in the folder `where`, and where it found the repository.
    file: the notebook's own place, which VS Code reveals."""
    find = execute["read"](SOURCES[0]).cells[1].source
    find = find.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
    if file:
        find = f"__vsc_ipynb_file__ = {str(file)!r}\n{find}"
    cells = [nbformat.v4.new_code_cell(source) for source in (find, "print(ROOT)")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(where)}}
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    return [o.text.strip() for cell in notebook.cells for o in cell.outputs]


def test_the_first_cell_finds_the_repository(tmp_path):
    """From its root, and from another folder where the notebook's own place is known."""
    assert opened(ROOT) == opened(tmp_path, file=FOLDER / "01_forward_pass.ipynb") == [str(ROOT)]


def test_a_notebook_opened_alone_fetches_the_repository_or_says_what_to_do(tmp_path):
    with pytest.raises(CellExecutionError, match="in a clone of it, or set REPOSITORY above"):
        opened(tmp_path)
    far = tmp_path / "far"
    (far / "notebooks").mkdir(parents=True)
    (far / "notebooks" / "start.py").write_text("ROOT = 'a clone'", encoding="utf-8")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "a repository"]):
        subprocess.run(["git", *command], cwd=far, check=True)
    assert opened(tmp_path, far.as_uri()) == opened(tmp_path, far.as_uri()) == ["a clone"]


def test_pictures_have_few_colours_and_keep_their_hues():
    image, png = Image.linear_gradient("L").convert("RGB"), io.BytesIO()
    image.paste((255, 0, 0), (5, 5, 90, 9))
    image.save(png, "PNG")
    small = base64.b64decode(execute["smaller"](base64.b64encode(png.getvalue())))
    small = Image.open(io.BytesIO(small))
    colours = [rgb for _, rgb in small.convert("RGB").getcolors()]
    assert len(colours) <= 128 and min(255 - r + g + b for r, g, b in colours) < 40


def test_a_figure_is_white_on_a_dark_page_too():
    """Black labels on a transparent picture would vanish."""
    figure, png = plots.axes(1, 1)[0], io.BytesIO()
    figure.savefig(png)
    assert Image.open(png).convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_minutes_by_hand():
    """150 words, 18 lines of code that are not folded and 9 that are printed, ten printed lines, a
    picture, a prediction and a question: 1 + 1.5 + 1 + 1/3 + 1.5 + 1 minutes. What is folded is
    free."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    out = nbformat.v4.new_output
    folded = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}
    printed = [out("stream", text=10 * "line\n"), out("display_data", {"image/png": ""})]
    source = [out("stream", text=9 * "code\n")]
    cells = [text("word " * 146 + "**Predict:** it **1.** what"),
             code("a\n\n" * 17, outputs=printed), code("getsource(f)", outputs=source),
             code("c\nd", metadata=folded, outputs=printed)]
    assert execute["minutes"](nbformat.v4.new_notebook(cells=cells)) == pytest.approx(19 / 3)


def test_html_of_a_generation_is_escaped():
    ids = STORIES.encode(' <b>&"</b>\x1b').ids
    seen = Generation(STORIES, [[0]])
    seen.add(make_round([ids], [len(ids) - 1], [len(ids) - 1]))
    seen.sure = [[0.5] * len(ids)]
    page = plots.text_html(seen)
    assert "<b>" not in page and "\x1b" not in page
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert STORIES.decode(ids).replace("\x1b", "\u241b") in shown
