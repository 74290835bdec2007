"""Compare norms in bfloat16 with transformers', also the one that an adapter applies in place of TransformerEngine's."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from pipeline.train.megatron.adapters import _fused_norm
from pipeline.train.megatron.local_modules import RMSNorm

WIDTH, EPSILON = 64, 1e-6


@pytest.fixture
def config() -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 1, "use_cpu_initialization": True}
    return TransformerConfig(**sizes, params_dtype=torch.bfloat16, layernorm_zero_centered_gamma=True)


@pytest.fixture
def theirs() -> Gemma3RMSNorm:
    norm = Gemma3RMSNorm(WIDTH, EPSILON).bfloat16()
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.normal_(0, 0.1)
    return norm


def test_weights_around_one_keep_their_precision(config, theirs):
    ours = RMSNorm(config, WIDTH, EPSILON)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))
    rounded = torch.nn.functional.rms_norm(x, (WIDTH,), theirs.weight + 1, EPSILON)
    assert not torch.equal(rounded, theirs(x))


def test_an_adapter_norms_its_input_as_the_module_that_has_the_norm(config, theirs):
    module = torch.nn.Linear(WIDTH, 2)
    vars(module).update(vars(SimpleNamespace(layer_norm_weight=theirs.weight.detach(), eps=EPSILON, config=config)))
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(_fused_norm(module)(x), theirs(x))
