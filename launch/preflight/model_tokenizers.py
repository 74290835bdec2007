"""Check the tokenizers of a recipe's models: that they exist, have the chat template that prompts need, and fit the models."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from launch.preflight import model_readings, tool_calls
from launch.preflight.model_readings import ModelReading
from launch.recipes.model_files import is_inside, model_config, model_folder
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import PolicyConfig, Problem, Recipe, collected
from pipeline.data.file_tokenizer import TOKENIZER_FILES, read_tokenizer
from pipeline.data.templates import choose_template, folder_template
from pipeline.data.token_alignment import TokenBytes, other_vocabulary, vocabulary_difference


def problems(
    recipe: Recipe, pending: Sequence[os.PathLike] = (), notes: list[str] | None = None
) -> Generator[Problem, None, Path | None]:
    """Yield problems of tokenizers, and return the path of the policy's tokenizer.json.

    Returns None if a needed recipe is still to write that file, or if only older formats exist, which need transformers. notes:
    receives which models have no stop tokens.
    """
    readings: dict[str, ModelReading] = {}
    for section, model in model_readings.models(recipe).items():
        reading = yield from _check(recipe, section, model, pending)
        if reading:
            readings[section] = reading
            if notes is not None and not reading.stops.tokens and (section != "policy" or config.generates(recipe)):
                notes.append(
                    f"{section}: no file of {model.model_name} names a stop token; every answer runs to the maximum length"
                )
            yield from _too_large(reading, f"{section}.tokenizer.name", f"{section}.model_name", reading.rows)
    yield from tool_calls.problems(recipe, readings.get("policy"))
    if policy := readings.get("policy"):
        for section, model in config.models(recipe).items():  # these read the policy's tokens
            if section not in readings:
                yield from _too_large(policy, f"{section}.model_name", f"{section}.model_name", rows(section, model, pending))
        return policy.tokenizer.vocabulary_file
    return None


def _check(
    recipe: Recipe, section: str, model: PolicyConfig, pending: Sequence[os.PathLike]
) -> Generator[Problem, None, ModelReading | None]:
    """Yield problems of one tokenizer, and return its reading."""
    key, tokenizer_config = f"{section}.tokenizer", model.tokenizer
    if not tokenizer_config.name:
        if tokenizer_config.name != model.model_name:
            yield Problem(f"{key}.name", "missing-value", "got an empty name; expected a folder or a Hugging Face name")
        return None
    if is_inside(tokenizer_config.name, pending):
        return None
    tokenizer_problems: list[Problem] = []
    with collected(tokenizer_problems):
        folder = model_folder(f"{key}.name", tokenizer_config.name)
    if tokenizer_problems:
        if tokenizer_config.name != model.model_name:  # otherwise the check of the model reports the problems
            yield from tokenizer_problems
        return None
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        message = f"got {folder}, which has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)} in it"
        yield Problem(f"{key}.name", "file-not-found", message)
        return None
    reading = None
    with collected(tokenizer_problems):
        folder_default, _ = folder_template(folder)
        template = choose_template(tokenizer_config, folder_default, f"{key}.chat_template").template
        reading = model_readings.read(section, model, pending)
    yield from tokenizer_problems
    wants = "" if tokenizer_problems else _renders(recipe, section)
    if wants and not template and section == "judge":
        message = f"got null, and the tokenizer in {folder} has none; expected a chat template, with which the judge is asked"
        yield Problem(wants, "missing-value", message)
    elif wants and not template:
        message = (
            f"got true, but the tokenizer in {folder} has no chat template. Try {key}.chat_template, or false for bare text"
        )
        yield Problem(wants, "missing-value", message)
    elif wants and reading:
        yield from reading.problems
    return reading


def _renders(recipe: Recipe, section: str) -> str:
    """Return the recipe's key that requires a model's chat template; "" if no key does."""
    if section == "judge":
        return "judge.tokenizer.chat_template"
    if config.trains(recipe):
        return "data.apply_chat_template" if recipe.data.apply_chat_template else ""
    asking = [name for name, task in recipe.evaluate.tasks.items() if task.apply_chat_template]
    if asking:
        return f"evaluate.tasks.{asking[0]}.apply_chat_template"
    return "evaluate.lm_eval.apply_chat_template" if recipe.evaluate.lm_eval.apply_chat_template else ""


def rows(section: str, model: PolicyConfig, pending: Sequence[os.PathLike]) -> int | None:
    """Return the number of rows of a model's embedding; None if it is not known, which other checks report."""
    model_json = None
    with collected([]):
        model_json = model_config(model, pending, f"{section}.model_name")
    size = (model_json or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _too_large(reading: ModelReading, key: str, model: str, rows: int | None) -> Iterator[Problem]:
    """Yield a problem if texts or prompts may contain tokens for which the model's embedding has no row.

    Tokens beyond the rows do no harm if they are special, no stop or BOS tokens, and not in the chat template, such as tokens
    for padding or images. key: the key of the problem. model: the key of the model with that number of `rows`.
    """
    if rows is None:
        return
    tokenizer = reading.tokenizer
    beyond = {id: text for text, id in tokenizer.get_vocab().items() if id >= rows}
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    rendered = str(tokenizer.chat_template or "")
    used = {*reading.stops.ids, tokenizer.bos_token_id}
    harmful = [id for id, text in sorted(beyond.items()) if id not in special or id in used or text in rendered]
    if harmful:
        first = f"id {harmful[0]} {beyond[harmful[0]]!r}"
        message = f"got the tokenizer in {tokenizer.name_or_path} with {len(tokenizer)} tokens, including {first}"
        hint = "Try the tokenizer of this model, or a model with a resized embedding"
        yield Problem(key, "too-large", f"{message}; expected ids below {rows}, the embedding rows of {model}. {hint}")


# ---- teachers -----------------------------------------------------------------------------------------------------------


def teacher_problems(
    recipe: Recipe, tokenizer: Path | None, pending: Sequence[os.PathLike], notes: list[str] | None = None
) -> Iterator[Problem]:
    """Yield problems of each teacher's vocabulary.

    Models with the same tokenizer may differ in their unused rows, and a teacher could give probability to a row that the
    policy lacks. tokenizer: the policy's tokenizer.json, or None. pending: models that needed recipes are still to write.
    notes: receives which teachers have another tokenizer.
    """
    student_rows, needs = rows("policy", recipe.policy, pending), build(recipe).needs
    for name, teacher in config.teachers(recipe).items():
        if teacher.model_name is None:  # other checks report it
            continue
        section, model = config.teacher_section(name), config.teacher_policy(recipe, teacher)
        key, difference = f"{section}.model_name", None
        if tokenizer and not is_inside(model.tokenizer.name, pending):
            with collected([]):  # other checks report errors, such as a missing folder
                difference = _difference(section, model, tokenizer)
        if difference and needs.teacher_top_k and not needs.own_top_k:
            yield other_vocabulary(key, teacher.model_name, recipe.policy.tokenizer.name, difference)
            continue
        if difference or needs.own_top_k:
            yield from _other_tokenizer(recipe, section, model, tokenizer, pending, needs.teacher_top_k)
            if notes is not None:
                differs = f"its vocabulary differs from the policy's: {difference}; " if difference else ""
                what = "distributions at the ends of" if needs.own_top_k else "log-probs of"
                notes.append(
                    f"{section}: {differs}it reads texts in its own tokens, and the loss compares {what} chunks of text"
                )
            continue
        least, length = recipe.policy.max_total_sequence_length, model.max_total_sequence_length
        if difference == "" and length < least:
            message = f"got {length}; expected at least policy.max_total_sequence_length, {least}, since the teacher reads"
            yield Problem(f"{section}.max_total_sequence_length", "too-small", f"{message} the policy's tokens")
        teacher_rows = rows(section, model, pending)
        if student_rows and teacher_rows and teacher_rows > student_rows:
            most = f"expected at most the policy's {student_rows}"
            reason = "since the teacher may give probability to rows that the policy does not have"
            yield Problem(
                key, "too-large", f"got {teacher.model_name} with {teacher_rows} rows of vocabulary; {most}, {reason}"
            )


def _difference(section: str, model: PolicyConfig, student_file: Path) -> str | None:
    """Return how the teacher's vocabulary differs from the policy's; "" if not, None if unknown. Raises RecipeError."""
    teacher_file = model_folder(f"{section}.tokenizer.name", model.tokenizer.name) / "tokenizer.json"
    if not teacher_file.exists():
        return None
    return vocabulary_difference(read_tokenizer(student_file).get_vocab(), read_tokenizer(teacher_file).get_vocab())


def _other_tokenizer(
    recipe: Recipe, section: str, model: PolicyConfig, student_file: Path | None, pending: Sequence[os.PathLike], top_k: int
) -> Iterator[Problem]:
    """Yield the problems of a teacher that reads texts in its own tokens. top_k: see Needs.teacher_top_k."""
    reading = yield from _check(recipe, section, model, pending)
    if reading:
        yield from _too_large(reading, f"{section}.tokenizer.name", f"{section}.model_name", reading.rows)
        least = min(reading.rows or top_k, rows("policy", recipe.policy, pending) or top_k)
        if least < top_k:
            message = f"got {top_k}; expected at most {least}, the smaller vocabulary of policy and {section}"
            yield Problem(f"{recipe.algorithm}.topk_logits_k", "too-large", message)
        teacher_file = reading.tokenizer.vocabulary_file
        for key, file in (("policy.tokenizer.name", student_file), (f"{section}.tokenizer.name", teacher_file)):
            try:
                _ = file and TokenBytes(read_tokenizer(file))
            except ValueError as error:
                yield Problem(key, "unsupported", str(error))
    section_of_run = config.section(recipe)
    assert isinstance(section_of_run, config.OnlineConfig)  # only these have teachers
    if (turns := section_of_run.max_rollout_turns) > 1:
        message = f"got {turns}; expected 1, since {section} reads the text of one answer to a prompt"
        yield Problem(f"{recipe.algorithm}.max_rollout_turns", "unsupported", message)
    if recipe.rollout:
        message = f"got a function; expected null, since {section} reads the text of one answer to a prompt"
        yield Problem("rollout", "unsupported", message)
