"""Keys of models: `policy`, `value`, `teacher` and `judge`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.algorithms.served_models import ServedTokenizerConfig
from pipeline.config.generation import GenerationConfig, VLLMConfig
from pipeline.config.megatron import RECOMPUTE, MegatronConfig
from pipeline.recipe.values import (
    CHAT_TEMPLATE,
    HF_OVERRIDES,
    LIVE,
    MISSING,
    Bool,
    Float,
    Int,
    Line,
    Live,
    Positive,
    Text,
    interpolation,
)

PRECISIONS = {"float32": 4, "bfloat16": 2, "float16": 2}  # values of policy.precision, and the bytes per number
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass
class TokenizerConfig:
    """The tokenizer and its chat template."""

    name: Line = interpolation("${policy.model_name}")
    """A folder, a GGUF file, or a Hugging Face name whose files are in the local cache."""
    chat_template: Annotated[Text | None, Field(description=CHAT_TEMPLATE)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""


@dataclass
class LoRAConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W + alpha / dim B A. Only they are trained.

    Their definitions are peft's. They are split like their layers. Routers, convolutions and experts that transformers does not
    dispatch by token (Llama 4, JetMoE) get none. Each routed expert has its own. peft's all-linear also adapts routers, and
    gives gate_up_proj, which has one A here, twice the rank. peft has no DoRA of experts, so an export merges these.
    """

    enabled: Bool = False
    """Train adapters in place of all weights."""
    target_modules: list[Text] = field(default_factory=list)
    """Names, or ends of names, of the layers to adapt, as in transformers; * matches any text. gate_up_proj and down_proj
    include routed experts; experts.down_proj means only experts. Must be empty with match_all_linear."""
    exclude_modules: list[Text] = field(default_factory=list)
    """Names, or ends of names, of layers that get no adapter; * matches any text."""
    match_all_linear: Bool = True
    """Adapt all linear layers except the head, and all routed experts. Routers get no adapter."""
    dim: Positive = 8
    """Rank of the adapters."""
    alpha: Positive = 32
    """Scale: adapters are multiplied by alpha / dim."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of adapters in optimizer steps. The dropped entries depend on the parallel layout. Log-probs are
    computed without dropout."""
    dropout_position: Literal["pre", "post"] = "post"
    """pre: dropout of the input of A. post: of the output of B."""
    lora_A_init: Literal["xavier", "gaussian", "kaiming"] = "xavier"
    """Initialization of A. B starts at 0."""
    use_dora: Bool = False
    """Also train a magnitude for each row of W (DoRA, https://arxiv.org/abs/2402.09353)."""
    use_rslora: Bool = False
    """Scale adapters by alpha / sqrt(dim) (rsLoRA, https://arxiv.org/abs/2312.03732)."""


@dataclass
class DTensorConfig:
    """The FSDP2 backend: PyTorch's fully_shard, with tensor parallelism by DTensor."""

    enabled: Bool | None = None
    """Train with FSDP2. null: submit.py chooses the backend by the model's size."""
    data_parallel_replicate_size: Positive = 1
    """Replicas of the weights (HSDP). The ranks of a replica shard it. 1: shard over all ranks."""
    tensor_parallel_size: Positive = 1
    """Tensor-parallel ranks. They do not split mixers with a recurrent state (Nemotron-H, Qwen3.5, Qwen3-Next, LFM2, Bamba,
    Granite 4, Jamba, Zamba2, OLMo Hybrid, Mamba). They divide the sequences of a microbatch instead, so one long sequence keeps
    only one rank busy. The exception: without sequence_parallel, the projections of Qwen3.5's and Qwen3-Next's delta nets are
    split."""
    sequence_parallel: Bool = False
    """Shard activations between tensor-parallel regions by tokens. Needs tensor parallelism."""
    context_parallel_size: Positive = 1
    """Context-parallel ranks, which share each sequence."""
    expert_parallel_size: Positive = 1
    """Expert-parallel ranks, which hold different experts of each layer."""
    activation_checkpointing: Annotated[Bool | None, Field(description=RECOMPUTE)] = False
    recompute_granularity: Literal["full", "selective"] | None = "full"
    """What activation_checkpointing recomputes. full: whole layers. selective: everything except the outputs of matrix products
    and attention. null: submit.py chooses."""
    cpu_offload: Bool = False
    """Keep parameters and optimizer state in host memory."""
    reference_cpu_offload: Bool = True
    """Keep the reference policy's weights, in policy.precision, in page-locked host memory while it is idle. While its
    log-probs are computed, the weights take GPU memory: in bfloat16, 2 bytes for each parameter of a rank. With adapters, the
    reference is the model without them and takes no extra memory."""
    use_liger_kernel: Bool = False
    """Replace transformers' norms, rotary embeddings and MLPs by Liger's kernels. Needs GPUs and `pip install
    '.[liger]'`."""
    flash_attention: Annotated[Int | None, Field(ge=2, le=3)] = None
    """Attention kernels. 2: PyTorch's. 3: FlashAttention-3, which needs Hopper GPUs and the package flash_attn_interface. null:
    3 if it is available and policy.deterministic is false, else 2."""
    compile: Bool | None = None
    """Compile decoder layers with torch.compile. null: on GPUs, for dense models without tensor parallelism, selective
    recomputation or Liger's kernels. Compiled layers round differently from eager ones; with policy.deterministic a synchronous
    run still resumes to the last bit on the same machine. Compilation uses a full microbatch of sequences of
    max_total_sequence_length tokens, so memory must suffice for it even if no data are that long."""
    lora_cfg: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass
class SequencePackingConfig:
    """Packing of sequences, end to end, into microbatches."""

    enabled: Bool = True
    """Fill microbatches up to a number of tokens. false: a microbatch has train_micro_batch_size sequences, also packed end to
    end."""
    train_mb_tokens: Positive | None = 8192
    """Maximum tokens of a microbatch in training. null: submit.py chooses; see activation_checkpointing."""
    logprob_mb_tokens: Positive = 8192
    """Maximum tokens of a microbatch in log-prob passes."""

    @property
    def train_tokens(self) -> int:
        """Return train_mb_tokens, after the submission's choice."""
        assert self.train_mb_tokens is not None, "launch/plan/recomputation.py chooses it"
        return self.train_mb_tokens


@dataclass
class OptimizerConfig:
    """A torch optimizer."""

    name: Text = "torch.optim.AdamW"
    """Dotted path of the optimizer's class: torch's, another library's or your own. Each takes a trial step before weights are
    loaded. torch.optim.Muon, with FSDP2, updates the matrices of layers, experts and adapters, at any layout as torch updates
    whole matrices; AdamW updates embeddings, heads, norms and biases. Megatron-Core trains with torch.optim.AdamW or Adam."""
    kwargs: Annotated[dict[str, Any], Live(("lr", "adamw.lr"))] = field(
        default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01}
    )
    """Arguments of the optimizer. With torch.optim.Muon, `adamw` has AdamW's arguments, whose lr and weight_decay are Muon's
    unless they are given. adjust_lr_fn=match_rms_adamw makes Muon's updates as large as AdamW's at the same lr."""


@dataclass
class RouterReplayConfig:
    """Router replay (R3, arXiv 2510.11370) for mixtures of experts that learn from an engine's answers."""

    enabled: Bool = False
    """Send each token to the experts that vLLM chose when it sampled, in the policy's log-probs and updates. Otherwise engine
    and trainer, which round differently, choose other experts for some tokens. Weights of the experts still come from the
    trained router; the reference model chooses for itself. The experts pass through rank 0: a byte (two above 256 experts) for
    each token, layer and chosen expert, 384 bytes a token of Qwen3-30B-A3B. Answers do not share the rows of their prompts."""


@dataclass
class PolicyConfig:
    """The model that is trained."""

    model_name: Line = MISSING
    """A folder, a GGUF file, or a Hugging Face name whose files are in the local cache."""
    random_init: Bool = False
    """Initialize weights from the config and the seed. The folder then needs no weights."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    freeze_parameters: list[Text] = field(default_factory=list)
    """Tensors that are not trained: patterns of their names in the model's files, such as model.embed_tokens.* or
    model.layers.[0-7].*; * matches any text. Frozen tensors get no gradient, no optimizer state and no weight decay, and
    grad_norm leaves them out. Tensors that are one parameter in memory are frozen together: all experts of a layer and, with
    Megatron-Core, queries with keys and values, and gates with up projections. Frozen values stay the same to the bit, in
    policy.precision. The plan counts no gradients and no optimizer state for frozen tensors; its times do not change. Must be
    empty with adapters, which freeze all other weights."""
    train_global_batch_size: Positive = 512
    """Sequences per optimizer update, over all ranks. DPO and RM: pairs."""
    train_micro_batch_size: Positive = 4
    """Sequences per microbatch without sequence packing."""
    logprob_batch_size: Positive = interpolation("${.train_micro_batch_size}")
    """Sequences per microbatch of log-prob passes without sequence packing."""
    max_total_sequence_length: Annotated[Int, Field(ge=2)] = 512
    """Maximum tokens of a sequence, including the prompt."""
    precision: Precision = "bfloat16"
    """Precision of weights and activations. Master weights are float32. float16 needs FSDP2 and scales the loss. Its resolution
    is 8 times that of bfloat16, so engines and training differ less."""
    deterministic: Bool = False
    """On GPUs, compute the same bits in each run with the same images, GPUs and layout, so that a resumed run equals the
    uninterrupted one to the last bit. Deterministic kernels are slower; plan=true accounts for it. Runs on CPUs are
    deterministic without this key."""
    logprob_chunk_size: Positive | None = 2048
    """Number of tokens whose logits are in memory at a time. null: all."""
    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    max_grad_norm: Annotated[Float | None, Field(ge=0)] = 1.0
    """Maximum norm of gradients. null, 0: do not clip."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: Annotated[Any, LIVE] = None
    """Learning-rate schedule: one {name, kwargs}, or, as in NeMo-RL, a list of them that ends with {milestones: [...]}. It
    advances once per step of the algorithm, however many optimizer updates a step has. null: a constant rate."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    moe_aux_loss_coeff: Annotated[Float, Field(ge=0)] = 0.0
    """Coefficient of the load-balancing loss of mixtures of experts, which is computed for each sequence and layer (DeepSeek-V3
    eq. 17 to 20, Megatron-Core's seq_aux_loss) and added for all layers. 0: no such loss. Typical: 1e-4 to 1e-3. Routers must
    train: with Megatron-Core, megatron_cfg.freeze_moe_router=false. Answers do not share the rows of their prompts."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)


# ---- other models of the train ranks, with the policy's layout -------------------------------------------------------------


@dataclass
class ValueConfig:
    """PPO's critic: the body of a language model, or a reward model, with one value per token."""

    model_name: Line = interpolation("${policy.model_name}")
    """A folder, a GGUF file, or a Hugging Face name whose files are in the local cache."""
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    precision: Precision = interpolation("${policy.precision}")
    """See policy.precision."""
    max_grad_norm: Annotated[Float | None, Field(ge=0)] = 1.0
    """Maximum norm of gradients. null, 0: do not clip."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: Annotated[Any, LIVE] = None
    """See policy.scheduler. It also advances in the steps before ppo.policy_training_start_step."""


@dataclass
class TeacherConfig:
    """Distillation's teacher.

    Its vocabulary may differ from the policy's with grpo.adv_estimator.name=opd, and with loss_fn.kl_type=gold or uld.
    """

    model_name: Line | None = None
    """A folder, a GGUF file, or a Hugging Face name whose files are in the local cache."""
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    tokenizer: ServedTokenizerConfig = field(default_factory=ServedTokenizerConfig)
    """Read if the vocabulary differs from the policy's, or with loss_fn.kl_type=gold or uld."""
    max_total_sequence_length: Positive = interpolation("${policy.max_total_sequence_length}")
    """Maximum tokens of prompt and answer together in the teacher's own tokenizer. Longer answers are not learned from."""
    precision: Precision = interpolation("${policy.precision}")
    """See policy.precision."""
    cpu_offload: Bool = True
    """Keep the weights in host memory while the teacher is idle."""


@dataclass
class TeachersConfig:
    """Several teachers. One of them scores each sample: that of the sample's environment.

    The loss is one mean over all tokens of the step. Checkpoints have no teachers.
    """

    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by the key of their environment under `env`; an alternative to `teacher`. Teachers with equal settings are
    loaded once."""
    default_teacher_alias: Text | None = None
    """Key in `teachers` of the teacher for all other environments. null: each environment has a teacher."""


@dataclass
class ServedJudgeConfig:
    """A generative judge on ranks of its own, those of cluster.judge. Environments of kind llm_judge without a url ask it.

    Its weights are never trained or refitted.
    """

    model_name: Line | None = None
    """A folder, or a Hugging Face name whose files are in the local cache. null: no judge is served."""
    tokenizer: ServedTokenizerConfig = field(default_factory=ServedTokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    precision: Precision = interpolation("${policy.precision}")
    """Precision of weights and activations."""
    max_num_seqs: Positive | None = None
    """Maximum replies that one engine decodes concurrently. null: as in policy.generation.max_num_seqs."""
    vllm_cfg: VLLMConfig = field(default_factory=lambda: VLLMConfig(gpu_memory_utilization=0.9))
    """Options of its engines. max_model_len limits the judge's prompt and reply together."""
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vllm.LLM."""
