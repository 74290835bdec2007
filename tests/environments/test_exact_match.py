import numpy as np

from pipeline.types import Prompt
from tests.environments.pooled import made

PROMPT = Prompt(0, np.zeros(1, np.int32), "addition", {"answer": "132"})


def reward(text: str, pattern: str | None = None) -> float:
    outcome = made("exact_match", pattern=pattern).step(PROMPT, text)
    assert outcome.metrics == {"accuracy": outcome.reward, "unparsed": float(pattern is not None and not outcome.extracted)}
    return outcome.reward


def test_the_whole_text():
    assert reward(" 132\n") == 1.0
    assert reward("0132") == reward("13 2") == reward("") == 0.0


def test_the_last_match_of_the_pattern_counts():
    pattern = r";(\d+)$"
    assert reward("7+5=12,4+8+1=13;132", pattern) == 1.0
    assert reward("7+5=12,4+8+1=13;133", pattern) == 0.0
    assert reward("132", pattern) == reward(";132 or so", pattern) == reward(";", pattern) == 0.0
    assert reward("1 then 132", r"\d+") == 1.0
    assert reward("132 then 1", r"\d+") == 0.0
