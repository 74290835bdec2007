"""Check the tokenizer and the data files of a recipe before anything is created or submitted.

`architecture.py` checks a model's config.json, `data_records.py` the records of data files.

Reads JSON, JSONL and tokenizer.json, imports neither torch nor transformers, and bounds how much it reads, so that it takes
less than two seconds. The job checks records beyond these bounds, and prompt lengths with the chat template applied.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

from launch.preflight import (
    architecture,
    data_files,
    data_records,
    libraries,
    model_tokenizers,
    prompt_tokens,
)
from launch.preflight.data_files import FirstRecords
from launch.preflight.data_records import Fields
from launch.preflight.rendered_records import RenderedRecords
from launch.recipes.model_files import hf_home, hub_cache
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
from pipeline.data.columns import recognize_columns
from pipeline.data.records import check_prompt_text
from pipeline.recipe import user_files

LONGEST = 256  # tokens are counted for this many of the longest prompts, and for as many of the first ones
SHOWN_FAULTS = 5  # faults reported per data file


def problems(
    recipe: Recipe,
    pending: Sequence[os.PathLike] = (),
    notes: list[str] | None = None,
    fields: Mapping[str, Fields] | None = None,
) -> Iterator[Problem]:
    """Yield problems of tokenizers and data files.

    pending: models of needed recipes that have not run yet, which are not checked. notes: receives how data files are read.
    fields: name of a user's environment -> its fields (`user_imports.fields`).
    """
    notes = [] if notes is None else notes
    notes += prompt_tokens.notes(recipe)
    yield from architecture.problems(recipe, pending)
    yield from libraries.problems(recipe)
    tokenizer = yield from model_tokenizers.problems(recipe, pending, notes)
    yield from model_tokenizers.teacher_problems(recipe, tokenizer, pending)
    for key, dataset in config.keyed_sets(recipe.data).items() if config.trains(recipe) else ():
        yield from _check_dataset(recipe, key, dataset, tokenizer, notes, fields or {})


# ---- data ---------------------------------------------------------------------------------------------------------------


def _check_dataset(
    recipe: Recipe,
    key: str,
    dataset: DatasetConfig,
    tokenizer: Path | None,
    notes: list[str],
    fields: Mapping[str, Fields],
) -> Iterator[Problem]:
    texts: list[Problem] = []
    template, system = "{}", ""
    with collected(texts):
        template = _template(f"{key}.prompt_file", dataset.prompt_file) if dataset.prompt_file else "{}"
    with collected(texts):
        system = _text(f"{key}.system_prompt_file", dataset.system_prompt_file) if dataset.system_prompt_file else ""
    yield from texts
    if not recipe.data.apply_chat_template:
        for name in ("system_prompt_file", "messages_key"):
            if getattr(dataset, name):
                message = f"got {getattr(dataset, name)}, which needs a chat template, but data.apply_chat_template is false"
                yield Problem(f"{key}.{name}", "contradiction", message)
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
    if records is None:
        return
    rendered = functools.partial(RenderedRecords, recipe, tokenizer=None if texts else tokenizer, text=template, system=system)
    function_fields = fields.get(dataset.env_name or "")
    inputs, answers = yield from _check_records(recipe, key, dataset, records, notes, function_fields, rendered)
    if tokenizer and inputs and not texts:
        system = system if recipe.data.apply_chat_template else ""
        prompts = [(number, f"{system}{template.format(text)}".strip()) for number, text in _select_texts(inputs)]
        yield from prompt_tokens.problems(records, prompts, tokenizer, recipe, "prompts")
    if tokenizer and answers:
        yield from prompt_tokens.problems(records, _select_texts(answers), tokenizer, recipe, "answers")


def _select_texts(texts: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the (record number, text) pairs to tokenize: those of the longest texts and the first ones."""
    return list(dict.fromkeys(sorted(texts, key=lambda numbered: -len(numbered[1]))[:LONGEST] + texts[:LONGEST]))


def _check_records(
    recipe: Recipe,
    key: str,
    dataset: DatasetConfig,
    records: FirstRecords,
    notes: list[str],
    fields: Fields | None,
    rendered: Callable[..., RenderedRecords],
) -> Generator[Problem, None, tuple[list[tuple[int, str]], list[tuple[int, str]]]]:
    """Yield a problem for each fault of the records, one for all records with the same fault; return (prompts, answers).

    Each is a list of (record number, text); the answers are those to learn from. fields: those of the user's environment; None
    if there is none. rendered: a function that returns the renderer of a data set's records.
    """
    numbered = records.numbered
    inputs: list[tuple[int, str]] = []
    answers: list[tuple[int, str]] = []
    unusable: dict[str, list[int]] = {}
    try:
        columns = recognize_columns(recipe, key, dataset, (record for _, record in numbered))
    except ValueError as error:
        alike = numbered if dataset.dataset_name in GENERATED_DATASETS else numbered[:1]
        unusable[str(error)] = [number for number, _ in alike]
    else:
        if columns.description:
            notes.append(f"{key}: {columns.description}")
        if columns.dataset.messages_key != dataset.messages_key and not recipe.data.apply_chat_template:
            yield _untemplated(records, columns.dataset.messages_key)
            return [], []
        rows = [record for _, record in numbered]
        notes += data_records.absent_tools(recipe, key, dataset, rows)
        required: Sequence[str] = ()
        if fields is not None:
            notes += data_records.replaced_columns(key, columns.dataset, fields, rows)
            absent = list(data_records.absent_columns(recipe, key, dataset, columns.dataset, fields.required, rows))
            yield from absent
            required = () if absent else fields.required
        expected = data_records.ExpectedAnswers(recipe, columns.dataset)
        refused = rendered(dataset=columns.dataset).faults(numbered, notes)
        for number, record in numbered:
            try:
                text = data_records.prompt(recipe, record, columns.dataset, required)
                if number in refused:
                    raise ValueError(refused[number])
            except ValueError as error:
                unusable.setdefault(str(error), []).append(number)
            else:
                inputs += [] if text is None else [(number, text)]
                answers += [(number, answer) for answer in data_records.learned_answers(recipe, record, columns.dataset)]
                if fault := expected.fault(record):
                    unusable.setdefault(fault, []).append(number)
    stays, count = records.bad, len(numbered)
    if dataset.data_path is not None:  # `datasets` refuses the whole file for such a line
        unusable, stays, count = unusable | records.bad, {}, count + sum(map(len, records.bad.values()))
    bad = droppable("data.bad_records", recipe.data.bad_records == "drop", unusable, count) | stays
    yield from bad_record_problems(records, bad)
    return inputs, answers


def _untemplated(records: FirstRecords, column: str | None) -> Problem:
    """Return the problem of a column with conversations while data.apply_chat_template is false."""
    message = f"{records.location(records.numbered[0][0])}: '{column}' is a conversation, which needs a chat template"
    hint = "but data.apply_chat_template is false. Try data.apply_chat_template=true"
    return Problem(records.key, "contradiction", f"{message}, {hint}")


def bad_record_problems(records: FirstRecords, bad: dict[str, list[int]]) -> Iterator[Problem]:
    """Yield a problem for each of the first SHOWN_FAULTS faults, and one for the number of records with other faults.

    bad: message -> record numbers.
    """
    for message, numbers in list(bad.items())[:SHOWN_FAULTS]:
        yield Problem(
            records.key, "bad-record", f"{records.location(numbers[0])}: {message}{data_files.also(numbers, records.unit)}"
        )
    if more := sum(map(len, list(bad.values())[SHOWN_FAULTS:])):
        yield Problem(records.key, "bad-record", f"{records.path}: {more} more {records.unit}s have other faults")


def droppable(key: str, drops: bool, bad: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """Return message -> record numbers: the faults to report for a file of `count` records.

    Returns {} if bad records are dropped and at least one record remains. key: the key `bad_records` of these data. drops:
    whether its value is `drop`. bad: fault -> record numbers.
    """
    wrong = sum(map(len, bad.values()))
    if drops and wrong < count:
        return {}
    return {f"{fault}{_advice(key, fault, wrong < count)}": numbers for fault, numbers in bad.items()}


def _advice(key: str, fault: str, others_usable: bool) -> str:
    """Return the end of a message about `fault`, with a remedy. others_usable: whether other records have no fault."""
    if not others_usable:
        return "; no record can be used"
    return f", or {key}=drop" if ". Try " in fault else f". Try to fix it, or {key}=drop"


def _template(key: str, path: str) -> str:
    """Return a prompt file's text. Raises RecipeError if it does not have exactly one {} for the prompt."""
    text = _text(key, path)
    try:
        return check_prompt_text(text)
    except ValueError as error:
        raise RecipeError(Problem(key, "bad-format", f"got {path}; {error}")) from None


def _text(key: str, path: str) -> str:
    try:
        return user_files.read_text(path)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise RecipeError(data_files.unreadable(key, path, error)) from None


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
        what = f"got {name}, a file; expected a folder or a name. Try {key}.data_path for JSONL, or the file's folder"
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


def _is_cached(name: str) -> bool:
    # `datasets` writes org___name in lower case; older versions kept the case. A raw copy is in the hub's cache.
    prepared = {name.replace("/", "___"), name.replace("/", "___").lower(), _snake(name)}
    raw = hub_cache() / f"datasets--{name.replace('/', '--')}"
    files = (path for path in raw.glob("snapshots/*/**/*") if path.is_file() and path.name not in DATASET_CARDS)
    return any(files) or any((datasets_cache() / folder).is_dir() for folder in prepared)


def _snake(name: str) -> str:
    """Return the folder name of a prepared data set in `datasets`: `OpenAI/GSM8KData` -> `OpenAI___gsm8_k_data`."""
    organization, slash, short = name.rpartition("/")
    short = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", short)).lower()
    return f"{organization}{'___' if slash else ''}{short}"
