"""An environment that rewards even an untrained model and logs what it judges, and records asked in small units."""

import json
import os
import time
from pathlib import Path

from pipeline.environments.environment import Environment, Outcome
from pipeline.types import Prompt


class Digits(Environment):
    """Rewards the share of the answer's characters that are digits.

    log: file that gets a line [prompt's index, text] for each answer. unparsed: where no character is a digit.
    """

    def __init__(self, log: str, delay_s: float = 0.0) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._delay_s = delay_s

    def step(self, prompt: Prompt, text: str) -> Outcome:
        os.write(self._log, (json.dumps([prompt.index, text]) + "\n").encode())
        time.sleep(self._delay_s)
        digits = "".join(filter(str.isdigit, text))
        return Outcome(len(digits) / max(1, len(text)), {"unparsed": float(not digits)}, extracted=digits)


def small_units(split: str, seed: int, path: str) -> list[dict]:
    """Return the records of a file, which are asked by likelihood in units of a few."""
    from pipeline.evaluation import lm_eval_model

    lm_eval_model.UNIT_TOKENS = 150
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
