"""Rows with the columns of each named data set, and their repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.data.hub import configs, download

Row = dict[str, Any]


def turns(*texts: str) -> list[dict[str, str]]:
    """Return messages, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def question(problem: str, answer: str, **more: Any) -> Row:
    return {"problem": problem, "answer": answer, **more}


def math_instruct(number: int) -> Row:
    return {
        "problem": f"{number}+1=",
        "generated_solution": f"it is {number + 1}",
        "expected_answer": str(number + 1),
        "problem_source": "math",
    }


def dapo(problem: str, answer: str) -> Row:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "0"},
    }


def preference(number: int, context: list | str, first: str, second: str) -> Row:
    return {
        "domain": "general",
        "language": "english",
        "context": context,
        "response1": first,
        "response2": second,
        "overall_preference": number,
        "individual_preference": [{"score": number, "reasoning": "so", "feedback": "so"}],
    }


def passage(context: str, asked: str, *answers: str) -> Row:
    given = {"text": list(answers), "answer_start": [0] * len(answers)}
    return {"id": "1", "title": "t", "context": context, "question": asked, "answers": given}


LINES = "solve: {}\n\nanswer: last"
GRADE = {"question": "how many?", "answer": "first 1+1=<<1+1=2>>2\n#### 1,002"}
SAID = turns("hello", "hi", "how are you?")
PAIR = {
    "id": "1",
    "source": "s",
    "prompt": "say more",
    "chosen": [*turns("say", "yes", "more"), {"role": "assistant", "content": "more words"}],
    "rejected": [*turns("say", "yes", "more"), {"role": "assistant", "content": "no"}],
}
MIXTURE = [{"id": str(i), "source": "s", "messages": turns(f"say {i}", f"it is {i}")} for i in range(10)]
PLAIN = {  # repositories of one file, without a card
    "agentica-org/DeepScaleR-Preview-Dataset": (
        "deepscaler.jsonl",
        [question("1+1=", "2", solution="so 2"), question("2+1=", "3", solution="so 3")],
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "data/dapo.parquet",
        [dapo(LINES.format("3+1="), "4"), dapo(LINES.format("3+2="), "5")],
    ),
    "BytedTsinghua-SIA/AIME-2024": ("data/aime.parquet", [dapo(LINES.format("30+3="), "33")]),
    "allenai/tulu-3-sft-mixture": ("data/train-0.parquet", MIXTURE),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        "data/train-0.parquet",
        [PAIR, {**PAIR, "rejected": turns("say", "no")}],
    ),
    "HuggingFaceH4/aime_2024": ("data/train-0.parquet", [question("20+4=", "24", id=60), question("10+1=", "011", id=61)]),
    "MathArena/aime_2026": ("data/train-0.parquet", [{"problem_idx": 1, "answer": 277, "problem": "270+7="}]),
}
SUBSETS = {  # ending of the files, and rows by subset and split
    "nvidia/OpenMathInstruct-2": (
        "parquet",
        {("default", "train"): [math_instruct(7)], ("default", "train_1M"): [math_instruct(i) for i in range(40)]},
    ),
    "openai/gsm8k": (
        "parquet",
        {
            ("main", "train"): [GRADE],
            ("main", "test"): [{**GRADE, "question": "how many then?"}],
            ("socratic", "train"): [{**GRADE, "question": "how?"}],
        },
    ),
    "nvidia/HelpSteer3": (
        "jsonl.gz",
        {
            ("preference", "train"): [
                preference(-2, SAID, "good", "bad"),
                preference(1, SAID[:1], "no", "hello to you"),
                preference(0, SAID[:1], "so", "or so"),
            ],
            ("preference", "validation"): [preference(3, SAID[:1], "b", "a")],
            ("feedback", "train"): [{"context": SAID, "response": "good", "feedback": ["fine"]}],
        },
    ),
    "rajpurkar/squad": (
        "parquet",
        {
            ("plain_text", "train"): [passage("a house is red", "what is red?", "a house", "house")],
            ("plain_text", "validation"): [passage("a house is old", "what is old?", "a house")],
        },
    ),
    "opencompass/AIME2025": (
        "jsonl",
        {
            ("AIME2025-I", "test"): [{"question": "10+2=", "answer": "12"}],
            ("AIME2025-II", "test"): [{"question": "10+3=", "answer": "13"}],
        },
    ),
    "open-r1/OpenR1-Math-220k": (
        "parquet",
        {
            ("default", "train"): [question("8+8=", "16", solution="so 16")],
            ("extended", "train"): [question("9+9=", "18", solution="so 18")],
        },
    ),
    "nvidia/Nemotron-Cascade-2-SFT-Data": (
        "jsonl",
        {
            ("math", "train"): [{"messages": [{"role": "system", "content": "think"}, *turns("5+5=", "10")]}],
            ("chat", "train"): [{"messages": turns("hello", "hi")}],
        },
    ),
}


def download_all(cache: Path) -> None:
    """Write every named data set's repository, small, to the hub cache."""
    for repository, (path, rows) in PLAIN.items():
        download(cache, repository, {path: rows})
    for repository, (ending, rows) in SUBSETS.items():
        paths = {names: f"{names[0]}/{names[1]}.{ending}" for names in rows}
        subsets = {subset: {split: path for (one, split), path in paths.items() if one == subset} for subset, _ in rows}
        download(cache, repository, {paths[names]: of_split for names, of_split in rows.items()}, configs(**subsets))
