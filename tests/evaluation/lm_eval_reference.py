"""The same likelihood tasks by lm-evaluation-harness, with its own tasks, prompts and Hugging Face model, on local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.evaluation.likelihood_data import SUBJECTS, records, write_jsonl

TASKS = Path(lm_eval.__file__).parent / "tasks"
THEIRS = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "winogrande": ("winogrande/default.yaml", "validation"),
    "piqa": ("piqa/piqa.yaml", "validation"),
    "arc": ("arc/arc_easy.yaml", "test"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "test"),
    "boolq": ("super_glue/boolq/default.yaml", "validation"),
    "mmlu": ("mmlu/default/mmlu_{subject}.yaml", "test"),
    "lambada": ("lambada/lambada_openai.yaml", "test"),
    "documents": (None, "test"),
}
"""The task's file, and the split of its questions, by our format."""
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "test_split": "test",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}
SPLITS = ("train", "validation", "test", "dev")


def make_data(folder: Path, count: int) -> None:
    """Write FORM/SPLIT.jsonl of each format, and FORM_SUBJECT/SPLIT.jsonl of each subject."""
    for form in THEIRS:
        for seed, split in enumerate(SPLITS):
            rows = records(form, count, seed)
            write_jsonl(folder / form / f"{split}.jsonl", rows)
            for subject in SUBJECTS if form == "mmlu" else ():
                write_jsonl(folder / f"mmlu_{subject}" / f"{split}.jsonl", [row for row in rows if row["subject"] == subject])


def task_files(folder: Path, data: Path) -> dict[str, list[str]]:
    """Write the tasks' files, and return the names of the tasks of each format."""
    folder.mkdir()
    names: dict[str, list[str]] = {}
    for form, (file, _) in THEIRS.items():
        for subject in SUBJECTS if form == "mmlu" else ("",):
            name = f"{form}_{subject}" if subject else form
            config: dict[str, Any] = {"include": str(TASKS / file.format(subject=subject))} if file else dict(ROLLING)
            files = {split: str(data / name / f"{split}.jsonl") for split in SPLITS}
            config |= {"task": f"tiny_{name}", "dataset_path": "json", "dataset_name": None, "tag": None}
            config["dataset_kwargs"] = {"data_files": files, "cache_dir": str(data / "cache")}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
            names.setdefault(form, []).append(f"tiny_{name}")
    return names


def evaluate(model: HFLM, folder: Path, names: list[str], **settings: Any) -> dict[str, Any]:
    """Return lm-evaluation-harness's results."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results: Any = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, bootstrap_iters=0, fewshot_random_seed=1234, **settings
    )
    return results


def likelihoods(samples: list[dict[str, Any]]) -> list[list[float]]:
    """Return the log-likelihoods of each document's choices."""
    found = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        values = [reply[0] for reply in sample["resps"]]
        found.append([float(value[0]) if isinstance(value, list | tuple) else float(value) for value in values])
    return found
