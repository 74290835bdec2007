"""Check the models, tokenizers and data files of a recipe before anything is created or submitted.

Reads data files, JSON and tokenizer.json, imports neither torch nor transformers, and bounds how much it reads and encodes. The
job checks what lies beyond these bounds.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launch.preflight import architecture, data_files, data_records, libraries, model_tokenizers, user_imports
from launch.preflight.data_files import FirstRecords
from launch.preflight.data_records import Fields
from launch.recipes.model_files import hf_home, hub_cache
from launch.recipes.trust import Trust
from launch.terminal.units import plural
from pipeline import config
from pipeline.config import (
    DATASET_CARDS,
    GENERATED_DATASETS,
    NAMED_DATASETS,
    DatasetConfig,
    Problem,
    Recipe,
    RecipeError,
    collected,
    is_dotted_path,
    nearest_dataset,
)
from pipeline.data import sources
from pipeline.data.media import refuse_media
from pipeline.data.records import check_prompt_text
from pipeline.recipe import user_files

FEW = 4  # records of the hub's cache that are searched for images
PROCESSED = 256  # records to which a processor is applied before submission


def problems(
    recipe: Recipe,
    pending: Sequence[os.PathLike] = (),
    notes: list[str] | None = None,
    fields: Mapping[str, Sequence[Fields]] | None = None,
    trust: Trust = Trust.NOTHING,
) -> Iterator[Problem]:
    """Yield problems of models, tokenizers and data files.

    pending: models of needed recipes that have not run yet, which are not checked. notes: receives how data files are read.
    fields: name of an environment -> the fields of the user's code in it (`user_imports.fields`). trust: whose processors may
    run.
    """
    notes = [] if notes is None else notes
    trains = config.trains(recipe)
    most, context = recipe.policy.generation.max_new_tokens, recipe.policy.max_total_sequence_length
    if config.generates(recipe) and trains and most > context:
        notes.append(
            f"policy.generation.max_new_tokens: {most} is above policy.max_total_sequence_length={context}, the limit of prompt"
            " and answer together; answers end at this limit"
        )
    yield from architecture.problems(recipe, pending)
    yield from libraries.problems(recipe)
    tokenizer = yield from model_tokenizers.problems(recipe, pending, notes)
    yield from model_tokenizers.teacher_problems(recipe, tokenizer, pending, notes)
    for key, dataset in config.keyed_sets(recipe.data).items() if trains else ():
        own, name = (fields or {}).get(dataset.env_name or "", ()), dataset.env_name
        read = *own, *data_records.of_judges(recipe.env, name), *data_records.of_agents(recipe.env, name)
        yield from _check_dataset(recipe, key, dataset, tokenizer, notes, read, trust)


def _check_dataset(
    recipe: Recipe,
    key: str,
    dataset: DatasetConfig,
    tokenizer: Path | None,
    notes: list[str],
    fields: Sequence[Fields],
    trust: Trust,
) -> Iterator[Problem]:
    texts: list[Problem] = []
    with collected(texts):
        if dataset.prompt_file:
            _check_template(f"{key}.prompt_file", dataset.prompt_file)
    with collected(texts):
        if dataset.system_prompt_file:
            _text(f"{key}.system_prompt_file", dataset.system_prompt_file)
    yield from texts
    if not recipe.data.apply_chat_template:
        for name in ("system_prompt_file", "messages_key"):
            if getattr(dataset, name):
                message = f"got {getattr(dataset, name)}, which needs a chat template, but data.apply_chat_template is false"
                yield Problem(f"{key}.{name}", "contradiction", message)
    yield from data_files.split_problems(key, dataset)
    if dataset.data_path is None:
        yield from check_name(key, dataset.dataset_name)
    elif dataset.dataset_name is not None:
        yield Problem(key, "contradiction", "got both dataset_name and data_path; expected one of them")
    unread: list[Problem] = []
    records = None
    with collected(unread):
        records = data_files.first_records(key, dataset, notes, drops=recipe.data.bad_records == "drop")
        records = records or data_files.first_generated(key, dataset, config.section(recipe).seed, notes)
    yield from unread
    if records is None and not unread and not dataset.processor:
        yield from _cached_media(key, dataset)
    if records is not None and dataset.processor:
        records = _process(recipe, key, dataset.processor, records, trust, notes)
        if not (records is None or records.numbered or records.bad):
            message = f"{dataset.processor} drops all of the first {PROCESSED} records or fewer; expected one that remains"
            yield Problem(f"{key}.processor", "no-records", message)
            return
    if records is not None:
        yield from data_records.problems(recipe, key, dataset, records, None if texts else tokenizer, fields, notes)


def _cached_media(key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    """Yield a problem if the first records of a data set in the hub's cache have images, sound or video."""
    records = None
    with collected([]):  # a damaged file, which `datasets` may not read
        records = data_files.first_cached(key, dataset, FEW)
    if records is None:
        return
    for number, record in records.numbered:
        try:
            refuse_media(record)
        except ValueError as error:
            yield Problem(records.key, "bad-record", f"{records.location(number)}: {error}")
            return


def _process(recipe: Recipe, key: str, path: str, records: FirstRecords, trust: Trust, notes: list[str]) -> FirstRecords | None:
    """Return the records that a processor makes of the first ones; None if it does not run here. notes: receives why."""
    first = records.numbered[:PROCESSED]
    answers = user_imports.processed(recipe, trust, path, [record for _, record in first])
    if isinstance(answers, str):
        notes.append(f"{key}.processor: only the job checks what it makes of the records: {answers}")
        return None
    made = replace(records, numbered=[], others=[])
    for (number, _), answer in zip(first, answers, strict=True):
        made.numbered += [(number, record) for record in answer.get("made", ())]
        if "fault" in answer:
            made.bad.setdefault(answer["fault"], []).append(number)
    if dropped := sum(answer.get("made") == [] for answer in answers):
        notes.append(f"{key}.processor: {path} drops {dropped} of the first {plural(len(first), 'record')}")
    return made


def _check_template(key: str, path: str) -> None:
    """Raise RecipeError if a prompt file does not have exactly one {} for the prompt."""
    text = _text(key, path)
    try:
        check_prompt_text(text)
    except ValueError as error:
        raise RecipeError(Problem(key, "bad-format", f"got {path}; {error}")) from None


def _text(key: str, path: str) -> str:
    try:
        return user_files.read_text(path)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise RecipeError(sources.unreadable(key, path, error)) from None


def check_name(key: str, name: str | None) -> Iterator[Problem]:
    """Yield a problem if a data set's name is neither built into Hetstep, nor a folder, nor in the local caches."""
    if name is None:
        yield Problem(
            key, "missing-value", "expected dataset_name or data_path. Try data_path=FILE.jsonl, or a data set's name"
        )
        return
    if name in GENERATED_DATASETS or (name not in NAMED_DATASETS and Path(name).is_dir()):
        return
    if is_dotted_path(name) and not Path(name).exists():
        return  # user_imports.py checks it
    if Path(name).is_file():
        what = f"got {name}, a file; expected a folder or a name. Try {key}.data_path={name}"
        yield Problem(f"{key}.dataset_name", "bad-format", what)
        return
    repository = NAMED_DATASETS[name].repository if name in NAMED_DATASETS else name
    if _is_cached(repository):
        return
    caches = f"the local caches {datasets_cache()} and {hub_cache()}"
    if name in NAMED_DATASETS:
        what = f"got '{name}', which is {repository}; expected it in one of {caches}"
    else:
        kinds = f"a generated data set ({', '.join(GENERATED_DATASETS)}), a folder, or one in {caches}"
        what = f"got '{name}'; expected {kinds}"
        what += f". Did you mean '{close}'?" if (close := nearest_dataset(name)) else ""
    hint = f"Try `hf download --repo-type dataset {repository}`, or data_path"
    yield Problem(f"{key}.dataset_name", "unavailable-dataset", f"{what}. {hint}".replace("?.", "?"))


def datasets_cache() -> Path:
    """Return the folder of data sets that `datasets` has prepared."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets").expanduser()


def is_prepared(name: str, subset: str | None = None) -> bool:
    """Return whether `datasets` has prepared a data set, or a subset of it, in its cache."""
    # `datasets` writes org___name in lower case; older versions kept the case.
    short = name.replace("/", "___")
    folders = [datasets_cache() / folder for folder in (short, short.lower(), _snake(name))]
    return any(folder.is_dir() and (not subset or any(folder.glob(f"{glob.escape(subset)}*"))) for folder in folders)


def _is_cached(name: str) -> bool:
    raw = hub_cache() / f"datasets--{name.replace('/', '--')}"
    files = (path for path in raw.glob("snapshots/*/**/*") if path.is_file() and path.name not in DATASET_CARDS)
    return any(files) or is_prepared(name)


def _snake(name: str) -> str:
    """Return the folder name of a prepared data set in `datasets`: `OpenAI/GSM8KData` -> `OpenAI___gsm8_k_data`."""
    organization, slash, short = name.rpartition("/")
    short = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", short)).lower()
    return f"{organization}{'___' if slash else ''}{short}"
