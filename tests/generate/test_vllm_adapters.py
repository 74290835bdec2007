"""Adapters in vLLM's own LoRA against merged weights: greedy tokens and log-probs."""

from typing import get_args

import numpy as np
import pytest
import torch
from vllm.config.lora import MaxLoRARanks

from pipeline.config import LoRAConfig
from pipeline.config.lora_refit_checks import SERVED_DIM
from pipeline.generate import build
from pipeline.train.adapters import arithmetic
from pipeline.train.adapters.served import served_adapters
from pipeline.train.adapters.spec import AdapterSpec
from tests.generate.tiny import drain, load, policy, refit, requests
from tests.problems import refused


def drawn_adapters(shapes, seed):
    """Return A and B that change the model's greedy choices."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def merged(weights, tensors, spec):
    """Return the weights with the adapters merged."""
    layers = {name.split(".lora_")[0] for name in tensors}
    changed = {
        f"{layer}.weight": arithmetic.merge(
            weights[f"{layer}.weight"], tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"], spec.scale
        )
        for layer in layers
    }
    return weights | changed


def test_submission_knows_the_greatest_rank():
    assert max(get_args(MaxLoRARanks)) == SERVED_DIM


@pytest.mark.parametrize("rslora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_adapters_equal_merged_weights(checkpoint, new_engine, rslora):
    base = checkpoint("llama", 0)
    section = policy(base.folder, "vllm")
    section.dtensor_cfg.lora_cfg = LoRAConfig(True, dim=4, alpha=6, use_rslora=rslora)
    spec, served = AdapterSpec.of(section.dtensor_cfg.lora_cfg), served_adapters(section)
    engine, reference = build(section, 1, 0, 0, served), new_engine("vllm", "llama")
    assert engine.shapes == served.shapes
    asked, seen = requests(8, 1, temperature=0.0), []
    for version, deliver in enumerate((refit, lambda e, weights, version: load(e, weights.items(), version), refit)):
        tensors = drawn_adapters(served.shapes, version)
        deliver(engine, tensors, version)
        load(reference, merged(base.weights(), tensors, spec).items(), version + 1)
        ours, theirs = drain(engine, asked), drain(reference, asked)
        assert {id: done.tokens.tolist() for id, done in ours.items()} == {id: d.tokens.tolist() for id, d in theirs.items()}
        assert all(np.abs(done.logprobs - theirs[id].logprobs).max() < 1e-4 for id, done in ours.items())
        seen.append({id: done.tokens.tolist() for id, done in ours.items()})
    assert seen[0] != seen[1] != seen[2]
    engine.close()
    reference.close()


def test_an_engine_that_cannot_serve_adapters_refuses(checkpoint):
    section = policy(checkpoint("llama", 0).folder, "transformers")
    section.dtensor_cfg.lora_cfg = LoRAConfig(True, dim=513)
    served = served_adapters(section)
    with refused(("policy.generation.lora_refit", "unsupported")):
        build(section, 1, 0, 0, served)
    section.generation.backend = "vllm"
    with refused(("policy.generation.lora_refit", "unsupported")):
        build(section, 1, 0, 0, served)
