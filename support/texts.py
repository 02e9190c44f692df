"""Texts in files, which are documents, the prompts of a batch, or the prompts that this project is
measured on."""
import json
import sys
from pathlib import Path

from checkpoint import parse_json, read_text
from model import Refused

# separates the documents of a file; its id begins a document and ends an answer
BOUNDARY = "<|endoftext|>"
PROMPTS = Path(__file__).with_name("prompts")


def read_texts(path, key, separator):
    """The texts of a file. In a .jsonl file they stand under `key` in its lines, in any other file
    between the separators. Raises ValueError if there is none."""
    return list(numbered_texts(path, key, separator).values())


def numbered_texts(path, key, separator):
    """The same texts by number. Numbers count lines, or what lies between the separators, from
    1."""
    jsonl = path.suffix.lower() == ".jsonl"
    if jsonl:
        separator = "\n"
    texts = {}
    # trap: `splitlines` also splits at U+2028 and others, which a text may hold
    for i, part in enumerate(read_text(path).split(separator), 1):
        if not part.strip():
            continue
        entry = parse_json(part) if jsonl else {key: part.strip("\n")}
        if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
            raise Refused(f'{path}, line {i}: expected a JSON object with a text under "{key}"')
        texts[i] = entry[key]
    if not texts:
        raise Refused(f"{path}: no text in it")
    return texts


def read_prompts(name):
    """The lines of support/prompts/NAME.jsonl, with "prompt", "text", "source" and "licence"."""
    return [json.loads(line) for line in read_text(PROMPTS / f"{name}.jsonl").split("\n") if line]


def batch(prompt, file):
    """The texts to continue, by the names that messages give them: the lines of --prompt-file, or
    standard input."""
    if file:
        lines = numbered_texts(file, "prompt", "\n")
        return {f"{file}, line {n}": text for n, text in lines.items()}
    return {"the prompt": read_input().removesuffix("\n")}


def read_input():
    """Standard input as text; bytes that are not UTF-8 become surrogates."""
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    return sys.stdin.read()
