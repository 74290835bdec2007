"""The recipe's schema: every key with its type, range, default and meaning.

Keys that mean the same as in NeMo-RL have its names. `recipes/KEYS.md` lists all keys.
"""

from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.algorithms import ALGORITHMS, CLASSES, GROUP, ONLINE, build
from pipeline.algorithms.ahead import AsyncConfig, settings
from pipeline.algorithms.sections import LossConfig, OfflineConfig, OnlineConfig, ValueLossConfig
from pipeline.config.checkpointing import CheckpointingConfig
from pipeline.config.cluster import ClusterConfig
from pipeline.config.environments import EnvironmentConfig
from pipeline.config.generation import VLLMConfig
from pipeline.config.megatron import MegatronConfig, MegatronLoRAConfig
from pipeline.config.policy import (
    LoRAConfig,
    PolicyConfig,
    ServedJudgeConfig,
    TeacherConfig,
    TeachersConfig,
    ValueConfig,
)
from pipeline.recipe.values import (
    LIVE,
    MISSING,
    Bool,
    Check,
    DottedPath,
    Float,
    Folder,
    Int,
    Line,
    Live,
    NotNegative,
    Positive,
    Text,
    interpolation,
    not_a_kind,
)
from pipeline.seams import entry_points, extras

# ---- data ----------------------------------------------------------------------------------------------------------------


@dataclass
class DatasetConfig:
    """A data set and its columns.

    If a record lacks the columns that the recipe names, the columns of TRL's formats and other common ones are recognized. A
    key of a column may name a field of a nested column, such as reward_model.ground_truth, unless a column has that name.
    """

    dataset_name: Line | None = None
    """A generated or named data set, a name or folder for `datasets`, or the dotted path of your own callable (split, seed=,
    **kwargs) that returns a sequence of records."""
    data_path: Line | list[Line] | None = None
    """A file of Parquet, Arrow, CSV, TSV, a JSON array or JSON lines (texts also as .gz, .bz2, .xz, .zst), a list of files, a
    glob, a folder of files, or a folder of `save_to_disk`. In recipes that inherit, data_path and dataset_name replace each
    other."""
    subset: Text | None = None
    """Configuration of the repository. null: the data set's default."""
    split: Text | None = None
    """Split of the data set, or of a folder whose files are named by split. null: the default, mostly `train`."""
    max_samples: Positive | None = None
    """Number of records to use, drawn at random with `seed`. null: all."""
    split_validation_size: Annotated[Float, Field(ge=0)] = 0.0
    """Training data held out for validation: a fraction below 1, or a number of records from 1."""
    seed: Int = 42
    """Seed of the draws for max_samples and split_validation_size."""
    repeat: Positive = 1
    """Number of passes over the records in one epoch."""
    processor: DottedPath | None = None
    """Dotted path of your own function that makes a record, a list of records or None (which drops it) of each record, before
    its columns are read."""
    input_key: Text = "input"
    """Column of the prompt: a string, or messages {role, content}. DPO, RM: the prompt of both answers; `''` if the answers
    include it."""
    output_key: Text = "output"
    """Column of the answer: a string, or messages."""
    messages_key: Text | None = None
    """Column of a list of {role, content}, in place of input_key and output_key."""
    text_key: Text | None = None
    """SFT: column of a text. The loss counts every token of it."""
    chosen_key: Text = "chosen"
    """DPO, RM: column of the better answer, or of messages {role, content} that end in it and may include the prompt."""
    rejected_key: Text = "rejected"
    """DPO, RM: column of the worse answer, in the form of chosen_key."""
    label_key: Text | None = "label"
    """KTO: column that says whether the answer is good: true or false, or 1 or 0. null: a record has the answers chosen_key and
    rejected_key, of which the first is good."""
    tools_key: Text | None = "tools"
    """Column of the tools that the chat template shows: a list of JSON schemas of functions, also as JSON text. null: none. The
    column chat_template_kwargs has variables of the template."""
    margin_key: Text | None = None
    """RM: column of the margin by which the chosen answer is better."""
    prompt_file: Line | None = None
    """File of a prompt template, whose `{}` is replaced by the input. With messages, it applies to the first message of the
    user."""
    system_prompt_file: Line | None = None
    """File of the system prompt."""
    env_name: Text | None = None
    """Key under `env` of the environment that scores the answers."""
    weight: Annotated[Float | None, Live(within="data.datasets."), Field(gt=0)] = None
    """Relative sampling weight in data.datasets (Live). null in all of them: number of records."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of a generated data set, of `datasets`, or of your own callable."""


@dataclass
class CurriculumConfig:
    """Choice of prompts by how well the policy answers them: pools of easy and hard records."""

    enabled: Bool = False
    """Whether to choose prompts by the mean reward of their records' latest answers."""
    easy: Float = 1.0
    """Mean reward from which on a record is easy."""
    hard: Float = 0.0
    """Mean reward up to which a record is hard."""
    easy_share: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of prompts drawn from the easy records; others pass over these."""
    hard_share: Annotated[Float, Field(ge=0, le=1)] = 0.1
    """Share of prompts drawn from the hard records; others pass over these."""


@dataclass
class DataConfig:
    """Training and validation data."""

    train: DatasetConfig | None = field(default_factory=DatasetConfig)
    validation: DatasetConfig | None = None
    datasets: dict[str, DatasetConfig] = field(default_factory=dict)
    """Several training data sets by name, mixed by weight, in place of train."""
    validations: dict[str, DatasetConfig] = field(default_factory=dict)
    """Several validation data sets by name, each with its own metrics, in place of validation."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    max_input_seq_length: Positive = interpolation("${policy.max_total_sequence_length}")
    """Maximum tokens of a prompt; for offline algorithms, of a sequence."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt that exceeds max_input_seq_length or leaves no room for an answer."""
    unknown_tokens: Literal["error", "keep", "drop"] = "error"
    """What to do with a record whose text the tokenizer can only partly represent, using its unknown token. The longest and the
    first texts of a data_path are checked before submission; all texts, when the job reads them."""
    bad_records: Literal["error", "drop"] = "error"
    """What to do with an unusable record, such as one without an answer or a pair of identical answers. error: fail and name
    its file and line (Parquet: row). drop: skip it and count it in the metric data/records_dropped. The first records are
    checked before submission, the first 20,000 when the job begins."""
    learn_prefilled: Bool = False
    """SFT, DPO, RM: include in the loss the reasoning marks that the generation prompt already has, such as an empty <think>
    block, as TRL's training templates do."""
    shuffle: Bool = True
    """Shuffle every epoch, with the algorithm's seed."""
    apply_chat_template: Bool = True
    """Render prompts with the chat template. false: use the text as it is, after prompt_file."""


# ---- the run ------------------------------------------------------------------------------------------------------------


@dataclass
class EvaluationConfig:
    """Evaluation of a run's checkpoints as they are completed, each in a job of its own (launch/evaluate.py, step=follow)."""

    suite: Line | None = None
    """A file in recipes/suites/, without .yaml, or a path. null: checkpoints are not evaluated."""
    period: Positive = 1
    """Evaluate every Nth checkpoint, and the last."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Keys of `cluster` for the evaluation jobs, as in {time_min: 30, generate: {nodes: 1}, partition: small}. They override
    the run's. A key that only components have, such as partition, sets cluster.generate's."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the suite's recipe to change, such as {evaluate.seed: 1}."""


@dataclass
class MonitorConfig:
    """Samples of what each rank uses (GPU, memory, network, engine), metrics `resources/...` and warnings."""

    period_s: Annotated[Float | None, Field(ge=0.1)] = 5.0
    """Seconds between two samples of a rank, each of a few milliseconds of a CPU. null: take none."""


@dataclass
class _Logs:
    tensorboard_enabled: Bool = True
    """Write TensorBoard events."""
    num_rollouts_to_log: Annotated[NotNegative | None, LIVE] = None
    """Rollouts per step to write as JSONL. null: all."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


def _trackers() -> dict[str, type[Any]]:
    """Return name -> class of a tracker, for the trackers of the extra `trackers`; {} if this is not installed."""
    module = extras.find("trackers")
    return module.TRACKERS if module else {}


TRACKERS = _trackers()


def _switch(tracker: type[Any]) -> Any:
    text = f"Send metrics, samples and scores to {tracker.title}, from a separate process."
    return Annotated[Bool, Field(description=text)]


_Trackers = make_dataclass(
    "_Trackers",
    [
        entry
        for name, tracker in TRACKERS.items()
        for entry in (
            (f"{name}_enabled", _switch(tracker), field(default=False)),
            (name, tracker.Section, field(default_factory=tracker.Section)),
        )
    ],
    bases=(_Logs,),
)


@dataclass
class LoggerConfig(_Trackers):
    """Logs of a run. It has a section for each tracker in pipeline/trackers."""


@dataclass
class PlanConfig:
    """Assumptions of the plan where no earlier run provides a measurement.

    They change nothing in the run but what submission chooses by the plan: recomputation and microbatches that are left open.
    """

    prompt_tokens: Annotated[Float | None, Field(ge=0)] = None
    """Mean tokens of a prompt. null: estimated as in launch/plan/lengths.py."""
    answer_tokens: Annotated[Float | None, Field(gt=0)] = None
    """Mean tokens of an answer. null: estimated as in launch/plan/lengths.py."""
    longest_tokens: Positive | None = None
    """Tokens of the longest sequence in an offline algorithm's data, which bounds memory. null: data.max_input_seq_length,
    which the run enforces."""
    hardware: Line | None = None
    """A file that `make gpu-check` wrote on the same kind of GPU. The plan uses its measurements in place of the assumptions in
    recipes/hardware."""


def _not_an_algorithm(name: str) -> str | None:
    if name in ALGORITHMS:
        return None
    known = (*CLASSES, *entry_points.find(GROUP))
    return not_a_kind(name, known, f"one of: {', '.join(known)}; or the dotted path of a class")


@dataclass
class _Run:
    name: Line = MISSING
    """Name of the run. Default: the name of the recipe's file without .yaml."""
    algorithm: Annotated[
        Line,
        Check(_not_an_algorithm, "not-a-choice"),
        Field(
            description=f"Algorithm of the run: {', '.join(CLASSES)}; one of an installed package; or the dotted path of your"
            " own class (pipeline/algorithms/README.md). Its section of the recipe has the same name, or that of your class's"
            " file.",
            json_schema_extra={"anyOf": [{"enum": list(CLASSES)}, {"type": "string", "pattern": "^\\w+(\\.\\w+)*$"}]},
        ),
    ] = MISSING
    algorithm_class: DottedPath | None = None
    """Dotted path of the class of an algorithm that is not one of ours. Set by `algorithm`."""
    run_dir: Folder = MISSING
    """Folder for the output of the run. If it exists, the run continues from its last checkpoint. Default: runs/<name>."""
    needs: list[Line] = field(default_factory=list)
    """Recipes that run first, each once, in runs/<name>."""
    rollout: DottedPath | None = None
    """Dotted path of your own `async def generate(engine, prompt, seed)`, which plays the episodes
    (pipeline/rollout/engine_client.py). null: the policy answers, and the environment replies, in turn."""
    module_folders: list[Line] = field(default_factory=list)
    """Folders to search for your own modules, after PYTHONPATH. The folder of the recipe's file is added."""


_Algorithms = make_dataclass(
    "_Algorithms",
    [(name, ALGORITHMS[name].Section, field(default_factory=ALGORITHMS[name].Section)) for name in CLASSES],
    bases=(_Run,),
)


@dataclass
class Recipe(_Algorithms):
    """A run. It has one section for each algorithm in pipeline/algorithms."""

    loss_fn: LossConfig = field(default_factory=LossConfig)
    value_loss_fn: ValueLossConfig = field(default_factory=ValueLossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    judge: ServedJudgeConfig = field(default_factory=ServedJudgeConfig)
    on_policy_distillation: TeachersConfig = field(default_factory=TeachersConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: dict[str, EnvironmentConfig] = field(default_factory=dict)
    """Environments by name."""
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)


def recipe_class(name: object) -> type[Any]:
    """Return the schema of recipes with the algorithm `name`: `Recipe`, and the section of a user's algorithm.

    name: None: of all algorithms that are registered.
    """
    names = [other for other in ALGORITHMS if other not in CLASSES and name in (None, other)]
    return _with_sections(*((other, ALGORITHMS[other].Section) for other in names)) if names else Recipe


@cache
def _with_sections(*added: tuple[str, type[Any]]) -> type[Recipe]:
    fields = [(name, section, field(default_factory=section)) for name, section in added]
    return make_dataclass(Recipe.__name__, fields, bases=(Recipe,))


def generates(recipe: Recipe) -> bool:
    """Return whether the algorithm samples. The job then has a generate component."""
    return recipe.algorithm in ONLINE


def trains(recipe: Recipe) -> bool:
    """Return whether the algorithm trains a model. The job then has a train component. An evaluation has none."""
    return recipe.algorithm not in ALGORITHMS or ALGORITHMS[recipe.algorithm].trains_model


def runs_ahead(recipe: Recipe) -> bool:
    """Return whether engines sample while the train ranks train."""
    return build(recipe).runs_ahead


def ahead(recipe: Recipe) -> AsyncConfig:
    """Return the algorithm's section of asynchronous generation; the defaults (off) if the algorithm has none."""
    return settings(recipe) or AsyncConfig()


def section(recipe: Recipe) -> OnlineConfig | OfflineConfig:
    """Return the section of the recipe's algorithm."""
    return getattr(recipe, recipe.algorithm)


def only_evaluates(recipe: Recipe) -> bool:
    """Return whether the run validates once and trains nothing."""
    return section(recipe).max_num_steps == 0


def rollout_function(recipe: Recipe) -> str:
    """Return the dotted path of the user's rollout function; "" for the built-in rollout."""
    return recipe.rollout or "" if trains(recipe) else ""


def engine_ranks(vllm: VLLMConfig) -> int:
    """Return the number of generate ranks of one engine."""
    return vllm.tensor_parallel_size * vllm.pipeline_parallel_size


def uses_megatron(policy: PolicyConfig) -> bool:
    """Return whether Megatron-Core trains; if not, FSDP2 does. `launch/plan/backend_choice.py` writes the choice."""
    return policy.megatron_cfg.enabled is True


def compiles(policy: PolicyConfig, mixture: bool) -> bool:
    """Return whether FSDP2 compiles a model's decoder layers on GPUs.

    mixture: whether the model has experts, state spaces or delta nets, as `ModelShape.mixture` says.
    """
    dtensor = policy.dtensor_cfg
    if dtensor.compile is not None:
        return dtensor.compile
    draws = dtensor.lora_cfg.enabled and dtensor.lora_cfg.dropout > 0
    sharded, selective = dtensor.tensor_parallel_size > 1, dtensor.recompute_granularity == "selective"
    return not (mixture or sharded or selective or dtensor.use_liger_kernel or draws)


def trial_lengths(policy: PolicyConfig) -> tuple[int, ...]:
    """Return the lengths of the sequences with which compiled layers start: a full microbatch of the longest sequences."""
    longest, packing = policy.max_total_sequence_length, policy.sequence_packing
    count = max(1, packing.train_tokens // longest) if packing.enabled else policy.train_micro_batch_size
    return (longest,) * count


def environments_apart(recipe: Recipe) -> bool:
    """Return whether environments have ranks of their own. The job then has an environment component."""
    return generates(recipe) and recipe.cluster.environment.nodes > 0


def environment_component(recipe: Recipe) -> str:
    """Return the name of the component whose ranks run the environments."""
    return "environment" if environments_apart(recipe) else "generate"


def needs_triton(recipe: Recipe, component: str) -> bool:
    """Return whether a component's ranks compile kernels on GPUs and cannot run without them (vLLM, Megatron-Core).

    FSDP2 runs its layers eagerly if they cannot be compiled.
    """
    if component == "environment":
        return False
    if component in ("generate", "judge"):
        return recipe.policy.generation.backend == "vllm"
    return uses_megatron(recipe.policy) and recipe.policy.megatron_cfg.bias_activation_fusion is not False


def adapters(policy: PolicyConfig) -> LoRAConfig | MegatronLoRAConfig | None:
    """Return the section of the adapters that the chosen backend trains; None if it trains all weights."""
    lora = policy.megatron_cfg.peft if uses_megatron(policy) else policy.dtensor_cfg.lora_cfg
    return lora if lora.enabled else None


def expert_tensor_parallel_size(megatron: MegatronConfig) -> int:
    """Return the experts' tensor-parallel size. null means tensor_model_parallel_size, or 1 with expert parallelism."""
    if megatron.expert_tensor_parallel_size is not None:
        return megatron.expert_tensor_parallel_size
    return megatron.tensor_model_parallel_size if megatron.expert_model_parallel_size == 1 else 1
