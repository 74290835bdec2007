"""What can be said against a recipe from the files it names, before anything is created or submitted.

The model's own files are `launch/preflight_model.py`'s.

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

from launch import preflight_model
from launch.model_files import hf_home, hub_cache, inside, model_folder, read_json
from pipeline.config import ENVIRONMENT_KINDS, GENERATED_DATASETS, DatasetConfig, Recipe, RecipeError

SCAN_BYTES = 32 << 20  # of each data file
LONGEST = 256  # prompts whose tokens are counted: those with the most characters
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
    policy = recipe.policy
    tokenizer = None
    if not inside(policy.tokenizer.name, pending):
        folder = model_folder("policy.tokenizer.name", policy.tokenizer.name)
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            raise RecipeError(f"policy.tokenizer.name: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
        _check_chat_template(recipe, folder)
        tokenizer = folder / "tokenizer.json"  # others are only in the old formats, which need transformers
    for key, dataset in (("data.train", recipe.data.train), ("data.validation", recipe.data.validation)):
        if dataset is not None:
            _check_dataset(recipe, key, dataset, tokenizer if tokenizer and tokenizer.exists() else None)


def _check_chat_template(recipe: Recipe, folder: Path) -> None:
    """That the tokenizer has one, where the recipe asks for one and gives none itself."""
    if not recipe.data.apply_chat_template or recipe.policy.tokenizer.chat_template is not None:
        return
    settings = folder / "tokenizer_config.json"
    if not any(folder.glob("chat_template*")) and not (settings.exists() and read_json(settings).get("chat_template")):
        raise RecipeError(
            f"data.apply_chat_template: true, but the tokenizer in {folder} has no chat template; give one in"
            " policy.tokenizer.chat_template, or data.apply_chat_template=false for bare text"
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
        _check_record(f"{key}.data_path: {dataset.data_path}:{number}", record, dataset)
        if dataset.messages_key is None:
            inputs.append((number, str(record[dataset.input_key])))
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


def _check_record(where: str, record: Any, dataset: DatasetConfig) -> None:
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: a {type(record).__name__}, not a JSON object")
    for key in [dataset.messages_key] if dataset.messages_key else [dataset.input_key, dataset.output_key]:
        if key not in record:
            raise RecipeError(f"{where}: no key '{key}'; there are: {', '.join(record) or 'none'}")
    if dataset.messages_key is None:
        value = record[dataset.input_key]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RecipeError(f"{where}: '{dataset.input_key}' is a {type(value).__name__}, not a text or a number")
        return
    messages = record[dataset.messages_key]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise RecipeError(f"{where}: '{dataset.messages_key}' is not a list of {{role, content}}")


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
