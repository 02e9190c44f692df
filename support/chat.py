"""A message -> the prompt that a chat model was trained on: the checkpoint's own template, in a sandbox.

The one thing to remember: a template often writes the begin-of-text token itself, and the tokenizer may add
another; `checkpoint.encode` leaves exactly one.
"""
import json
from datetime import datetime
from pathlib import Path

import jinja2.sandbox

from support.files import read_json, read_text


def read_template(folder):
    """The template in `folder`, from chat_template.jinja or tokenizer_config.json, as a function
    render(messages, add_generation_prompt=True) -> text.

    Raises ValueError if there is no template. `render` raises it if the template is broken or refuses the
    messages.
    """
    folder = Path(folder)
    file, path = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    source = read_text(file) if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{folder}: no chat template, so this is a base model: prompt it without --chat")

    def refuse(why):
        raise jinja2.TemplateError(why)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = json.dumps  # jinja2's own escapes for HTML
    env.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    special = {key: value["content"] if isinstance(value, dict) and "content" in value else value
               for key, value in config.items() if key.endswith("_token")}

    def render(messages, add_generation_prompt=True):
        try:
            text = env.from_string(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **special)
            return text.encode().decode()  # a template can write what is not valid Unicode
        except Exception as e:  # a template is a program: it can fail in any way
            raise ValueError(f"{folder}: the chat template fails: {' '.join(str(e).split())[:200]}") from None

    return render


def end_of_turn(render, tokenizer):
    """The special id with which the template ends an answer, such as <|eot_id|> or <end_of_turn>, as a tuple
    of one id or none. It is found by rendering an answer and looking at what follows it."""
    mark = "\u2603"
    text = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}], False)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    after = tokenizer.encode(text.rpartition(mark)[2], add_special_tokens=False).ids
    return tuple(i for i in after if i in special)[:1]
