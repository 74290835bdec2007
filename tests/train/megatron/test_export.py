"""Check that a DeepSeek in half precision exports its routers' biases in float32, bitwise, in every way."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.config import TokenizerConfig
from pipeline.train.hf_export import export, export_checkpoint
from tests.end_to_end.runs import ROOT
from tests.train import cases, ranks
from tests.train.megatron import layouts

BIAS = torch.full((4,), 4.0 + 0.003)  # of each expert; bfloat16 would make it 4


def test_a_routers_bias_is_exported_bit_for_bit(models, realm, tmp_path):
    tokenizer = TokenizerConfig(str(ROOT / "recipes/tiny"))
    policy = cases.policy(models / "deepseek_v3", precision="bfloat16", tokenizer=tokenizer)
    trained = layouts.backend(policy)
    for name, local in trained._local.items():
        if name.endswith("expert_bias"):
            local.tensor.copy_(BIAS)
    trained.shards().write(tmp_path / "checkpoint", 0)
    export(trained, policy, tmp_path / "running", writes=True)
    export_checkpoint(tmp_path / "checkpoint", policy, tmp_path / "offline")
    files = [load_file(tmp_path / way / "model.safetensors") for way in ("running", "offline")]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "offline").state_dict()
    for way, tensors in enumerate((ranks.weights(trained), *files, read)):
        biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
        assert [bias.tolist() for bias in biases] == [BIAS.tolist()] * 2, way
        assert tensors["model.norm.weight"].dtype == torch.bfloat16
