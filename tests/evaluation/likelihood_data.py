"""Small data of each format by likelihood, with the columns of the data sets, and a tiny model with a real tokenizer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from pipeline.algorithms.evaluate import EvaluateConfig, TaskConfig
from tests.generate.tiny import SHAPE, policy

Record = dict[str, Any]
TEXT = """\
the a of to in is was she he they river stone quickly naïve café 東京 tree's can't 3.14 running walked over under green house
because when Dr. Smith's — emoji🙂 energy heat water light bread [step] salt double-space old new small "quoted"\
"""
WORDS = [*re.split(r"\s", TEXT), ""]
SUBJECTS = ("abstract_algebra", "high_school_us_history", "virology")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def sentence(chance: random.Random, low: int, high: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(low, high)))


def hellaswag(chance: random.Random, number: int) -> Record:
    endings = [sentence(chance, 2, 9) for _ in range(4)]
    if number % 5 == 0:
        endings[3] = endings[1]  # a tie
    record = {"activity_label": f"Washing {number}", "ctx_a": sentence(chance, 4, 12), "ctx_b": sentence(chance, 0, 4)}
    return {**record, "endings": endings, "label": str(chance.randrange(4)), "ctx": "unused"}


def winogrande(chance: random.Random, number: int) -> Record:
    text = f"{sentence(chance, 3, 8)} _ {sentence(chance, 2, 6)}."
    return {"sentence": text, "option1": "the tree", "option2": f"Smith{number}", "answer": str(1 + chance.randrange(2))}


def piqa(chance: random.Random, number: int) -> Record:
    ways = {"sol1": sentence(chance, 3, 9), "sol2": sentence(chance, 3, 9)}
    return {"goal": sentence(chance, 2, 6), **ways, "label": chance.randrange(2)}


def labelled(chance: random.Random, number: int) -> Record:
    count = 3 + number % 3
    labels = list("12345" if number % 4 == 0 else "ABCDE")[:count]
    return {"text": [sentence(chance, 1, 5) for _ in labels], "label": labels}


def arc(chance: random.Random, number: int) -> Record:
    choices = labelled(chance, number)
    return {
        "id": f"Q{number}",
        "question": sentence(chance, 4, 9),
        "choices": choices,
        "answerKey": chance.choice(choices["label"]),
    }


def openbookqa(chance: random.Random, number: int) -> Record:
    choices = labelled(chance, number)
    # Question and choices are joined with a space, whatever the question ends with.
    question = sentence(chance, 4, 9) + ("  " if number % 3 == 0 else "")
    return {"question_stem": question, "choices": choices, "answerKey": chance.choice(choices["label"])}


def boolq(chance: random.Random, number: int) -> Record:
    return {"passage": sentence(chance, 9, 30), "question": sentence(chance, 3, 7), "label": chance.randrange(2)}


def mmlu(chance: random.Random, number: int) -> Record:
    choices = [sentence(chance, 1, 4) for _ in range(4)]
    question = sentence(chance, 3, 9) + (" \n" if number % 4 == 0 else "")
    return {"question": question, "subject": SUBJECTS[number % 3], "choices": choices, "answer": chance.randrange(4)}


def lambada(chance: random.Random, number: int) -> Record:
    return {"text": sentence(chance, 1 if number == 3 else 6, 1 if number == 3 else 20)}


def documents(chance: random.Random, number: int) -> Record:
    return {"text": sentence(chance, 1, 60) if number % 4 else sentence(chance, 150, 250)}


MAKERS: dict[str, Callable[[random.Random, int], Record]] = {
    "hellaswag": hellaswag,
    "winogrande": winogrande,
    "piqa": piqa,
    "arc": arc,
    "openbookqa": openbookqa,
    "boolq": boolq,
    "mmlu": mmlu,
    "lambada": lambada,
    "documents": documents,
}
TASKS = {"arc": "arc_easy", "lambada": "lambada_openai"}
"""Our format -> the harness's task, where they differ."""


def records(form: str, count: int, seed: int = 0) -> list[Record]:
    """Return `count` records of a format."""
    chance = random.Random(f"{form} {seed}")
    return [MAKERS[form](chance, number) for number in range(count)]


def write_jsonl(path: Path, rows: Sequence[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def save_model(folder: Path, family: str, longest: int = 1024, **shape: Any) -> Path:
    """Save a random model with a byte-level tokenizer: llama begins every text with <s>, qwen3 has no such token."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    begins = family == "llama"
    special = [*(["<s>"] if begins else []), "</s>"]
    texts = [json.dumps(row, ensure_ascii=False) for form in MAKERS for row in records(form, 12, seed=9)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=480, special_tokens=special, initial_alphabet=alphabet))
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>" if begins else None)
    tokenizer.chat_template = ("<s>" if begins else "") + TEMPLATE
    tokenizer.save_pretrained(folder)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    settings = {**SHAPE, "vocab_size": len(tokenizer), "max_position_embeddings": longest, **shape}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(**settings)).save_pretrained(folder)
    return folder


def recipe(folder: Path, backend: str, longest: int, **settings: Any) -> Any:
    """Return what the harness's tasks read of a recipe."""
    evaluate = EvaluateConfig()
    return SimpleNamespace(evaluate=evaluate, policy=policy(folder, backend, max_model_len=longest, **settings))


def task_config(form: str, path: Path, **settings: Any) -> TaskConfig:
    config = TaskConfig(kind="lm_eval", format=TASKS.get(form, form), apply_chat_template=False, seed=1234)
    config.data.data_path = str(path)
    for name, value in settings.items():
        target = config.data if hasattr(config.data, name) else config
        assert hasattr(target, name), name
        setattr(target, name, value)
    return config
