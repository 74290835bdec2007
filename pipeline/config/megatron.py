"""`policy.megatron_cfg`: the Megatron-Core backend's keys, named as in NeMo-RL.

`pipeline/config/fixed_keys.py` has those of NeMo-RL's keys that can have only one value here.
`pipeline/config/megatron_checks.py` checks combinations of keys, `pipeline/config/parallelism.py` how the ranks divide.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.recipe.values import LIVE, Bool, Float, NotNegative, Positive, Text, interpolation

RECOMPUTE = (
    "Recompute activations in the backward pass. null: submit.py chooses the fastest setting that fits according to the plan,"
    " prints it and stores it. A continued run keeps the setting while it fits. Without GPUs, or for a model without a plan,"
    " submit.py chooses the setting with the least memory."
)


@dataclass
class MegatronOptimizerConfig:
    """Optimizer in Megatron's names. Its state and main weights are float32, sharded over the data-parallel ranks."""

    lr: Annotated[Float, LIVE, Field(ge=0)] = 5e-6
    """Learning rate."""
    min_lr: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Learning rate at the end of scheduler.lr_decay_style."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.01
    """Weight decay."""
    adam_beta1: Float = 0.9
    """Adam's first beta."""
    adam_beta2: Float = 0.999
    """Adam's second beta."""
    adam_eps: Float = 1e-8
    """Adam's epsilon."""
    clip_grad: Annotated[Float | None, Field(ge=0)] = interpolation("${policy.max_grad_norm}")
    """Maximum norm of gradients. null, 0: do not clip."""


@dataclass
class MegatronSchedulerConfig:
    """Learning-rate schedule in Megatron's names: linear warm-up from lr_warmup_init, then a decay.

    Iterations are steps of the algorithm, however many optimizer updates a step has.
    """

    lr_decay_style: Annotated[Literal["constant", "linear", "cosine", "inverse-square-root"], LIVE] = "constant"
    """Decay of the learning rate."""
    lr_decay_iters: Annotated[Positive | None, LIVE] = None
    """Step at which the rate reaches optimizer.min_lr. null: only with a constant rate."""
    lr_warmup_iters: Annotated[NotNegative, LIVE] = 0
    """Steps of warm-up."""
    lr_warmup_init: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Learning rate at the start of the warm-up."""


@dataclass
class MegatronDDPConfig:
    """Reduction of gradients over the data-parallel ranks."""

    grad_reduce_in_fp32: Bool = True
    """Accumulate the gradients of a step's microbatches in float32. false: in policy.precision."""
    overlap_grad_reduce: Bool = True
    """Reduce gradients during the backward pass."""


@dataclass
class MegatronLoRAConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W + alpha / dim B A. Only A and B are trained.

    Modules have Megatron's names. linear_qkv and linear_fc1 share one A between the projections that they fuse. linear_q,
    linear_k, linear_v, linear_fc1_gate and linear_fc1_up are their parts with an A each, as FSDP2's adapters have it. Mamba and
    gated delta layers have in_proj and out_proj. Routers, convolutions and gpt-oss's experts get none.
    """

    enabled: Bool = False
    """Train adapters in place of all weights."""
    target_modules: list[Text] = field(default_factory=list)
    """Modules to adapt, by the last part of their names (linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, out_proj;
    linear_q, linear_k, linear_v, linear_fc1_gate, linear_fc1_up), or by whole names with *. Empty: all linear layers of the
    decoder, by their fused names."""
    exclude_modules: list[Text] = field(default_factory=list)
    """Modules that get no adapter, named as in target_modules, which must be empty."""
    dim: Positive = 8
    """Rank of the adapters."""
    alpha: Positive = 32
    """Scale: adapters are multiplied by alpha / dim."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of adapters in training."""
    dropout_position: Literal["pre", "post"] = "post"
    """pre: dropout of the input of A. post: of the output of B."""
    lora_A_init_method: Literal["xavier", "gaussian", "kaiming"] = "xavier"
    """Initialization of A. B starts at 0."""
    use_dora: Bool = False
    """Also train a magnitude for each row of W (DoRA, https://arxiv.org/abs/2402.09353)."""
    use_rslora: Bool = False
    """Scale adapters by alpha / sqrt(dim) (rsLoRA, https://arxiv.org/abs/2312.03732)."""


@dataclass
class MegatronConfig:
    """The Megatron-Core backend. Data-parallel size = ranks / (tensor x pipeline x context)."""

    enabled: Bool | None = None
    """Train with Megatron-Core. null: submit.py chooses the backend by the model's size."""
    tensor_model_parallel_size: Positive = 1
    """Tensor-parallel ranks."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline stages."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage. null: as many as in the others."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last stage. null: as many as in the others."""
    context_parallel_size: Positive = 1
    """Context-parallel ranks, which share each sequence."""
    expert_model_parallel_size: Positive = 1
    """Expert-parallel ranks, which share the experts."""
    expert_tensor_parallel_size: Positive | None = None
    """Tensor-parallel ranks of each expert. null: tensor_model_parallel_size without expert parallelism, else 1. NeMo-RL's
    default of 1 would silently give wrong gradients without expert parallelism."""
    sequence_parallel: Bool = False
    """Shard activations between tensor-parallel regions along the sequence. Needs tensor parallelism; mixtures of experts with
    tensor parallelism require it."""

    activation_checkpointing: Annotated[Bool | None, Field(description=RECOMPUTE)] = False
    recompute_granularity: Literal["full", "selective"] | None = "full"
    """What activation_checkpointing recomputes. full: whole layers. selective: recompute_modules. null: submit.py chooses, also
    recompute_method and recompute_num_layers if they are null."""
    recompute_method: Literal["uniform", "block"] | None = None
    """recompute_granularity=full: how layers are grouped. null: uniform."""
    recompute_num_layers: Positive | None = None
    """recompute_granularity=full: number of layers per group (uniform), or of recomputed layers per stage (block). null: 1."""
    recompute_modules: list[Text] | None = None
    """recompute_granularity=selective: modules by Megatron's names. null: [core_attn]."""
    empty_unused_memory_level: Annotated[NotNegative, Field(le=2)] = 0
    """When to empty the CUDA cache. 0: never. 1: after each step. 2: also after each forward pass."""

    freeze_moe_router: Bool = True
    """Do not train the routers of mixtures of experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """Data type in which routers compute. null: policy.precision."""
    moe_router_bias_update_rate: Annotated[Float, Field(ge=0)] = 0.0
    """Update rate of the bias that balances load in models such as DeepSeek-V3."""
    moe_shared_expert_overlap: Bool = False
    """Compute shared experts while tokens are dispatched to the others."""

    moe_grouped_gemm: Bool | None = None
    """Use one kernel for all experts. null: use it if it is installed. true: fail if it is not."""
    moe_permute_fusion: Bool | None = None
    """Use the fused kernel; see moe_grouped_gemm for the values."""
    apply_rope_fusion: Bool | None = None
    """Use the fused kernel; see moe_grouped_gemm for the values."""
    bias_activation_fusion: Bool | None = None
    """Use the fused kernel; see moe_grouped_gemm for the values."""
    gradient_accumulation_fusion: Bool = False
    """Accumulate gradients inside the matrix product. Needs TransformerEngine or apex."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] | None = None
    """Attention kernel of TransformerEngine. null: auto."""

    optimizer: MegatronOptimizerConfig | None = None
    """null: policy.optimizer."""
    scheduler: MegatronSchedulerConfig | None = None
    """null: policy.scheduler."""
    distributed_data_parallel_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    model_overrides: dict[str, Any] = field(default_factory=dict)
    """Other arguments of Megatron's TransformerConfig."""
    peft: MegatronLoRAConfig = field(default_factory=MegatronLoRAConfig)
