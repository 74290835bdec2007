"""`policy.megatron_cfg`: the Megatron-Core backend's keys, named as in NeMo-RL.

What a key may hold is checked in `pipeline/config/megatron_checks.py`, how the ranks divide in `pipeline/config/layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional  # OmegaConf reads these annotations at run time

MEGATRON_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")  # pipeline/models/


@dataclass
class MegatronOptimizerConfig:
    """Megatron's names for an optimizer. Its state and main weights are float32 and cut over the data ranks."""

    optimizer: str = "adam"  # that is, AdamW
    lr: float = 5e-6
    min_lr: float = 0.0  # where scheduler.lr_decay_style ends
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9  # says nothing: the only optimizer is adam
    clip_grad: Optional[float] = "${policy.max_grad_norm}"  # type: ignore[assignment]  # null, 0: do not clip
    # Says nothing: with state in float32 it computes the same, and checkpoints need main weights as they are.
    use_precision_aware_optimizer: bool = False
    # Only what follows from the rest:
    bf16: Optional[bool] = None  # whether policy.precision is bfloat16; null says nothing
    fp16: bool = False
    params_dtype: str = "float32"
    use_distributed_optimizer: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    overlap_cpu_optimizer_d2h_h2d: bool = False


@dataclass
class MegatronSchedulerConfig:
    """Megatron's names for a learning-rate schedule: linear warm-up from lr_warmup_init, then a decay.

    Iterations are steps of the algorithm, whatever number of optimizer updates such a step has.
    """

    lr_decay_style: str = "constant"  # constant, linear, cosine, inverse-square-root
    lr_decay_iters: Optional[int] = None  # the step at which optimizer.min_lr is reached; only a constant rate needs none
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0
    # Only what follows from the rest: the weight decay does not change.
    start_weight_decay: Optional[float] = None  # optimizer.weight_decay; null says nothing
    end_weight_decay: Optional[float] = None
    weight_decay_incr_style: str = "constant"


@dataclass
class MegatronDDPConfig:
    grad_reduce_in_fp32: bool = True  # False: a step's microbatches are summed in policy.precision
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True  # says nothing: a refit reads every weight before the next forward pass could wait for it
    # Only these values: the parameters are not sharded, the optimizer is.
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "optim_grads_params"


@dataclass
class MegatronCheckpointConfig:
    async_save: bool = False  # what checkpointing.async_save is by default
    ckpt_assume_constant_structure: bool = True  # only this value


@dataclass
class MegatronConfig:
    enabled: Optional[bool] = None  # null: launch/backend.py chooses at submission
    force_reconvert_from_hf: bool = False

    # How the train ranks divide. Data-parallel ranks are what is left: ranks / (tensor x pipeline x context).
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: Optional[int] = None  # null: as many as the others
    num_layers_in_last_pipeline_stage: Optional[int] = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    # null: tensor_model_parallel_size where experts are not spread, else 1. NeMo-RL's default of 1 would be silently wrong in
    # the first case: see check_expert_layout in pipeline/config/layout.py.
    expert_tensor_parallel_size: Optional[int] = None
    sequence_parallel: bool = False  # needs tensor parallelism, and a mixture of experts with tensor parallelism needs it

    # Memory
    activation_checkpointing: bool = False  # without it the next four keys say nothing
    recompute_granularity: str = "full"  # full, selective
    recompute_method: Optional[str] = None  # of full: uniform, block; null: uniform
    recompute_num_layers: Optional[int] = None  # of full; null: 1
    recompute_modules: Optional[list[str]] = None  # of selective, in Megatron's names; null: [core_attn]
    empty_unused_memory_level: int = 0  # empty the CUDA cache 1: after a step, 2: after every forward pass as well
    defer_fp32_logits: bool = True  # says nothing: logits are cast to float32 policy.logprob_chunk_size tokens at a time

    # Precision: activations between pipeline stages have the policy's, and no other.
    pipeline_dtype: str = "${policy.precision}"

    # Mixture of experts
    freeze_moe_router: bool = True
    moe_router_dtype: Optional[str] = "fp64"  # fp32, fp64; null: policy.precision
    moe_router_bias_update_rate: float = 0.0  # of models that balance load by a bias (DeepSeek-V3)
    moe_shared_expert_overlap: bool = False

    # Kernels. null: on where what is installed can do it; true where it cannot ends the run before training.
    moe_grouped_gemm: Optional[bool] = None
    moe_permute_fusion: Optional[bool] = None
    apply_rope_fusion: Optional[bool] = None
    bias_activation_fusion: Optional[bool] = None
    gradient_accumulation_fusion: bool = False  # needs TransformerEngine or apex
    attention_backend: Optional[str] = None  # auto, flash, fused, unfused of TransformerEngine; null: auto

    optimizer: Optional[MegatronOptimizerConfig] = None  # null: policy.optimizer
    scheduler: Optional[MegatronSchedulerConfig] = None  # null: policy.scheduler
    distributed_data_parallel_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    checkpoint: MegatronCheckpointConfig = field(default_factory=MegatronCheckpointConfig)
    env_vars: Optional[dict[str, str]] = None  # of the train ranks, set before Python starts
    model_overrides: dict[str, Any] = field(default_factory=dict)  # straight to Megatron's TransformerConfig

    # NeMo-RL's keys for what this backend does not do. Each may hold the value that it has here and no other; why is in
    # pipeline/config/megatron_checks.py.
    virtual_pipeline_model_parallel_size: Optional[int] = None
    moe_token_dispatcher_type: str = "alltoall"
    moe_router_load_balancing_type: str = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_enable_deepep: bool = False
    moe_per_layer_logging: bool = False
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.0
    mtp_use_repeated_layer: bool = False
    mtp_detach_heads: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_modules: list[str] = field(default_factory=list)
    cuda_graph_warmup_steps: int = 3
    fine_grained_activation_offloading: bool = False
    offload_modules: Optional[list[str]] = None
    use_fused_linear_logprobs: bool = False
    fused_linear_logprobs_chunk_size: int = 256
    use_fused_weighted_squared_relu: bool = False
    use_gloo_process_groups: bool = False
    fp8_cfg: dict[str, Any] = field(default_factory=lambda: {"enabled": False})  # while false, its other keys say nothing
    peft: dict[str, Any] = field(default_factory=lambda: {"enabled": False})  # the same
