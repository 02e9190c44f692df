"""The Plan that generate.py's flags ask for: what drafts, and what is read for it."""
import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from test_generate import SMALL, STORIES, as_json
from tiny import command

import checkpoint
import generate
from control import MOST
from lab.m2r2 import M2R2
from lab.save import save, save_head
from machine.quant import Int4
from methods.costs import by_bytes
from methods.medusa import Medusa
from methods.prophet import Prophet
from support import auto, measure
from support.measure import Measured

call = command(generate.main)


@pytest.fixture
def plan(stories):
    """The Plan that flags ask for, of the shipped model or another one."""
    model, tokenizer = stories

    def made(*flags, model=model):
        options = generate.parse(["x", *map(str, flags)])
        return generate.plan_of(options, model, tokenizer)

    return made


@pytest.fixture
def arms(plan):
    """The arms of `auto` by name, for a folder with these weights."""
    return lambda folder, *flags, **model: {
        arm.name: arm for arm in plan("--model", folder, *flags, **model).make().arms}


def test_a_draft_vocabulary_shortens_the_head(call, plan, tmp_path):
    plain = as_json(call, "--draft", "none")["outputs"]
    path, few = tmp_path / "vocab.json", [0, *range(200, 1223)]
    path.write_text(json.dumps({"ids": few}))
    for draft in (["--exit-layer", "2"], ["--draft", SMALL]):
        assert as_json(call, "--draft-vocab", path, *draft)["outputs"] == plain
        assert plan("--draft-vocab", path, *draft).make().model.ids.tolist() == few
    path.write_text('{"ids": [4096]}')
    for draft in [], ["--draft", "exit"]:
        call.refuses(["x", "--draft-vocab", path, *draft], tmp_path, "vocab.json", "4095")


def test_auto_weighs_what_is_named_or_lies_beside_the_weights(plan, arms, stories, tmp_path):
    (tmp_path / "draft_vocab.json").write_text(json.dumps({"ids": [0, *range(200, 1223)]}))
    L = stories[0].c.n_layers
    pace = plan("--draft", "auto", "--skip", "a3,m4", "--gamma", "5",
                "--draft-vocab", tmp_path / "draft_vocab.json").make()
    ways = {way.name: way.drafter for way in pace.arms}
    assert pace.longest == 5 and len(ways["skip set"].sublayers) == 2 * L - 2
    (tmp_path / "skip.json").write_text('{"attn": [2]}')
    assert arms(tmp_path)["skip set"].drafter.model.share == 1024 / 4096


def unmeasured(model, arms, *how):
    """The costs counted in bytes as if they had been measured, and drafts at .4 of a pass."""
    return by_bytes(model), {arm.name: Measured(0.0, 0.4, 0.0, 0.5) for arm in arms}


def test_the_model_in_few_bits_is_a_candidate(arms, stories, tmp_path, monkeypatch):
    """If bytes count, even next to trained heads.
    Its price is measured and grows with what both read."""
    monkeypatch.setattr(auto, "LARGE", 0)
    monkeypatch.setattr(measure, "kept_costs", unmeasured)
    half, _ = checkpoint.load(STORIES, "cpu", torch.bfloat16)
    arm = arms(tmp_path, model=half)["quantised copy"]
    assert isinstance(arm.drafter.model.head, Int4)
    assert len(arm.drafter.sublayers) == 2 * half.c.n_layers
    assert arm.cost(64, 1) == pytest.approx(0.4) and arm.cost(1000, 1) > 1
    assert arm.drafter.model.head.rounds, "a draft may round what it multiplies"
    double = copy.deepcopy(stories[0]).double()
    assert "quantised copy" not in arms(tmp_path, model=double), "no product"
    assert len(arms(STORIES, model=half)) == 2 and "quantised copy" in arms(STORIES, model=half)
    monkeypatch.setattr(auto, "LARGE", 64e6)
    small = "a small model lies in the processor's caches"
    assert "quantised copy" not in arms(tmp_path, model=half), small


def test_a_small_model_drafts_in_few_bits_alone_and_as_an_arm(call, plan):
    quantised = "--draft-quant", "int4"
    plain = as_json(call, "--draft", "none")["outputs"]
    for flags in (["--draft", SMALL], ["--draft-model", SMALL], ["--draft-model", SMALL, "--fast"]):
        assert as_json(call, *flags, *quantised)["outputs"] == plain
    made = plan("--draft", SMALL, *quantised)
    assert "in int4" in made.note and isinstance(made.make().model.head, Int4)
    whole, few = (plan("--draft-model", SMALL, *bits).make().arms[-1] for bits in ((), quantised))
    assert isinstance(few.drafter.model.head, Int4) and few.name == whole.name == "small model"
    assert few.cost(0, 1) < 0.25 * whole.cost(0, 1), "by the bytes of float32 and int4"


def test_trained_heads_beside_the_weights_are_candidates(arms, tmp_path, capsys):
    """Even heads of other weights, but no heads of another shape,
    and none for a quantised model."""
    model, _ = checkpoint.load(STORIES, "cpu", torch.float32)
    other, _ = checkpoint.load(STORIES.parent / "stories-gemma2", "cpu")
    model.norm.weight.data *= 1.5
    for head in (Prophet(model, 1), Medusa(other, 2)):
        (tmp_path / "heads" / head.kind).mkdir(parents=True)
        save_head(head, tmp_path / "heads" / head.kind)
    found = arms(tmp_path)
    assert "prophet" in found and "medusa" not in found
    assert "medusa" in capsys.readouterr().err.splitlines()[0]
    assert "prophet" in arms(tmp_path, "--fast")
    assert "prophet" not in arms(tmp_path, "--quant", "int8")


def test_costs_are_measured_with_the_runs_own_settings(call, plan, stories, tmp_path, monkeypatch):
    assert plan().make().machine == by_bytes(stories[0]), "a small model"
    measured = []

    def kept(model, arms, text, probs, rows, settings):
        measured.append((probs.keywords, rows, dict(settings)))
        return unmeasured(model, arms)

    monkeypatch.setattr(measure, "kept_costs", kept)
    assert "measured" in plan("--fast").note
    monkeypatch.setattr(auto, "LARGE", 1e3)
    assert "measured" in plan("--temperature", "0.8", "--exact").note
    assert "measured" in plan("--temperature", "0.8", "--fast").note, "speed is asked for"
    assert [how["temperature"] for how, *_ in measured] == [0.0, 0.8, 0.8]
    assert all(how == settings for how, _, settings in measured)
    first, second = as_json(call), as_json(call)
    assert first["outputs"] == second["outputs"] and "as measured" in first["how"]
    (tmp_path / "two.txt").write_text("One\nTwo\n")
    call("--prompt-file", tmp_path / "two.txt", "--max-new", "4", "--json")
    assert measured[-1][1] == 2
    assert "in bytes" in plan("--temperature", "0.8").note, "the same seed writes the same text"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "in bytes" in plan().note, "each process would measure its own"


def test_gamma_of_a_skip_file(plan, tmp_path):
    """0: the search that wrote the file found no gain, and so nothing is drafted by default."""
    file = tmp_path / "skip.json"

    def found(more, *flags):
        file.write_text(json.dumps({"attn": [3, 11], "mlp": [4]} | more))
        made = plan("--skip", file, *flags)
        return made.gamma, "found no gain" in made.note

    assert found({}) == (3, False)
    assert found({"gamma": 5}) == (5, False) and found({"gamma": 0}) == (0, True)
    assert found({"gamma": 0}, "--gamma", "1") == (1, False), "what the user says comes first"
    with pytest.raises(ValueError, match="skip.json.*gamma"):
        found({"gamma": -1})


def test_draft_model_of_another_tokenizer(call, tmp_path):
    shutil.copytree(SMALL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    spec = json.loads(file.read_text())
    vocab = spec["model"]["vocab"]
    a, b = list(vocab)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(spec))
    call.refuses(["x", "--draft", tmp_path / "other"], tmp_path, "other: its tokenizer differs")


@pytest.mark.parametrize("rows", [4000, 4160])
def test_draft_model_of_another_padded_vocabulary(call, stories, tmp_path, rows):
    """As Qwen2.5 0.5B has for 7B; also with a draft vocabulary."""
    plain = as_json(call, "--draft", "none")["outputs"]
    model, tokenizer = checkpoint.load(SMALL, "cpu")
    model.c = replace(model.c, vocab_size=rows)
    w = torch.cat([model.tok, model.tok[:100]])[:rows]  # what stands in padded rows may be likely
    checkpoint.put(model, "tok", torch.nn.Parameter(w, requires_grad=False))
    save(model, tmp_path / "other", tokenizer)
    (tmp_path / "vocab.json").write_text(json.dumps({"ids": [0, *range(200, 1223)]}))
    for more in [], ["--draft-vocab", tmp_path / "vocab.json"]:
        r = as_json(call, "--draft", tmp_path / "other", *more)
        assert r["outputs"] == plain and r["accepted"] > 0


# --- a reader's own


OWN = """import beside
import torch
from control import Confidence
from drafter import Draft, Drafter
from layerskip import SelfDraft
from methods.trees import Siblings

def third(model, gamma):
    return SelfDraft(model, range(model.c.n_layers * 2 // 3), gamma)

def sure(gamma):
    return Confidence(beside.BAR, gamma)

def tree(model, gamma):
    return Siblings(third(model, gamma), [2])

class Odd(Drafter):
    def __init__(self, model, gamma):
        super().__init__(gamma)
    def ids(self, state):
        return state.send([[5, 6] for _ in state.known])
    def propose(self, state):
        return Draft(self.ids(state))
    %s

none = lambda *args: None
seven = 7
"""


@pytest.fixture
def mine(tmp_path):
    """Writes a reader's file, which imports another one. Its path."""
    def write(body=""):
        (tmp_path / "beside.py").write_text("BAR = 2")
        (tmp_path / "mine.py").write_text(OWN % body)
        return tmp_path / "mine.py"

    return write


def test_a_drafter_and_a_rule_from_a_file(call, mine):
    """The rule stops after every first token: no confidence reaches 2."""
    plain, mine = as_json(call, "--draft", "none")["outputs"], mine()
    r = as_json(call, "--draft", f"{mine}:third", "--gamma", "4")
    assert r["outputs"] == plain and r["accepted"] > 0
    assert (r["draft"], r["gamma"]) == (f"{mine}:third", 4)
    for heat in (), ("--temperature", "1"):
        r = as_json(call, "--draft", f"{mine}:tree", *heat)
        assert r["accepted"] > 0, "even a tree passes all checks"
    for draft in (f"{mine}:third", "exit", SMALL, "int4", "kangaroo"):
        r = as_json(call, "--draft", draft, "--rule", f"{mine}:sure")
        assert r["outputs"] == plain and r["gamma"] == MOST
        assert r["proposed"] <= r["target_passes"], "one token per draft"


PROPOSE = "def propose(self, state): return"
SILENT = {      # what would not fail, but write another text
    f"{PROPOSE} Draft(self.ids(state) + 10**6)": "ids from 0 to 4095",
    f"{PROPOSE} Draft(self.ids(state).repeat(2, 1))": "with B = 1",
    f"{PROPOSE} Draft(self.ids(state), None, state.n.new_ones(7))": "Draft.length",
    f"{PROPOSE} Draft(self.ids(state), None, state.n * 9)": "from 0 to K = 2",
    f"{PROPOSE} Draft(self.ids(state), torch.ones(1, 2, 7))": "(1, 2, 4096)",
    f"{PROPOSE} Draft(self.ids(state), torch.randn(1, 2, 4096))": "must hold distributions",
    f"{PROPOSE} Draft(self.ids(state), torch.eye(4096)[None, :2])": "is 0 for a",
    f"{PROPOSE} state.known[0].append(5) or Draft(self.ids(state))": "it has changed",
    "def begin(self, state, trace): state.tokens[:, 0] = 5": "it has changed",
    "def begin(self, state, trace): state.n += 1": "it has changed"}


@pytest.mark.parametrize("body, flags, culprits", [
    *((body, "--draft MINE:Odd", ["mine.py:Odd", culprit]) for body, culprit in SILENT.items()),
    ("", "--draft MINE:none", ["mine.py:none", "NoneType", "Drafter"]),
    ("", "--draft exit --rule MINE:none", ["mine.py:none", "NoneType", "Rule"]),
    ("", "--draft MINE:seven", ["no class or function seven"]),
    ("", "--draft MINE:eight", ["no class or function eight"]),
    ("", "--draft nowhere.py:x", ["nowhere.py"]),
    ("", "--draft exit --rule x", ["--rule", "FILE.py:NAME"]),
    ("", "--draft suffix --rule MINE:sure", ["a rule without a stop"]),
    ("", "--rule MINE:sure", ["--rule", "auto"]),
    ("", "--draft medusa --tree 4 --rule MINE:sure", ["--tree"])], ids=str)
def test_what_is_wrong_with_a_readers_file_is_one_line(
        call, mine, tmp_path, body, flags, culprits):
    flags = flags.replace("MINE", str(mine(body))).split()
    call.refuses(["x", "--json", *flags], tmp_path, *culprits)


@pytest.mark.parametrize("text, error",
                         [("x = (1,\n", SyntaxError), ("import nothing_like_it", ImportError),
                          ("def f(model, gamma): 1 / 0", ZeroDivisionError)])
def test_an_error_in_a_readers_file_keeps_its_traceback(call, tmp_path, text, error):
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(error):
        call("x", "--draft", f"{tmp_path}/odd.py:f")


def test_heads_of_the_lab_draft_by_their_folder(call, plan, stories, tmp_path):
    assert as_json(call, "--draft", STORIES / "heads" / "transfer")["draft"] == "transfer"
    save_head(M2R2(stories[0], 2), tmp_path)
    assert plan("--draft", tmp_path).draft == "m2r2"
