"""Judge how many verifiable instructions of a prompt an answer follows: IFEval (https://arxiv.org/abs/2311.07911).

`prompt.task["answer"]` is JSON with the columns of google/IFEval, {"instruction_id_list": [...], "kwargs": [{...}, ...]}.
`kwargs` has a mapping of arguments for each instruction; null stands for an argument that the instruction does not take. The
rules are in `ifeval_rules.py`.

strict: the answer as it is. loose: an instruction is also followed if the answer follows it without its first or last line, or
without stars. An empty answer follows no instruction.

Differences to lm-evaluation-harness: sentences are counted by other rules (`ifeval_text.py`), unless `sentences: punkt` is set;
arguments that it replaces at random, such as a letter "#", count as they are; languages are detected with a fixed seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome, Unjudged
from pipeline.environments.ifeval_rules import RULES, check_arguments
from pipeline.environments.ifeval_text import TextAnalysis

if TYPE_CHECKING:
    from pipeline.types import Prompt

Instruction = tuple[str, dict[str, Any]]
"""(id, arguments), such as ("punctuation:no_comma", {})."""


@dataclass
class IFEvalArguments:
    """The kwargs of `kind: ifeval`."""

    reward: Literal["strict", "loose", "share"] = "strict"
    """strict, loose: 1 if the answer follows all instructions by this rule, else 0. share: the share of instructions that the
    answer follows by the rule strict."""
    sentences: Literal["rules", "punkt"] = "rules"
    """How sentences are counted. punkt: by NLTK, which needs its data punkt_tab where the ranks run."""


class IFEval(BuiltinEnvironment):
    """Rewards an answer that follows its instructions.

    Metrics: `prompt_strict` and `prompt_loose`, 1 if all instructions are followed; `instruction_strict` and
    `instruction_loose`, the share of followed instructions; `instructions`, their number; `unparsed`, 1 for an empty answer.
    """

    Arguments = IFEvalArguments
    package = "langdetect"

    def __init__(self, arguments: IFEvalArguments, context: EnvironmentContext) -> None:
        self._reward, self._analysis = arguments.reward, TextAnalysis(arguments.sentences)

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: Any) -> None:
        read_instructions(answer)

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge an answer. Raises Unjudged if the instructions cannot be read."""
        try:
            instructions = read_instructions(prompt.task["answer"])
        except ValueError as error:
            raise Unjudged(f"prompt {prompt.index}: {error}") from None
        strict = judge_instructions(instructions, [text], self._analysis)
        loose = judge_instructions(instructions, variants(text), self._analysis)
        shares = {"strict": sum(strict) / len(strict), "loose": sum(loose) / len(loose)}
        metrics = {f"prompt_{name}": float(share == 1) for name, share in shares.items()}
        metrics |= {f"instruction_{name}": share for name, share in shares.items()}
        metrics |= {"instructions": float(len(strict)), "unparsed": float(not text.strip())}
        reward = shares["strict"] if self._reward == "share" else metrics[f"prompt_{self._reward}"]
        return Outcome(reward, metrics)


def read_instructions(answer: str) -> list[Instruction]:
    """Return the instructions in a task's "answer". Raises ValueError for an unknown instruction or unfitting arguments."""
    columns = json.loads(answer)
    if not isinstance(columns, dict) or not columns.get("instruction_id_list"):
        raise ValueError("got no instruction_id_list; expected JSON with instruction_id_list and kwargs")
    instructions = []
    for name, arguments in zip(columns["instruction_id_list"], columns["kwargs"], strict=True):
        present = {key: value for key, value in (arguments or {}).items() if value is not None}
        check_arguments(name, present)
        instructions.append((name, present))
    return instructions


def judge_instructions(instructions: Sequence[Instruction], texts: Sequence[str], analysis: TextAnalysis) -> list[bool]:
    """Return for each instruction whether at least one text follows it. An empty text follows no instruction."""
    present = [text for text in texts if text.strip()]
    return [any(RULES[name](text, analysis, **arguments) for text in present) for name, arguments in instructions]


def variants(text: str) -> list[str]:
    """Return all variants of a text: with and without its first line, with and without its last line and its stars."""
    lines = text.split("\n")
    texts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*texts, *(variant.replace("*", "") for variant in texts)]
