"""Formats of chat benchmarks: AlpacaEval, Arena-Hard and MT-Bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from pipeline.data.records import text_of, value_of
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe import user_files
from pipeline.recipe.values import Line, Text


@dataclass
class BaselineArguments:
    """The baseline's answers, and the difficulty of each question."""

    baseline_file: Line | None = None
    """JSONL of a baseline's answers by question: Arena-Hard's model_answer files, AlpacaEval's outputs, or the
    answers/TASK.jsonl of another evaluation. null: the records have them."""
    difficulty_key: Text | None = None
    """Column of a question's difficulty, for the length-controlled win rate. null: none."""


class AlpacaEval(Format):
    """Records {instruction, output, generator, dataset}: the outputs are the baseline's. Groups: `dataset`."""

    Arguments = BaselineArguments
    columns = ("instruction",)

    @override
    def question(self, record: Record, index: int) -> Question:
        instruction = text_of(record, "instruction")
        baseline = _baselines(self.arguments.baseline_file).get(instruction) if self.arguments.baseline_file else None
        if baseline is None:
            baseline = text_of(record, "output")
        task = {"baseline": baseline, "difficulty": _difficulty(record, self.arguments.difficulty_key)}
        return Question("", instruction, task=task, group=str(record.get("dataset") or ""))


class ArenaHard(Format):
    """Records {uid or question_id, category or cluster, prompt or turns: [{content}]}. Groups: `category` or `cluster`.

    A record has the baseline's answer in `baseline`, or `baseline_file` has it.
    """

    Arguments = BaselineArguments

    @override
    def question(self, record: Record, index: int) -> Question:
        name = str(record.get("uid") or record.get("question_id") or "")
        if not name:
            raise ValueError("has neither 'uid' nor 'question_id'")
        prompt = text_of(record, "prompt") if "prompt" in record else _content(value_of(record, "turns"))
        if "baseline" in record:
            baseline = text_of(record, "baseline")
        elif self.arguments.baseline_file is None:
            raise ValueError("has no 'baseline', and format_kwargs.baseline_file is null")
        elif (baseline := _baselines(self.arguments.baseline_file).get(name)) is None:
            raise ValueError(f"{self.arguments.baseline_file} has no answer to question {name}")
        task = {"baseline": baseline, "difficulty": _difficulty(record, self.arguments.difficulty_key)}
        group = str(record.get("category") or record.get("cluster") or "")
        return Question(name, prompt, task=task, group=group)


class MTBench(Format):
    """Records {question_id, category, turns: [text, ...], reference: [text, ...] or null}. Groups: `category`.

    Hugging Face's copy has `prompt_id` and `prompt` in place of question_id and turns.
    """

    @override
    def question(self, record: Record, index: int) -> Question:
        name = value_of(record, "prompt_id" if "prompt_id" in record else "question_id")
        turns = value_of(record, "turns" if "turns" in record or "prompt" not in record else "prompt")
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError(f"the turns are {turns!r}; expected a list of texts")
        references = record.get("reference") or []
        if isinstance(references, str) or len(references) > len(turns):
            raise ValueError(f"'reference' is {references!r}; expected a list with at most one text for each turn")
        task = {"turns": turns, "references": [reference or "" for reference in references]}
        return Question(str(name), turns[0], task=task, group=str(record.get("category") or ""))


_READ: dict[tuple[str, int], dict[str, str]] = {}


def _baselines(path: str) -> dict[str, str]:
    """Return question -> the baseline's answer. Raises ValueError if the file cannot be read."""
    try:
        key = (path, Path(path).stat().st_mtime_ns)
        if key not in _READ:
            lines = user_files.read_text(path, user_files.MAX_JSON).split("\n")
            _READ[key] = dict(_answer(json.loads(line)) for line in lines if line.strip())
        return _READ[key]
    except OSError as error:
        raise ValueError(f"format_kwargs.baseline_file {path}: {error.strerror}") from None
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"format_kwargs.baseline_file {path}: cannot read a line's question and answer: {type(error).__name__} {error}"
        ) from None


def _answer(record: dict[str, Any]) -> tuple[str, str]:
    """Return (question, answer) from a record of a baseline's file."""
    if "output" in record:  # AlpacaEval
        return record["instruction"], record["output"]
    if "messages" in record:  # Arena-Hard 2
        return str(record["uid"]), _content(record["messages"][-1:])
    if "choices" in record:  # Arena-Hard 0.1
        return str(record["question_id"]), _content(record["choices"][0]["turns"])
    texts = record.get("details", {}).get("texts")
    return str(record["question"]), texts[0] if texts else record["text"]  # an evaluation's


def _content(turns: Any) -> str:
    """Return the text of the first turn, which is a text, {content: text}, or {content: {answer: text}}."""
    turn = turns[0] if isinstance(turns, list) and turns else turns
    content = turn["content"] if isinstance(turn, dict) and "content" in turn else turn
    if isinstance(content, dict):
        content = content.get("answer")
    if not isinstance(content, str):
        raise ValueError(f"got {turns!r}; expected turns with a string as 'content'")
    return content


def _difficulty(record: Record, key: str | None) -> float | None:
    return None if key is None else float(value_of(record, key))
