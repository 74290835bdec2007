"""Read `--name value` as transformers' HfArgumentParser does (https://huggingface.co/docs/transformers/internal/trainer_utils)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
OPTION = re.compile(r"--[A-Za-z_]")


def parse(words: Sequence[str]) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Return ((name, value, the option's word) for each option, the other words).

    An option without a value is true, `--no_NAME` is false, and several values are a list. A dash in a name is an underscore.
    """
    options: list[tuple[str, Any, str]] = []
    others: list[str] = []
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        if not OPTION.match(word):
            others.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        while not equals and number < len(words) and not OPTION.match(words[number]):
            values.append(words[number])
            number += 1
        name = name.replace("-", "_")
        if not values and name.startswith("no_"):
            options.append((name.removeprefix("no_"), False, word))
        else:
            read = [value(text) for text in values] or [True]
            options.append((name, read if len(read) > 1 else read[0], word))
    return options, others


def value(text: Any) -> Any:
    """Return the value of a text: a number, a Boolean, null or JSON; else the text itself. Other values stay as they are."""
    if not isinstance(text, str):
        return text
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if (plain := text.lower()) in ("true", "false"):
        return plain == "true"
    if text in ("None", "null"):  # "none" is a value of some fields
        return None
    if text[:1] in "{[":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text.removesuffix(",") if len(text) > 1 else text
