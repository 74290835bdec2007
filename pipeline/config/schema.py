"""The recipe's schema: every key with its type, range, default and meaning.

Keys follow NeMo-RL's where they mean the same; ours adds `cluster.train`, `cluster.generate` and `cluster.timeouts`.
`recipes/KEYS.md` lists them all.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.algorithms import ALGORITHMS, ONLINE, build
from pipeline.algorithms.sections import LossConfig, OfflineConfig, OnlineConfig, ValueLossConfig
from pipeline.config.cluster import ClusterConfig
from pipeline.config.environments import EnvironmentConfig
from pipeline.config.generation import VLLMConfig
from pipeline.config.megatron import MegatronConfig
from pipeline.config.policy import PolicyConfig, TeacherConfig, ValueConfig
from pipeline.values import MISSING, Bool, Duration, Float, Folder, Int, Line, NotNegative, Positive, Text, interpolation

# ---- data ----------------------------------------------------------------------------------------------------------------


@dataclass
class DatasetConfig:
    """A data set and its columns.

    Where a record lacks the columns that the recipe names, those of TRL and other common ones are recognized.
    """

    dataset_name: Annotated[
        Line | None,
        Field(
            description="A generated or named data set of ours, a name or folder for `datasets`, or the dotted path of a"
            " callable (split, seed=, **kwargs) that returns a sequence of records."
        ),
    ] = None
    data_path: Annotated[Line | None, Field(description="A JSONL file, in place of dataset_name.")] = None
    subset: Annotated[Text | None, Field(description="Configuration of the repository. null: the data set's own.")] = None
    split: Annotated[Text | None, Field(description="null: the data set's own, `train` for most.")] = None
    max_samples: Annotated[Positive | None, Field(description="So many records, drawn at random with `seed`. null: all.")] = (
        None
    )
    split_validation_size: Annotated[
        Float, Field(ge=0, description="Training data held out for validation: below 1 a share, from 1 a number of records.")
    ] = 0.0
    seed: Annotated[Int, Field(description="Seed of max_samples and split_validation_size.")] = 42
    repeat: Annotated[Positive, Field(description="How many times the records are gone through in one epoch.")] = 1
    input_key: Annotated[
        Text,
        Field(
            description="Column of a text or of messages {role, content}. DPO, RM: what both answers begin with; `''` for none."
        ),
    ] = "input"
    output_key: Annotated[Text, Field(description="Column of a text or of messages.")] = "output"
    messages_key: Annotated[
        Text | None, Field(description="Column of a list of {role, content}, in place of input_key and output_key.")
    ] = None
    text_key: Annotated[Text | None, Field(description="SFT: column of a text of which every token is learned.")] = None
    chosen_key: Annotated[
        Text,
        Field(
            description="DPO, RM: column of the better answer, or of messages {role, content} that end in it, perhaps after the"
            " prompt."
        ),
    ] = "chosen"
    rejected_key: Annotated[Text, Field(description="DPO, RM: column of the worse answer, as chosen_key.")] = "rejected"
    margin_key: Annotated[Text | None, Field(description="RM: column of how much better the chosen answer is.")] = None
    prompt_file: Annotated[
        Line | None,
        Field(description="A file with a text around the input, whose place is `{}`. With messages: the first of the user."),
    ] = None
    system_prompt_file: Annotated[Line | None, Field(description="A file with the system prompt.")] = None
    env_name: Annotated[Text | None, Field(description="Key under `env` of the environment that judges.")] = None
    weight: Annotated[
        Float | None,
        Field(gt=0, description="data.datasets: how often it is drawn from. null, for all: its number of records."),
    ] = None
    kwargs: Annotated[
        dict[str, Any], Field(description="Arguments of a generated data set, of `datasets`, or of your own callable.")
    ] = field(default_factory=dict)


@dataclass
class DataConfig:
    """The data to train and validate on."""

    train: DatasetConfig | None = field(default_factory=DatasetConfig)
    validation: DatasetConfig | None = None
    datasets: Annotated[
        dict[str, DatasetConfig], Field(description="In place of train: several data sets by name, mixed by weight.")
    ] = field(default_factory=dict)
    validations: Annotated[
        dict[str, DatasetConfig], Field(description="In place of validation: several data sets by name, each with its metrics.")
    ] = field(default_factory=dict)
    max_input_seq_length: Annotated[Positive, Field(description="Tokens of the longest prompt.")] = interpolation(
        "${policy.max_total_sequence_length}"
    )
    overlong_prompts: Annotated[
        Literal["error", "drop"],
        Field(description="What to do with a prompt above max_input_seq_length, or that leaves no room for an answer."),
    ] = "error"
    unknown_tokens: Annotated[
        Literal["error", "keep", "drop"],
        Field(description="What to do with a prompt of which the tokenizer knows a part only as its unknown token."),
    ] = "error"
    bad_records: Annotated[
        Literal["error", "drop"],
        Field(description="What to do with a record that cannot be used: no answer, say, or two that are the same."),
    ] = "error"
    shuffle: Annotated[Bool, Field(description="Shuffle each epoch, with the algorithm's seed.")] = True
    apply_chat_template: Annotated[Bool, Field(description="false: the prompt is the bare text after prompt_file.")] = True


# ---- the run ------------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointingConfig:
    """The checkpoints of a run."""

    enabled: Annotated[Bool, Field(description="Whether checkpoints are saved.")] = True
    save_period: Annotated[Positive, Field(description="Steps between checkpoints. The last step is always saved.")] = 10
    keep_top_k: Annotated[
        Positive | None, Field(description="Keep the best so many by metric_name, and the latest. null: all.")
    ] = 3
    metric_name: Annotated[
        Text | None, Field(description="`val:accuracy` or `train:reward`, say. null: keep the latest keep_top_k.")
    ] = None
    higher_is_better: Annotated[Bool, Field(description="Whether a higher value of the metric is better.")] = True
    async_save: Annotated[Bool, Field(description="Write while training goes on.")] = interpolation(
        "${policy.megatron_cfg.checkpoint.async_save}"
    )
    save_consolidated: Annotated[
        Bool, Field(description="Also write a Hugging Face checkpoint, in `hf/` beside the sharded one.")
    ] = False
    checkpoint_must_save_by: Annotated[
        Duration | None,
        Field(description="Save and leave by then: days:hours:minutes:seconds after the job's start. null: its time limit."),
    ] = None


@dataclass
class LoggerConfig:
    """The logs of a run."""

    tensorboard_enabled: Annotated[Bool, Field(description="Write TensorBoard events.")] = True
    timeline_enabled: Annotated[Bool, Field(description="Record what each rank does when, for launch/timeline.py.")] = True
    num_rollouts_to_log: Annotated[NotNegative | None, Field(description="Rollouts per step, as JSONL. null: all.")] = None


@dataclass
class PlanConfig:
    """Assumptions of the plan where no earlier run tells. They change nothing about the run."""

    prompt_tokens: Annotated[Float | None, Field(description="Mean tokens of a prompt. null: see launch/plan/lengths.py.")] = (
        None
    )
    answer_tokens: Annotated[Float | None, Field(description="Mean tokens of an answer. null: see launch/plan/lengths.py.")] = (
        None
    )


@dataclass
class _Run:
    name: Annotated[Line, Field(description="Name of the run. Default: the file's, without .yaml.")] = MISSING
    algorithm: Annotated[
        Literal[tuple(ALGORITHMS)], Field(description="What the run computes; the recipe's section of this name is read.")
    ] = MISSING  # type: ignore[assignment]
    run_dir: Annotated[
        Folder, Field(description="What the run writes. Given again, the run goes on where it stopped. Default: runs/<name>.")
    ] = MISSING
    needs: Annotated[list[Line], Field(description="Recipes that run first, each once, in runs/<name>.")] = field(
        default_factory=list
    )
    module_folders: Annotated[
        list[Line],
        Field(description="Where your own modules are looked for, after PYTHONPATH. The folder of the recipe's file is added."),
    ] = field(default_factory=list)


_Algorithms = make_dataclass(
    "_Algorithms",
    [(name, algorithm.Section, field(default_factory=algorithm.Section)) for name, algorithm in ALGORITHMS.items()],
    bases=(_Run,),
)


@dataclass
class Recipe(_Algorithms):
    """A run. It has a section for each algorithm of pipeline/algorithms."""

    loss_fn: LossConfig = field(default_factory=LossConfig)
    value_loss_fn: ValueLossConfig = field(default_factory=ValueLossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: Annotated[dict[str, EnvironmentConfig], Field(description="Environments by name.")] = field(default_factory=dict)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


def generates(recipe: Recipe) -> bool:
    """Return whether the algorithm samples, so that the job has a generate component."""
    return recipe.algorithm in ONLINE


def runs_ahead(recipe: Recipe) -> bool:
    """Return whether engines sample while the train ranks learn."""
    return build(recipe).runs_ahead


def section(recipe: Recipe) -> OnlineConfig | OfflineConfig:
    """Return the section of the recipe's algorithm."""
    return getattr(recipe, recipe.algorithm)


def only_evaluates(recipe: Recipe) -> bool:
    """Return whether the run validates once and learns nothing."""
    return section(recipe).max_num_steps == 0


def engine_ranks(vllm: VLLMConfig) -> int:
    """Return how many generate ranks make one engine."""
    return vllm.tensor_parallel_size * vllm.pipeline_parallel_size


def uses_megatron(policy: PolicyConfig) -> bool:
    """Return whether Megatron-Core trains, else FSDP2. `launch/backend.py` writes the choice into the recipe at submission."""
    return policy.megatron_cfg.enabled is True


def expert_tensor_parallel_size(megatron: MegatronConfig) -> int:
    """Return the size that `expert_tensor_parallel_size` stands for; see there."""
    if megatron.expert_tensor_parallel_size is not None:
        return megatron.expert_tensor_parallel_size
    return megatron.tensor_model_parallel_size if megatron.expert_model_parallel_size == 1 else 1
