"""Check the records of a data file as the job does, with its code (`pipeline/data/chat.py`), but without transformers.

All records that `data_files` reads are parsed. The first and the longest ones are rendered and tokenized too, within bounds of
time and memory, since a chat template is a program of the model's author. The job checks all records.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.preflight import bounded, data_files
from launch.preflight.data_files import FirstRecords, Record
from launch.terminal.units import plural
from pipeline.algorithms import LABELED
from pipeline.config import (
    GENERATED_DATASETS,
    DatasetConfig,
    Problem,
    Recipe,
    RecipeError,
    answer_check,
    generates,
    prompt_tools,
)
from pipeline.config.environments import Environments, judging_scorers
from pipeline.data.chat import Encoder, unknown_token
from pipeline.data.columns import column, column_names, guess_columns, judged_by_answer, recognize_columns
from pipeline.data.file_tokenizer import FileTokenizer
from pipeline.data.records import GROUND_TRUTH, OF_VERL, RecordReader, Turns
from pipeline.data.turns import GENERATION_BLOCK

ENCODED = 256  # of the first records, and as many of the longest other ones
MOST_TOKENS = 250_000  # of the first records together, and of the longest ones: about a second each
MOST_CHARACTERS = 1 << 17  # of a record; tokenizers need much memory for longer ones
SHOWN_FAULTS = 5  # faults reported per data file
Numbered = list[tuple[int, Record]]


@dataclass(frozen=True)
class Fields:
    """Fields of a user's reward function or of a judge's prompt. An environment that is a class has none."""

    key: str  # that names the function, such as env.NAME.kind
    path: str  # of the function, or a name for the prompt
    required: Sequence[str]  # that it needs from a record
    kwargs_key: str
    kwargs: Sequence[str] = ()  # that kwargs give, in place of columns of the same names
    advice: str = "a default for it, or a value in the environment's kwargs"  # for one that no record has


def of_judges(environments: Environments, name: str | None) -> list[Fields]:
    """Return the columns that prompts of judges contain, for the environment `name`."""
    found = []
    for scorer in judging_scorers(environments, name):
        columns, reference = scorer.kwargs.get("columns"), scorer.kwargs.get("reference")
        if scorer.kind == "llm_judge" and (columns or reference):
            key, required = f"{scorer.kwargs_key}.{'columns' if columns else 'reference'}", [*(columns or []), reference]
            found.append(
                Fields(key, "the judge's prompt", [*filter(None, required)], scorer.kwargs_key, advice="another column")
            )
    return found


def of_agents(environments: Environments, name: str | None) -> list[Fields]:
    """Return the columns that an agent gets, or that its image's path has, for the environment `name`."""
    if name is None or name not in environments or environments[name].kind != "agent":
        return []
    arguments, key = environments[name].kwargs, f"env.{name}.kwargs"
    in_path = re.findall(r"\{(\w+)\}", str((arguments.get("sandbox") or {}).get("image", "")))
    found = {f"{key}.columns": list(arguments.get("columns") or []), f"{key}.sandbox.image": in_path}
    return [Fields(at, "the agent", names, key, advice="another column") for at, names in found.items() if names]


@dataclass(frozen=True)
class EncodedRecord:
    """The result of encoding a record as the job does."""

    number: int
    fault: str | None = None
    tokens: int = 0  # of its longest sequence
    unknown: str = ""  # the texts that the tokenizer does not know


def problems(
    recipe: Recipe,
    key: str,
    dataset: DatasetConfig,
    records: FirstRecords,
    tokenizer: Path | None,
    fields: Sequence[Fields],
    notes: list[str],
) -> Iterator[Problem]:
    """Yield a problem for each fault of the records, one for all records with the same fault.

    tokenizer: the path of the policy's tokenizer.json; None: encode no records. fields: those of the user's code in the
    environment. notes: receives which columns are read.
    """
    numbered, usable, sizes = records.numbered, [], {}
    faults: dict[int, str] = {}
    encoded: list[EncodedRecord] = []
    reader, required = None, ()
    try:
        columns = recognize_columns(recipe, key, dataset, (record for _, record in numbered))
    except ValueError as error:
        alike = numbered if dataset.dataset_name in GENERATED_DATASETS else numbered[:1]
        faults = {number: str(error) for number, _ in alike}
    else:
        if columns.description:
            notes.append(f"{key}: {columns.description}")
        if columns.dataset.messages_key != dataset.messages_key and not recipe.data.apply_chat_template:
            yield _untemplated(records, columns.dataset.messages_key)
            return
        rows = [record for _, record in numbered]
        notes += _absent_tools(recipe, key, dataset, rows)
        if fields:
            notes += _replaced_columns(key, columns.dataset, fields, rows)
            absent = list(_absent_columns(key, dataset, columns.dataset, fields, rows))
            yield from absent
            required = () if absent else [*dict.fromkeys(name for one in fields for name in one.required)]
        reader = RecordReader(recipe.data, columns.dataset)
        for number, record in numbered:
            try:
                sizes[number] = _read(recipe, reader, record, required)
                usable.append((number, record))
            except ValueError as error:
                faults[number] = str(error)
        encoded = _encode(recipe, key, columns.dataset, tokenizer, usable, sizes, notes) if tokenizer and usable else []
        faults |= {record.number: record.fault for record in encoded if record.fault}
        notes += _labels_alike(recipe, key, reader, usable)
        faults |= _unjudged(recipe, reader, [pair for pair in usable if pair[0] not in faults])
    unusable: dict[str, list[int]] = {}
    for number in sorted(faults):
        unusable.setdefault(faults[number], []).append(number)
    unusable, count = unusable | records.bad, len(numbered) + sum(map(len, records.bad.values()))
    drops = recipe.data.bad_records == "drop"
    yield from bad_record_problems(records, droppable("data.bad_records", drops, unusable, count))
    if reader is not None and not drops:
        for other in records.others:
            yield from bad_record_problems(other, _unlike(recipe, reader, other, required))
    if tokenizer:
        yield from _token_problems(recipe, records, tokenizer, [record for record in encoded if not record.fault])


def _read(recipe: Recipe, reader: RecordReader, record: Record, required: Iterable[str]) -> int:
    """Return about how many characters of a record are encoded. Raise ValueError with the first fault of its columns.

    required: fields that the user's reward function needs.
    """
    if generates(recipe):
        read: Any = reader.question(record)
        if judged_by_answer(recipe, reader.dataset):
            reader.answer(record)
        reader.check_fields(record, required)
    else:
        read = reader.learned(recipe.algorithm, record)
        reader.margin(record)
    try:
        return len(str(read))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _unlike(recipe: Recipe, reader: RecordReader, records: FirstRecords, required: Sequence[str]) -> dict[str, list[int]]:
    """Return fault -> record numbers of another file of the data set, whose columns may differ from the first file's."""
    faults = dict(records.bad)
    for number, record in records.numbered:
        try:
            _read(recipe, reader, record, required)
        except ValueError as error:
            faults.setdefault(str(error), []).append(number)
    return {f"{fault}{_advice('data.bad_records', fault, True)}": numbers for fault, numbers in faults.items()}


def _unjudged(recipe: Recipe, reader: RecordReader, records: Numbered) -> Iterator[tuple[int, str]]:
    """Yield (number, fault) of the first valid records by whose expected answer the environment cannot judge.

    The job checks later ones where it uses them.
    """
    dataset = reader.dataset
    check = answer_check(recipe.env, dataset.env_name) if generates(recipe) and judged_by_answer(recipe, dataset) else None
    if check is None:
        return
    for number, record in records[: check.at_start]:
        try:
            check.check(reader.answer(record))
        except ValueError as error:
            name = dataset.messages_key or dataset.output_key
            yield number, f"'{name}': env.{dataset.env_name} cannot use it as the expected answer: {error}"


# ---- columns ------------------------------------------------------------------------------------------------------------


def _untemplated(records: FirstRecords, name: str | None) -> Problem:
    """Return the problem of a column with conversations while data.apply_chat_template is false."""
    message = f"{records.location(records.numbered[0][0])}: '{name}' is a conversation, which needs a chat template"
    hint = "but data.apply_chat_template is false. Try data.apply_chat_template=true"
    return Problem(records.key, "contradiction", f"{message}, {hint}")


def _labels_alike(recipe: Recipe, key: str, reader: RecordReader, records: Numbered) -> Iterator[str]:
    """Yield a note if all answers have the same label: the policy then learns from good, or from bad, answers alone."""
    if (
        recipe.algorithm in LABELED
        and len(labels := {good for _, record in records for _, good in reader.labeled(record)}) == 1
    ):
        kinds = ("good", "bad") if labels == {True} else ("bad", "good")
        count = "answer is" if len(records) == 1 else f"{len(records):,} answers are all"
        yield f"{key}: the first {count} {kinds[0]}; {recipe.algorithm} needs {kinds[1]} ones too"


def _absent_tools(recipe: Recipe, key: str, dataset: DatasetConfig, records: list[Record]) -> Iterator[str]:
    """Yield a note if the recipe names a column of tools that no record has. Later records may have it."""
    tools_key = dataset.tools_key
    if not tools_key or tools_key == DatasetConfig().tools_key or not recipe.data.apply_chat_template:
        return
    if all(column(record, tools_key) is None for record in records):
        close_names = difflib.get_close_matches(tools_key, [name for name in _columns(records) if name != tools_key], 1, 0.7)
        hint = f". Did you mean {close_names[0]}?" if close_names else ""
        message = f"none of the first {len(records)} records has tools in '{tools_key}'; their prompts list no tools"
        yield f"{key}.tools_key: {message}{hint}"


def _replaced_columns(key: str, dataset: DatasetConfig, fields: Sequence[Fields], records: list[Record]) -> Iterator[str]:
    """Yield a note for each argument of a user's reward function that kwargs give and the records have too."""
    names = _field_names(dataset, records)
    for one in fields:
        for name in names if one.kwargs else ():
            if name in one.kwargs:
                yield f"{one.kwargs_key}.{name}: it replaces '{name}' of the records of {key}. Try another name to keep both"


def _columns(records: list[Record]) -> dict[str, None]:
    return dict.fromkeys(name for record in records for name in (*record, *column_names(record)))


def _field_names(dataset: DatasetConfig, records: list[Record]) -> dict[str, None]:
    """Return the names of the fields that records give a reward function."""
    columns = _columns(records)
    names = columns | ({"expected": None} if dataset.output_key in columns or dataset.messages_key else {})
    return names | ({GROUND_TRUTH: None} if {OF_VERL, "expected"} & names.keys() else {})


def _absent_columns(
    key: str, configured: DatasetConfig, dataset: DatasetConfig, fields: Sequence[Fields], records: list[Record]
) -> Iterator[Problem]:
    """Yield a problem for each reward function that needs a field which no record has, or if `output_key` looks misspelt.

    configured: the data set as the recipe describes it. dataset: the data set with its recognized columns.
    """
    columns = _columns(records)
    if configured.output_key not in columns and (
        close_names := difflib.get_close_matches(configured.output_key, columns, 1, 0.7)
    ):
        message = f"got {configured.output_key}; expected one of the columns {', '.join(columns)}. Try {close_names[0]}"
        yield Problem(f"{key}.output_key", "missing-column", message)
        return
    names = _field_names(dataset, records)
    for one in fields:
        if absent := [field for field in one.required if field not in names]:
            answer = guess_columns(["output_key"], list(columns), judged=True)["output_key"]
            hint = f"{key}.output_key={answer}" if absent[0] in ("expected", GROUND_TRUTH) else one.advice
            near = difflib.get_close_matches(absent[0], columns, 1)
            hint += f". Did you mean {near[0]}?" if near else ""
            message = f"{one.path} needs {absent[0]}, but the records of {key} have: {', '.join(columns)}. Try {hint}"
            yield Problem(one.key, "missing-column", message)


# ---- tokens -------------------------------------------------------------------------------------------------------------


def _encode(
    recipe: Recipe,
    key: str,
    dataset: DatasetConfig,
    tokenizer: Path,
    records: Numbered,
    sizes: Mapping[int, int],
    notes: list[str],
) -> list[EncodedRecord]:
    """Return the results of the first and of the longest records; none if another check reports the tokenizer.

    dataset: the data set with its recognized columns. sizes: record number -> characters. notes: receives why records are not
    encoded.
    """
    short = [(number, record) for number, record in records if sizes[number] <= MOST_CHARACTERS]
    if left := len(records) - len(short):
        longer = f"{plural(left, 'record')} of more than {MOST_CHARACTERS:,} characters"
        notes.append(f"{key}: only the job checks that the tokenizer encodes {longer}")
    first = short[:ENCODED]
    longest = sorted(short[ENCODED:], key=lambda numbered: -sizes[numbered[0]])[:ENCODED]

    def work() -> tuple[list[tuple[Any, ...]], str]:
        """Return (the results, the first error that tells of this check and not of a record; "" without one)."""
        try:
            of_files: Any = FileTokenizer(tokenizer.parent, recipe.policy.tokenizer)  # has what Encoder uses of transformers'
            tools = prompt_tools(recipe.env, dataset.env_name) if generates(recipe) else ()
            encoder = Encoder(of_files, recipe.policy.tokenizer, recipe.data, dataset, tools)
        except RecipeError:
            return [], ""
        results: list[tuple[Any, ...]] = []
        raised = ""
        for chosen, seconds in ((first, bounded.SECONDS / 4), (longest, bounded.SECONDS / 2)):
            tokens = 0
            for number, record in chosen:
                if tokens > MOST_TOKENS or time.process_time() > seconds:  # of this fork
                    break
                try:
                    lengths, texts = _sequences(recipe, encoder, record)
                except ValueError as error:
                    results.append((number, str(error)))
                    continue
                except (TypeError, AttributeError, LookupError) as error:  # the job's tokenizer may encode the record
                    raised = raised or f"{type(error).__name__}: {error}"
                    continue
                unknown = _unknown(encoder, texts) if recipe.data.unknown_tokens == "error" else ""
                results.append((number, None, max(lengths), unknown))
                tokens += sum(lengths)
        return results, raised

    try:
        results, raised = bounded.call(work)
    except bounded.Unbounded as error:
        results, raised = [], str(error)
    if raised:
        notes.append(
            f"policy.tokenizer: only the job checks that it encodes {'all' if results else 'the'} records: here {raised}"
        )
    return [EncodedRecord(*result) for result in results]


def _sequences(recipe: Recipe, encoder: Encoder, record: Record) -> tuple[list[int], list[str]]:
    """Return (numbers of tokens, texts) of a record's prompt, example or pair. Raises ValueError as the job does."""
    if generates(recipe):
        question = encoder.question(record)
        if not isinstance(question, str):
            question = encoder.template.text(question, **encoder.template_options(record), add_generation_prompt=True)
        return [len(encoder.prompt(record))], [question]
    sizes, texts = [], []
    for example in encoder.learned(recipe.algorithm, record):
        marks_turns = False
        if isinstance(example, Turns):
            texts.append(encoder.template.text(example.messages, **example.options))
            template = encoder.tokenizer.get_chat_template(tools=example.options.get("tools"))
            marks_turns = bool(GENERATION_BLOCK.search(template))  # which only transformers reads
        else:
            texts.append((example.prompt or "") + example.text)
        sizes.append(encoder.count(example) if marks_turns else len(encoder.encode(example)[0]))
    return sizes, texts


def _unknown(encoder: Encoder, texts: list[str]) -> str:
    """Return the first parts of texts that the tokenizer does not know, and the token for them; "" if it knows all."""
    mark, parts = unknown_token(encoder.tokenizer), []
    for text in texts if mark is not None else ():
        encoding = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        parts += [repr(text[begin:end]) for token, (begin, end) in tokens if token == mark]
    return f"{', '.join(dict.fromkeys(parts[:5]))}, which becomes {encoder.tokenizer.unk_token}" if parts else ""


def _token_problems(recipe: Recipe, records: FirstRecords, tokenizer: Path, encoded: list[EncodedRecord]) -> Iterator[Problem]:
    """Yield a problem for the longest record if it is too long, and for the first record with unknown text."""
    if encoded and recipe.data.overlong_prompts == "error":
        yield from _too_long(recipe, records, max(encoded, key=lambda record: (record.tokens, record.number)))
    if unknown := [record for record in encoded if record.unknown]:
        first = min(unknown, key=lambda record: record.number)
        source = f"{records.location(first.number)}: the tokenizer in {tokenizer.parent}"
        message = f"does not know {first.unknown} (in {len(unknown)} of the {len(encoded)} records checked)"
        hint = "Try another policy.tokenizer.name, or data.unknown_tokens=keep or drop"
        yield Problem(records.key, "bad-record", f"{source} {message}. {hint}")


def _too_long(recipe: Recipe, records: FirstRecords, longest: EncodedRecord) -> Iterator[Problem]:
    if longest.tokens > (limit := recipe.data.max_input_seq_length):
        message = f", but data.max_input_seq_length is {limit}"
    elif generates(recipe) and longest.tokens >= (limit := recipe.policy.max_total_sequence_length):
        message = f" leaves no room for an answer in policy.max_total_sequence_length {limit}"
    else:
        return
    sequence = "prompt" if generates(recipe) else "sequence"
    hint = f"Try a shorter {sequence}, a higher limit, or data.overlong_prompts=drop"
    where = records.location(longest.number)
    yield Problem(records.key, "too-large", f"{where}: a {sequence} of {longest.tokens} tokens{message}. {hint}")


# ---- messages -----------------------------------------------------------------------------------------------------------


def bad_record_problems(records: FirstRecords, bad: Mapping[str, list[int]]) -> Iterator[Problem]:
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
