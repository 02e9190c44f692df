"""Runs the notebooks: each NN_name.py becomes NN_name.ipynb with all of its outputs, and the
picture of the cell that is tagged "gallery" becomes NN_name.png.

    python notebooks/execute.py [01 04 ...]
    python notebooks/execute.py --stale     which pages have outputs of older code

The .py file is the source, in jupytext's percent format; an .ipynb is made from
it, and never edited. Its line `%run start.py` becomes the folded cell `find.py`.
Its metadata has a hash of each function of ours that it imports or prints.
"""
import ast
import base64
import hashlib
import io
import re
import sys
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
LIMIT = 600  # seconds for a cell, on a machine that is busy

# how much of a page a student does per minute. The first three are the pace of reading aloud: words
# of text, lines of code and printed lines per minute, as espeak-ng reads our pages at 150 words per
# minute. Then pictures, predictions or trials, and questions, which are our estimates.
PER_MINUTE = {"words": 150, "code": 18, "printed": 10, "pictures": 3, "tasks": 2 / 3,
              "questions": 1}


def sources(*names):
    """The notebooks, also the lab's, whose names begin with one of `names`. No names: all."""
    files = [*HERE.glob("[0-9][0-9]_*.py"), HERE.parent / "lab/notebooks/beyond.py"]
    return [p for p in sorted(files) if p.name.startswith(names or "")]


def smaller(png):
    """A picture in base64 with at most 128 colours, which is enough for a chart."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    out = io.BytesIO()
    image = image.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def read(path):
    """The notebook of a source file. Its first cell of code finds the repository."""
    notebook = jupytext.read(path)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = first.source.removeprefix("%run start.py\n")
    folded = {"jupyter": {"source_hidden": True}}
    source = (HERE / "find.py").read_text(encoding="utf-8").strip()
    find = nbformat.v4.new_code_cell(source, metadata=folded)
    notebook.cells.insert(notebook.cells.index(first), find)
    return notebook


def imported(code):
    """{a name in a page: what it imports of us by that name, such as "control.best_gamma"}"""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):      # then it uses module.name
            modules = {a.name for a in node.names}
            found |= {name: name for name in re.findall(r"\b\w+\.\w+", code)
                      if name.split(".")[0] in modules}
    return found


def source_of(name):
    """The definition of module.name in our code; None if there is none."""
    module, _, name = name.rpartition(".")
    file = HERE.parent / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    nodes = (node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    return next((ast.get_source_segment(text, node) for node in nodes), None)


def made_of(notebook):
    """{"prints" or "imports": {definition: its hash}}. What a page prints is hashed as it is, what
    it imports without comments, docstrings and layout, which change no output."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = re.sub(r"^%.*|get_ipython.*", "", "\n".join(cells), flags=re.M)
    names = imported(code)
    printed = {names.get(name) for name in re.findall(r"getsource\(([\w.]+)\)", code)}
    found = {"prints": {}, "imports": {}}
    for name in sorted(set(names.values())):
        text = source_of(name)
        if text is None:
            continue
        kind = "prints" if name in printed else "imports"
        if kind == "imports":
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                    node.body[0] = ast.Pass()
            text = ast.unparse(tree)
        found[kind][name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return found


def stale(path, kinds=("prints", "imports")):
    """The definitions whose code is not that of the page's outputs."""
    stored = nbformat.read(path.with_suffix(".ipynb"), 4).metadata.get("made_of", {})
    return sorted(name for kind in kinds for name, code in made_of(read(path))[kind].items()
                  if stored.get(kind, {}).get(name) != code)


def execute(path, where):
    """The notebook of a source file, run from the folder `where`. Raises nbclient's
    CellExecutionError where a cell fails."""
    notebook = read(path)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["kernelspec"] = kernel
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"  # trap: random ids would change in every run
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", record_timing=False,
                   resources={"metadata": {"path": str(where)}}).execute()
    for output in (o for cell in notebook.cells for o in cell.get("outputs", ())):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata.pop("jupytext", None)
    notebook.metadata["made_of"] = made_of(notebook)
    return notebook


def minutes(notebook):
    """How long a student needs who reads all that is not folded at the pace of reading aloud, and
    predicts, tries and answers. PER_MINUTE has the paces."""
    counts = Counter()
    for cell in notebook.cells:
        folded = cell.metadata.get("jupyter", {})
        if cell.cell_type == "markdown":
            counts["words"] += len(cell.source.split())
            counts["tasks"] += len(re.findall(r"\*\*(?:Predict|Try it)", cell.source))
            counts["questions"] += len(re.findall(r"\*\*\d\.\*\* ", cell.source))
            continue
        if not folded.get("source_hidden"):
            counts["code"] += sum(map(bool, cell.source.split("\n")))
        kind = "code" if "getsource" in cell.source else "printed"      # it may print code
        for output in () if folded.get("outputs_hidden") else cell.outputs:
            counts[kind] += output.get("text", "").count("\n")
            counts["pictures"] += "image/png" in output.get("data", {})
    return sum(count / PER_MINUTE[kind] for kind, count in counts.items())


def main(names):
    if names == ("--stale",):
        for path in sources():
            print(path.stem, *stale(path))
        return
    for path in sources(*names):
        notebook = execute(path, path.parent)
        nbformat.write(notebook, path.with_suffix(".ipynb"))
        (best,) = (cell for cell in notebook.cells if "gallery" in cell.metadata.get("tags", ()))
        path.with_suffix(".png").write_bytes(base64.b64decode(best.outputs[-1].data["image/png"]))
        size = path.with_suffix(".ipynb").stat().st_size / 1e3
        print(f"{path.with_suffix('.ipynb').name}: {size:.0f} KB, {minutes(notebook):.0f} minutes")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
