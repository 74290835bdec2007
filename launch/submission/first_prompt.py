"""Show the first prompt of a recipe's data as the model will see it, as text and as tokens, without transformers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from launch.preflight import bounded, model_readings
from launch.preflight.data_files import FirstRecords, first_records
from launch.preflight.model_readings import ModelReading
from launch.terminal.safe_text import plain
from pipeline import config
from pipeline.config import DatasetConfig, Recipe, RecipeError, generates, prompt_tools
from pipeline.data.chat import Encoder
from pipeline.data.columns import recognize_columns

MOST_TEXT = (600, 200)  # characters shown of a text's beginning and end
MOST_TOKENS = (24, 8)
READ = 20  # records that show which columns a file has
WIDTH = 110


def text(recipe: Recipe) -> str:
    """Return lines about the first prompt; "" if no data set is in files here, or the model has no tokenizer.json here."""
    if not config.trains(recipe):
        return ""
    try:
        for key, dataset in config.keyed_sets(recipe.data).items():
            if dataset.processor:  # a plan runs no code of the user
                continue
            records = first_records(key, dataset, [], READ, recipe.data.bad_records == "drop")
            if records and records.numbered:
                reading = model_readings.read("policy", recipe.policy)
                return "\n".join(_lines(recipe, key, dataset, records, reading)) if reading else ""
        return ""
    except (RecipeError, ValueError):  # the checks of the recipe report it
        return ""


def _lines(recipe: Recipe, key: str, dataset: DatasetConfig, records: FirstRecords, reading: ModelReading) -> Iterator[str]:
    numbered = records.numbered
    columns = recognize_columns(recipe, key, dataset, [record for _, record in numbered]).dataset

    def work() -> dict[str, Any]:
        tokenizer: Any = reading.tokenizer  # has what Encoder uses of transformers' class
        tools = prompt_tools(recipe.env, dataset.env_name) if generates(recipe) else ()
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, columns, tools)
        wrong: dict[str, Any] = {}
        for number, record in numbered if recipe.data.bad_records == "drop" else numbered[:1]:
            try:
                return {"number": number, "tokens": encoder.prompt(record).tolist()}
            except Exception as error:  # a template may raise anything
                wrong = wrong or {"number": number, "error": str(error)}
        return wrong

    reply: dict[str, Any] = {}
    try:
        reply = bounded.call(work)
    except bounded.Unbounded as error:
        reply = {"number": numbered[0][0], "error": str(error)}
    if (reading.problems and recipe.data.apply_chat_template) or not reply:  # the checks of the recipe report it
        return
    where = records.location(reply["number"])
    if "error" in reply:
        yield f"the first prompt, of {where}, cannot be shown: {reply['error']}"
        return
    tokens: list[int] = reply["tokens"]
    yield f"the first prompt, of {where}, as the model sees it:"
    shown = _cut(reading.tokenizer.decode(tokens), *MOST_TEXT, " [...] ")
    for line in shown.split("\n"):
        line = plain(line)
        yield from (f"  | {line[at : at + WIDTH]}".rstrip() for at in range(0, max(1, len(line)), WIDTH))
    names = [f"{token} {reading.tokenizer.decode([token])!r}" for token in tokens]
    first, last = MOST_TOKENS
    listed = names if len(names) <= first + last else [*names[:first], "...", *names[-last:]]
    yield from textwrap.wrap(f"{len(tokens)} tokens: {', '.join(listed)}", WIDTH, initial_indent="  ", subsequent_indent="    ")


def _cut(text: str, first: int, last: int, between: str) -> str:
    return text if len(text) <= first + last else f"{text[:first]}{between}{text[-last:]}"
