"""Write a student's folder: for each exercise a file with the stub, a picture of what is wanted
and, where it helps, a slow specification; a README, and rules for coding assistants.

    python exercises/start.py OUT

The stubs are cut out of the library when this is run, and no solution is in the folder.
"""
import argparse
import inspect
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exercises import splice  # noqa: E402
from exercises.specs import SPECS  # noqa: E402
from exercises.tasks import SITTINGS, TASKS, file_name  # noqa: E402


def folder_name(out):
    """The student's folder as its files call it: where it lies is for the student to say."""
    return shlex.quote(out.resolve().name)


def student_file(task, out):
    """The text of one file."""
    spec = inspect.getsource(SPECS[task.name]) if task.name in SPECS else ""
    stubs = [splice.stub(task.module, name) for name in task.functions]
    lines = [f'"""Exercise {task.number}: {task.name}, of {task.module}. '
             f"Sitting {task.sitting}, about "
             f"{task.minutes} minutes, difficulty {task.stars} of 3.", "",
             task.text.replace("\\", "\\\\").rstrip(), "",
             "Grade it in the library's folder, with the path of your folder:",
             f"    python exercises/grade.py {folder_name(out)} {task.number}", '"""',
             *splice.opening(task.module, "\n".join([*stubs, spec])), ""]
    for stub in stubs:
        lines += ["", stub]
    if spec:
        lines += ["", "# A slow and obvious specification, for you to run. It is no answer.", "",
                  spec]
    return "\n".join(lines)


def table():
    """The exercises by sittings, as Markdown."""
    rows = ["| sitting | read first | exercise | of | minutes | difficulty |",
            "|---|---|---|---|---|---|"]
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
    hours = round(sum(task.minutes for task in TASKS) / 60)
    page = Path(__file__).with_name("student.md").read_text(encoding="utf-8")
    page = page.format(count=len(TASKS), hours=hours, out=folder_name(out), table=table())
    (out / "README.md").write_text(page, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("coach.md"), out / "AGENTS.md")


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
