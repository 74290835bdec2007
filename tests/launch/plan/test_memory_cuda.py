"""Predicted memory against torch.cuda.max_memory_allocated."""

import dataclasses

import pytest
import torch

from tests.launch.plan import measure
from tests.launch.plan.memory_cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = ("fsdp_medium_bfloat16", "fsdp_vocabulary_bfloat16_128", "megatron_medium_bfloat16", "megatron_vocabulary_bfloat16_128")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_allocated(name, again, tmp_path):
    """Check with activations kept and recomputed; 4,096 tokens at a time, so that activations outweigh the weights."""
    key = "policy.megatron_cfg" if name.startswith("megatron") else "policy.dtensor_cfg"
    more = ("policy.train_global_batch_size=256", "policy.sequence_packing.train_mb_tokens=4096")
    if again:
        more += (f"{key}.activation_checkpointing=true",)
    case = CASES[name]
    case = dataclasses.replace(case, gpus=1, overrides=(*case.overrides, *more))
    predicted, _ = case.predicted()
    assert abs(predicted / measure.measured(case, tmp_path, "cuda") - 1) < 0.1
