"""From a message to the prompt a chat model was trained on, by the checkpoint's own template.

A template is a Jinja program, which runs in a sandbox. It gets what `apply_chat_template`
of transformers would give it, so both render the same text.
"""
import json
from datetime import datetime
from pathlib import Path

import jinja2.ext
import jinja2.sandbox

from checkpoint import read_text, token_settings
from model import Refused


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks text to train on, and renders it."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)    # variables set inside are not seen outside


def refuse(message):
    raise jinja2.TemplateError(message)


def read_template(folder):
    """The chat template in `folder` as a function render(messages, add_generation_prompt=True).
    Raises Refused if there is none; `render` raises it if the template fails or refuses the
    messages."""
    file = Path(folder) / "chat_template.jinja"
    config = token_settings(Path(folder))
    source = read_text(file) if file.is_file() else config.get("chat_template")
    if isinstance(source, list):    # some models also have one for tools
        source = {t.get("name"): t.get("template") for t in source}.get("default")
    if not isinstance(source, str):
        raise Refused(f"{folder}: no chat template, so this is a base model: prompt it without "
                      "--chat")
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    # Jinja's own escapes for HTML
    env.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(
        x, ensure_ascii=ensure_ascii, **how)
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # <s> and the like: a file gives a token as a string, as an object or as null
    special = {key: t.get("content") if isinstance(t, dict) else t
               for key, t in config.items() if key.endswith("_token") and isinstance(t, str | dict)}

    def render(messages, add_generation_prompt=True):
        try:
            return env.from_string(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt,
                tools=None, documents=None, **special)  # trap: undefined is not None
        except Exception as e:  # a template is a program and can fail in any way
            why = " ".join(str(e).split())[:200]
            raise Refused(f"{folder}: the chat template fails: {why}") from None

    return render


PROBE = "what-the-user-wrote"     # a word that no template has


def message(folder):
    """A function of a user's message that returns the prompt, by the template in `folder`. Raises
    Refused as `read_template` does, or if the template leaves out the message."""
    render = read_template(folder)

    def ask(text):
        return render([{"role": "user", "content": text}])

    if PROBE not in ask(PROBE):
        raise Refused(f"{folder}: the chat template leaves out the message")
    return ask


def encoder(folder, encode):
    """A function of a user's message that returns ids. The template renders the special tokens, so
    encode(text, special=False) adds none."""
    render = message(folder)
    return lambda text: encode(render(text), special=False)
