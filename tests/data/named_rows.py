"""Rows in the columns of each data set that has a name, and the repositories that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.data.hub import configs, download

Row = dict[str, Any]


def turns(*texts: str) -> list[dict[str, str]]:
    """The user speaks first."""
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


def download_all(cache: Path) -> None:
    """Every named data set's repository, small."""
    download(
        cache,
        "nvidia/OpenMathInstruct-2",
        {
            "data/train-0.parquet": [math_instruct(7)],
            "data/train_1M-0.parquet": [math_instruct(i) for i in range(40)],
        },
        configs(default={"train": "data/train-*", "train_1M": "data/train_1M-*"}),
    )
    deepscaler = [question("1+1=", "2", solution="so 2"), question("2+1=", "3", solution="so 3")]
    download(cache, "agentica-org/DeepScaleR-Preview-Dataset", {"deepscaler.jsonl": deepscaler})
    lines = "solve: {}\n\nanswer: last"
    download(
        cache,
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"data/dapo.parquet": [dapo(lines.format("3+1="), "4"), dapo(lines.format("3+2="), "5")]},
    )
    download(cache, "BytedTsinghua-SIA/AIME-2024", {"data/aime.parquet": [dapo(lines.format("30+3="), "33")]})
    grade = {"question": "how many?", "answer": "first 1+1=<<1+1=2>>2\n#### 1,002"}
    download(
        cache,
        "openai/gsm8k",
        {
            "main/train-0.parquet": [grade],
            "main/test-0.parquet": [{**grade, "question": "how many then?"}],
            "socratic/train-0.parquet": [{**grade, "question": "how?"}],
        },
        configs(
            main={"train": "main/train-*", "test": "main/test-*"},
            socratic={"train": "socratic/train-*"},
        ),
    )
    said = turns("hello", "hi", "how are you?")
    download(
        cache,
        "nvidia/HelpSteer3",
        {
            "preference/train.jsonl.gz": [
                preference(-2, said, "good", "bad"),
                preference(1, said[:1], "no", "hello to you"),
                preference(0, said[:1], "so", "or so"),
            ],
            "preference/validation.jsonl.gz": [preference(3, said[:1], "b", "a")],
            "feedback/train.jsonl.gz": [{"context": said, "response": "good", "feedback": ["fine"]}],
        },
        configs(
            preference={"train": "preference/train.jsonl.gz", "validation": "preference/validation.jsonl.gz"},
            feedback={"train": "feedback/train.jsonl.gz"},
        ),
    )
    mixture = [{"id": str(i), "source": "s", "messages": turns(f"say {i}", f"it is {i}")} for i in range(10)]
    download(cache, "allenai/tulu-3-sft-mixture", {"data/train-0.parquet": mixture})
    pair = {
        "id": "1",
        "source": "s",
        "prompt": "say more",
        "chosen": [*turns("say", "yes", "more"), {"role": "assistant", "content": "more words"}],
        "rejected": [*turns("say", "yes", "more"), {"role": "assistant", "content": "no"}],
    }
    apart = {**pair, "rejected": turns("say", "no")}
    download(cache, "allenai/llama-3.1-tulu-3-8b-preference-mixture", {"data/train-0.parquet": [pair, apart]})
    download(
        cache,
        "rajpurkar/squad",
        {
            "plain_text/train-0.parquet": [passage("a house is red", "what is red?", "a house", "house")],
            "plain_text/validation-0.parquet": [passage("a house is old", "what is old?", "a house")],
        },
        configs(plain_text={"train": "plain_text/train-*", "validation": "plain_text/validation-*"}),
    )
    aime = [question("20+4=", "24", id=60), question("10+1=", "011", id=61)]
    download(cache, "HuggingFaceH4/aime_2024", {"data/train-0.parquet": aime})
    download(
        cache,
        "opencompass/AIME2025",
        {
            "aime2025-I.jsonl": [{"question": "10+2=", "answer": "12"}],
            "aime2025-II.jsonl": [{"question": "10+3=", "answer": "13"}],
        },
        configs(**{"AIME2025-I": {"test": "aime2025-I.jsonl"}, "AIME2025-II": {"test": "aime2025-II.jsonl"}}),
    )
    download(
        cache,
        "MathArena/aime_2026",
        {"data/train-0.parquet": [{"problem_idx": 1, "answer": 277, "problem": "270+7="}]},
    )
    download(
        cache,
        "open-r1/OpenR1-Math-220k",
        {
            "data/train-0.parquet": [question("8+8=", "16", solution="so 16")],
            "extended/train-0.parquet": [question("9+9=", "18", solution="so 18")],
        },
        configs(default={"train": "data/train-*"}, extended={"train": "extended/train-*"}),
    )
    download(
        cache,
        "nvidia/Nemotron-Cascade-2-SFT-Data",
        {
            "math/train.jsonl": [{"messages": [{"role": "system", "content": "think"}, *turns("5+5=", "10")]}],
            "chat/train.jsonl": [{"messages": turns("hello", "hi")}],
        },
        configs(math={"train": "math/train.jsonl"}, chat={"train": "chat/train.jsonl"}),
    )
