"""Answers between tags, against what NeMo-RL's own code returned: `HFMultiRewardVerifyWorker.verify` at commit 7ea279a."""

import numpy as np
import pytest

from pipeline.types import Prompt
from tests.environments.pooled import made

CASES = {  # text -> whether it is correct, an integer, in the form
    "<think>2+2</think>\n<answer>4</answer>": (1, 1, 1),
    "<think>2+2</think>\n<answer> 4 </answer>\n": (1, 1, 1),
    "<think>2+2</think><answer>4</answer>": (1, 1, 0),
    " 4\n": (1, 1, 0),
    "<answer>5</answer> <answer>4": (1, 1, 0),
    "<think>a\nb</think>\n<answer>four</answer>": (0, 0, 1),
    "x<think>a</think>\n<answer>4</answer>": (1, 1, 0),
    "<think>a</think>\n<answer>4</answer> so": (1, 1, 0),
    "<think>a</think>\n<answer>3</answer><answer>4</answer>": (1, 1, 0),
    "<think></think>\n<answer></answer>": (0, 0, 1),
    "<answer>٤</answer>": (0, 1, 0),
    "-4": (0, 0, 0),
    "4</answer>3": (1, 1, 0),
}


@pytest.mark.parametrize(("place", "check"), [(0, "correct"), (1, "integer"), (2, "format")])
def test_equals_nemo_rls_rewards(place, check):
    environment, prompt = made("answer_tags", check=check), Prompt(0, np.zeros(1, np.int32), "x", {"answer": "4"})
    found = {text: environment.step(prompt, text).reward for text in CASES}
    assert found == {text: expected[place] for text, expected in CASES.items()}
