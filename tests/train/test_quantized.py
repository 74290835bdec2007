"""Quantized checkpoints train, are served and are exported in bfloat16, with the weights that they hold."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from launch.preflight import model_weights
from pipeline.boxes import Box, whole
from pipeline.config import TokenizerConfig
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.models.quantized import unpacked
from pipeline.models.weight_files import read_weight_files
from pipeline.train.hf_export import export_checkpoint
from pipeline.train.initial_weights import initial_weights
from pipeline.train.saved_weights import model_weights as weights_of
from tests.data.test_chat import CHATML
from tests.models.cases import configs
from tests.problems import named, refused
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.test_export import TINY

PROJECTIONS = ("gate_up_proj", "down_proj")
FORMATS = {  # the family that is published in it, a quantized tensor, the end of its scales' name, the problem without these
    "mxfp4": ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj", "_scales", "unavailable-model"),
    "fp8": ("minimax_m2", "model.layers.1.self_attn.q_proj.weight", "_scale_inv", "unsupported"),
    "fp8_tensors": ("ministral3", "model.layers.1.self_attn.q_proj.weight", "_scale_inv", "unsupported"),
}


@pytest.fixture(scope="module", params=FORMATS)
def published(request, tmp_path_factory) -> Path:
    """Return a checkpoint as OpenAI publishes gpt-oss, MiniMax and Mistral theirs: quantized matrices, and bfloat16."""
    folder = tmp_path_factory.mktemp(request.param) / request.param
    config = configs()[FORMATS[request.param][0]]
    config.max_position_embeddings = 64
    torch.manual_seed(3)
    if request.param == "mxfp4":
        config.hidden_size, config.intermediate_size = 64, 96
        config.rope_parameters |= {"beta_fast": 32.0, "beta_slow": 1.0}
    elif request.param == "fp8":
        config.hidden_size, config.intermediate_size, config.head_dim = 160, 136, 36  # blocks at the ends are smaller
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    quantization = {"mxfp4": _mxfp4, "fp8": _fp8, "fp8_tensors": _fp8_tensors}[request.param](tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    return folder


def _mxfp4(tensors: dict[str, torch.Tensor]) -> dict:
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, groups, dtype=torch.uint8)
    return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def _fp8(tensors: dict[str, torch.Tensor]) -> dict:
    for name in [name for name in tensors if re.search(r"(_proj|w[123])\.weight", name)]:
        tensors[name] = torch.randn(tensors[name].shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = 0.01 + torch.rand([-(-size // 128) for size in tensors[name].shape])
    return {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate"]}


def _fp8_tensors(tensors: dict[str, torch.Tensor]) -> dict:
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name] = torch.randn(tensors[name].shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = (0.01 + torch.rand(())).bfloat16()
        tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.rand(()).bfloat16()
    return {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


@pytest.fixture(scope="module")
def dequantized(published) -> dict[str, torch.Tensor]:
    """Return the weights that transformers loads from the same folder; for FP8, whose last blocks it refuses, by definition."""
    if published.name == "mxfp4":
        options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_pretrained(published, **options)
        return {name: tensor.detach() for name, tensor in model.named_parameters()}
    tensors = load_file(published / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight, scales = name.removesuffix("_scale_inv"), tensors.pop(name)
        tensors.pop(f"{weight.removesuffix('weight')}activation_scale", None)
        (rows, columns), every = tensors[weight].shape, scales
        if scales.dim():
            every = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        tensors[weight] = (tensors[weight].float() * every.float()).bfloat16()
    return tensors


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 20
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def policy_of(folder: Path):
    tokens = TokenizerConfig(TINY, chat_template=CHATML)
    return cases.policy(folder, precision="bfloat16", tokenizer=tokens)


@pytest.mark.parametrize("backend", [ranks.backend, layouts.backend], ids=["fsdp", "megatron"])
def test_both_backends_train_the_dequantized_weights(published, dequantized, backend, realm, tmp_path):
    """Their exports are checkpoints in bfloat16, without a word of quantization."""
    trained = backend(policy_of(published))
    try:
        check(dict(ranks.weights(trained)), dequantized)
        trained.shards().write(tmp_path / "checkpoint", 0)
    finally:
        layouts.release()
    export_checkpoint(tmp_path / "checkpoint", policy_of(published), tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    check(load_file(tmp_path / "hf/model.safetensors"), dequantized)


@pytest.mark.parametrize("part", [(0, 1), (0.35, 0.55), (0.9, 1)])
def test_a_rank_reads_its_box_from_the_blocks_around_it(published, dequantized, part):
    policy, name = policy_of(published), FORMATS[published.name][1]
    read, shape = initial_weights(policy, model_config(policy), seed=0), dequantized[name].shape
    first, last = ([int(share * size) for size in shape] for share in part)
    box = Box(tuple(first), tuple(end - start for start, end in zip(first, last, strict=True)))
    assert torch.equal(read(name, box), dequantized[name][box.within(whole(tuple(shape)))])


def test_an_engine_is_built_for_the_dequantized_weights(published, dequantized):
    """vLLM's own loader takes every tensor of the model in bfloat16, and none of blocks and scales."""
    pytest.importorskip("vllm")
    from pipeline.generate.vllm_rank import record_rank

    policy = policy_of(published)
    policy.generation.vllm_cfg.max_model_len = 32
    shapes, _ = checkpoint_shapes(model_config(policy))
    units = record_rank(policy, shapes, 0, 1)
    assert {region.name for unit in units for region in unit.regions} == shapes.keys()
    check(dict(weights_of(policy, seed=0)), dequantized)  # those of an evaluation


def test_submission_reads_the_tensors_of_the_blocks(published, dequantized, tmp_path):
    model, stored = json.loads((published / "config.json").read_text()), read_weight_files(published).tensors
    assert model_weights.tensor_problems("k", published, model, stored, "logprobs") == []
    assert {name: entry.shape for name, entry in unpacked(stored).items()} == {
        n: tuple(t.shape) for n, t in dequantized.items()
    }
    _, name, ending, code = FORMATS[published.name]
    lost = (name + ending, f"{name.removesuffix('weight')}activation_scale")
    without = {name: entry for name, entry in stored.items() if name not in lost}
    assert named(model_weights.tensor_problems("k", published, model, without, "logprobs")) == {("k", code)}
    tensors = {n: tensor for n, tensor in load_file(published / "model.safetensors").items() if n not in lost}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(model))
    policy = policy_of(tmp_path)
    with refused(("policy.model_name", code)):
        initial_weights(policy, model_config(policy), seed=0)
