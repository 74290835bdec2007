"""SFT: supervised fine-tuning, the mean negative log-likelihood of the tokens that the mask counts: `sft_loss` in loss.py.

The mask (assistant turns only) is the data's. Left out: weighting of examples.
"""

from __future__ import annotations

from pipeline.algorithms.base import Needs
from pipeline.algorithms.loss import sft_loss


class SFT:
    needs = Needs()

    def __init__(self) -> None:
        self.losses = {"policy": sft_loss}
