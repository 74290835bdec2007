"""A few records of each data set in the suites math and science, with the columns of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def _gsm8k(numbers: range) -> Rows:
    solution = "He has {0} and then {1} = <<{0}+2={1}>>{1}.\n#### {1}"
    return [{"question": f"Tom has {i} apples and gets 2. How many?", "answer": solution.format(i, i + 2)} for i in numbers]


def _hendrycks(kind: str) -> Rows:
    solution = "We have $1+1=\\boxed{\\frac{4}{2}}$."
    return [{"problem": f"What is $1+1$ in {kind}?", "level": "Level 1", "type": kind, "solution": solution}]


def _mmlu(subject: str, count: int) -> Rows:
    choices = ["one", "two", "three", "four"]
    return [{"question": f" {subject}: {i}? ", "subject": subject, "choices": choices, "answer": i % 4} for i in range(count)]


def _mmlu_pro(category: str, count: int) -> Rows:
    return [
        {
            "question_id": i,
            "question": f"Which number is {i} in {category}?",
            "options": [f"{n} " for n in range(10)],
            "answer": "ABCDEFGHIJ"[i],
            "answer_index": i,
            "cot_content": f"A: Let's think step by step. It is {i}. The answer is ({'ABCDEFGHIJ'[i]}).",
            "category": category,
            "src": "made",
        }
        for i in range(count)
    ]


MINERVA_SUBSETS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
RECORDS: dict[str, dict[str, Rows]] = {
    "gsm8k": {"main/test": _gsm8k(range(8)), "main/train": _gsm8k(range(20, 40))},
    "minerva_math": {f"{subset}/test": _hendrycks(subset.replace("_", " ").title()) for subset in MINERVA_SUBSETS},
    "math500": {
        "test": [
            {
                "problem": "Convert $(0,3)$ to polar coordinates.",
                "solution": "We get $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.",
                "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
                "subject": subject,
                "level": 2,
                "unique_id": f"test/{subject}/{number}.json",
            }
            for number, subject in enumerate(("Precalculus", "Algebra", "Algebra"))
        ]
    },
    "aime24": {
        "train": [{"ID": f"2024-I-{i}", "Problem": f"Find ${i}$.", "Solution": f"It is {i}.", "Answer": i} for i in range(3)]
    },
    "aime25": {"test": [{"problem": f"Find ${i}$.", "answer": str(i), "id": str(i)} for i in range(3)]},
    "gpqa_diamond": {
        "gpqa_diamond/train": [
            {
                "Record ID": f"rec{i}",
                "Question": f"Which particle is {i}?\n",
                "Correct Answer": "the right one [title]here",
                **{f"Incorrect Answer {n}": f"wrong  {n}\n" for n in (1, 2, 3)},
                "High-level domain": ("Physics", "Chemistry")[i % 2],
                "Subdomain": "made",
            }
            for i in range(4)
        ]
    },
    "mmlu": {
        "all/test": _mmlu("anatomy", 3) + _mmlu("world_religions", 2),
        "all/dev": _mmlu("world_religions", 5) + _mmlu("anatomy", 5),
    },
    "mmlu_pro": {
        "test": _mmlu_pro("law", 3) + _mmlu_pro("computer science", 2),
        "validation": _mmlu_pro("computer science", 6) + _mmlu_pro("law", 6),
    },
    "arc_challenge": {
        "ARC-Challenge/test": [
            {
                "id": f"Mercury_{i}",
                "question": "What is cold?",
                "choices": {"text": ["ice", "fire", "steam", "lava"][:count], "label": list(labels[:count])},
                "answerKey": labels[0],
            }
            for i, (labels, count) in enumerate([("ABCD", 4), ("1234", 4), ("ABC", 3)])
        ]
    },
}
"""By task, and by the path below data_path without .jsonl."""


def write(folder: Path, tasks: tuple[str, ...] = tuple(RECORDS)) -> list[str]:
    """Write the records of tasks, and return the overrides that name them."""
    overrides = []
    for task in tasks:
        for name, rows in RECORDS[task].items():
            path = folder / task / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        key = f"evaluate.tasks.{task}.data"
        overrides += [f"{key}.dataset_name=null", f"{key}.data_path={folder / task}"]
    return overrides
