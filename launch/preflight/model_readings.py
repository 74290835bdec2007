"""Read what the job will read from a model's folder: stop tokens, special tokens, chat template, vocabulary.

The code that decides is the same as in the job (`pipeline/data/stop_tokens.py`, `pipeline/data/templates.py`). It gets the
tokenizer's files in place of transformers' tokenizer. Nothing here imports transformers or torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.preflight import bounded
from launch.recipes.model_files import is_inside, model_config, model_folder, read_json
from pipeline import config
from pipeline.config import PolicyConfig, Problem, Recipe, RecipeError, collected
from pipeline.data.file_tokenizer import VOCABULARY, FileTokenizer
from pipeline.data.stop_tokens import CONFIG, GENERATION, StopTokens, decide
from pipeline.data.templates import check_template
from pipeline.data.turn_ends import QUESTION, RENDER_ERRORS, TurnEnds, find_turn_ends
from pipeline.models import rope
from pipeline.recipe.values import is_template


@dataclass(frozen=True)
class ModelReading:
    """The tokenizer, template, stop tokens and sizes of one model of a recipe, as its folder has them."""

    section: str
    model: PolicyConfig
    tokenizer: FileTokenizer
    stops: StopTokens
    opening: str
    """The text that the template puts before the user's text in a prompt; empty without a chat template."""
    rows: int | None
    """Number of rows of the embedding: vocab_size in config.json."""
    ropes: tuple[rope.Rope, ...] = ()
    """Rotary position embeddings, several if layers differ."""
    problems: tuple[Problem, ...] = ()
    """Why the chat template cannot be used."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the reading as rows (label, text) to print."""
        yield "stop tokens", ", ".join(map(str, self.stops.tokens)) or "none: every answer runs to the maximum length"
        yield from (("", note) for note in self.stops.notes)
        yield "BOS and EOS", self._added_tokens()
        yield "padding", "none: sequences are packed end to end"
        tokenizer = self.tokenizer
        if isinstance(tokenizer.chat_template, dict):
            names = ", ".join(tokenizer.chat_template)
            yield "template", f"{tokenizer.chosen.source} ({names}), SHA-256 {tokenizer.chosen.digest}"
        elif tokenizer.chat_template:
            yield "template", f"{tokenizer.chosen.source}, SHA-256 {tokenizer.chosen.digest}"
        else:
            yield "template", "none"
        rows = f"; {self.rows} rows in {CONFIG}" if self.rows else ""
        yield "vocabulary", f"{len(tokenizer)} tokens in {tokenizer.name_or_path}/{VOCABULARY}{rows}"
        yield from (("RoPE", f"{rope} ({rope.source})") for rope in self.ropes)

    def _added_tokens(self) -> str:
        """Return a text about the special tokens that the tokenizer adds around texts and conversations."""
        tokenizer = self.tokenizer
        plain, bounds = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
        at = next((i for i in range(len(bounds)) if bounds[i : i + len(plain)] == plain), 0)
        names = [str(tokenizer.convert_ids_to_tokens(id)) for id in bounds]
        before, after = names[:at], names[at + len(plain) :]
        phrases = [f"begins with {' '.join(before)}"] if before else []
        phrases += [f"ends with {' '.join(after)}"] if after else []
        text = f"a text without the template {' and '.join(phrases) or 'gets none'} ({VOCABULARY})"
        if not tokenizer.chat_template:
            return text
        bos = tokenizer.bos_token
        begins = bool(bos) and self.opening.startswith(bos)
        return f"{text}; the template writes {bos} itself" if begins else f"{text}; the template writes no BOS"


def read(section: str, model: PolicyConfig, pending: Sequence[os.PathLike] = ()) -> ModelReading | None:
    """Return the reading of a model's folder; None without a tokenizer.json, or if a needed run has yet to write the model.

    section: the recipe's section of the model, such as policy or evaluate.judge. Raises RecipeError.
    """
    key = f"{section}.tokenizer"
    if is_inside(model.tokenizer.name, pending) or not model.tokenizer.name:
        return None
    folder = model_folder(f"{key}.name", model.tokenizer.name)
    if not (folder / VOCABULARY).exists():
        return None
    tokenizer: Any = FileTokenizer(folder, model.tokenizer, f"{key}.chat_template")  # has what is used of transformers' class
    ends, opening, problems = _render_probe(tokenizer, model, f"{key}.chat_template")
    weights_folder: Path | None = None
    model_json: dict[str, Any] = {}
    rows = None
    ropes: list[rope.Rope] = []
    if not is_inside(model.model_name, pending):
        with collected([]):  # other checks report a model that is not here, or its model_json
            weights_folder = model_folder(f"{section}.model_name", model.model_name)
            model_json = read_json(weights_folder / CONFIG)
            rows = (model_config(model, pending, f"{section}.model_name") or {}).get("vocab_size")
            text = {**model_json, **(model_json.get("text_config") or {})}
            ropes = rope.decide(text, model.hf_config_overrides, f"{section}.hf_config_overrides")
    generation = read_json(weights_folder / GENERATION) if weights_folder and (weights_folder / GENERATION).exists() else {}
    try:
        stops = decide(tokenizer, ends, generation, model_json, model.hf_config_overrides)
    except RecipeError as error:
        raise RecipeError(
            *(Problem(f"{section}.model_name", problem.code, problem.message) for problem in error.problems)
        ) from None
    rows = rows if isinstance(rows, int) else None
    return ModelReading(section, model, tokenizer, stops, opening, rows, tuple(ropes), problems)


def models(recipe: Recipe) -> dict[str, PolicyConfig]:
    """Return the models of a recipe that have a tokenizer of their own, by section."""
    models_of = {"policy": recipe.policy}
    if (name := config.reward_environment(recipe)) and recipe.env[name].model_name:
        models_of[f"env.{name}"] = config.reward_model_policy(recipe)
    return models_of | config.served_models(recipe)


def template_files(recipe: Recipe) -> dict[str, Path]:
    """Return the files and folders from which a recipe takes chat templates, by key."""
    readers = models(recipe) | config.teacher_policies(recipe)
    templates = {f"{section}.tokenizer.chat_template": model.tokenizer.chat_template for section, model in readers.items()}
    return {key: Path(text) for key, text in templates.items() if text and not is_template(text) and Path(text).exists()}


def describe_models(recipe: Recipe) -> Iterator[str]:
    """Yield lines about every model of a recipe that has a tokenizer, and one line about each model that cannot be read."""
    for section, model in models(recipe).items():
        yield f"{section}: {model.model_name}"
        try:
            reading = read(section, model)
        except RecipeError as error:
            yield from (f"  cannot be read: {problem}" for problem in error.problems)
            continue
        if reading is None:
            yield f"  the job reads the tokenizer, which has no {VOCABULARY}"
            continue
        yield from (f"  {label:<12} {text}" for label, text in reading.lines())
        yield from (f"  cannot be used: {problem}" for problem in reading.problems)


def _render_probe(tokenizer: Any, model: PolicyConfig, key: str) -> tuple[TurnEnds, str, tuple[Problem, ...]]:
    """Render short conversations; return the ends of turns, the text before the user's in a prompt, and the problems.

    The template runs in a process with limits of time and memory. key: the key to which problems belong.
    """
    if not tokenizer.chat_template:
        return find_turn_ends(tokenizer), "", ()
    kwargs = model.tokenizer.chat_template_kwargs or {}

    def work() -> dict[str, Any]:
        wrong: list[Problem] = []
        with collected(wrong):
            check_template(tokenizer, kwargs, key)
        ends = find_turn_ends(tokenizer, kwargs)
        try:
            messages: Any = [{"role": "user", "content": QUESTION}]
            text = tokenizer.apply_chat_template(messages, **{**kwargs, "tokenize": False, "add_generation_prompt": True})
        except RENDER_ERRORS:
            text = ""
        opening, question, _ = text.partition(QUESTION)
        return {
            "ends": [ends.last, ends.between, ends.call, ends.inner, ends.why],
            "opening": opening if question else "",
            "problems": [(problem.key, problem.code, problem.message) for problem in wrong],
        }

    try:
        result = bounded.call(work)
    except bounded.Unbounded as error:
        problem = Problem(key, "unsupported", f"{tokenizer.chosen.source}: cannot be rendered: {error}")
        return TurnEnds(why=str(error)), "", (problem,)
    return TurnEnds(*result["ends"]), result["opening"], tuple(Problem(*fields) for fields in result["problems"])
