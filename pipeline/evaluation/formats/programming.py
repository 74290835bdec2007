r"""Programming tasks: HumanEval and HumanEval+, MBPP and MBPP+, LiveCodeBench.

All are scored by `env.NAME.kind=code_benchmark`.

HumanEval and MBPP can be asked in three styles:

    chat        the prompt is a message; the model answers freely, with the code in a fenced block
    instruct    as lm-evaluation-harness's *_instruct tasks: the model continues an answer that has opened a fenced block
    completion  as its humaneval and mbpp, for base models without a chat template. HumanEval's function is continued, with
                stop=["\nclass", "\ndef", "\n#", "\nif", "\nprint"]; MBPP has num_few_shot=3 and stop=["[DONE]"]
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.environments.code_process import free_names
from pipeline.evaluation.questions import Format, Message, Question, Record
from pipeline.recipe.values import Check, Text

Style = Annotated[
    Literal["chat", "instruct", "completion"],
    Field(description="chat: a request. instruct: a request and the answer's beginning. completion: a text to continue."),
]


@dataclass
class StyleArguments:
    """The style in which HumanEval and MBPP are asked."""

    style: Style = "chat"


# ---- HumanEval ---------------------------------------------------------------------------------------------------------------


class HumanEval(Format):
    """openai_humaneval and evalplus/humanevalplus: the model completes a function from its head and docstring."""

    Arguments = StyleArguments
    columns = ("task_id", "prompt", "canonical_solution", "test", "entry_point")

    @override
    def question(self, record: Record, index: int) -> Question:
        code, name, style = record["prompt"], record["entry_point"], self.arguments.style
        if "def check(" not in record["test"]:
            raise ValueError("test does not define check(candidate)")
        request = f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```\n"
        start = f"Here is the completed function:\n```python\n{code}\n"
        prompts: dict[str, str | list[Message]] = {"completion": code, "chat": request, "instruct": _continue(request, start)}
        tests = {"program": f"{record['test']}\n\ncheck({name})\n", "setup": code, "entry_point": name}
        return Question(
            id=str(record["task_id"]),
            prompt=prompts[style],
            target=record["canonical_solution"],
            task=_task(tests, "blocks" if style == "chat" else "continuation", code=code),
        )


# ---- MBPP --------------------------------------------------------------------------------------------------------------------

EXAMPLES: tuple[Record, ...] = (
    {
        "task_id": 2,
        "text": "Write a function to find the similar elements from the given two tuple lists.",
        "code": "def similar_elements(test_tup1, test_tup2):\r\n"
        "  res = tuple(set(test_tup1) & set(test_tup2))\r\n  return (res) ",
        "test_list": [
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ],
    },
    {
        "task_id": 3,
        "text": "Write a python function to identify non-prime numbers.",
        "code": "import math\r\ndef is_not_prime(n):\r\n    result = False\r\n    for i in range(2,int(math.sqrt(n)) + 1):\r\n"
        "        if n % i == 0:\r\n            result = True\r\n    return result",
        "test_list": [
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ],
    },
    {
        "task_id": 4,
        "text": "Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        "code": "import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n"
        "  return largest_nums",
        "test_list": [
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ],
    },
)
"""MBPP's own worked examples: its tasks 2, 3 and 4."""


class MBPP(Format):
    """google-research-datasets/mbpp, full or sanitized, and evalplus/mbppplus: the prompt is a text and three tests.

    MBPP+ is scored by its column `test`, and MBPP by `test_list`. `test_imports` and `test_setup_code` run first.
    """

    Arguments = StyleArguments
    columns = ("task_id", "code", "test_list")
    examples = EXAMPLES

    @override
    def question(self, record: Record, index: int) -> Question:
        text = record.get("prompt") or record.get("text")
        if not text:
            raise ValueError("has neither 'text' nor 'prompt'")
        style, examples = self.arguments.style, record["test_list"][:3]
        setup = [*(record.get("test_imports") or []), record.get("test_setup_code") or ""]
        program = "\n".join([*setup, record.get("test") or "\n".join(record["test_list"])])
        name = _called_function("\n".join([*setup, *record["test_list"]]), record["code"])
        return Question(
            id=str(record["task_id"]),
            prompt=_mbpp_prompt(text, examples, style, plus="test" in record),
            target=f"{record['code']}\n[DONE]" if style == "completion" else f"```python\n{record['code']}\n```",
            task=_task({"program": program, "setup": "", "entry_point": name}, "blocks" if style == "chat" else "open_block"),
        )


def _mbpp_prompt(text: str, tests: Sequence[str], style: str, plus: bool) -> str | list[Message]:
    examples, begin = "\n".join(tests), "You are an expert Python programmer, and here is your task:"
    if style == "completion":
        return f"{begin} {text} Your code should pass these tests:\n\n{examples}\n[BEGIN]\n"
    request = f"{begin}\n{text}\nYour code should pass these tests:\n{examples}"
    if style == "chat":
        return f"{request}\nAnswer with the code in a Python block."
    if not plus:
        return _continue(request, "\n```python\n")
    request = f"{text} Your code should satisfy the following assertion:\n{tests[0]}"
    return _continue(request, "Here is a solution to this programming problem:\n```python\n")


def _called_function(tests: str, code: str) -> str:
    """Return the name of the first function that the tests call and do not define. Raises ValueError if there is none.

    code: a solution. It may define a function with the name of a built-in one: task 126 asks for `sum`.
    """
    try:
        names = free_names(tests, ()) | {
            name for name in re.findall(r"^def (\w+)", code, re.MULTILINE) if hasattr(builtins, name)
        }
    except SyntaxError as error:
        raise ValueError(f"the tests are not Python: {error}") from error
    by_position = {match.start(): name for name in names if (match := re.search(rf"\b{name}\s*\(", tests))}
    if not by_position:
        raise ValueError("the tests call no function of the answer")
    return by_position[min(by_position)]


# ---- LiveCodeBench -----------------------------------------------------------------------------------------------------------

SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct"
    " Python program that matches the specification and passes all tests."
)
WITH_STARTER = (
    "### Format: You will use the following starter code to write the solution to the problem and enclose your code within"
    " delimiters.\n```python\n{code}\n```\n\n"
)
WITHOUT_STARTER = (
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the"
    " sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the"
    " inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n"
)


def _date_error(value: str) -> str | None:
    try:
        date.fromisoformat(value)
    except ValueError:
        return f"got '{value}'; expected a date such as 2024-08-01"
    return None


Day = Annotated[Text, Check(_date_error)]


@dataclass
class LiveCodeBenchArguments:
    """A window of contests, so that a model is asked what it cannot have been trained on."""

    since: Day | None = None
    """First day of the contests, such as 2024-08-01. null: all."""
    until: Day | None = None
    """Last day of the contests. null: all."""


class LiveCodeBench(Format):
    """livecodebench/code_generation_lite: the answer is a program that reads stdin, or a method that the starter code begins.

    Questions need a chat template. The private tests stay encoded until an answer is judged. Groups: `difficulty`.
    """

    Arguments = LiveCodeBenchArguments
    columns: ClassVar[tuple[str, ...]] = (
        *("question_content", "question_id", "contest_date", "starter_code", "difficulty"),
        *("public_test_cases", "private_test_cases", "metadata"),
    )

    @override
    def indices(self, records: Sequence[Record]) -> Sequence[int]:
        """Return the indices of the problems whose contest date is from `since` to `until`, both included."""
        since, until = self.arguments.since or "", self.arguments.until or "9999"
        if (since, until) == ("", "9999"):
            return range(len(records))
        days = [str(record.get("contest_date") or "")[:10] for record in records]
        if undated := days.count(""):
            raise ValueError(
                f"{undated} records have no contest_date; expected one in every record, since `since` or `until` is set"
            )
        return [index for index, day in enumerate(days) if since <= day <= until]

    @override
    def question(self, record: Record, index: int) -> Question:
        starter = record["starter_code"] or ""
        form = WITH_STARTER.replace("{code}", starter) if starter else WITHOUT_STARTER
        user = f"### Question:\n{record['question_content']}\n\n{form}### Answer: (use the provided format with backticks)\n\n"
        metadata = json.loads(record["metadata"] or "{}")
        public = json.loads(record["public_test_cases"] or "[]")
        functional = any(case.get("testtype") == "functional" for case in public) or bool(starter)
        name = metadata.get("func_name") or ""
        if functional and not name:
            raise ValueError("the task asks for a function, but its metadata have no func_name")
        return Question(
            id=str(record["question_id"]),
            prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
            task=_task(
                {"tests": public, "private": record["private_test_cases"], "function": name if functional else ""}, "blocks"
            ),
            group=record["difficulty"] or "",
        )


def _continue(request: str, beginning: str) -> list[Message]:
    """Return a conversation of the user's request and the beginning of the answer, which the model continues."""
    return [{"role": "user", "content": request}, {"role": "assistant", "content": beginning}]


def _task(tests: dict[str, Any], style: str, code: str = "") -> dict[str, Any]:
    return {"answer": json.dumps(tests), "style": style, "given": code}
