"""Several processes write the text of one, token for token; and none of them hangs when another dies."""
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import expected
import pytest
import torch
import torch.distributed as dist
from tiny import LIVELY, LLAMA, PROMPTS, make

import checkpoint
import generate as command
from control import Confidence, DoNoHarm
from layerskip import SelfDraft, ShortHead, without
from machine import parallel
from machine.quant import KINDS, byte_costs, quantise
from methods.trees import Siblings
from sampling import Coins, to_probs
from speculative import ModelDraft, NGram, Then, generate

ROOT = Path(__file__).parent.parent
SHAPES = {family: replace(c, n_layers=3, n_heads=8, n_kv_heads=4) for family, c in LIVELY.items()}
SOME = [4, 9, 0, 2, 16, 3]
DRAFTERS = {  # (target, small model) -> drafter
    "plain": lambda m, small: None,
    "n-gram": lambda m, small: NGram(4, 1),
    "exit": lambda m, small: SelfDraft(m, range(2), 3),
    "skip": lambda m, small: SelfDraft(m, without(m.c.n_layers, attn=[1], mlp=[2]), 3),
    "model": lambda m, small: ModelDraft(small, 3),
    "stop rule": lambda m, small: SelfDraft(m, range(2), Confidence(0.3, 4)),
    "do no harm": lambda m, small: SelfDraft(m, range(2), DoNoHarm(0.3, 4)),
    "draft vocabulary": lambda m, small: SelfDraft(ShortHead(m, SOME), range(2), 3),
    "then n-gram": lambda m, small: Then(SelfDraft(m, range(2), 2), NGram(2, 1)),
    "siblings": lambda m, small: Siblings(SelfDraft(m, range(2), 2), (1, 1)),
    "nf4 copy": lambda m, small: ModelDraft(quantise(m, "nf4"), 3)}     # of its own slices: another draft


# --- what every process does


def texts(folder, small, prompts, dtype, names, new):
    """{drafter: [text and passes, greedy; the same, sampled]} of one process, or of one of several."""
    part = parallel.place()
    m, _ = checkpoint.load(folder, "cpu", dtype, part=part)
    m, made = parallel.join(m) if part != (0, 1) else m, {}
    small, _ = checkpoint.load(small, "cpu", dtype)
    for name in names:
        made[name] = []
        for temperature in (0, 1.0):
            coins = Coins(5) if part == (0, 1) else parallel.Agreed(Coins(5))
            probs = partial(to_probs, temperature=temperature)
            made[name].append(generate(m, prompts, new, DRAFTERS[name](m, small), probs, coins))
    return made


def every(jobs):
    return [texts(*job) for job in jobs]


def draws(weights, chances):
    """Each process has a seed of its own."""
    coins = parallel.Agreed(Coins(parallel.place()[0]))
    return [coins.choose(weights).tolist(), coins.flip(chances).tolist()]


def quantised(folder):
    """A text of a quantised target, plain and drafted; and what a share costs."""
    m = parallel.join(checkpoint.load(folder, "cpu", quant=KINDS["int8"], part=parallel.place())[0])
    found = [generate(m, PROMPTS, 7, drafter)[0] for drafter in (None, SelfDraft(m, range(2), 3))]
    return [*found, byte_costs(m).sublayers, byte_costs(m).head]


def main(argv, victim=None, how=None, limit=60):
    """generate.main; process `victim` dies, or stops for good, in the middle of a text."""
    parallel.LIMIT = parallel.timedelta(seconds=limit)
    honest, calls = dist.broadcast, []

    def broadcast(*args):
        calls.append(0)
        if len(calls) == 9 and parallel.place()[0] == victim:
            os.kill(os.getpid(), how)
        return honest(*args)

    dist.broadcast = broadcast
    return command.main(argv)


def child(rank, world, port, folder, own_group, job, args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), fd)
    try:
        if own_group:
            result = job(*args)
        else:
            with parallel.together():
                result = job(*args)
    except SystemExit as e:
        result = e.code
    sys.stdout.flush()
    (folder / f"result{rank}").write_text(json.dumps(result))
    os._exit(0)     # a broken group can make a process hang on its way out


def spawn(folder, world, job, *args, own_group=False, lost=None):
    """job(*args) in so many processes: [(result or None, stdout, stderr)], rank by rank. As under torchrun
    their parent keeps the store in which they find each other. Nobody waits for the end of process `lost`."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tokenizers"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = [context.Process(target=child, args=(rank, world, store.port, folder, own_group, job, args))
             for rank in range(world)]
    for process in group:
        process.start()
    end, found = time.monotonic() + 300, []
    for rank, process in enumerate(group):
        if rank != lost:
            process.join(max(0.1, end - time.monotonic()))
    for rank, process in enumerate(group):
        process.kill()
        result, out, err = (folder / f"{name}{rank}" for name in ("result", "out", "err"))
        found.append((json.loads(result.read_text()) if result.is_file() else None, out.read_text(),
                      err.read_text()))
    return found


# --- the same text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints in float64 of both families, and a small model."""
    folder = tmp_path_factory.mktemp("tiny")
    for family, c in SHAPES.items():
        checkpoint.save(make(c), folder / family, expected.byte_tokenizer())
    tokenizer = expected.byte_tokenizer()
    checkpoint.save(make(replace(LLAMA, n_layers=2), 5), folder / "small", tokenizer)
    words = replace(SHAPES["llama"], vocab_size=tokenizer.get_vocab_size())
    checkpoint.save(make(words), folder / "words", tokenizer)
    return folder


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_write_the_text_of_one(folders, tmp_path, world):
    """Greedy and sampled, with as many passes; a copy in few bits is one of other slices, and so another
    draft."""
    want = assert_same_texts([(folders / family, folders / "small", PROMPTS, None, list(DRAFTERS), 7)
                              for family in SHAPES], world, tmp_path)
    passes = {name: rows[0][1] for name, rows in want[0].items()}
    assert passes["plain"] == 7 and len(set(passes.values())) > 2, "the drafts differ"


def test_two_processes_write_the_text_of_one_on_the_shipped_models(tmp_path):
    prompts, weights = [[1, 5, 300, 2000, 9, 4, 4, 7], [3, 8]], ROOT / "weights"
    names, small = ["exit", "model"], weights / "stories-draft"
    assert_same_texts([(weights / name, small, prompts, torch.float32, names, 8)
                       for name in ("stories-llama", "stories-gemma2")], 2, tmp_path)


def assert_same_texts(jobs, world, folder):
    want = json.loads(json.dumps(every(jobs)))
    found = spawn(folder / "group", world, every, jobs)
    for got, _, err in found:
        assert err == "" and got is not None
        for ours, truth in zip(got, want, strict=True):
            copies = [made.get("nf4 copy", [[0]])[0][0] for made in (ours, truth)]
            assert copies[0] == copies[1]
            assert ours | {"nf4 copy": 0} == truth | {"nf4 copy": 0}
    assert len({json.dumps(got) for got, _, _ in found}) == 1
    return want


def test_what_rank_0_drew_counts(tmp_path):
    weights, chances = torch.ones(3, 50), torch.full((4, 5), 0.5)
    found = spawn(tmp_path / "group", 2, draws, weights, chances)
    coins = Coins(0)
    want = [coins.choose(weights).tolist(), coins.flip(chances).tolist()]
    assert [got for got, _, _ in found] == [want, want]


def test_a_quantised_target_in_several_processes(folders, tmp_path):
    """Each quantises its own slices; drafting does not change the text of that target."""
    (first, _, _), (second, _, _) = spawn(tmp_path / "group", 2, quantised, folders / "gemma2")
    assert first == second
    plain, drafted, sublayers, head = first
    assert plain == drafted
    whole = byte_costs(checkpoint.load(folders / "gemma2", "cpu", quant=KINDS["int8"])[0])
    assert sum(sublayers) == pytest.approx(sum(whole.sublayers) / 2, rel=0.1) and head == 9 * 32 * 8


# --- reading


class Slices:
    """A safetensors file that counts what is read of each tensor."""

    def __init__(self, file, read):
        self.file, self.read = file, read

    def get_slice(self, name):
        self.name, self.slice = name, self.file.get_slice(name)
        self.get_shape, self.get_dtype = self.slice.get_shape, self.slice.get_dtype
        return self

    def __getitem__(self, cuts):
        tensor = self.slice[cuts]
        self.read[self.name] = self.read.get(self.name, 0) + tensor.numel()
        return tensor


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("world", [2, 4])
def test_each_process_reads_only_its_slices(folders, monkeypatch, family, world):
    """All of them together read each matrix once, and everybody the embeddings and norms."""
    whole, _ = checkpoint.load(folders / family, "cpu")
    honest, read = checkpoint.find_weights, {}
    monkeypatch.setattr(checkpoint, "find_weights", lambda folder: {
        name: Slices(file, read) for name, file in honest(folder).items()})
    shares = [checkpoint.load(folders / family, "cpu", part=(rank, world))[0] for rank in range(world)]
    for name, piece in checkpoint.parts(whole):
        if name == "lm_head.weight":    # the last repeats what 17 rows lack
            assert read[name] == -(-17 // world) * world * 32
        else:
            assert read[name] == piece.numel() * (1 if "proj" in name else world), name
    for kind in ("wqkv", "wo"):
        own = [getattr(share.blocks[2].attn, kind) for share in shares]
        assert torch.equal(torch.cat(own, int(kind == "wo")), getattr(whole.blocks[2].attn, kind))
    gates, ups = zip(*(share.blocks[1].mlp.gate_up.chunk(2) for share in shares), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), whole.blocks[1].mlp.gate_up)
    assert torch.equal(torch.cat([share.blocks[0].mlp.down for share in shares], 1), whole.blocks[0].mlp.down)
    if family == "llama":
        heads, twice = [share.head for share in shares], -17 % world
        assert torch.equal(torch.cat([*heads[:-1], heads[-1][twice:]]), whole.head)
    c = shares[1].c
    assert (c.n_heads, c.n_kv_heads, c.hidden_dim, c.vocab_size) == (8 // world, 4 // world, 48 // world, 17)


def test_sizes_that_do_not_fit_are_refused(folders):
    with pytest.raises(ValueError, match="^3 processes cannot share 4 key-value heads evenly$"):
        checkpoint.load(folders / "llama", "cpu", part=(0, 3))
    with pytest.raises(ValueError, match="^8 processes cannot share 4 key-value heads evenly$"):
        checkpoint.load(folders / "gemma2", "cpu", part=(7, 8))
    with pytest.raises(ValueError, match="^2 processes cannot share 3 columns of an MLP evenly$"):
        checkpoint.share(replace(SHAPES["llama"], hidden_dim=3), 2)


# --- the command


def test_torchrun_writes_one_text(folders):
    """On the shipped model; what the others print is not seen."""
    argv = ["generate.py", "Once upon a time", "--max-new", "6", "--dtype", "float32", "--device", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run([*torchrun, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = out.stdout.splitlines()
    assert out.returncode == 0 and lines[0].startswith("Once upon a time, there was a little girl")
    assert sum("Once upon a time" in line for line in lines) == 1
    assert " threads, 2 processes, after reading the prompt" in lines[-1]


@pytest.fixture
def argv(folders):
    return ["x", "--model", str(folders / "words"), "--device", "cpu", "--max-new", "20", "--exit-layer", "1"]


@pytest.mark.parametrize("flags, line", [
    (["--exit-layer", "9"], "exit layer must lie between 1 and 3 (all blocks), got 9"),
    (["--fast"], "--fast goes with one process, not with several"),
    (["--gamma", "x"], "argument --gamma: invalid int value: 'x'; see --help")], ids=["exit", "fast", "flag"])
def test_what_all_find_wrong_is_said_once(argv, tmp_path, flags, line):
    found = spawn(tmp_path / "group", 2, main, [*argv, *flags], own_group=True)
    assert [status for status, _, _ in found] == [2, 2] and all(out == "" for _, out, _ in found)
    line = f"generate.py: {line}\n"
    assert sorted(err for _, _, err in found) == ["", line]


def test_only_one_process_could_read_the_standard_input(monkeypatch):
    monkeypatch.setattr(parallel, "place", lambda: (0, 2))
    with pytest.raises(ValueError, match="^standard input goes to one process only: give the prompt, or"):
        command.read_prompts(command.parse(["-"]))


@pytest.mark.parametrize("victim, how, limit", [(1, signal.SIGKILL, 60), (0, signal.SIGKILL, 60),
                                                (1, signal.SIGSTOP, 5)], ids=["dies", "first dies", "hangs"])
def test_a_process_that_is_lost_ends_the_others(argv, tmp_path, victim, how, limit):
    found = spawn(tmp_path / "group", 2, main, argv, victim, how, limit, own_group=True,
                  lost=victim)
    assert found[victim][0] is None, "it never got to its end"
    status, _, err = found[1 - victim]
    line = f"generate.py: process {1 - victim} of 2 has lost the others: one of them has ended, or "
    assert status == 2 and err.count("\n") == 1 and err.startswith(line)
