r"""Mathematical problems: GSM8K, MATH-500, Minerva's MATH, and AIME.

Each class names the repository whose columns it reads. The environments `math`, `gsm8k` and `minerva_math` score the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import override

from pipeline.data.records import text_of
from pipeline.environments.minerva_math import last_box
from pipeline.evaluation.formats.minerva_examples import EXAMPLES
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe.values import Text

PROMPT_TEXT = Field(description="Text around a problem; {question} stands for the problem.")
STEP_BY_STEP = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass
class GSM8KArguments:
    """Arguments of the format gsm8k."""

    prompt_text: Annotated[Text, PROMPT_TEXT] = "Question: {question}\nAnswer:"


class GSM8K(Format):
    """openai/gsm8k: `answer` is a solution that ends in `#### 72`."""

    Arguments = GSM8KArguments
    columns = ("question", "answer")

    @override
    def question(self, record: Record, index: int) -> Question:
        problem, solution = text_of(record, "question"), text_of(record, "answer")
        _, mark, answer = solution.rpartition("####")
        if not mark:
            raise ValueError("'answer' has no ####; expected the final answer after it")
        prompt = self.arguments.prompt_text.replace("{question}", problem)
        return Question("", prompt, f" {solution}", {"answer": answer.strip()})


@dataclass
class ProblemArguments:
    """Arguments of formats of problems with a bare answer."""

    prompt_text: Annotated[Text, PROMPT_TEXT] = STEP_BY_STEP


class _Problems(Format):
    """Problems whose answer column has the answer alone, without a solution. Subclasses name the columns."""

    Arguments = ProblemArguments
    problem: str = "problem"
    answer: str = "answer"
    id: str = ""
    group: str = ""

    @property
    @override
    def required(self) -> tuple[str, ...]:
        return (self.problem, self.answer)

    @override
    def question(self, record: Record, index: int) -> Question:
        answer = text_of(record, self.answer)
        return Question(
            id=_text(record, self.id),
            prompt=self.arguments.prompt_text.replace("{question}", text_of(record, self.problem)),
            target=f" {self.worked_answer(record)}",
            task={"answer": answer},
            group=_text(record, self.group),
        )

    def worked_answer(self, record: Record) -> str:
        r"""Return the text that answers a worked example: the record's `solution`, or else the answer in \boxed{}."""
        return f"{record['solution']}" if record.get("solution") else f"\\boxed{{{record[self.answer]}}}"


class MATH500(_Problems):
    """HuggingFaceH4/MATH-500, grouped by subject."""

    id, group = "unique_id", "subject"


class AIME24(_Problems):
    """Maxwell-Jia/AIME_2024."""

    problem, answer, id = "Problem", "Answer", "ID"


class AIME25(_Problems):
    """math-ai/aime25."""

    id = "id"


@dataclass
class MinervaArguments:
    """Arguments of the format minerva_math."""

    prompt_text: Annotated[Text, PROMPT_TEXT] = "Problem:\n{question}\n\nSolution:"


class MinervaMATH(Format):
    """EleutherAI/hendrycks_math with Minerva's prompt (arXiv:2206.14858), grouped by subject.

    The expected answer is the content of the last box of `solution`. The four worked examples are the paper's.
    """

    Arguments = MinervaArguments
    columns = ("problem", "solution")
    examples = EXAMPLES

    @override
    def question(self, record: Record, index: int) -> Question:
        solution = text_of(record, "solution")
        if (answer := last_box(solution)) is None:
            raise ValueError("'solution' has no \\boxed{...}; expected the final answer in it")
        prompt = self.arguments.prompt_text.replace("{question}", text_of(record, "problem"))
        return Question("", prompt, f" {solution}", {"answer": answer}, group=_text(record, "type"))


def _text(record: dict[str, Any], key: str) -> str:
    """Return the column `key` as a text; "" if the record lacks it."""
    return str(record[key]) if key and record.get(key) is not None else ""
