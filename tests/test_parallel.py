"""Several processes write the text of one, token for token; and none hangs when another dies."""
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import expected
import pytest
import torch
import torch.distributed as dist
from tiny import LIVELY, LLAMA, MORE, PROMPTS, make

import checkpoint
import generate as command
from drafter import ModelDraft
from lab.save import save
from layerskip import SelfDraft
from machine import parallel
from machine.quant import KINDS, quantise
from methods import heads
from methods.costs import by_bytes
from methods.standin import ShortHead
from methods.trees import Siblings
from model import Transformer
from sampling import Coins, to_probs
from speculative import generate

ROOT = Path(__file__).parent.parent
SHAPES = {family: replace(c, n_layers=3, n_heads=8, n_kv_heads=4)
          for family, c in (LIVELY | MORE).items()}
DRAFTERS = {  # (target, small model) -> drafter
    "plain": lambda m, small: None,
    "model": lambda m, small: ModelDraft(small, 3),
    "vocabulary": lambda m, small: SelfDraft(ShortHead(m, [4, 9, 0, 2, 16, 3]), range(2), 3),
    "siblings": lambda m, small: Siblings(SelfDraft(m, range(2), 2), (1, 1))}


# --- what every process does


@parallel.together()
def written(folder):
    """{family and drafter: [text and passes, greedy; the same, sampled]}, and greedy texts,
    quantised: of plain decoding and of two drafts. Each process quantises its own slices."""
    part, made = parallel.here(), {}

    def load(family, quant=None):
        m, _ = checkpoint.load(folder / family, "cpu", quant=quant, part=part)
        return m if part == (0, 1) else parallel.unite(m)

    small, _ = checkpoint.load(folder / "small", "cpu")
    for family in SHAPES:
        m = load(family)
        for name, drafter in DRAFTERS.items() if family in LIVELY else [*DRAFTERS.items()][:2]:
            # each process has a seed of its own: what the first one draws counts
            coins = Coins(0) if part == (0, 1) else parallel.Agreed(Coins(part.rank))
            made[f"{family}, {name}"] = [
                generate(m, PROMPTS, 7, drafter(m, small), partial(to_probs, temperature=t), coins)
                for t in (0, 1.0)]
    m = load("gemma2", KINDS["int8"])
    drafters = None, SelfDraft(m, range(2), 3), ModelDraft(quantise(m, "int4"), 3)
    return made, [generate(m, PROMPTS, 7, drafter)[0] for drafter in drafters]


def main(argv, victim=None, how=None, limit=60):
    """generate.main; process `victim` dies, or stops for good, in the middle of a text."""
    parallel.LIMIT = parallel.timedelta(seconds=limit)
    honest, calls = dist.broadcast, []

    def broadcast(*args):
        calls.append(0)
        if len(calls) == 9 and parallel.here()[0] == victim:
            os.kill(os.getpid(), how)
        return honest(*args)

    dist.broadcast = broadcast
    return command.main(argv)


def child(rank, world, port, folder, job, args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), fd)
    try:
        result = job(*args)
    except SystemExit as e:
        result = e.code
    sys.stdout.flush()
    (folder / f"result{rank}").write_text(json.dumps(result))
    os._exit(0)     # a broken group can make a process hang on its way out


def spawn(folder, world, job, *args, lost=None):
    """job(*args) in several processes: [(result or None, stdout, stderr)], by rank. As under
    torchrun their parent keeps the store in which they meet. `lost` is not waited for."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tokenizers"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = [context.Process(target=child, args=(rank, world, store.port, folder, job, args))
             for rank in range(world)]
    for process in group:
        process.start()
    for rank, process in enumerate(group):
        if rank != lost:
            process.join(300)
    found = []
    for rank, process in enumerate(group):
        process.kill()
        result, out, err = (folder / f"{name}{rank}" for name in ("result", "out", "err"))
        found.append((json.loads(result.read_text()) if result.is_file() else None, out.read_text(),
                      err.read_text()))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints in float64 of both families, and a small model."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), expected.byte_tokenizer()
    words = replace(SHAPES["llama"], vocab_size=tokenizer.get_vocab_size())
    for name, c in (SHAPES | {"small": replace(LLAMA, n_layers=2), "words": words}).items():
        save(make(c), folder / name, tokenizer)
    return folder


# --- the same text


def test_several_processes_write_the_text_of_one(folders, tmp_path):
    """With as many passes, greedy and sampled, and when quantised."""
    (first, _, err), (second, _, other) = spawn(tmp_path / "group", 2, written, folders)
    assert err == other == "" and first == second
    ours, texts = first
    want, _ = json.loads(json.dumps(written(folders)))
    assert ours == want and texts == [texts[0]] * 3
    assert len({rows[0][1] for rows in want.values()}) > 2, "the drafts differ"


@pytest.mark.parametrize("family", SHAPES)
def test_each_process_reads_only_its_slices(folders, monkeypatch, family):
    """Together they read each matrix once, and every one the embeddings and norms."""
    whole, _ = checkpoint.load(folders / family, "cpu")
    slice_of, sizes = parallel.Part.slice_of, []

    def counted(part, stored, shape):
        sizes.append(math.prod(shape))
        return slice_of(part, stored, shape)

    monkeypatch.setattr(parallel.Part, "slice_of", counted)
    for rank in range(4):
        m, _ = checkpoint.load(folders / family, "cpu", part=parallel.Part(rank, 4))
    pieces = list(checkpoint.parts(whole))
    for i, (name, piece) in enumerate(pieces):
        times = 1 if "proj" in name else 4
        times = 20 / 17 if name == "lm_head.weight" else times  # 20 rows, where 17 cannot be shared
        assert sum(sizes[i :: len(pieces)]) == round(piece.numel() * times), name
    assert (m.c.n_heads, m.c.n_kv_heads, m.c.hidden_dim, m.c.vocab_size) == (2, 1, 12, 17)
    own, all_of_it = (cost.unit * (1 - cost.head) for cost in map(by_bytes, (m, whole)))
    assert own == pytest.approx(all_of_it / 4, rel=0.1), "a share costs its own bytes"


def test_sizes_that_do_not_fit_are_refused(folders):
    with pytest.raises(ValueError, match="3 processes cannot share 4 key-value heads evenly"):
        checkpoint.load(folders / "llama", "cpu", part=parallel.Part(0, 3))
    with pytest.raises(ValueError, match="2 processes cannot share 3 columns of an MLP evenly"):
        parallel.Part(0, 2).of(Transformer(replace(SHAPES["llama"], hidden_dim=3)))


# --- the command

@parallel.together()
def each_source(folder):
    """{--draft: the ids that generate.py writes, or the line that refuses it}, for every row of the
    table."""
    kinds = {"model": folder / "words", "heads": folder / "heads", "file": "mine.py:Mine"}
    more = {"skip": ["--skip", "a1"], "int8": ["--draft-vocab", folder / "few.json"]}
    found = {}
    for kind in command.SOURCES:
        out = io.StringIO()
        words = ["ab ab ab", "--model", folder / "words", "--device", "cpu", "--max-new",
                 12, "--json", "--draft", kinds.get(kind, kind), *more.get(kind, [])]
        try:
            with redirect_stdout(out):
                command.run([str(word) for word in words])
            found[kind] = json.loads(out.getvalue())["outputs"][0]["ids"]
        except (ValueError, OSError) as e:
            found[kind] = str(e)
    return found


def test_every_source_drafts_in_two_processes_or_says_why_not(folders, tmp_path):
    """A drafter of one's own might draw other random numbers in each process."""
    (folders / "heads").mkdir()
    (folders / "heads" / heads.FILE).touch()
    (folders / "few.json").write_text('{"ids": [5, 9, 20, 31]}')
    (first, _, err), (second, _, other) = spawn(tmp_path / "group", 2, each_source, folders)
    assert err == other == "" and first == second
    alone = each_source(folders)
    refused = {kind for kind, got in first.items() if isinstance(got, str)}
    assert refused == {*heads.KINDS, "heads", "file"}
    assert all("processes" in first[kind] for kind in refused)
    for kind in command.SOURCES.keys() - refused:
        assert first[kind] == alone[kind] == alone["none"], kind


def test_torchrun_writes_one_text(tmp_path):
    """From any folder, on the shipped model; what the others print is not seen."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            ROOT / "generate.py", "Once upon a time",
            *"--max-new 6 --dtype float32 --device cpu".split()]
    out = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0
    assert out.stdout.count("Once upon a time, there was a little girl") == 1


@pytest.fixture
def argv(folders):
    flags = {"--model": folders / "words", "--device": "cpu", "--max-new": 20, "--exit-layer": 1}
    return ["x", *(str(word) for pair in flags.items() for word in pair)]


def test_what_all_find_wrong_is_said_once(argv, tmp_path):
    found = spawn(tmp_path / "group", 2, main, [*argv, "--exit-layer", "9"])
    assert [status for status, *_ in found] == [2, 2]
    assert "".join(err for *_, err in found).count("\n") == 1


@pytest.mark.parametrize("victim, how, limit", [(0, signal.SIGKILL, 60), (1, signal.SIGSTOP, 5)])
def test_a_process_that_is_lost_ends_the_others(argv, tmp_path, victim, how, limit):
    found = spawn(tmp_path / "group", 2, main, argv, victim, how, limit, lost=victim)
    assert found[victim][0] is None, "it never got to its end"
    status, _, err = found[1 - victim]
    assert status == 2
    assert err.startswith(f"generate.py: process {1 - victim} of 2 has lost the others")
