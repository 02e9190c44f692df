"""What train.py and search.py keep, however their runs end. Each promise is tested here once. A file of tests
imports all of them, and its fixture `run` says what a run of its command is.

The one thing to remember: a run that was interrupted and resumed ends as one that nobody disturbed.
"""
import itertools
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tiny import Command, full_disk, tree

from support.files import LOCK, lock


class Run(NamedTuple):
    """A command whose runs are short, and save after each step."""
    call: Command
    flags: Callable         # (out="out", **changes) -> a command line
    before_step: Callable   # from now on, call this function before each step
    steps: Callable         # folder -> how many steps are saved there
    same_end: Callable      # (folder, folder): asserts that both runs have ended alike
    main_file: str          # what --resume reads

    def goes_on(self, folder):
        """--resume in folder / "out" brings it to the end of a run that was not interrupted."""
        self.before_step(lambda: None)
        assert self.call(*self.flags(resume=True))[0] == 0
        assert self.call(*self.flags("whole"))[0] == 0
        self.same_end(folder / "out", folder / "whole")


def interrupt(run, folder, step):
    """Ctrl-C after so many steps of a run in folder / "out", which --resume begins or goes on with."""
    left = step - (run.steps(folder / "out") if (folder / "out").exists() else 0)
    taken = itertools.count()
    run.before_step(lambda: signal.raise_signal(signal.SIGINT) if next(taken) == left else None)
    status, printed, err = run.call(*run.flags(resume=True))
    assert status == 130 and printed == "" and "Traceback" not in err
    assert run.steps(folder / "out") == step


@pytest.mark.parametrize("steps", [(0,), (1, 4)])
def test_ctrl_c_loses_the_running_step_only(steps, run, tmp_path):
    for step in steps:
        interrupt(run, tmp_path, step)
    run.goes_on(tmp_path)


def test_a_full_disk_loses_the_running_step_only(run, tmp_path):
    interrupt(run, tmp_path, 3)
    before = tree(tmp_path)
    run.before_step(lambda: None)
    with full_disk((tmp_path / "out" / run.main_file).stat().st_size // 2):
        status, _, err = run.call(*run.flags(resume=True))
    assert status == 2 and "Traceback" not in err and "too large" in err.splitlines()[-1]
    assert tree(tmp_path) == before, "what step 3 left, and no file that was begun"
    run.goes_on(tmp_path)


def test_two_processes_do_not_write_in_one_folder(run, tmp_path):
    """The second is refused, whatever it asks for, before it reads or writes anything; and the first ends as
    if it had been alone."""
    tried = []

    def second():
        if not tried:
            tried.append(tree(tmp_path))
            assert run.call.main(run.flags(resume=True)) == 2 and tree(tmp_path) == tried[0]

    run.before_step(second)
    status, _, err = run.call(*run.flags())
    assert status == 0 and tried and err.count(f"{tmp_path / 'out'}: another process is writing here") == 1
    with lock(tmp_path / "out"):
        run.call.refuses(run.flags(resume=True), tmp_path, "another process")
    run.goes_on(tmp_path)


def test_resume_without_a_run_starts_one(run, tmp_path):
    for out in ("empty", "killed"):
        (tmp_path / out).mkdir()
    (tmp_path / "killed" / LOCK).touch()    # before it wrote anything else, so that nothing can be lost there
    for out, resume in (("whole", None), ("not/there", True), ("empty", True), ("killed", None)):
        assert run.call(*run.flags(out, resume=resume))[0] == 0
        run.same_end(tmp_path / out, tmp_path / "whole")


def test_a_folder_of_other_files_is_refused(run, tmp_path):
    interrupt(run, tmp_path, 1)
    run.call.refuses(run.flags(), tmp_path, "out", "--resume")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("dear diary")
    for resume in (None, True):
        run.call.refuses(run.flags("notes", resume=resume), tmp_path, "notes", "--out")
        run.call.refuses(run.flags("file", resume=resume), tmp_path, "file")
        run.call.refuses(run.flags("file/below", resume=resume), tmp_path, "file/below")
