"""`policy.megatron_cfg`: the Megatron-Core backend's keys, named as in NeMo-RL.

`pipeline/config/megatron_checks.py` checks combinations of keys, `pipeline/config/parallelism.py` how the ranks divide.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.recipe.values import LIVE, Bool, Float, Int, NotNegative, Positive, Text, Variables, interpolation

MEGATRON_MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "glm4",
    "glm4_moe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""The `model_type`s of pipeline/models/."""
IGNORED = "Has no effect: "
RECOMPUTE = (
    "Recompute activations in the backward pass. null: submit.py chooses the fastest setting that fits according to the plan,"
    " prints it and stores it. A continued run keeps the setting while it fits. Without GPUs, or for a model without a plan,"
    " submit.py chooses the setting with the least memory."
)


@dataclass(frozen=True)
class OnlyDefault:
    """Annotation of a NeMo-RL key that may only have its default, with the reason."""

    reason: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": f"Only the default is supported: {self.reason}."}


@dataclass
class MegatronOptimizerConfig:
    """Optimizer in Megatron's names. Its state and main weights are float32, sharded over the data-parallel ranks."""

    optimizer: Literal["adam"] = "adam"
    """Optimizer. adam: AdamW."""
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
    sgd_momentum: Annotated[Float, Field(description=f"{IGNORED}the only optimizer is adam.")] = 0.9
    clip_grad: Annotated[Float | None, Field(ge=0)] = interpolation("${policy.max_grad_norm}")
    """Maximum norm of gradients. null, 0: do not clip."""
    use_precision_aware_optimizer: Annotated[
        Bool,
        Field(
            description=f"{IGNORED}with float32 state it computes the same, and checkpoints need the main weights as they are."
        ),
    ] = False
    bf16: Bool | None = None
    """Must be policy.precision == bfloat16, or null."""
    fp16: Annotated[Bool, OnlyDefault("float16 trains with FSDP2 alone, see policy.precision")] = False
    params_dtype: Annotated[Text, OnlyDefault("main weights are float32")] = "float32"
    use_distributed_optimizer: Annotated[
        Bool, OnlyDefault("the optimizer's state is always sharded over the data-parallel ranks")
    ] = True
    optimizer_cpu_offload: Annotated[
        Bool, OnlyDefault("the optimizer's state stays on the GPUs, sharded over the data-parallel ranks")
    ] = False
    optimizer_offload_fraction: Annotated[
        Float, OnlyDefault("the optimizer's state stays on the GPUs, sharded over the data-parallel ranks")
    ] = 0.0
    overlap_cpu_optimizer_d2h_h2d: Annotated[
        Bool, OnlyDefault("the optimizer's state stays on the GPUs, sharded over the data-parallel ranks")
    ] = False


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
    start_weight_decay: Float | None = None
    """optimizer.weight_decay or null, because weight decay is constant."""
    end_weight_decay: Float | None = None
    """optimizer.weight_decay or null, because weight decay is constant."""
    weight_decay_incr_style: Annotated[Text, OnlyDefault("weight decay is constant")] = "constant"


@dataclass
class MegatronDDPConfig:
    """Reduction of gradients over the data-parallel ranks."""

    grad_reduce_in_fp32: Bool = True
    """Accumulate the gradients of a step's microbatches in float32. false: in policy.precision."""
    overlap_grad_reduce: Bool = True
    """Reduce gradients during the backward pass."""
    overlap_param_gather: Annotated[
        Bool, Field(description=f"{IGNORED}a refit reads all gathered weights before the next forward pass starts.")
    ] = True
    use_custom_fsdp: Annotated[
        Bool, OnlyDefault("policy.dtensor_cfg.enabled=true shards parameters over data-parallel ranks")
    ] = False
    data_parallel_sharding_strategy: Annotated[Text, OnlyDefault("it applies to use_custom_fsdp")] = "optim_grads_params"


@dataclass
class MegatronCheckpointConfig:
    """Writing of checkpoints."""

    async_save: Bool = False
    """Default of checkpointing.async_save."""
    ckpt_assume_constant_structure: Annotated[Bool, OnlyDefault("a run's checkpoints all have the same structure")] = True


@dataclass
class MegatronLoRAConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W + alpha / dim B A. Only A and B are trained.

    Modules have Megatron's names. linear_qkv and linear_fc1 share one A between the projections that they fuse. linear_q,
    linear_k, linear_v, linear_fc1_gate and linear_fc1_up are their parts with an A each, as FSDP2's adapters have it. Routers,
    convolutions, gpt-oss's experts, and projections of Mamba and gated delta layers get none.
    """

    enabled: Bool = False
    """Train adapters in place of all weights."""
    target_modules: list[Text] = field(default_factory=list)
    """Modules to adapt, by the last part of their names (linear_qkv, linear_proj, linear_fc1, linear_fc2; linear_q, linear_k,
    linear_v, linear_fc1_gate, linear_fc1_up), or by whole names with *. Empty: all linear layers of the decoder, by their fused
    names."""
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
    lora_B_init_method: Annotated[Text, OnlyDefault("adapters start as the base model")] = "zero"
    a2a_experimental: Annotated[
        Bool, Field(description=f"{IGNORED}ranks exchange the dim columns between A and B, never whole activations.")
    ] = False
    lora_dtype: Annotated[
        Text | None,
        Field(description=f"{IGNORED}adapters are in policy.precision, in float32 in the optimizer."),
    ] = None
    use_dora: Bool = False
    """Also train a magnitude for each row of W (DoRA, https://arxiv.org/abs/2402.09353)."""
    use_rslora: Bool = False
    """Scale adapters by alpha / sqrt(dim) (rsLoRA, https://arxiv.org/abs/2312.03732)."""


@dataclass
class MegatronConfig:
    """The Megatron-Core backend. Data-parallel size = ranks / (tensor x pipeline x context)."""

    enabled: Bool | None = None
    """Train with Megatron-Core. null: submit.py chooses the backend by the model's size."""
    force_reconvert_from_hf: Bool = False
    """Convert the Hugging Face weights again, even if the conversion is cached. The first job that needs a model converts it
    for all later jobs. The cache is HETSTEP_MEGATRON_CHECKPOINT_DIR, else NRL_MEGATRON_CHECKPOINT_DIR, else
    $HF_HOME/hetstep."""
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
    defer_fp32_logits: Annotated[
        Bool, Field(description=f"{IGNORED}logits are cast to float32 policy.logprob_chunk_size tokens at a time.")
    ] = True
    pipeline_dtype: Text = interpolation("${policy.precision}")
    """Data type of activations between stages. Only policy.precision is supported."""

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
    checkpoint: MegatronCheckpointConfig = field(default_factory=MegatronCheckpointConfig)
    env_vars: Variables | None = None
    """Environment variables of the train ranks, set before Python starts."""
    model_overrides: dict[str, Any] = field(default_factory=dict)
    """Other arguments of Megatron's TransformerConfig."""

    virtual_pipeline_model_parallel_size: Annotated[
        Int | None, OnlyDefault("interleaved pipeline stages are not supported")
    ] = None
    moe_token_dispatcher_type: Annotated[
        Text, OnlyDefault("other dispatchers do not accept sequences of varying length, or need DeepEP")
    ] = "alltoall"
    moe_router_load_balancing_type: Annotated[
        Text, OnlyDefault("a balancing loss would be divided by a different count than the policy's loss")
    ] = "none"
    moe_aux_loss_coeff: Annotated[
        Float, OnlyDefault("a balancing loss would be divided by a different count than the policy's loss")
    ] = 0.0
    moe_enable_deepep: Annotated[Bool, OnlyDefault("DeepEP is not supported")] = False
    moe_per_layer_logging: Annotated[Bool, OnlyDefault("the load of experts is not logged")] = False
    mtp_num_layers: Annotated[Int, OnlyDefault("multi-token prediction is not trained")] = 0
    mtp_loss_scaling_factor: Annotated[Float, OnlyDefault("multi-token prediction is not trained")] = 0.0
    mtp_use_repeated_layer: Annotated[Bool, OnlyDefault("multi-token prediction is not trained")] = False
    mtp_detach_heads: Annotated[Bool, OnlyDefault("multi-token prediction is not trained")] = False
    cuda_graph_impl: Annotated[Text, OnlyDefault("packed batches vary in shape, and a CUDA graph has a fixed one")] = "none"
    cuda_graph_modules: Annotated[list[Text], OnlyDefault("CUDA graphs are not supported")] = field(default_factory=list)
    cuda_graph_warmup_steps: Annotated[Int, OnlyDefault("CUDA graphs are not supported")] = 3
    fine_grained_activation_offloading: Annotated[
        Bool, OnlyDefault("activation_checkpointing=true with recompute_granularity=selective saves memory too")
    ] = False
    offload_modules: Annotated[
        list[Text] | None, OnlyDefault("activation_checkpointing=true with recompute_granularity=selective saves memory too")
    ] = None
    use_fused_linear_logprobs: Annotated[Bool, OnlyDefault("policy.logprob_chunk_size bounds the memory of logits")] = False
    fused_linear_logprobs_chunk_size: Annotated[Int, OnlyDefault("policy.logprob_chunk_size bounds the memory of logits")] = 256
    use_fused_weighted_squared_relu: Annotated[Bool, OnlyDefault("no supported model family has this activation")] = False
    use_gloo_process_groups: Annotated[Bool, OnlyDefault("process groups use gloo on CPUs and NCCL on GPUs")] = False
    fp8_cfg: dict[str, Any] = field(default_factory=lambda: {"enabled": False})
    """Only enabled=false is supported; the other keys then have no effect."""
    peft: MegatronLoRAConfig = field(default_factory=MegatronLoRAConfig)
