"""Write the zip that a course's server grades with: the part of this library that the grader needs,
`setup.sh` and `run_autograder`, as Gradescope wants them.

    python exercises/autograder.py autograder.zip

It holds the solutions: the zip is for the server alone.
"""
import argparse
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises.tasks import choose  # noqa: E402

FOLDERS = "exercises", "tests", "support", "methods", "machine"
FILES = "pyproject.toml", "requirements.txt", "requirements-dev.txt", "LICENSE"
# Once, when the image is made. Python 3.11 or newer must be in it;
# torch without CUDA is a tenth of the size.
SETUP = """#!/usr/bin/env bash
set -e
apt-get update && apt-get install -y python3 python3-venv
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install -r /autograder/source/requirements-dev.txt \\
    --extra-index-url https://download.pytorch.org/whl/cpu
"""
# For each submission. AT is where the server keeps it all; a rehearsal sets it.
RUN = """#!/usr/bin/env bash
AT=${AT:-/autograder}
PY=${PY:-$AT/venv/bin/python}
$PY $AT/source/exercises/grade.py $AT/submission --gradescope $AT/results/results.json @ONLY@ \\
    || test -s $AT/results/results.json
"""


def contents(only=()):
    """{name in the zip: bytes}. only: the numbers of the exercises that were set, if not all."""
    flag = " ".join(["--only", *only] if only else [])
    files = [*ROOT.glob("*.py"), *(ROOT / "lab").glob("*.py"), *(ROOT / name for name in FILES)]
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*")
                  if p.is_file() and "__pycache__" not in p.parts]
    found = {str(p.relative_to(ROOT).as_posix()): p.read_bytes() for p in files}
    run = RUN.replace("@ONLY@", flag)
    return found | {"setup.sh": SETUP.encode(), "run_autograder": run.encode()}


def write(path, only=()):
    with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(contents(only).items()):
            info = zipfile.ZipInfo(name)    # with a fixed date: the same library, the same zip
            runs = name in ("setup.sh", "run_autograder")
            info.external_attr = (0o755 if runs else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)


def main(argv=None):
    p = argparse.ArgumentParser(description="Write the zip that a course's server grades with.")
    p.add_argument("out", type=Path, metavar="OUT", help="a new file")
    p.add_argument("--only", nargs="+", type=int, default=[], metavar="N",
                   help="the exercises that were set, with marks for them alone")
    a = p.parse_args(argv)
    try:
        write(a.out, [str(choose(str(number)).number) for number in a.only])
    except KeyError as e:
        p.error(e.args[0])
    except OSError as e:
        p.error(str(e))
    print(f"{a.out}: {a.out.stat().st_size / 1e6:.1f} MB. "
          "It holds the solutions: for the server alone")


if __name__ == "__main__":
    sys.exit(main())
