"""A message -> the prompt a chat model was trained on: the checkpoint's own template, in a sandbox.

A template is a program in Jinja. The variables, filters, functions and tags it finds here are those
of `apply_chat_template` in transformers, so both render the same text.
"""
import json
from datetime import datetime
from pathlib import Path

import jinja2.ext
import jinja2.sandbox

from support.files import read_json, read_text


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks text to train on, and renders it."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)  # variables set inside are not seen outside


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replaces Jinja's own `tojson`, which escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def refuse(message):
    raise jinja2.TemplateError(message)


def read_template(folder):
    """The default template in `folder` as a function render(messages, add_generation_prompt=True).

    Raises ValueError if there is none; `render` raises it if the template is broken or refuses the
    messages.
    """
    folder = Path(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    templates, special = find_templates(folder, config), find_special_tokens(folder, config)
    source = templates.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: " + (
            "none of its chat templates is named 'default'" if templates.keys() - {"default"} else
            "no chat template, so this is a base model: prompt it without --chat"))
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def render(messages, add_generation_prompt=True):
        try:
            return env.from_string(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt,
                tools=None, documents=None, **special)  # trap: what is undefined is not None
        except Exception as e:  # a template is a program: it can fail in any way
            why = " ".join(str(e).split())[:200]
            raise ValueError(f"{folder}: the chat template fails: {why}") from None

    return render


def find_templates(folder, config):
    """{name: template}. Template files take precedence over tokenizer_config.json, which may hold
    one template or several."""
    main, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    files = {"default": main} if main.is_file() else {}
    files |= {path.stem: path for path in more.glob("*.jinja")}
    source = config.get("chat_template")
    if files:
        return {name: read_text(path) for name, path in files.items()}
    if isinstance(source, list):
        return {str(t.get("name")): t.get("template") for t in source if isinstance(t, dict)}
    return source if isinstance(source, dict) else {"default": source} if source is not None else {}


def find_special_tokens(folder, config):
    """{"bos_token": "<s>", ...}. A file gives a token as a string, as an object or as null."""
    path = folder / "special_tokens_map.json"
    if path.is_file() and "added_tokens_decoder" not in config:  # that key replaces the file
        config = config | read_json(path)
    extra = config.get("extra_special_tokens")
    tokens = {key: token for key, token in config.items() if key.endswith("_token")}
    tokens |= extra if isinstance(extra, dict) else {}
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
