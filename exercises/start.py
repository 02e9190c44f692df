"""Write a student's folder: for each exercise a file with the stub, a picture of what is wanted and, where it
helps, a slow specification; a README, and rules for coding assistants.

    python exercises/start.py OUT

The stubs are cut out of the library when this is run, and no solution is in the folder.
"""
import argparse
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import splice  # noqa: E402
from exercises.specs import SPECS  # noqa: E402
from exercises.tasks import SITTINGS, TASKS, file_name  # noqa: E402

README = """# Exercises: self-speculative decoding

{count} pieces of a library, cut out for you to write. Each file says what is wanted; put your code in place
of `raise NotImplementedError`. Then let it be graded, in the folder of the library:

```
python exercises/grade.py {out}        # all of them
python exercises/grade.py {out} 1      # the first
```

The grader needs what `pip install -r requirements-dev.txt` installs. It runs your code in a copy of the
library and says what was given, what was expected, what came, and the likely mistake. It never changes your
files.

- What counts is the text and its distribution. No test measures speed, and none asks how many drafts you
  keep: an answer that is right and gains less than it could passes, and the remark beside it says why.
- Loops are as good as tensors. Helpers, as functions, may stand beside yours; `torch` and `math` are enough.
- The other functions of the library are there as if you stood in its file: `verify` may call `torch`, `chain`
  may call `wanted`. Read whatever of the library you like, except the function itself.

{table}

"Read first" names files of the library; the notebooks open in Jupyter, and on the web as they are. Difficulty
1: a few lines once you see it. 2: think first, on paper. 3: the better part of an hour, and worth it.
"""


def student_file(task, out):
    """The text of one file."""
    spec = inspect.getsource(SPECS[task.name]) if task.name in SPECS else ""
    stubs = [splice.stub(task.module, name) for name in task.functions]
    lines = [f'"""Exercise {task.number}: {task.name}, of {task.module}. Sitting {task.sitting}, about '
             f"{task.minutes} minutes, difficulty {task.stars} of 3.", "",
             task.text.replace("\\", "\\\\").rstrip(), "", "Grade it in the library's folder:",
             f"    python exercises/grade.py {out} {task.number}", '"""',
             *splice.opening(task.module, "\n".join([*stubs, spec])), ""]
    for stub in stubs:
        lines += ["", stub]
    if spec:
        lines += ["", "# A slow and obvious specification, for you to run. It is no answer.", "", spec]
    return "\n".join(lines)


def table():
    """The exercises by sittings, as Markdown."""
    rows = ["| sitting | read first | exercise | of | minutes | difficulty |", "|---|---|---|---|---|---|"]
    for i, (about, read) in enumerate(SITTINGS, 1):
        for task in (task for task in TASKS if task.sitting == i):
            rows.append(f"| {about} | {read} | {task.number} `{task.name}` | `{task.module}` | "
                        f"{task.minutes} | {task.stars} |")
            about, read = "", ""
    return "\n".join(rows)


def write(out):
    """Make the folder. Raises FileExistsError where it holds anything: no work is overwritten."""
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: nothing was written")
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        (out / file_name(task)).write_text(student_file(task, out), encoding="utf-8")
    (out / "README.md").write_text(README.format(count=len(TASKS), out=out, table=table()), encoding="utf-8")
    coach = (ROOT / "exercises" / "coach.md").read_text(encoding="utf-8")
    (out / "AGENTS.md").write_text(coach, encoding="utf-8")


def main(argv=None):
    p = argparse.ArgumentParser(description="Write a student's folder of exercises.")
    p.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    a = p.parse_args(argv)
    try:
        write(a.out)
    except OSError as e:
        sys.exit(str(e))
    print(f"{len(TASKS)} exercises are in {a.out}: start with {a.out / 'README.md'}")


if __name__ == "__main__":
    main()
