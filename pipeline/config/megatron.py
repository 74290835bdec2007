"""`policy.megatron_cfg`: the Megatron-Core backend's keys, named as in NeMo-RL.

`pipeline/config/megatron_checks.py` checks combinations of keys, `pipeline/config/parallelism.py` how the ranks divide.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.values import Bool, Float, Int, NotNegative, Positive, Text, Variables, interpolation

MEGATRON_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")  # pipeline/models/
FIXED = "Only the default is supported."  # NeMo-RL's key for what this backend does not do; why is in megatron_checks.py
IGNORED = "Has no effect: "


@dataclass
class MegatronOptimizerConfig:
    """Megatron's names for an optimizer. Its state and main weights are float32, sharded over the data-parallel ranks."""

    optimizer: Annotated[Literal["adam"], Field(description="adam: AdamW.")] = "adam"
    lr: Annotated[Float, Field(ge=0, description="Learning rate.")] = 5e-6
    min_lr: Annotated[Float, Field(ge=0, description="Learning rate at which scheduler.lr_decay_style ends.")] = 0.0
    weight_decay: Annotated[Float, Field(ge=0, description="Weight decay.")] = 0.01
    adam_beta1: Annotated[Float, Field(description="Adam's first beta.")] = 0.9
    adam_beta2: Annotated[Float, Field(description="Adam's second beta.")] = 0.999
    adam_eps: Annotated[Float, Field(description="Adam's epsilon.")] = 1e-8
    sgd_momentum: Annotated[Float, Field(description=f"{IGNORED}the only optimizer is adam.")] = 0.9
    clip_grad: Annotated[Float | None, Field(ge=0, description="Clip gradients to this norm. null, 0: do not clip.")] = (
        interpolation("${policy.max_grad_norm}")
    )
    use_precision_aware_optimizer: Annotated[
        Bool,
        Field(
            description=f"{IGNORED}with float32 state it computes the same, and checkpoints need the main weights as they are."
        ),
    ] = False
    bf16: Annotated[Bool | None, Field(description="Whether policy.precision is bfloat16. No other value is supported.")] = None
    fp16: Annotated[Bool, Field(description=FIXED)] = False
    params_dtype: Annotated[Text, Field(description=FIXED)] = "float32"
    use_distributed_optimizer: Annotated[Bool, Field(description=FIXED)] = True
    optimizer_cpu_offload: Annotated[Bool, Field(description=FIXED)] = False
    optimizer_offload_fraction: Annotated[Float, Field(description=FIXED)] = 0.0
    overlap_cpu_optimizer_d2h_h2d: Annotated[Bool, Field(description=FIXED)] = False


@dataclass
class MegatronSchedulerConfig:
    """Megatron's names for a learning-rate schedule: linear warm-up from lr_warmup_init, then a decay.

    Iterations are steps of the algorithm, however many optimizer updates a step has.
    """

    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root"], Field(description="How the learning rate decays.")
    ] = "constant"
    lr_decay_iters: Annotated[
        Positive | None, Field(description="Step at which optimizer.min_lr is reached. null: only with a constant rate.")
    ] = None
    lr_warmup_iters: Annotated[NotNegative, Field(description="Steps of warm-up.")] = 0
    lr_warmup_init: Annotated[Float, Field(ge=0, description="Learning rate at the start of the warm-up.")] = 0.0
    start_weight_decay: Annotated[
        Float | None, Field(description="optimizer.weight_decay or null: the weight decay does not change.")
    ] = None
    end_weight_decay: Annotated[
        Float | None, Field(description="optimizer.weight_decay or null: the weight decay does not change.")
    ] = None
    weight_decay_incr_style: Annotated[Text, Field(description=FIXED)] = "constant"


@dataclass
class MegatronDDPConfig:
    """The reduction of gradients over the data-parallel ranks."""

    grad_reduce_in_fp32: Annotated[
        Bool, Field(description="Sum a step's microbatches in float32. false: in policy.precision.")
    ] = True
    overlap_grad_reduce: Annotated[Bool, Field(description="Reduce gradients while the backward pass goes on.")] = True
    overlap_param_gather: Annotated[
        Bool, Field(description=f"{IGNORED}a refit reads every weight before the next forward pass could wait for it.")
    ] = True
    use_custom_fsdp: Annotated[Bool, Field(description=FIXED)] = False
    data_parallel_sharding_strategy: Annotated[Text, Field(description=FIXED)] = "optim_grads_params"


@dataclass
class MegatronCheckpointConfig:
    """The writing of checkpoints."""

    async_save: Annotated[Bool, Field(description="Default of checkpointing.async_save.")] = False
    ckpt_assume_constant_structure: Annotated[Bool, Field(description=FIXED)] = True


@dataclass
class MegatronConfig:
    """The Megatron-Core backend. Data-parallel ranks are what is left: ranks / (tensor x pipeline x context)."""

    enabled: Annotated[
        Bool | None, Field(description="Train with Megatron-Core. null: chosen at submission by the model's size.")
    ] = None
    force_reconvert_from_hf: Annotated[Bool, Field(description="Convert the Hugging Face weights again.")] = False
    tensor_model_parallel_size: Annotated[Positive, Field(description="Ranks that share each layer.")] = 1
    pipeline_model_parallel_size: Annotated[Positive, Field(description="Stages of the pipeline.")] = 1
    num_layers_in_first_pipeline_stage: Annotated[Positive | None, Field(description="null: as many as in the others.")] = None
    num_layers_in_last_pipeline_stage: Annotated[Positive | None, Field(description="null: as many as in the others.")] = None
    context_parallel_size: Annotated[Positive, Field(description="Ranks that share each sequence.")] = 1
    expert_model_parallel_size: Annotated[Positive, Field(description="Ranks over which experts are spread.")] = 1
    expert_tensor_parallel_size: Annotated[
        Positive | None,
        Field(
            description="Ranks that share each expert. null: tensor_model_parallel_size where experts are not spread, else 1."
            " NeMo-RL's default of 1 would silently be wrong in the first case."
        ),
    ] = None
    sequence_parallel: Annotated[
        Bool,
        Field(
            description="Shard activations between tensor-parallel regions over the sequence. Needs tensor parallelism, and"
            " mixtures of experts with tensor parallelism need it."
        ),
    ] = False

    activation_checkpointing: Annotated[Bool, Field(description="Recompute activations in the backward pass.")] = False
    recompute_granularity: Annotated[
        Literal["full", "selective"],
        Field(description="What is recomputed with activation_checkpointing: whole layers, or recompute_modules."),
    ] = "full"
    recompute_method: Annotated[Literal["uniform", "block"] | None, Field(description="full. null: uniform.")] = None
    recompute_num_layers: Annotated[Positive | None, Field(description="full: layers of a block. null: 1.")] = None
    recompute_modules: Annotated[
        list[Text] | None, Field(description="selective: modules, in Megatron's names. null: [core_attn].")
    ] = None
    empty_unused_memory_level: Annotated[
        NotNegative, Field(le=2, description="Empty the CUDA cache. 1: after a step. 2: after every forward pass too.")
    ] = 0
    defer_fp32_logits: Annotated[
        Bool, Field(description=f"{IGNORED}logits are cast to float32 policy.logprob_chunk_size tokens at a time.")
    ] = True
    pipeline_dtype: Annotated[
        Text, Field(description="Type of activations between stages. Only policy.precision is supported.")
    ] = interpolation("${policy.precision}")

    freeze_moe_router: Annotated[Bool, Field(description="Do not train routers of mixtures of experts.")] = True
    moe_router_dtype: Annotated[
        Literal["fp32", "fp64"] | None, Field(description="Type in which routers compute. null: policy.precision.")
    ] = "fp64"
    moe_router_bias_update_rate: Annotated[
        Float, Field(ge=0, description="Update rate of the bias by which some models, as DeepSeek-V3, balance load.")
    ] = 0.0
    moe_shared_expert_overlap: Annotated[Bool, Field(description="Compute shared experts while tokens are dispatched.")] = False

    moe_grouped_gemm: Annotated[
        Bool | None,
        Field(description="One kernel for all experts. null: where it is installed. true fails where it is not."),
    ] = None
    moe_permute_fusion: Annotated[Bool | None, Field(description="Fused kernel, as moe_grouped_gemm.")] = None
    apply_rope_fusion: Annotated[Bool | None, Field(description="Fused kernel, as moe_grouped_gemm.")] = None
    bias_activation_fusion: Annotated[Bool | None, Field(description="Fused kernel, as moe_grouped_gemm.")] = None
    gradient_accumulation_fusion: Annotated[
        Bool, Field(description="Add gradients in the matrix product. Needs TransformerEngine or apex.")
    ] = False
    attention_backend: Annotated[
        Literal["auto", "flash", "fused", "unfused"] | None, Field(description="TransformerEngine's attention. null: auto.")
    ] = None

    optimizer: Annotated[MegatronOptimizerConfig | None, Field(description="null: policy.optimizer.")] = None
    scheduler: Annotated[MegatronSchedulerConfig | None, Field(description="null: policy.scheduler.")] = None
    distributed_data_parallel_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    checkpoint: MegatronCheckpointConfig = field(default_factory=MegatronCheckpointConfig)
    env_vars: Annotated[
        Variables | None, Field(description="Environment variables of the train ranks, set before Python starts.")
    ] = None
    model_overrides: Annotated[dict[str, Any], Field(description="More arguments of Megatron's TransformerConfig.")] = field(
        default_factory=dict
    )

    virtual_pipeline_model_parallel_size: Annotated[Int | None, Field(description=FIXED)] = None
    moe_token_dispatcher_type: Annotated[Text, Field(description=FIXED)] = "alltoall"
    moe_router_load_balancing_type: Annotated[Text, Field(description=FIXED)] = "none"
    moe_aux_loss_coeff: Annotated[Float, Field(description=FIXED)] = 0.0
    moe_enable_deepep: Annotated[Bool, Field(description=FIXED)] = False
    moe_per_layer_logging: Annotated[Bool, Field(description=FIXED)] = False
    mtp_num_layers: Annotated[Int, Field(description=FIXED)] = 0
    mtp_loss_scaling_factor: Annotated[Float, Field(description=FIXED)] = 0.0
    mtp_use_repeated_layer: Annotated[Bool, Field(description=FIXED)] = False
    mtp_detach_heads: Annotated[Bool, Field(description=FIXED)] = False
    cuda_graph_impl: Annotated[Text, Field(description=FIXED)] = "none"
    cuda_graph_modules: Annotated[list[Text], Field(description=FIXED)] = field(default_factory=list)
    cuda_graph_warmup_steps: Annotated[Int, Field(description=FIXED)] = 3
    fine_grained_activation_offloading: Annotated[Bool, Field(description=FIXED)] = False
    offload_modules: Annotated[list[Text] | None, Field(description=FIXED)] = None
    use_fused_linear_logprobs: Annotated[Bool, Field(description=FIXED)] = False
    fused_linear_logprobs_chunk_size: Annotated[Int, Field(description=FIXED)] = 256
    use_fused_weighted_squared_relu: Annotated[Bool, Field(description=FIXED)] = False
    use_gloo_process_groups: Annotated[Bool, Field(description=FIXED)] = False
    fp8_cfg: Annotated[
        dict[str, Any], Field(description="Only enabled=false is supported; its other keys then have no effect.")
    ] = field(default_factory=lambda: {"enabled": False})
    peft: Annotated[
        dict[str, Any], Field(description="Only enabled=false is supported; its other keys then have no effect.")
    ] = field(default_factory=lambda: {"enabled": False})
