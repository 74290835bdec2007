"""Build one pipeline stage of a Megatron-Core GPTModel from a Hugging Face config.

With a GPU and TransformerEngine, the stage consists of TransformerEngine's modules. Otherwise it consists of Megatron-Core's
local modules with our norm and attention (`local_modules.py`); on a GPU, a warning says so. Fused kernels are used where they
are available, unless the recipe turns them off.

transformers derives the rotary frequencies from the config, so every scaling that does not depend on the sequence is supported.
YaRN's factor on queries and keys is applied to the softmax scale, which is equivalent. Multi-latent attention has its own
rotary embeddings.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear as WholeLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PreTrainedConfig
from typing_extensions import override

from pipeline import models
from pipeline.config import MegatronConfig, PolicyConfig, Problem, RecipeError
from pipeline.models import deepseek
from pipeline.models.family import Features
from pipeline.train.logprobs import VocabularyShard
from pipeline.train.megatron.features import scale_embeddings, set_rotary, softmax_factor, with_features, with_layers
from pipeline.train.megatron.groups import tensor_group
from pipeline.train.megatron.local_modules import PackedAttention, RMSNorm
from pipeline.types import Head

if not HAVE_TE:  # two modules of Megatron-Core 0.16.1 do not notice that TransformerEngine is not importable
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    # Experts that work on a latent: without TransformerEngine, its projections are torch's, whole on every rank too.
    moe_layer.HAVE_TE = True
    moe_layer.TELinear = lambda *sizes, parallel_mode, **named: WholeLinear(*sizes, **named)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x). Megatron-Core's own is compiled, which needs a C++ compiler on CPUs."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu2": squared_relu,
}
"""{name in the families' descriptions: activation function}. relu2: max(x, 0)^2."""


class PipelineStage(GPTModel):
    """One pipeline stage. It returns hidden states for the next stage or, on the last stage, for an `OutputHead`."""

    value_head: torch.nn.Linear  # on the last stage, instead of `output_layer`

    @override
    def _postprocess(self, hidden_states, *args, **kwargs):
        """Return hidden states [t, 1, H], whole on each rank, instead of logits, the largest tensor of the step."""
        if self.post_process and self.config.sequence_parallel:
            # Each rank has the whole gradient (`target_outputs` sums it over the vocabulary), so the backward only splits it.
            return tensor_parallel.gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states

    def head(self, vocabulary: int) -> tuple[torch.Tensor, VocabularyShard | None]:
        """Return (this rank's rows of the last stage's head, the shard of the vocabulary that they are; None: all of it).

        The head of log-probs is the output layer, or the embedding if it is tied. vocabulary: its size without padding.
        """
        if hasattr(self, "value_head"):
            return self.value_head.weight, None
        tied, group = self.share_embeddings_and_output_weights, tensor_group()
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None  # on the last stage
        start = group.rank() * len(weight)
        weight = weight[: max(vocabulary - start, 0)]  # without padding
        return weight, VocabularyShard(start, group) if group.size() > 1 else None


def build(policy: PolicyConfig, hf: PreTrainedConfig, head: Head = "logprobs") -> PipelineStage:
    """Return this rank's stage, in the recipe's precision, with uninitialised weights.

    Raises RecipeError for a model or a layout that Megatron-Core does not support.
    """
    engine, features = transformer_engine(), models.features(hf)
    config = _transformer_config(policy, hf, engine)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rows = -(-hf.vocab_size // size)
    if rows * (size - 1) >= hf.vocab_size:
        message = f"got {size}; a vocabulary of {hf.vocab_size} leaves some ranks without a row"
        raise RecipeError(Problem("policy.megatron_cfg.tensor_model_parallel_size", "too-large", message))
    with _core_errors_as_problems():
        stage = PipelineStage(
            config,
            _spec(config, features, engine),  # pyright: ignore[reportArgumentType] - it takes both kinds
            vocab_size=rows * size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope" if features.rotary else "none",
            share_embeddings_and_output_weights=head == "logprobs" and hf.tie_word_embeddings,
            parallel_output=True,
        )
    if head == "values" and stage.post_process:
        weight = stage.output_layer.weight
        assert weight is not None  # with a value head, the embedding is not tied
        stage.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device)
        del stage.output_layer
    if config.multi_latent_attention:
        _set_latent_norms(stage)
    elif features.rotary:
        set_rotary(stage, hf, features)
    if features.embedding_scale is not None and stage.pre_process:
        scale_embeddings(stage, features.embedding_scale)
    if policy.megatron_cfg.freeze_moe_router:
        for name, parameter in stage.named_parameters():
            if ".router." in name:
                parameter.requires_grad_(False)
    return stage.train()  # Megatron-Core recomputes activations only in training mode; there is no dropout


def _set_latent_norms(stage: PipelineStage) -> None:
    """Set the epsilon of the norms of latents, because Megatron-Core has one epsilon for all norms of a model.

    TransformerEngine fuses these norms into the projections after them.
    """
    for name, module in stage.named_modules():
        norm = name.endswith(("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"))
        if norm and hasattr(module, "eps"):
            module.eps = deepseek.LATENT_NORM_EPSILON  # pyright: ignore[reportArgumentType] - a plain attribute


def transformer_engine() -> bool:
    """Return whether to use TransformerEngine: on a GPU, if Megatron-Core could import it. Warn on a GPU if it could not."""
    if not torch.cuda.is_available():
        return False
    if not HAVE_TE:
        why = "Megatron-Core does not support this version"
        try:
            # An optional package; imported for the reason of its ImportError.
            import transformer_engine.pytorch.fp8  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            why = str(error)
        warnings.warn(
            f"TransformerEngine cannot be imported ({why}); Megatron-Core's local modules are used, which are slower",
            stacklevel=2,
        )
    return HAVE_TE


def _transformer_config(policy: PolicyConfig, hf: PreTrainedConfig, engine: bool) -> TransformerConfig:
    megatron = policy.megatron_cfg
    dtype = getattr(torch, policy.precision)
    family = models.family(hf.model_type).transformer(hf)
    arguments = {**family, **_layout(megatron, dtype), **_fusions(megatron, engine), **_recompute(megatron, engine)}
    arguments["deterministic_mode"] = policy.deterministic
    if arguments.get("num_moe_experts"):
        arguments |= _mixture(megatron, engine)
    latent = arguments.get("multi_latent_attention", False)
    features = models.features(hf)
    if not latent and features.rotary:
        scale = arguments.get("softmax_scale") or arguments["kv_channels"] ** -0.5
        arguments["softmax_scale"] = softmax_factor(hf, features) * scale
    arguments["activation_func"] = ACTIVATIONS[arguments.get("activation_func", "silu")]
    if arguments["activation_func"] is not F.silu and megatron.bias_activation_fusion is None:
        arguments["bias_activation_fusion"] = False  # Megatron-Core has no such kernel
    if arguments.get("rotary_interleaved") and megatron.apply_rope_fusion is None:
        arguments["apply_rope_fusion"] = False  # Megatron-Core does not tell the kernel for packed sequences
    if megatron.attention_backend:
        arguments["attention_backend"] = AttnBackend[megatron.attention_backend]
    arguments |= megatron.model_overrides
    cls = MLATransformerConfig if latent else TransformerConfig
    with _core_errors_as_problems():
        return cls(**arguments)


@contextlib.contextmanager
def _core_errors_as_problems() -> Iterator[None]:
    """Turn errors of Megatron-Core's checks into RecipeError."""
    try:
        yield
    except RecipeError:
        raise
    except (AssertionError, ValueError, TypeError) as error:
        message = f"Megatron-Core does not accept this layout or these options: {error}"
        raise RecipeError(Problem("policy.megatron_cfg", "unsupported", message)) from error


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
        "calculate_per_token_loss": True,  # losses are already divided, so Megatron-Core must sum, not average
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths requires it, for dense models too
    }


def _fusions(megatron: MegatronConfig, engine: bool) -> dict[str, bool]:
    """Return {fusion: whether to use it}. Fusions that are null in the recipe are on if their dependencies are available."""
    needs_engine = {"apply_rope_fusion": megatron.apply_rope_fusion, "moe_permute_fusion": megatron.moe_permute_fusion}
    for name, enabled in needs_engine.items():
        if enabled and not engine:
            raise _needs_engine(name, "true", "null or false")
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
        if modules and "layernorm" in modules and not engine:  # Megatron-Core 0.16.1 then calls TransformerEngine
            raise _needs_engine("recompute_modules", "layernorm", "other modules")
        return {"recompute_granularity": "selective", "recompute_modules": modules and list(modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method or "uniform",
        "recompute_num_layers": megatron.recompute_num_layers or 1,
    }


def _mixture(megatron: MegatronConfig, engine: bool) -> dict[str, Any]:
    grouped = megatron.moe_grouped_gemm
    if grouped and not engine:
        raise _needs_engine("moe_grouped_gemm", "true", "null or false")
    return {
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "moe_grouped_gemm": engine and not megatron.peft.enabled
        if grouped is None
        else grouped,  # adapters need separate experts
        "moe_permute_fusion": engine if megatron.moe_permute_fusion is None else megatron.moe_permute_fusion,
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_router_load_balancing_type": "none",  # load_balancing.py has the loss
        "moe_router_bias_update_rate": megatron.moe_router_bias_update_rate,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
    }


def _needs_engine(name: str, value: str, alternative: str) -> RecipeError:
    message = f"got {value}, which requires TransformerEngine; it is not available. Try {alternative}"
    return RecipeError(Problem(f"policy.megatron_cfg.{name}", "not-installed", message))


def _spec(config: TransformerConfig, features: Features, engine: bool) -> TransformerBlockSubmodules:
    """Return the spec of a stage's modules: TransformerEngine's or Megatron-Core's local modules, some replaced by ours."""
    block: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm")
    if not engine:
        block = _with_our_modules(block)
    if features.layers is not None:
        block = with_layers(block, config, features.layers)
    return with_features(block, config, features, TENorm if engine else RMSNorm)  # pyright: ignore[reportArgumentType]


def _with_our_modules(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return a local spec in which our norm and attention, which support more layouts, replace Megatron-Core's."""
    layers: dict[int, Any] = {id(spec): spec for spec in block.layer_specs or ()}  # submodules are annotated as object
    for layer in layers.values():
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                # Whole on every rank, as with TransformerEngine. If cut as in the local spec, the gradient of the keys' rotary
                # part would be of a rank's own heads only.
                setattr(attention, name, WholeLinear)
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            norm = getattr(attention, name, None)
            if norm is not None and norm is not IdentityOp:
                setattr(attention, name, RMSNorm)
    final_norm: Any = RMSNorm  # a class is allowed too, against the annotation
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=final_norm)


def data_parallel(
    policy: PolicyConfig, stage: PipelineStage, then: Callable[[], None] | None = None
) -> DistributedDataParallel:
    """Wrap a stage that is trained, so that gradients are summed over data-parallel ranks.

    then: a function that is called after this sum, to sum gradients over other ranks.
    """
    settings = policy.megatron_cfg.distributed_data_parallel_config
    model = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
            overlap_grad_reduce=settings.overlap_grad_reduce,
            # Never overlapped with the next forward pass: a refit reads every weight before it, and our head reads the output
            # layer's weight without running the module, which would wait for it.
            overlap_param_gather=False,
            use_distributed_optimizer=True,
        ),
        stage,
    )

    def finalize(models_: list, num_tokens=None, **kwargs) -> None:
        finalize_model_grads(models_, None, **kwargs)  # None: the loss is already divided
        if then is not None:
            then()

    stage.config.finalize_model_grads_func = finalize
    stage.config.no_sync_func = model.no_sync
    return model
