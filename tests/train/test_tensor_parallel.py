"""Check that unsupported tensor-parallel plans raise errors. Supported plans: test_layouts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen3Config

from pipeline.train import tensor_parallel
from tests.problems import refused
from tests.train import attention_models, cases


class Mesh:
    """The part of a mesh that the checks use."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


QWEN3 = {**cases.SHAPE, "head_dim": 16}
REFUSED = {
    "query heads": (Qwen3Config(**QWEN3), 8, "not-divisible"),
    "key heads": (Qwen3Config(**{**QWEN3, "num_attention_heads": 12, "num_key_value_heads": 4}), 6, "not-divisible"),
    "width": (Qwen3Config(**{**QWEN3, "intermediate_size": 45}), 2, "not-divisible"),
    "vocabulary": (Qwen3Config(**{**QWEN3, "vocab_size": 5, "num_key_value_heads": 4}), 4, "too-large"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    config, size, code = REFUSED[case]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with refused((tensor_parallel.KEY, code)):
        tensor_parallel.parallelize(model, Mesh(size))


@pytest.mark.parametrize("style", ["packed_rowwise", "unknown"])
def test_an_unknown_style_is_refused(style):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3))
    model._tp_plan = {"model.layers.*.mlp.down_proj": style}
    with refused((tensor_parallel.KEY, "unsupported")):
        tensor_parallel.parallelize(model, Mesh(2))


def test_a_model_without_a_plan():
    config = GPTNeoXConfig(vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=1, num_attention_heads=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model._tp_plan = {}
    with refused((tensor_parallel.KEY, "unsupported")):
        tensor_parallel.parallelize(model, Mesh(2))


def test_norms_of_cut_heads_have_partial_gradients():
    """The plan of GLM-4.5 does not name them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(attention_models.configs()["glm4_moe"])
    assert "model.layers.*.self_attn.q_norm" not in model.tp_plan
    styles = tensor_parallel.expand(model)
    for name in ("q_norm", "k_norm"):
        assert styles[f"model.layers.0.self_attn.{name}"] == "replicated_with_grad_allreduce"
