"""The recipe: merging, inheritance, and that every list of names in the schema is the one that the code serves."""

import pytest

from pipeline import config
from pipeline.config import RecipeError

MINIMAL = "algorithm: grpo\npolicy: {model_name: x}\nenv: {e: {kind: math}}\ndata: {train: {env_name: e}}\n"


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return to


def test_later_layers_win(write):
    write("grandparent.yaml", MINIMAL + "grpo: {seed: 1, num_prompts_per_step: 1, max_num_steps: 1}\n")
    write("parent.yaml", "defaults: grandparent.yaml\ngrpo: {seed: 2, num_prompts_per_step: 64}\n")
    child = write("child.yaml", "defaults: [parent.yaml]\ngrpo: {seed: 3}\n")
    recipe = config.load(child, ["grpo.seed=4"])
    assert (recipe.name, recipe.grpo.seed, recipe.grpo.num_prompts_per_step, recipe.grpo.max_num_steps) == ("child", 4, 64, 1)


def test_what_is_written_is_read_back(write, tmp_path):
    recipe = config.load(write("a.yaml", MINIMAL), ["policy.optimizer.kwargs.eps=1e-8", "policy.max_total_sequence_length=64"])
    config.write(recipe, tmp_path / "resolved.yaml")
    again = config.read(tmp_path / "resolved.yaml")
    assert again == recipe
    assert again.policy.optimizer.kwargs["eps"] == 1e-8
    assert again.data.max_input_seq_length == again.policy.generation.vllm_cfg.max_model_len == 64


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("defaults: b.yaml", [], "there is no"),
        ("defaults: a.yaml", [], "in a circle"),
        ("- a", [], "a recipe is a mapping"),
        ("grpo: {seed: [", [], "not YAML"),
        ("policy: {model_name: x}", [], "algorithm has no value"),
        (MINIMAL, ["grpo.sede=1"], "'grpo.sede' is not a key; did you mean 'grpo.seed'?"),
        (MINIMAL, ["grpo.seed=one"], "grpo.seed: 'one', but it must be a whole number"),
        (MINIMAL, ["seed"], "not key=value"),
        (MINIMAL, ["grpo.seed=${nowhere}"], "nowhere"),
        (
            MINIMAL,
            ["policy.dtensor_cfg.compile=true", "policy.dtensor_cfg.tensor_parallel_size=2", "cluster.train.ranks_per_node=2"],
            "policy.dtensor_cfg.compile: got true with policy.dtensor_cfg.tensor_parallel_size=2",
        ),
        (MINIMAL, ["policy.dtensor_cfg.flash_attention=4"], "policy.dtensor_cfg.flash_attention: '4' is not one of: 2, 3"),
        (
            MINIMAL,
            ["policy.dtensor_cfg.use_liger_kernel=true", "policy.dtensor_cfg.compile=true"],
            "policy.dtensor_cfg.use_liger_kernel: got true with policy.dtensor_cfg.compile=true",
        ),
        (
            MINIMAL,
            ["policy.dtensor_cfg.use_liger_kernel=true"],
            "policy.dtensor_cfg.use_liger_kernel: got true with cluster.train.gpus_per_node=0; expected GPUs",
        ),
        (
            MINIMAL,
            ["policy.dtensor_cfg.flash_attention=3", "cluster.train.gpus_per_node=8", "cluster.train.gpu=b200"],
            "policy.dtensor_cfg.flash_attention: got 3 with cluster.train.gpu=b200, of compute capability 10.0",
        ),
        (MINIMAL, ["policy.dtensor_cfg.recompute_granularity=some"], "'some' is not one of: full, selective"),
        (
            MINIMAL,
            ["policy.dtensor_cfg.recompute_granularity=selective"],
            "says nothing while policy.dtensor_cfg.activation_checkpointing is false",
        ),
        *(
            (
                MINIMAL,
                ["policy.dtensor_cfg.reference_cpu_offload=false", f"policy.dtensor_cfg.{key}=true"],
                f"reference_cpu_offload: says nothing while policy.dtensor_cfg.{key} is true",
            )
            for key in ("lora_cfg.enabled", "cpu_offload")
        ),
        (
            MINIMAL,
            [
                f"policy.dtensor_cfg.{key}"
                for key in ("activation_checkpointing=true", "recompute_granularity=selective", "compile=true")
            ],
            "policy.dtensor_cfg.recompute_granularity: got selective with policy.dtensor_cfg.compile=true",
        ),
        (MINIMAL, ["loss_fn.reference_policy_kl_type=k4"], "is not one of: k1, k2, k3"),
        (MINIMAL, ["policy.generation.temperature=0"], "must be above 0"),
        (MINIMAL, ["policy.generation.vllm_cfg.max_model_len=513"], "513 is above policy.max_total_sequence_length 512"),
        (MINIMAL, ["policy.generation.vllm_cfg.max_model_len=511"], "511 is below policy.max_total_sequence_length 512"),
        (
            MINIMAL,
            ["data.max_input_seq_length=513"],
            "data.max_input_seq_length: got 513; expected at most policy.max_total_sequence_length",
        ),
        (MINIMAL, ["algorithm=sft", "data.max_input_seq_length=513"], "data.max_input_seq_length: got 513"),
        (MINIMAL, ["algorithm=sft", "policy.generation.temperature=0.6"], "policy.generation.temperature: 0.6 divides"),
        (MINIMAL, ["algorithm=dpo", "policy.generation.temperature=0"], "policy.generation.temperature: 0.0 divides"),
        (MINIMAL, ["policy.generation.top_p=1.5"], "above 0 and at most 1"),
        (MINIMAL, ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"], "leave-one-out"),
        (MINIMAL, ["policy.sequence_packing.train_mb_tokens=100"], "cannot hold one sequence"),
        (MINIMAL, ["grpo.val_period=5"], "data.validation must name a data set"),
        (MINIMAL, ["checkpointing.checkpoint_must_save_by=03:45:00"], "days:hours:minutes:seconds, as in 00:03:45:00"),
        (MINIMAL, ["checkpointing.checkpoint_must_save_by=1:03:45:00"], "in quotes"),
        (MINIMAL, ["checkpointing.checkpoint_must_save_by='0:0:0:0'"], "leaves no time at all"),
        (MINIMAL, ["cluster.requeue.max_restarts=-1"], "cluster.requeue.max_restarts: -1 is too small; at least 0"),
        (MINIMAL, ["cluster.train.ranks_per_node=1024", "policy.dtensor_cfg.enabled=true"], "cannot be shared among 1024"),
    ],
)
def test_errors_say_where_and_what_would_be_right(write, text, overrides, message):
    with pytest.raises(RecipeError) as error:
        config.load(write("a.yaml", text), overrides)
    assert message in str(error.value)


def test_the_schema_names_what_there_is():
    from pipeline.environments.registry import KINDS

    assert set(config.ENVIRONMENT_KINDS) == set(KINDS)
