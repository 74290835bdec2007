"""DPO: direct preference optimization (https://arxiv.org/abs/2305.18290) on pairs of a chosen and a rejected answer.

Its loss is `dpo_loss` in pairs.py. Left out: divergences other than the reverse KL; hinge, robust, EXO, BCO, SPPO, APO; weights
by length (LD-DPO) or by policy.
"""

from __future__ import annotations

from functools import partial

from pipeline.algorithms.base import Needs
from pipeline.algorithms.pairs import dpo_loss
from pipeline.config import DPOConfig


class DPO:
    def __init__(self, config: DPOConfig):
        self.needs = Needs(reference=not config.reference_free, together=2)
        self.losses = {"policy": partial(dpo_loss, config)}
