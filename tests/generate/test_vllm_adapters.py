"""Adapters in vLLM's own LoRA against merged weights: greedy tokens and log-probs."""

import json
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.config.lora import MaxLoRARanks

from pipeline.config import LoRAConfig
from pipeline.config.recipe_checks import SERVED_DIM
from pipeline.generate import build
from pipeline.train.adapters import adapter_weights
from pipeline.train.adapters.served_adapters import served_adapters
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
        f"{layer}.weight": adapter_weights.merge(
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


def test_vllm_reads_the_files_that_the_index_names(tmp_path):
    """An engine that serves adapters reads its base weights itself. vLLM's own loader yields copies too."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from pipeline.generate.vllm_weight_files import LOAD_FORMAT

    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for value, file in enumerate(files):
        save_file({name: torch.full((2,), float(value)) for name in ("a", "b")}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ba", files, strict=True))}))

    def loaded(load_format: str) -> list[tuple[str, float]]:
        loader = get_model_loader(LoadConfig(load_format=load_format))
        assert isinstance(loader, DefaultModelLoader)
        found = loader._get_weights_iterator(DefaultModelLoader.Source(str(tmp_path), None, prefix="x."))
        return sorted((name, float(tensor[0])) for name, tensor in found)

    assert loaded("auto") == [("x.a", 0.0), ("x.a", 1.0), ("x.b", 0.0), ("x.b", 1.0)]
    assert loaded(LOAD_FORMAT) == [("x.a", 1.0), ("x.b", 0.0)]
    save_file({name: torch.full((2,), 7.0) for name in ("a", "b")}, tmp_path / "model.safetensors")
    assert loaded(LOAD_FORMAT) == [("x.a", 7.0), ("x.b", 7.0)]  # as transformers reads such a folder
