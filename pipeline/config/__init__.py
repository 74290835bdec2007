"""The recipe: its schema, its loading, and the checks that need only the recipe.

Start in `schema.py`, which has all keys, and in `loading.py`, which makes a `Recipe` from files and the command line. This
package does not import torch, so that commands on a login node start fast.
"""

from pipeline.algorithms import LABELED, OFFLINE, ONLINE, PAIRED
from pipeline.algorithms.ahead import AsyncConfig
from pipeline.algorithms.distillation import DistillationConfig
from pipeline.algorithms.dpo import DPOConfig
from pipeline.algorithms.grpo import AdvantageConfig, GRPOConfig
from pipeline.algorithms.kto import KTOConfig
from pipeline.algorithms.ppo import PPOConfig
from pipeline.algorithms.sections import (
    LossConfig,
    OfflineConfig,
    OnlineConfig,
    RewardedConfig,
    ValueLossConfig,
    bound,
)
from pipeline.config.checkpointing import CheckpointingConfig, Verify
from pipeline.config.cluster import (
    ClusterConfig,
    ComponentConfig,
    RequeueConfig,
    TimeoutsConfig,
    ranks,
    ranks_per_node,
)
from pipeline.config.data import (
    DATASET_CARDS,
    GENERATED_DATASETS,
    NAMED_DATASETS,
    data_paths,
    held_out_sets,
    is_dotted_path,
    keyed_sets,
    nearest_dataset,
    training_sets,
    validates,
    validation_sets,
)
from pipeline.config.environments import (
    KINDS,
    AnswerCheck,
    EnvironmentConfig,
    agents,
    answer_check,
    judged_by_expected_answers,
    kind_class,
    prompt_tools,
    read_kwargs,
    reads_calls,
    reads_columns,
)
from pipeline.config.formatting import format_override, format_with_origins
from pipeline.config.generation import GenerationConfig, RefitConfig, VLLMConfig
from pipeline.config.loading import (
    RECIPES,
    Loaded,
    changed,
    complete,
    find,
    independent,
    inspect,
    load,
    name_of,
    read,
    to_yaml,
    write,
)
from pipeline.config.megatron import (
    MegatronConfig,
    MegatronDDPConfig,
    MegatronLoRAConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
)
from pipeline.config.other_models import (
    critic,
    engine_models,
    evaluated_reward_model,
    judge_policy,
    models,
    only_scores,
    reward_environment,
    reward_model,
    reward_model_policy,
    served_judge_policy,
    served_models,
    serves_judge,
    serves_rewards,
    skipped_tasks,
    teacher_policies,
    teacher_policy,
    teacher_section,
    teachers,
)
from pipeline.config.parallelism import (
    Backend,
    check_expert_layout,
    colocated,
    components_on_train_nodes,
    refits_by_ipc,
    requested_backend,
    with_backend,
)
from pipeline.config.policy import (
    PRECISIONS,
    DTensorConfig,
    LoRAConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from pipeline.config.recipe_checks import components, has_gpus, model_components, problems, validate
from pipeline.config.schema import (
    CurriculumConfig,
    DataConfig,
    DatasetConfig,
    LoggerConfig,
    Recipe,
    adapters,
    ahead,
    compiles,
    engine_ranks,
    environment_component,
    environments_apart,
    expert_tensor_parallel_size,
    generates,
    needs_triton,
    only_evaluates,
    recipe_class,
    rollout_function,
    runs_ahead,
    section,
    trains,
    trial_lengths,
    uses_megatron,
)
from pipeline.recipe.problems import Problem, RecipeError, collected, problems_of, refuse
