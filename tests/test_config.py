"""The recipe: merging, inheritance, and that every list of names in the schema is the one that the code serves."""

import pytest

from pipeline import config
from pipeline.config import RecipeError
from tests.problems import named

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
    ("text", "expected"),
    [
        ("defaults: b.yaml", "there is no"),
        ("defaults: a.yaml", "in a circle"),
        ("- a", "a recipe is a mapping"),
        ("grpo: {seed: [", "not YAML"),
        ("policy: {model_name: x}", "algorithm: got no value"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(write, text, expected):
    with pytest.raises(RecipeError, match=expected):
        config.load(write("a.yaml", text))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.sede=1"], ("grpo.sede", "unknown-key")),
        (["grpo.seed=one"], ("grpo.seed", "wrong-type")),
        (["seed"], "not key=value"),
        (["grpo.seed=${nowhere}"], ("grpo.seed", "unknown-reference")),
        (
            ["policy.dtensor_cfg.compile=true", "policy.dtensor_cfg.tensor_parallel_size=2", "cluster.train.ranks_per_node=2"],
            ("policy.dtensor_cfg.compile", "contradiction"),
        ),
        (["policy.dtensor_cfg.flash_attention=4"], ("policy.dtensor_cfg.flash_attention", "too-large")),
        (
            ["policy.dtensor_cfg.use_liger_kernel=true", "policy.dtensor_cfg.compile=true"],
            ("policy.dtensor_cfg.use_liger_kernel", "contradiction"),
        ),
        (
            ["policy.dtensor_cfg.use_liger_kernel=true"],
            ("policy.dtensor_cfg.use_liger_kernel", "needs-gpu"),
        ),
        (
            ["policy.dtensor_cfg.flash_attention=3", "cluster.train.gpus_per_node=8", "cluster.train.gpu=b200"],
            ("policy.dtensor_cfg.flash_attention", "unsupported"),
        ),
        (["policy.dtensor_cfg.recompute_granularity=some"], ("policy.dtensor_cfg.recompute_granularity", "not-a-choice")),
        (
            ["policy.dtensor_cfg.recompute_granularity=selective"],
            ("policy.dtensor_cfg.recompute_granularity", "has-no-effect"),
        ),
        *(
            (
                ["policy.dtensor_cfg.reference_cpu_offload=false", f"policy.dtensor_cfg.{key}=true"],
                ("policy.dtensor_cfg.reference_cpu_offload", "has-no-effect"),
            )
            for key in ("lora_cfg.enabled", "cpu_offload")
        ),
        (
            [
                f"policy.dtensor_cfg.{key}"
                for key in ("activation_checkpointing=true", "recompute_granularity=selective", "compile=true")
            ],
            ("policy.dtensor_cfg.recompute_granularity", "contradiction"),
        ),
        (["loss_fn.reference_policy_kl_type=k4"], ("loss_fn.reference_policy_kl_type", "not-a-choice")),
        (["policy.generation.temperature=0"], ("policy.generation.temperature", "too-small")),
        (["policy.generation.vllm_cfg.max_model_len=513"], ("policy.generation.vllm_cfg.max_model_len", "contradiction")),
        (["policy.generation.vllm_cfg.max_model_len=511"], ("policy.generation.vllm_cfg.max_model_len", "contradiction")),
        (
            ["data.max_input_seq_length=513"],
            ("data.max_input_seq_length", "too-large"),
        ),
        (["algorithm=sft", "data.max_input_seq_length=513"], ("data.max_input_seq_length", "too-large")),
        (["algorithm=sft", "policy.generation.temperature=0.6"], ("policy.generation.temperature", "contradiction")),
        (["algorithm=dpo", "policy.generation.temperature=0"], ("policy.generation.temperature", "too-small")),
        (["policy.generation.top_p=1.5"], ("policy.generation.top_p", "too-large")),
        (["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=32"], "leave-one-out"),
        (["policy.sequence_packing.train_mb_tokens=100"], ("policy.sequence_packing.train_mb_tokens", "too-small")),
        (["grpo.val_period=5"], ("grpo.val_period", "missing-value")),
        (["checkpointing.checkpoint_must_save_by=03:45:00"], ("checkpointing.checkpoint_must_save_by", "bad-format")),
        (["checkpointing.checkpoint_must_save_by=1:03:45:00"], ("checkpointing.checkpoint_must_save_by", "bad-format")),
        (["checkpointing.checkpoint_must_save_by='0:0:0:0'"], ("checkpointing.checkpoint_must_save_by", "too-small")),
        (["cluster.requeue.max_restarts=-1"], ("cluster.requeue.max_restarts", "too-small")),
        (
            ["cluster.train.ranks_per_node=1024", "policy.dtensor_cfg.enabled=true"],
            ("policy.train_global_batch_size", "too-small"),
        ),
    ],
)
def test_what_is_wrong_has_a_key_and_a_code(write, overrides, expected):
    with pytest.raises(RecipeError) as error:
        config.load(write("a.yaml", MINIMAL), overrides)
    assert expected in str(error.value) if isinstance(expected, str) else expected in named(error.value.problems)


def test_the_schema_names_what_there_is():
    from pipeline.environments.registry import KINDS

    assert set(config.ENVIRONMENT_KINDS) == set(KINDS)
