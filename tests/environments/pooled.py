"""Build environments as a run does, and take their steps: in threads here, or in a pool of judges."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.environments.build_environments import build
from pipeline.environments.environment import Environment, Outcome
from pipeline.rollout.judges.environment_steps import CallFailure, EnvironmentSettings, StepOutcome, StepRequest
from pipeline.rollout.judges.pool import JudgePool
from pipeline.sandbox import processes
from pipeline.types import Prompt


def made(kind: str, timeout_s: float = 10.0, workers: int | None = None, **kwargs: Any) -> Any:
    """Return an environment of a kind, built from a recipe's `kwargs`."""
    return build({"x": EnvironmentConfig(kind=kind, timeout_s=timeout_s, workers=workers, kwargs=kwargs)})["x"]


def outcomes(environment: Environment, prompt: Prompt, texts: list[str]) -> list[Outcome]:
    """Return the outcomes of one-turn episodes, one for each text, with as many threads as the environment has workers."""
    with ThreadPoolExecutor(environment.workers) as threads:
        return list(threads.map(lambda text: environment.step(environment.reset(prompt), text), texts))


def write_tokenizer(folder: Path, **special: str) -> None:
    """Write a tokenizer whose tokens are bytes. special: tokens such as eos_token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special).save_pretrained(folder)


class Pool:
    """A pool of judges of one environment."""

    def __init__(self, folder: Path, kind: str, timeout_s: float, workers: int, **kwargs: Any) -> None:
        write_tokenizer(folder)
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        environment = EnvironmentConfig(kind=kind, timeout_s=timeout_s, workers=workers, kwargs=kwargs, precision="float32")
        settings = EnvironmentSettings({"x": environment}, TokenizerConfig(name=str(folder)), False, 1, sys.path, grace_s=0.0)
        self._wakeup, self._number = threading.Event(), 0
        self.judges = JudgePool(settings, self._wakeup)
        self.judges.wait_until_loaded()

    def judge(self, expected: str, *texts: str) -> list[StepOutcome | CallFailure]:
        """Return the outcome of each answer to one question, all submitted at once."""
        episodes = [str(self._number + place) for place in range(len(texts))]
        self._number += len(texts)
        for episode, text in zip(episodes, texts, strict=True):
            tokens = np.asarray(self._tokenizer(text.encode(errors="replace").decode()).input_ids, np.int32)
            prompt = Prompt(3, np.zeros(1, np.int32), "x", {"text": "", "answer": expected})
            self.judges.submit(StepRequest(episode, f"answer {episode}", "x", prompt, tokens, True, 10))
        found: dict[str, StepOutcome | CallFailure] = {}
        while len(found) < len(texts):
            self._wakeup.wait(self.judges.seconds_left())
            self._wakeup.clear()
            found |= self.judges.take()
        return [found[episode] for episode in episodes]

    @property
    def pids(self) -> list[int]:
        """The process ids of the judges."""
        assert self.judges._process is not None
        return processes.children(self.judges._process.pid)
