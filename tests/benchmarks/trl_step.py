"""Run TRL's GRPO step in TRL's own environment: `python -m tests.benchmarks.trl_step CASE FOLDER MICRO_BATCH`.

TRL's best on a CPU: float32, one optimizer step per generation (so that no forward pass for old log-probs is needed), no KL
term, no gradient checkpointing, no dropout, the fused AdamW, nothing logged or saved, generation with a cache and the whole
step as one batch. What TRL 1.16 has besides does not help here: its GRPO has no packed or padding-free training, Liger's
kernels need Triton, and continuous batching in transformers took 10 CPU seconds a rollout of the small case instead of 0.3.
Left out: TRL with vLLM, which would need the forward pass for old log-probs again.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.cases import CASES, EOS, LEARNING_RATE, Case, score
from tests.benchmarks.contender import Clock, Turns

_STEPS_OF_DATA = 64


class EndAt(LogitsProcessor):
    """Ends row i with token number `lengths[i]` and not before."""

    def __init__(self, prompt_length: int, lengths: torch.Tensor):
        self._last = prompt_length + lengths - 1  # [R] int64, position of each row's last token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = self._last <= input_ids.size(1)
        scores[:, EOS] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, EOS] = 0.0
        return scores


class TakeTurns(TrainerCallback):
    """Waits for the parent before a step, and sends it the times afterwards."""

    def __init__(self, turns: Turns, clock: Clock, lengths: list[int]):
        self._turns, self._clock, self._lengths = turns, clock, lengths

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.reply({})

    def on_step_begin(self, args, state, control, **kwargs):
        if not self._turns.wait():
            sys.exit()  # TRL would take this step before it checked `should_training_stop`
        self._clock.take()
        self._whole = self._clock.phase("whole")
        self._whole.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        self._whole.__exit__(None, None, None)
        times = self._clock.take()
        whole = times.pop("whole")
        times["backward and optimizer"] = [all - sum(t[i] for t in times.values()) for i, all in enumerate(whole)]
        self._turns.reply({"times": times, "lengths": self._lengths})


def _timed(clock: Clock, name: str, method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with clock.phase(name):
            return method(*args, **kwargs)

    return call


def trainer(case: Case, folder: Path, micro_batch: int) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=_STEPS_OF_DATA,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=case.samples // micro_batch,
        steps_per_generation=case.samples // micro_batch,
        num_generations=case.generations,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_completion_length=case.max_length,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        disable_dropout=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = [tokens for step in range(_STEPS_OF_DATA) for tokens in case.prompts_of(step)]
    texts = [" ".join(f"w{token}" for token in tokens) for tokens in prompts]
    return GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [score(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
    )


def main(name: str, folder: str, micro_batch: str) -> None:
    turns, clock, lengths = Turns(), Clock(), []
    case = CASES[name]
    grpo = trainer(case, Path(folder), int(micro_batch))
    ends = EndAt(case.prompt_length, torch.from_numpy(case.lengths()))
    grpo.model.generate = functools.partial(grpo.model.generate, logits_processor=LogitsProcessorList([ends]))
    generate = grpo._generate_single_turn

    def noting_lengths(*args):
        completions, logprobs = generate(*args)
        lengths[:] = map(len, completions)
        return completions, logprobs

    grpo._generate_single_turn = noting_lengths
    grpo._generate_and_score_completions = _timed(clock, "generate", grpo._generate_and_score_completions)
    grpo.compute_loss = _timed(clock, "forward and loss", grpo.compute_loss)
    grpo.add_callback(TakeTurns(turns, clock, lengths))
    grpo.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
