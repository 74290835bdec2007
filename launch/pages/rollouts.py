"""Read lengths, rewards and samples from rollouts/*.jsonl.

A long run's rollouts are too large for a page. Therefore only a limited number of files is read, at even distances over the
steps. Samples are shown from some of these files, without the middle of long texts. The page states each of these limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.drawing.html import Html, data, tag
from launch.drawing.step_picture import pick_evenly
from launch.pages.chart import Chart, Mark, Series
from launch.runs import run_keys
from pipeline.config import RecipeError
from pipeline.files.stored_files import FileKey, is_encrypted
from pipeline.observe.metrics import read_rollouts
from pipeline.recipe import user_files

KINDS = {"step": "training", "val": "validation"}
FILES = 200
"""Maximum number of files that are read for one run and kind."""
READ_BYTES = 1 << 30
"""Approximate number of bytes that are read for all runs together."""
SAMPLED_FILES = 24
"""Maximum number of files of one run and kind with samples on the page."""
SAMPLES = 32
"""Maximum number of samples of one file."""
PAGE_CHARACTERS = 4_000_000
"""Maximum number of characters of all samples on the page."""
TEXT_CHARACTERS = 6_000
"""Maximum number of characters of a prompt or completion."""
TURNS = 20
"""Maximum number of turns that are shown of an episode."""
DISTINCT = 6
"""If rewards have at most this many distinct values, a chart shows the share of each value."""
OWN = frozenset(("prompt_index", "sample", "reward"))
"""Numbers of a record that are not metrics."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class StepRollouts:
    """The lengths and rewards in one file of rollouts."""

    step: int
    lengths: list[int]
    rewards: list[float]


@dataclass
class Rollouts:
    """The parts of several runs' rollouts that charts and samples show."""

    steps: dict[tuple[int, str], list[StepRollouts]] = field(default_factory=dict)  # (run, kind) -> in order
    files: list[dict[str, Any]] = field(default_factory=list)  # for samples.js
    prompts: dict[str, int] = field(default_factory=dict)  # text -> number
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)  # why encrypted rollouts are missing, each reason once


def read(folders: Sequence[Path], page: Path | None = None) -> Rollouts:
    """Return the rollouts in the folders of runs. Runs are numbered in the order of `folders`.

    Encrypted rollouts whose key is not on this machine are left out, with a note. page: the file to which samples are written;
    None: no file. If it is in a run's folder, samples of this run's encrypted rollouts are left out, since the page would store
    them there as plain text.
    """
    rollouts = Rollouts()
    kinds = {(run, kind): _files(folder, kind) for run, folder in enumerate(folders) for kind in KINDS}
    kinds = {key: paths for key, paths in kinds.items() if paths}
    for (run, kind), paths in kinds.items():
        mean_size = sum(path.stat().st_size for path in paths) / len(paths) + 1
        chosen = pick_evenly(paths, min(FILES, max(2, int(READ_BYTES / len(kinds) / mean_size))))
        sampled = set(pick_evenly(chosen, SAMPLED_FILES))
        room = PAGE_CHARACTERS // len(kinds) // len(sampled)
        steps, of = [], 0
        run_name = f"{folders[run].name}: " if len(folders) > 1 else ""
        hides = _is_plain_beside(page, folders[run])
        for path, records in _readable(chosen, folders[run], rollouts.left_out):
            steps.append(
                StepRollouts(_step(path), [_length(record) for record in records], [record["reward"] for record in records])
            )
            if path not in sampled:
                continue
            if hides(path):
                rollouts.left_out.setdefault(
                    f"{run_name}a page in the run folder shows no encrypted samples. Try out=FILE outside the run folder"
                )
                continue
            of += 1
            rollouts.files.append(_samples(rollouts.prompts, run, kind, path, records, room))
        if not steps:
            continue
        rollouts.steps[run, kind] = steps
        rollouts.notes.append(f"{run_name}{KINDS[kind]}: samples of {of} of {len(paths)} steps")
    return rollouts


def _readable(paths: Sequence[Path], folder: Path, left_out: dict[str, None]) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield (file, its records) for each file with records.

    Stop at a file that cannot be decrypted, and add the reason to `left_out`.
    """
    key = run_keys.source(folder)
    for path in paths:
        try:
            records = _records(path, key)
        except RecipeError as error:
            if error.codes == ("unreadable",):
                raise
            left_out.setdefault(str(error))
            return
        if records:
            yield path, records


def _is_plain_beside(page: Path | None, folder: Path) -> Callable[[Path], bool]:
    """Return a function from a file of rollouts to whether it is encrypted while the page is in the same run folder."""
    if page is None or folder.resolve() not in (page.absolute().parent.resolve() / page.name).parents:
        return lambda path: False

    def is_encrypted_file(path: Path) -> bool:
        with user_files.open_file(path) as file:
            return is_encrypted(file.read(8))

    return is_encrypted_file


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "rollouts").glob(f"{kind}_*.jsonl"), key=_step)


def _step(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _records(path: Path, key: Callable[[], FileKey | None]) -> list[dict[str, Any]]:
    try:
        return read_rollouts(path, key)
    except FileNotFoundError:  # a restart has just deleted it
        return []


def _length(record: dict[str, Any]) -> int:
    return len(record["completion_tokens"])


# ---- samples ----------------------------------------------------------------------------------------------------------------


def _samples(prompts: dict[str, int], run: int, kind: str, path: Path, records: list[dict], room: int) -> dict[str, Any]:
    """Return the samples of one file, in the form that samples.js reads.

    prompts: text -> number of all prompts so far; new prompts are added. room: the number of characters for all texts.
    """
    samples = []
    for record in pick_evenly(records, SAMPLES):
        prompt, answer = shorten(record["prompt"]), _answer(record)
        room -= _characters(answer) + (len(prompt) if prompt not in prompts else 0) + 100
        if room < 0 and samples:
            break
        number = prompts.setdefault(prompt, len(prompts))
        samples.append({"prompt": number, **answer, "reward": _digits(record["reward"]), "facts": _facts(record)})
    return {"run": run, "kind": KINDS[kind], "step": _step(path), "of": len(records), "samples": samples}


def _answer(record: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of an answer: its completion or, for an episode with turns, the completion and observation of each turn.

    If there are more than TURNS turns, those in the middle are left out.
    """
    turns = record.get("turns")
    if not turns:
        return {"completion": shorten(record["completion"])}
    shown_turns = turns if len(turns) <= TURNS else [*turns[: TURNS // 2], None, *turns[-(TURNS // 2) :]]
    most = max(200, TEXT_CHARACTERS // len(shown_turns))
    left_out = (f"… {len(turns) - len(shown_turns) + 1} turns are left out here …", "")
    return {"turns": [(shorten(turn["said"], most), shorten(turn["told"], most)) if turn else left_out for turn in shown_turns]}


def _characters(answer: dict[str, Any]) -> int:
    return len(answer["completion"]) if "completion" in answer else sum(len(text) for turn in answer["turns"] for text in turn)


def _facts(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) for each fact to show about a sample in addition to its texts and its reward."""
    facts: list[tuple[str, Any]] = [("finish", record["finish"]), ("tokens", _length(record))]
    if turns := record.get("turns"):
        facts.append(("turns", len(turns)))
        rewards = " ".join(f"{turn['reward']:g}" for turn in turns if "reward" in turn)
        facts += [("rewards of turns", shorten(rewards, 200))] if rewards else []
    facts += [(key, shorten(str(record[key]), 600)) for key in ("dataset", "failure", "broke") if record.get(key)]
    facts += [(key, shorten(text, 200)) for key, text in record.get("notes", {}).items()]
    facts += [(key, _digits(value)) for key, value in record.items() if key not in OWN and isinstance(value, int | float)]
    if isinstance(answer := (record.get("task") or {}).get("answer"), str | int | float):
        facts.append(("answer", shorten(str(answer), 200)))
    if versions := sorted({version for version, _ in record.get("spans", ())}):
        facts.append(("weights of step", " to ".join(str(step) for step in dict.fromkeys((versions[0], versions[-1])))))
    return facts


def _digits(value: float) -> float | None:
    return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None


def shorten(text: str, most: int = TEXT_CHARACTERS) -> str:
    """Return the text; if it has more than `most` characters, replace its middle by a note."""
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters are left out here …\n{text[-tail:]}"


def samples(rollouts: Rollouts) -> Html:
    """Return the element in which samples.js draws the samples."""
    return tag("div", data({"files": rollouts.files, "prompts": list(rollouts.prompts)}, "samples-data"), class_="samples")


# ---- distributions ----------------------------------------------------------------------------------------------------------


def lengths(rollouts: Rollouts, marks: Sequence[Mark]) -> list[Chart]:
    """Return a chart of all runs' completion lengths for each kind of rollouts."""
    return list(_bands(rollouts, "completion tokens", "tokens", lambda step: step.lengths, marks, []))


def rewards(rollouts: Rollouts, labels: Sequence[str], marks: Sequence[Mark]) -> list[Chart]:
    """Return a chart with bands of all runs' rewards for each kind of rollouts.

    A run with 2 to DISTINCT distinct rewards has a separate chart of the share of each reward instead.
    """
    charts, shared = [], []
    for (run, kind), steps in rollouts.steps.items():
        values = sorted({reward for step in steps for reward in step.rewards})
        if not 1 < len(values) <= DISTINCT:
            continue
        shared.append((run, kind))
        x = [step.step for step in steps]
        counts = [Counter(step.rewards) for step in steps]
        shares = [[count[value] / count.total() for count in counts] for value in values]
        layers = [Series(f"{value:g}", x, y, run) for value, y in zip(values, shares, strict=True)]
        of = f" of {labels[run]}" if len(labels) > 1 else ""
        charts.append(Chart(f"share of each reward, {KINDS[kind]}{of}", layers, stacked=True))
    return [*_bands(rollouts, "reward", "", lambda step: step.rewards, marks, shared), *charts]


def _bands(rollouts, quantity, unit, values, marks, without) -> Iterator[Chart]:
    """Yield a chart of a quantity for each kind of rollouts, with its median, 25% to 75% and 5% to 95% in each step.

    values: a function from a StepRollouts to the values of the quantity. without: the (run, kind) pairs to leave out.
    """
    for kind in KINDS:
        series = []
        for run, kind_of_run in rollouts.steps:
            if kind_of_run == kind and (run, kind) not in without:
                steps = rollouts.steps[run, kind]
                x = [step.step for step in steps]
                q05, q25, q50, q75, q95 = np.transpose([np.quantile(values(step), QUANTILES) for step in steps]).tolist()
                series += [
                    Series("5% to 95%", x, (), run, "band", q05, q95),
                    Series("25% to 75%", x, (), run, "band", q25, q75),
                    Series("median", x, q50, run),
                ]
        if series:
            yield Chart(f"{quantity}, {KINDS[kind]}", series, unit=unit, marks=marks)
