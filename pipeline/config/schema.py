"""The recipe's schema: every key, its type and its default.

Keys follow NeMo-RL's where they mean the same; ours adds `cluster.train`, `cluster.generate` and `cluster.timeouts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional  # OmegaConf reads these annotations at run time

from omegaconf import MISSING

from pipeline.config.algorithms import (
    ONLINE,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    LossConfig,
    OfflineConfig,
    OnlineConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    ValueLossConfig,
)
from pipeline.config.cluster import ClusterConfig
from pipeline.config.megatron import MegatronConfig

# ---- the policy ---------------------------------------------------------------------------------------------------------


@dataclass
class TokenizerConfig:
    name: str = "${policy.model_name}"
    chat_template: Optional[str] = None  # Jinja text; null: the tokenizer's own
    chat_template_kwargs: Optional[dict[str, Any]] = None


@dataclass
class LoRAConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W + alpha / dim B A, of which only A and B are trained."""

    enabled: bool = False
    target_modules: list[str] = field(
        default_factory=list
    )  # names of linear layers, or their endings; with match_all_linear none
    exclude_modules: list[str] = field(default_factory=list)
    match_all_linear: bool = True  # all linear layers but the head
    dim: int = 8
    alpha: int = 32
    lora_A_init: str = "xavier"  # xavier, gaussian, kaiming; B begins at 0


@dataclass
class DTensorConfig:
    enabled: Optional[bool] = None  # null: launch/backend.py chooses at submission
    tensor_parallel_size: int = 1
    activation_checkpointing: bool = False  # without it the next key says nothing
    recompute_granularity: str = "full"  # full, selective: outputs of matrix products and attention are kept
    cpu_offload: bool = False
    # The reference policy's weights, in policy.precision, are in page-locked host memory while it does not compute
    reference_cpu_offload: bool = True
    # Liger's norms, rotary embeddings and MLPs in place of transformers': pip install 'hetstep[liger]', for GPUs
    use_liger_kernel: bool = False
    flash_attention: int = 2  # 2: torch's own; 3: FlashAttention-3, where flash_attn_interface is installed, on Hopper
    # torch.compile of decoder layers: pipeline/train/compiled.py. null: on GPUs, of dense models without tensor parallelism,
    # selective recomputation and Liger's kernels.
    # It rounds otherwise than eager layers do; on the same machine it resumes to the last bit. The model is compiled on a full
    # microbatch of sequences of max_total_sequence_length tokens, so memory must suffice for that even if no data are so long.
    compile: Optional[bool] = None
    lora_cfg: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass
class SequencePackingConfig:
    enabled: bool = True  # False: microbatches of train_micro_batch_size sequences; they are laid end to end just the same
    train_mb_tokens: int = 8192
    logprob_mb_tokens: int = 8192


@dataclass
class OptimizerConfig:
    name: str = "torch.optim.AdamW"
    kwargs: dict[str, Any] = field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01})


@dataclass
class ColocatedConfig:
    enabled: bool = False
    # How a refit moves weights within a node. ipc: in memory of the sender that the receivers map, by CUDA IPC on GPUs; as host
    # where they cannot. host: through host memory, by gloo, as refit_transport=broadcast does anyway.
    refit: str = "ipc"


@dataclass
class VLLMConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1  # 1: experts are cut like other weights; tensor_parallel_size: whole experts are spread
    gpu_memory_utilization: float = 0.6
    max_model_len: int = "${policy.max_total_sequence_length}"  # type: ignore[assignment]
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    # auto: policy.precision. fp8: linear layers in 8 bits, scaled in blocks of 128 x 128, quantised anew at every refit.
    precision: str = "auto"
    quantization_ignored_layer_kws: Optional[list[str]] = None  # layers with one of these in their names stay as they are
    env_vars: dict[str, str] = field(default_factory=dict)


@dataclass
class RefitConfig:
    # What a rank sends, or receives, in one round. It stages at most three times as much; four times where ranks share GPUs on
    # several nodes.
    bucket_bytes: int = 256 << 20
    digest: bool = True  # after every refit both ends prove that they hold the same values


@dataclass
class GenerationConfig:
    backend: str = "vllm"  # vllm, transformers
    max_new_tokens: int = 512  # of an answer, or of a turn; the window bounds it besides
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Optional[int] = None
    # Of validation. NeMo-RL's names; there only NeMo Gym may have other values than training, here every recipe may.
    val_temperature: float = "${.temperature}"  # type: ignore[assignment]
    val_top_p: float = "${.top_p}"  # type: ignore[assignment]
    val_top_k: Optional[int] = "${.top_k}"  # type: ignore[assignment]
    stop_token_ids: Optional[list[int]] = None  # end an answer besides the tokenizer's and the model's own end tokens
    max_num_seqs: int = 256  # completions that one engine decodes at once
    # Whether environments run in a process of their own beside each engine, else in threads of the engine's process
    environment_process: bool = True
    refit_transport: str = "planned"  # planned, delta: each rank receives its own shard; broadcast: all of it, from rank 0
    refit_cfg: RefitConfig = field(default_factory=RefitConfig)
    vllm_cfg: VLLMConfig = field(default_factory=VLLMConfig)
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)  # straight to vllm.LLM
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)


@dataclass
class PolicyConfig:
    model_name: str = MISSING  # a folder, or a Hugging Face name that is in the local cache
    random_init: bool = False  # weights drawn from the config and the seed: the folder needs none
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    train_global_batch_size: int = 512  # sequences per optimizer step
    train_micro_batch_size: int = 4
    logprob_batch_size: int = "${.train_micro_batch_size}"  # type: ignore[assignment]
    max_total_sequence_length: int = 512
    precision: str = "bfloat16"  # float32, bfloat16; master weights are float32 in either
    logprob_chunk_size: Optional[int] = 2048  # tokens whose logits exist at once; null: all
    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    max_grad_norm: Optional[float] = 1.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # NeMo-RL's list of {name, kwargs} ending in {milestones: [...]}, or one {name, kwargs}. It advances once per step of the
    # algorithm, whatever number of optimizer updates such a step has.
    scheduler: Optional[Any] = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)


# ---- other models of the train realm, cut as the policy is -------------------------------------------------------------------


@dataclass
class ValueConfig:
    """PPO's critic: the body of a language model, or a reward model, with one number per token."""

    model_name: str = "${policy.model_name}"
    random_init: bool = "${policy.random_init}"  # type: ignore[assignment]
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    precision: str = "${policy.precision}"
    max_grad_norm: Optional[float] = 1.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: Optional[Any] = None  # as policy.scheduler; it advances in the steps before policy_training_start_step too


@dataclass
class TeacherConfig:
    """Distillation's teacher; it must have the policy's vocabulary."""

    model_name: Optional[str] = None
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    precision: str = "${policy.precision}"
    cpu_offload: bool = True  # its weights are in host memory while it does not compute


# ---- data and environments ----------------------------------------------------------------------------------------------


GENERATED_DATASETS = (  # pipeline/data/datasets.py
    "calculator_multiplication",
    "scratchpad_addition",
    "scratchpad_preferences",
    "sliding_puzzle",
)
ENVIRONMENT_KINDS = (  # pipeline/environments/registry.py
    "calculator",
    "code",
    "code_interpreter",
    "exact_match",
    "llm_judge",
    "math",
    "multiple_choice",
    "reward_model",
    "sliding_puzzle",
    "tools",
    "verifiers",
)


@dataclass
class DatasetConfig:
    # One of GENERATED_DATASETS, one of NAMED_DATASETS (pipeline/config/data.py), a name or folder for `datasets`, or the dotted
    # path of a callable (split, seed=, **kwargs) that gives a sequence of records
    dataset_name: Optional[str] = None
    data_path: Optional[str] = None  # or a JSONL file
    subset: Optional[str] = None  # the repository's configuration; null: the data set's own
    split: Optional[str] = None  # null: the data set's own, which is "train" for most
    max_samples: Optional[int] = None  # so many of its records, drawn with `seed`; null: all
    split_validation_size: float = 0.0  # of training data: the share, or from 1 on the number, held out to validate on
    seed: int = 42  # of max_samples and split_validation_size
    repeat: int = 1  # the records so many times over, one pass after another
    # Columns. Where a record lacks those of the recipe, TRL's and common ones are recognized (pipeline/config/columns.py).
    input_key: str = "input"  # a text or messages {role, content}; DPO, RM: "" for what both answers begin with
    output_key: str = "output"  # a text or messages
    messages_key: Optional[str] = None  # a list of {role, content}; replaces input_key and output_key
    text_key: Optional[str] = None  # SFT: a text of which every token is learned; replaces the others
    chosen_key: str = (
        "chosen"  # DPO, RM: an answer, or messages {role, content} that end in one, perhaps with the prompt before
    )
    rejected_key: str = "rejected"
    margin_key: Optional[str] = None  # RM: by how much the chosen answer is the better one
    prompt_file: Optional[str] = None  # a text with {} where the input goes; of messages, what the user says first
    system_prompt_file: Optional[str] = None
    env_name: Optional[str] = None  # key under `env`
    weight: Optional[float] = None  # in data.datasets: how often it is drawn from; null, for all: its number of records
    kwargs: dict[str, Any] = field(default_factory=dict)  # for a generated data set, for `datasets`, or for a user's callable


@dataclass
class DataConfig:
    train: Optional[DatasetConfig] = field(default_factory=DatasetConfig)
    validation: Optional[DatasetConfig] = None
    datasets: dict[str, DatasetConfig] = field(default_factory=dict)  # in place of train: several by name, mixed by weight
    validations: dict[str, DatasetConfig] = field(default_factory=dict)  # in place of validation: several by name, each told of
    max_input_seq_length: int = "${policy.max_total_sequence_length}"  # type: ignore[assignment]
    # error, drop: what to do with a prompt longer than max_input_seq_length, or that leaves no room for an answer
    overlong_prompts: str = "error"
    # error, keep, drop: what to do with a prompt of which the tokenizer knows a part only as its unknown token
    unknown_tokens: str = "error"
    bad_records: str = (
        "error"  # error, drop: what to do with one that cannot be used (no answer, two answers that are the same)
    )
    shuffle: bool = True
    apply_chat_template: bool = True  # False: the prompt is the bare text after prompt_file


@dataclass
class RewardTokenizerConfig(TokenizerConfig):
    name: Optional[str] = None  # type: ignore[assignment]  # null: what lies with the reward model


@dataclass
class EnvironmentConfig:
    kind: str = MISSING  # one of ENVIRONMENT_KINDS, or the dotted path of a class or a function: pipeline/environments/own.py
    timeout_s: float = 10.0  # for one turn of an episode
    workers: Optional[int] = None  # turns judged at once, on each engine; null: the kind's own number
    broken_reward: float = 0.0  # of an answer that breaks its judge; for a kind of your own that pays less for wrong answers
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Of kind reward_model:
    model_name: Optional[str] = None  # what algorithm `rm` left in a run's hf/, or any sequence classifier with one label
    tokenizer: RewardTokenizerConfig = field(default_factory=RewardTokenizerConfig)
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    precision: str = "${policy.precision}"
    served_by: str = "train"  # train: the train ranks, cut as the policy is; reward: ranks of its own, cluster.reward
    cpu_offload: bool = True  # served_by train: its weights are in host memory while it does not compute


# ---- the run ------------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointingConfig:
    enabled: bool = True
    save_period: int = 10  # in steps; the last step is always saved
    keep_top_k: Optional[int] = 3  # by metric_name; the latest is kept besides; null: all
    metric_name: Optional[str] = None  # "val:accuracy", "train:reward"; null: keep the latest keep_top_k
    higher_is_better: bool = True
    async_save: bool = "${policy.megatron_cfg.checkpoint.async_save}"  # type: ignore[assignment]  # write while training goes on
    save_consolidated: bool = False  # also write a Hugging Face checkpoint, in `hf/` beside the sharded one
    checkpoint_must_save_by: Optional[str] = None  # days:hours:minutes:seconds after the job's start; null: its time limit


@dataclass
class LoggerConfig:
    tensorboard_enabled: bool = True
    timeline_enabled: bool = True  # what each rank did when, for launch/timeline.py
    num_rollouts_to_log: Optional[int] = None  # per step, as JSONL; null: all


@dataclass
class PlanConfig:
    """What the plan has to assume, where no earlier run tells it. It decides nothing about the run itself."""

    prompt_tokens: Optional[float] = None  # mean length of a prompt; null: see launch/plan/lengths.py
    answer_tokens: Optional[float] = None  # mean length of an answer; null: see there


@dataclass
class Recipe:
    name: str = MISSING  # the file's, without .yaml
    algorithm: str = MISSING  # grpo, ppo, distillation, sft, dpo, rm
    run_dir: str = MISSING  # what the run writes; given again, the run goes on where it stopped
    needs: list[str] = field(default_factory=list)  # recipes run first, each once, at runs/<name>
    # Where modules of one's own are looked for, after PYTHONPATH; to these the folder of the recipe's file is added
    module_folders: list[str] = field(default_factory=list)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    rm: RMConfig = field(default_factory=RMConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    value_loss_fn: ValueLossConfig = field(default_factory=ValueLossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: dict[str, EnvironmentConfig] = field(default_factory=dict)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


def generates(recipe: Recipe) -> bool:
    """Whether the algorithm samples, so that the job has a generate component."""
    return recipe.algorithm in ONLINE


def runs_ahead(recipe: Recipe) -> bool:
    """Whether engines sample while the train ranks learn."""
    ahead = recipe.grpo.async_grpo
    return recipe.algorithm == "grpo" and ahead.enabled and ahead.max_trajectory_age_steps > 0


def section(recipe: Recipe) -> OnlineConfig | OfflineConfig:
    """The algorithm's own."""
    return getattr(recipe, recipe.algorithm)


def evaluates_alone(recipe: Recipe) -> bool:
    """Whether the run validates once and learns nothing."""
    return section(recipe).max_num_steps == 0


PRECISIONS = {"float32": 4, "bfloat16": 2}  # what policy.precision may be, and the bytes of a number in it


def engine_ranks(vllm: VLLMConfig) -> int:
    """How many generate ranks make one engine."""
    return vllm.tensor_parallel_size * vllm.pipeline_parallel_size


def uses_megatron(policy: PolicyConfig) -> bool:
    """Whether Megatron-Core trains, else FSDP2. `launch/backend.py` writes the choice into the recipe at submission."""
    return policy.megatron_cfg.enabled is True


def expert_tensor_parallel_size(megatron: MegatronConfig) -> int:
    """The size that `expert_tensor_parallel_size` stands for; see there."""
    if megatron.expert_tensor_parallel_size is not None:
        return megatron.expert_tensor_parallel_size
    return megatron.tensor_model_parallel_size if megatron.expert_model_parallel_size == 1 else 1
