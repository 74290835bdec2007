"""What can be said against a recipe from the files it names, before anything is created or submitted.

The model's own files are `launch/preflight_model.py`'s, and the records of data files `launch/preflight_records.py`'s.

Reads JSON, JSONL and tokenizer.json; imports neither torch nor transformers, and bounds what it reads, so that it answers
within two seconds. What lies beyond the bounds, and by how much the chat template lengthens a prompt, is checked in
the job.
"""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch import preflight_model, preflight_records
from launch.model_files import hf_home, hub_cache, inside, model_config, model_folder, read_json
from pipeline import config
from pipeline.config import (
    ENVIRONMENT_KINDS,
    GENERATED_DATASETS,
    DatasetConfig,
    PolicyConfig,
    Recipe,
    RecipeError,
    TokenizerConfig,
)

SCAN_BYTES = 32 << 20  # of each data file
LONGEST = 256  # prompts whose tokens are counted: those with the most characters
OWN_TOKENS = 0.01  # share of a vocabulary that may be a model's own: markers of turns and the like
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check(recipe: Recipe, pending: list[Path] = ()) -> None:
    """Raises RecipeError. `pending`: run folders of needed recipes that have not run yet: nothing is looked for there."""
    for name, environment in recipe.env.items():
        if environment.kind not in ENVIRONMENT_KINDS and "." not in environment.kind:
            raise RecipeError(
                f"env.{name}.kind: '{environment.kind}' is not one of: {', '.join(ENVIRONMENT_KINDS)},"
                " nor the dotted path of a class"
            )
    preflight_model.check(recipe, pending)
    folder = _check_tokenizer(recipe, "policy.tokenizer", recipe.policy.tokenizer, pending)
    tokenizer = folder / "tokenizer.json" if folder else None  # others are only in the old formats, which need transformers
    if name := config.reward_environment(recipe):
        _check_reward_tokenizer(recipe, f"env.{name}", config.judge(recipe), pending)
    if recipe.algorithm == "distillation" and tokenizer and tokenizer.exists():
        _check_teacher_tokenizer(recipe, tokenizer, pending)
    for key, dataset in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if dataset is not None:
            _check_dataset(recipe, key, dataset, tokenizer if tokenizer and tokenizer.exists() else None)


def _check_tokenizer(recipe: Recipe, key: str, tokenizer: TokenizerConfig, pending: list[Path]) -> Path | None:
    """Its folder; None if it is yet to come out of a needed recipe. It has a chat template if the recipe asks for one."""
    if inside(tokenizer.name, pending):
        return None
    folder = model_folder(f"{key}.name", tokenizer.name)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise RecipeError(f"{key}.name: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    if recipe.data.apply_chat_template and tokenizer.chat_template is None:
        settings = folder / "tokenizer_config.json"
        if not any(folder.glob("chat_template*")) and not (settings.exists() and read_json(settings).get("chat_template")):
            raise RecipeError(
                f"data.apply_chat_template: true, but the tokenizer in {folder} has no chat template; give one in"
                f" {key}.chat_template, or data.apply_chat_template=false for bare text"
            )
    return folder


def _check_reward_tokenizer(recipe: Recipe, section: str, model: PolicyConfig, pending: list[Path]) -> None:
    folder = _check_tokenizer(recipe, f"{section}.tokenizer", model.tokenizer, pending)
    described = model_config(model, pending, f"{section}.model_name")
    if folder is None or described is None or not (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer

    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    if size > described.get("vocab_size", size):
        raise RecipeError(
            f"{section}.tokenizer.name: the tokenizer in {folder} has {size} tokens, but {section}.model_name only"
            f" {described['vocab_size']}; it is not this model's"
        )


def _check_teacher_tokenizer(recipe: Recipe, ours: Path, pending: list[Path]) -> None:
    """What the teacher says is likely is said in tokens, so they must be the policy's; a few added ones may differ."""
    name = recipe.teacher.model_name
    if inside(name, pending) or not (theirs := model_folder("teacher.model_name", name) / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer

    student, teacher = (Tokenizer.from_file(str(path)).get_vocab() for path in (ours, theirs))
    odd = [token for token, number in student.items() if teacher.get(token, number) != number]
    absent = len(student.keys() - teacher.keys())
    if odd or absent > OWN_TOKENS * len(student):
        what = f"'{odd[0]}' has another number there" if odd else f"{absent} of its {len(student)} tokens are not there"
        raise RecipeError(
            f"teacher.model_name: {name} has another vocabulary than policy.tokenizer.name {recipe.policy.tokenizer.name}:"
            f" {what}; a teacher must be of the policy's kind"
        )


# ---- data ---------------------------------------------------------------------------------------------------------------


def _check_dataset(recipe: Recipe, key: str, dataset: DatasetConfig, tokenizer: Path | None) -> None:
    template = _template(f"{key}.prompt_file", dataset.prompt_file) if dataset.prompt_file else "{}"
    if not recipe.data.apply_chat_template:
        for name in ("system_prompt_file", "messages_key"):
            if getattr(dataset, name):
                raise RecipeError(f"{key}.{name}: needs a chat template, and data.apply_chat_template is false")
    system = _text(f"{key}.system_prompt_file", dataset.system_prompt_file) if dataset.system_prompt_file else ""
    if dataset.data_path is None:
        _check_name(key, dataset.dataset_name)
        return
    if dataset.dataset_name is not None:
        raise RecipeError(f"{key}: both dataset_name and data_path are given; one of them")
    inputs: list[tuple[int, str]] = []  # (line number, text)
    for number, record in _records(f"{key}.data_path", Path(dataset.data_path)):
        try:
            text = preflight_records.check(recipe, f"{key}.data_path: {dataset.data_path}:{number}", record, dataset)
        except RecipeError as error:
            if recipe.data.bad_records == "drop":
                continue
            raise RecipeError(f"{error}; mend it, or data.bad_records=drop") from None
        if text is not None:
            inputs.append((number, text))
    if tokenizer and inputs and recipe.data.overlong_prompts == "error":
        longest = sorted(inputs, key=lambda numbered: -len(numbered[1]))[:LONGEST]
        prompts = [(number, f"{system}{template.format(text)}".strip()) for number, text in longest]
        _check_lengths(f"{key}.data_path: {dataset.data_path}", prompts, tokenizer, recipe.data.max_input_seq_length)


def _template(key: str, path: str) -> str:
    """A text with one {} in it; other braces are doubled, as Python's format has it."""
    text = _text(key, path)
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise RecipeError(f"{key}: {path}: {error}; write braces other than the input's as {{{{ and }}}}") from None
    if fields != [""]:
        raise RecipeError(
            f"{key}: {path} must have one {{}} where the input goes, and {{{{ and }}}} for braces; it has {fields}"
        )
    return text


def _text(key: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror} (looked from {os.getcwd()})") from None


def _check_name(key: str, name: str | None) -> None:
    if name is None:
        raise RecipeError(f"{key}: neither dataset_name nor data_path is given; data_path=FILE.jsonl, or a data set's name")
    if name in GENERATED_DATASETS or Path(name).is_dir():
        return
    datasets_cache = Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()
    # `datasets` writes org___name in lower case; older versions kept the case. A raw copy is in the hub's cache.
    prepared = {name.replace("/", "___"), name.replace("/", "___").lower(), _snake(name)}
    raw = hub_cache() / f"datasets--{name.replace('/', '--')}"
    if any((datasets_cache / folder).is_dir() for folder in prepared) or raw.is_dir():
        return
    raise RecipeError(
        f"{key}.dataset_name: '{name}' is neither a generated data set ({', '.join(GENERATED_DATASETS)}), nor a folder, nor in"
        f" the local caches {datasets_cache} and {hub_cache()}; fetch it with"
        f" `hf download --repo-type dataset {name}`, or give data_path"
    )


def _snake(name: str) -> str:
    """`OpenAI/GSM8KData` -> `OpenAI___gsm8_k_data`, as `datasets` names a prepared data set."""
    organization, slash, short = name.rpartition("/")
    short = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", short)).lower()
    return f"{organization}{'___' if slash else ''}{short}"


def _records(key: str, path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, object) of a JSONL file's first SCAN_BYTES. Raises RecipeError at a line that is not JSON."""
    try:
        file = open(path, "rb")  # noqa: SIM115 closed below
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror} (looked from {os.getcwd()})") from None
    with file:
        number = 0
        for number, line in enumerate(file, 1):
            if file.tell() > SCAN_BYTES:
                return
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.strip())
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                what = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else error.reason
                raise RecipeError(f"{key}: {path}:{number}: not JSON: {what}; a data file has one JSON object a line") from None
        if number == 0:
            raise RecipeError(f"{key}: {path} is empty; a data file has one JSON object a line")


def _check_lengths(where: str, prompts: list[tuple[int, str]], tokenizer: Path, limit: int) -> None:
    """`prompts`: (line number, text), of which each has at least as many tokens as the job will count."""
    from tokenizers import Tokenizer

    encodings = Tokenizer.from_file(str(tokenizer)).encode_batch([text for _, text in prompts], add_special_tokens=False)
    lengths = [(len(encoding.ids), number) for encoding, (number, _) in zip(encodings, prompts, strict=True)]
    length, number = max(lengths)
    if length > limit:
        raise RecipeError(
            f"{where}:{number}: a prompt of {length} tokens, but data.max_input_seq_length is {limit}; shorten it, raise the"
            " limit, or data.overlong_prompts=drop"
        )
