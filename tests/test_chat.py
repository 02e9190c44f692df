"""A message becomes the text and the ids that `apply_chat_template` of transformers makes of it."""
import contextlib
import json
from dataclasses import replace
from datetime import datetime

import expected
import jinja2
import pytest
from tiny import LLAMA, command, make
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

import checkpoint
import generate
from lab.save import save
from support import chat

TEMPLATES = {"brackets": """
{% set system = messages[0].content if messages[0].role == 'system' else false %}
{% for m in (messages[1:] if system else messages) %}{% if loop.index % 2 != (m.role == 'user') %}
{{ raise_exception('user and assistant take turns') }}{% endif %}
{% set before = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' if loop.first and system else '' %}
{% if m.role == 'user' %}{{ bos_token + '[INST] ' + before + m.content.strip() + ' [/INST]' }}
{% else %}{{ ' ' ~ m.content ~ ' ' ~ eos_token }}{% endif %}{% endfor %}""", "headers": """
{{- bos_token + "<|h|>system<|/h|>\n\n" }}{%- if tools is not none %}{{- "Tools: x\n" }}{%- endif %}
{{- (strftime_now("%d %b %Y") if strftime_now is defined) + "\n\n" }}{%- for m in messages %}
    {{- '<|h|>' + m['role'] + '<|/h|>\n\n' + m['content'] | trim + eos_token }}
{%- endfor %}{{- '<|h|>assistant<|/h|>\n\n' if add_generation_prompt }}\n""", "loop controls": """
{% set ns = namespace(s='') %}{% for m in messages[::-1] %}
  {% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.s = ns.s ~ m.content %}
{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}{{ ns.s }}""",
    "macros and generation": """
{% macro turn(role, text='') %}<{{ role | upper }}>{{ text }}{{ caller() if caller }}
{% endmacro %}{% set x = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}
{%- generation -%} {% set x = 'in' %}{{ x }} {{ m.content }} {{ loop.index }}
{% endgeneration %}{{ x }}{% else %}{% call turn(m.role) %}{{ m.content | length
}}{% endcall %}{% endif %}
{% endfor %}{{ turn('assistant', 'x') | indent(2) }}""", "json": """
{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'é': 1, 'b': 2} | tojson(true) }}
{{ {'b': "<é'>", 'a': none} | tojson(separators=(',', ':'), sort_keys=true) }}
{{ documents is none }} {{ tools is none }} {{ custom is defined }}
{{ enable_thinking is defined }} {{ messages[0].name }}"""}
ASK, MORE, ANSWER, SYSTEM = ({"role": role, "content": content} for role, content in (
    ("user", "Hi é <b>&"), ("user", "  two\nlines "), ("assistant", " Yes 🙂"), ("system", "!")))
CHATS = [([ASK], True), ([SYSTEM, MORE], True), ([ASK, ANSWER], False),
         ([SYSTEM, ASK, ANSWER, MORE], True), ([ASK, MORE], True)]
FILE, CONFIG, OLDER = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
SHOW = {FILE: "".join(f"{name}: {{{{ {name} }}}} " for name in (
    "bos_token", "eos_token", "unk_token", "boi_token", "add_bos_token"))}
ADDED = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
DEFAULT, RAG = {"name": "default", "template": "one"}, {"name": "rag", "template": "two"}
call = command(generate.main)


@pytest.fixture
def folder(tmp_path):
    """A function that writes a tiny model, whose tokenizer adds <s> and </s>, and these files."""
    def write(files):
        special, letters = "<s> </s> <|im_start|> <|im_end|>", pre_tokenizers.ByteLevel.alphabet()
        tokenizer = expected.byte_level(special.split(), sorted(letters))
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
        c = replace(LLAMA, vocab_size=tokenizer.get_vocab_size(), bos=0, eos=(1,), max_len=128)
        save(make(c), tmp_path, tokenizer)
        for name, text in files.items():
            (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return tmp_path
    return write


def both(path, messages, more=True):
    """(our text, their text, their ids), each None if the template refuses."""
    ours, theirs, ids, auto = None, None, None, AutoTokenizer.from_pretrained(path)
    with contextlib.suppress(ValueError):
        ours = chat.read_template(path)(messages, more)
    with contextlib.suppress(ValueError, jinja2.TemplateError):
        theirs = auto.apply_chat_template(messages, add_generation_prompt=more, tokenize=False)
        ids = auto.apply_chat_template(messages, add_generation_prompt=more, return_dict=False)
    return ours, theirs, ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_as_transformers_renders_them(folder, monkeypatch, name):
    clock = type("Clock", (datetime,), {"now": classmethod(lambda cls: cls(2026, 3, 9))})
    for module in (chat, chat_template_utils):
        monkeypatch.setattr(module, "datetime", clock)
    path = folder({FILE: TEMPLATES[name]})
    made = [both(path, *messages) for messages in CHATS]
    assert [ours for ours, _, _ in made] == [theirs for _, theirs, _ in made]
    assert [ours for ours, _, _ in made].count(None) == (name == "brackets")
    t = checkpoint.read_tokenizer(path)
    assert all(checkpoint.encode(t, ours, special=False) == ids for ours, _, ids in made if ours)


@pytest.mark.parametrize("files", [
    SHOW | {CONFIG: {"bos_token": None, "eos_token": ADDED, "add_bos_token": 1, "boi_token": "I"}},
    *(SHOW | {CONFIG: {"eos_token": "</s>", "bos_token": "<s>"} | listed, OLDER: {
        "eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None,
        "boi_token": "I"}}
      for listed in ({}, {"added_tokens_decoder": {}})),
    *({CONFIG: {"chat_template": source}} | files
      for source in (None, "config", [RAG, DEFAULT], [RAG]) for files in ({}, {FILE: "file"}))])
def test_where_templates_and_special_tokens_stand(folder, files):
    ours, theirs, _ = both(folder(files), [ASK])
    assert ours == theirs


def test_the_words_of_a_message_stand_in_the_text(call, folder):
    path = folder({FILE: "<{{ messages[0].content | trim }}>"})
    assert chat.message(path)(" Hi  é\n\"b\" ") == "<Hi  é\n\"b\">"
    out = call("Hi", "--chat", "--json", "--model", path, "--max-new", "1")[1]
    assert "Hi" in json.loads(out)["prompts"][0]


@pytest.mark.parametrize("template, why", [
    ("{{ messages | length }}", "leaves out the message"),
    (7, "no chat template"), ([RAG], "no chat template"), ("{% for x in %}", "template fails: "),
    ("{{ raise_exception('no\nusers here') }}", "the chat template fails: no users here"),
    ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'")])
def test_bad_templates(call, folder, template, why):
    path = folder({CONFIG: {"chat_template": template}})
    call.refuses(["Hi", "--chat", "--model", path], path, path, why)
