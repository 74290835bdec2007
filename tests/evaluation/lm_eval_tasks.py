"""Tasks of lm-evaluation-harness on small data, one of each kind, and engines that answer in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from pipeline.generate.generate_backend import GenerateBackend
from pipeline.types import Prompt, Request, Rollout, RolloutGroup, Turn

DOCUMENTS = 24
SUBJECTS = ("red", "blue")


def write(folder: Path, letters: str, seed: int = 0) -> None:
    """Write tasks made_* into a folder: choices, two choices of a group, a continuation, a perplexity, two of generation."""
    drawn = random.Random(seed)

    def text(low: int, high: int) -> str:
        words = ["".join(drawn.choices(letters, k=drawn.randint(1, 5))) for _ in range(drawn.randint(low, high))]
        return " ".join(words)

    rows = [
        {
            "question": text(2, 8),
            "choices": [text(1, 1 + i % 4) for _ in range(4)],
            "label": drawn.randrange(4),
            "text": text(3, 60 if i % 6 == 0 else 12),
            "answer": str(drawn.randrange(10)),
        }
        for i in range(DOCUMENTS)
    ]
    data = folder / "rows.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}},
        "test_split": "test",
        "fewshot_split": "train",
        "metadata": {"version": 1.0},
    }
    accuracy = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    numbers = {"name": "numbers", "filter": [{"function": "regex", "regex_pattern": r"(\d)"}, {"function": "take_first"}]}
    plain = {"name": "plain", "filter": [{"function": "take_first"}]}
    choices = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} =",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": accuracy,
    }
    generated = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}} =",
        "doc_to_target": "{{answer}}",
        "metric_list": exact,
        "filter_list": [numbers, plain],
    }
    tasks = {
        "made_choices": choices | {"num_fewshot": 2},
        **{f"made_{subject}": choices | {"doc_to_text": subject[0] + " {{question}}"} for subject in SUBJECTS},
        "made_continuation": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{question}}",
            "doc_to_target": " {{answer}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        },
        "made_perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "made_until": generated | {"generation_kwargs": {"until": [" ", "a=", "7"], "max_gen_toks": 24, "do_sample": False}},
        "made_long": generated | {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8}, "num_fewshot": 1},
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
    group = {
        "group": "made_colors",
        "task": [f"made_{subject}" for subject in SUBJECTS],
        "aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "made_colors.yaml").write_text(yaml.safe_dump(group))


NAMES = ["made_choices", "made_colors", "made_continuation", "made_perplexity", "made_until", "made_long"]


class OneEngine:
    """Answers like `Engines`, on a backend of this process. It ends after `most` answers, as a killed job does."""

    def __init__(self, backend: GenerateBackend, most: int | None = None) -> None:
        self.backend, self.left = backend, most
        self.asked = 0

    def _count(self, answers: int) -> None:
        self.asked += answers
        if self.left is not None and self.asked > self.left:
            raise KeyboardInterrupt

    def generate(self, prompts: Sequence[Prompt], spec, seed: int) -> Iterator[RolloutGroup]:
        assert len({prompt.index for prompt in prompts}) == len(prompts)
        by_id = {str(prompt.index): prompt for prompt in prompts}
        self.backend.add([Request(id, prompt.tokens, prompt.index ^ seed, spec.sampling) for id, prompt in by_id.items()])
        while self.backend.pending:
            for completion in self.backend.step():
                self._count(1)
                yield RolloutGroup(by_id[completion.id], (Rollout((Turn(completion),), 0.0),))

    def likelihoods(self, units):
        for place, unit in enumerate(units):
            self._count(len(unit))
            yield place, self.backend.likelihoods(unit)
