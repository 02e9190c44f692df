"""A message -> the prompt a chat model was trained on: the checkpoint's own template, in a sandbox.

A template is a program in Jinja. What it finds here is what `apply_chat_template` of transformers gives it,
so both render the same text.
"""
import json
from datetime import datetime
from pathlib import Path

import jinja2.ext
import jinja2.sandbox

from support.files import read_json, read_text


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replaces Jinja's own `tojson`, which escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def refuse(message):
    raise jinja2.TemplateError(message)


def read_template(folder):
    """The chat template in `folder` as a function render(messages, add_generation_prompt=True).

    Raises ValueError if there is none; `render` raises it if the template is broken or refuses the
    messages.
    """
    file, settings = Path(folder) / "chat_template.jinja", Path(folder) / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    source = read_text(file) if file.is_file() else config.get("chat_template")
    if isinstance(source, list):    # some models have one for tools, too
        source = {t.get("name"): t.get("template") for t in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: no chat template, so this is a base model: prompt it without --chat")
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    special = special_tokens(Path(folder), config)

    def render(messages, add_generation_prompt=True):
        try:
            return env.from_string(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt,
                tools=None, documents=None, **special)  # trap: what is undefined is not None
        except Exception as e:  # a template is a program: it can fail in any way
            why = " ".join(str(e).split())[:200]
            raise ValueError(f"{folder}: the chat template fails: {why}") from None

    return render


def special_tokens(folder, config):
    """{"bos_token": "<s>", ...}. A file gives a token as a string, as an object or as null."""
    path = folder / "special_tokens_map.json"
    if path.is_file() and "added_tokens_decoder" not in config:  # that key replaces the file
        config = config | read_json(path)
    tokens = {key: token for key, token in config.items() if key.endswith("_token")}
    texts = {key: t.get("content") if isinstance(t, dict) else t for key, t in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def end_of_turn(folder, render, tokenizer):
    """The ids that end an answer besides the model's own: a tuple of one or none.

    If generation_config.json names end-of-text ids, no other id ends an answer. Otherwise the
    template is rendered with an answer; the first special token after it, such as <|eot_id|>, ends
    a turn.
    """
    path, mark = Path(folder) / "generation_config.json", "\u2603"
    if path.is_file() and read_json(path).get("eos_token_id") is not None:
        return ()
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    try:
        _, found, after = render(chat, False).rpartition(mark)
        ids = tokenizer.encode(after, add_special_tokens=False).ids if found else []
    except Exception:  # a guess must not end the run
        return ()
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(i for i in ids if i in special)[:1]
