"""A Megatron-Core GPTModel from a Hugging Face config: one pipeline stage, whose last one ends in hidden states.

TransformerEngine's modules are taken where it imports on a GPU, else Megatron-Core's local ones with our norm and attention
(`local_modules.py`) and a warning. Fused kernels are used where what they need is there, unless the recipe says otherwise.

Rotary frequencies are those that transformers derives from the config, so every scaling that does not depend on the sequence is
supported; YaRN's factor on queries and keys becomes part of the softmax's scale, which is the same. Multi-latent attention has
rotary embeddings of its own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear as WholeLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline import models
from pipeline.config import MegatronConfig, PolicyConfig
from pipeline.models import deepseek
from pipeline.train.megatron.local_modules import PackedAttention, RMSNorm
from pipeline.types import Head

if not HAVE_TE:  # two places of Megatron-Core 0.16.1 do not see that TransformerEngine did not import
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


class PipelineStage(GPTModel):
    """One pipeline stage. Its output is hidden states: for the next stage, or of the last one for a head (`heads.py`)."""

    value_head: torch.nn.Linear  # of the last stage, in place of `output_layer`

    def _postprocess(self, hidden_states, *args, **kwargs):
        """In place of logits, which would be the largest tensor of the step: hidden states [t, 1, H], whole on each rank."""
        if self.post_process and self.config.sequence_parallel:
            # Each rank's gradient is complete (`target_outputs` sums it over the vocabulary), so it is only split.
            return tensor_parallel.gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states


def build(policy: PolicyConfig, hf: PreTrainedConfig, head: Head = "logprobs") -> PipelineStage:
    """This rank's stage, on its device, in the recipe's precision, with weights yet to be given.

    Raises ValueError, naming the key of the recipe, for what Megatron-Core cannot do with this model or layout.
    """
    engine = transformer_engine()
    config = _transformer_config(policy, hf, engine)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rows = -(-hf.vocab_size // size)
    if rows * (size - 1) >= hf.vocab_size:
        raise ValueError(
            f"policy.megatron_cfg.tensor_model_parallel_size: a vocabulary of {hf.vocab_size} leaves some of {size} ranks"
            " without a row"
        )
    with _refusals_named():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm")
        stage = PipelineStage(
            config,
            spec if engine else _with_our_modules(spec),
            vocab_size=rows * size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=head == "logprobs" and hf.tie_word_embeddings,
            parallel_output=True,
        )
    if head == "values" and stage.post_process:
        weight = stage.output_layer.weight
        stage.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device)
        del stage.output_layer
    if config.multi_latent_attention:
        _set_latent_norms(stage)
    else:
        stage.rotary_pos_emb.inv_freq, _ = rotary(hf)
    if policy.megatron_cfg.freeze_moe_router:
        for name, parameter in stage.named_parameters():
            if ".router." in name:
                parameter.requires_grad_(False)
    return stage.train()  # Megatron-Core recomputes activations in this mode only; there is no dropout


def _set_latent_norms(stage: PipelineStage) -> None:
    """Megatron-Core has one epsilon for all norms. TransformerEngine's are part of the projection that follows them."""
    for name, module in stage.named_modules():
        norm = name.endswith(("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"))
        if norm and hasattr(module, "eps"):
            module.eps = deepseek.LATENT_NORM_EPSILON


def transformer_engine() -> bool:
    """Return whether to build on TransformerEngine: where Megatron-Core could import all that it uses of it. Warns where a GPU
    must do without."""
    if not torch.cuda.is_available():
        return False
    if not HAVE_TE:
        why = "Megatron-Core does not know this version"
        try:
            import transformer_engine.pytorch.fp8  # noqa: F401 for the reason
        except ImportError as error:
            why = str(error)
        warnings.warn(
            f"TransformerEngine does not import ({why}); Megatron-Core's local modules are used instead, which are slower",
            stacklevel=2,
        )
    return HAVE_TE


def rotary(hf: PreTrainedConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [D / 2] float32, factor on queries and on keys), as transformers derives them."""
    parameters = hf.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width), 1.0


def _transformer_config(policy: PolicyConfig, hf: PreTrainedConfig, engine: bool) -> TransformerConfig:
    megatron = policy.megatron_cfg
    dtype = getattr(torch, policy.precision)
    family = models.family(hf.model_type).transformer(hf)
    arguments = {**family, **_layout(megatron, dtype), **_fusions(megatron, engine), **_recompute(megatron, engine)}
    if arguments.get("num_moe_experts"):
        arguments |= _mixture(megatron, engine)
    latent = arguments.get("multi_latent_attention", False)
    if not latent:
        width = arguments["kv_channels"]
        _, factor = rotary(hf)
        arguments["softmax_scale"] = factor * factor * width**-0.5
    arguments["activation_func"] = {"silu": F.silu}[arguments.get("activation_func", "silu")]
    if megatron.attention_backend:
        arguments["attention_backend"] = AttnBackend[megatron.attention_backend]
    arguments |= megatron.model_overrides
    cls = MLATransformerConfig if latent else TransformerConfig
    with _refusals_named():
        return cls(**arguments)


@contextlib.contextmanager
def _refusals_named() -> Iterator[None]:
    """What Megatron-Core refuses, as a ValueError that names the section of the recipe."""
    try:
        yield
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"policy.megatron_cfg: Megatron-Core does not take this layout or these options: {error}") from error


def _layout(megatron: MegatronConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        "context_parallel_size": megatron.context_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,  # each microbatch has its own number of tokens
        "calculate_per_token_loss": True,  # losses are divided already: Megatron-Core must sum, not average
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths demands it, of dense models too
    }


def _fusions(megatron: MegatronConfig, engine: bool) -> dict[str, bool]:
    """Null in the recipe: on where what it needs is there."""
    needs_engine = {"apply_rope_fusion": megatron.apply_rope_fusion, "moe_permute_fusion": megatron.moe_permute_fusion}
    for name, wanted in needs_engine.items():
        if wanted and not engine:
            raise ValueError(f"policy.megatron_cfg.{name}: true needs TransformerEngine, which is not here; null or false")
    activation = megatron.bias_activation_fusion
    return {
        "apply_rope_fusion": engine if megatron.apply_rope_fusion is None else megatron.apply_rope_fusion,
        "bias_activation_fusion": torch.cuda.is_available() if activation is None else activation,
        "gradient_accumulation_fusion": megatron.gradient_accumulation_fusion,
        "masked_softmax_fusion": False,
        "persist_layer_norm": engine,
        "bias_dropout_fusion": False,
    }


def _recompute(megatron: MegatronConfig, engine: bool) -> dict[str, Any]:
    if not megatron.activation_checkpointing:
        return {}
    if megatron.recompute_granularity == "selective":
        modules = megatron.recompute_modules
        if modules and "layernorm" in modules and not engine:  # Megatron-Core 0.16.1 asks TransformerEngine about FP8 there
            raise ValueError("policy.megatron_cfg.recompute_modules: layernorm needs TransformerEngine, which is not here")
        return {"recompute_granularity": "selective", "recompute_modules": modules and list(modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method or "uniform",
        "recompute_num_layers": megatron.recompute_num_layers or 1,
    }


def _mixture(megatron: MegatronConfig, engine: bool) -> dict[str, Any]:
    grouped = megatron.moe_grouped_gemm
    if grouped and not engine:
        raise ValueError("policy.megatron_cfg.moe_grouped_gemm: true needs TransformerEngine, which is not here; null or false")
    return {
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "moe_grouped_gemm": engine if grouped is None else grouped,
        "moe_permute_fusion": engine if megatron.moe_permute_fusion is None else megatron.moe_permute_fusion,
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_router_load_balancing_type": "none",  # losses that balance load would pull the policy from what it sampled with
        "moe_router_bias_update_rate": megatron.moe_router_bias_update_rate,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
    }


def _with_our_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A local spec with our norm and attention in the place of those that do less."""
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                # Whole on every rank, as with TransformerEngine. Cut as in the local spec, the gradient of the keys' rotary
                # part would be that of a rank's own heads only.
                setattr(attention, name, WholeLinear)
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            norm = getattr(attention, name, None)
            if norm is not None and norm is not IdentityOp:
                setattr(attention, name, RMSNorm)
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=RMSNorm)
