"""The benchmark of the log-prob head runs on the current head, which agrees with all logits at once."""

import pytest

from tests.benchmarks import logprob_head


@pytest.mark.full
def test_both_heads_are_measured_and_agree(capsys):
    logprob_head.compare("tiny", tokens=512, chunk=64, times=1)
    printed = capsys.readouterr().out
    assert all(f"  {head} " in printed for head in logprob_head.HEADS) and "MB in the passes" in printed
