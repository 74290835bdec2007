"""Other libraries' names for a key: each leads to an existing key, first to one that the recipe reads."""

import itertools

import pytest

from launch.preflight import signatures
from pipeline import config
from pipeline.config import aliases, schema_validation, unused_keys
from pipeline.config.schema import Recipe

KEYS = schema_validation.keys(Recipe)
ALGORITHMS = (*config.ONLINE, *config.OFFLINE)
BACKENDS = ("megatron", "dtensor", None)
KWARGS = "optimizer.kwargs."


def sections(key):
    return [key.replace(aliases.OWN, algorithm) for algorithm in ALGORITHMS] if aliases.OWN in key else [key]


def test_suggested_keys_exist():
    assert all(aliases.ALIASES.values()) and len(aliases.ALIASES) > 50
    optimizers = [signatures.signature(f"torch.optim.{name}") for name in ("AdamW", "Muon")]
    for target in set(itertools.chain(*aliases.ALIASES.values())):
        if KWARGS in target:
            section, _, option = target.partition(KWARGS)
            assert f"{section}{KWARGS[:-1]}" in KEYS and any(option in one.parameters for one in optimizers), target
        else:
            assert any(key.replace("env.NAME.", "env.*.") in KEYS for key in sections(target)), target


def test_equivalent_keys_exist():
    for one, other in unused_keys.SAME:
        assert one in KEYS and (other in KEYS or other.rpartition(".")[0] in KEYS), (one, other)


def test_no_alias_is_a_key_of_ours():
    assert not set(aliases.ALIASES) & set(KEYS)


def test_a_key_that_is_read_is_suggested_first():
    for name, algorithm, backend in itertools.product(aliases.ALIASES, ALGORITHMS, BACKENDS):
        readers = unused_keys.Readers(algorithm, backend)
        first, *_ = meant = aliases.equivalents(name, algorithm, readers.rank(name))
        targets = [one.replace(aliases.OWN, algorithm) for one in aliases.ALIASES[name]]
        assert first in targets and len(meant) <= 2
        assert readers.unread(first) is None or all(readers.unread(one) for one in targets), (name, algorithm, backend)


@pytest.mark.parametrize(
    ("given", "key", "meant"),
    [
        ("policy.optimizer.lr=1e-4", "policy.optimizer.lr", "'policy.optimizer.kwargs.lr'"),
        ("policy.lr=1e-4", "policy.lr", "'policy.optimizer.kwargs.lr'"),
        ("Learning-Rate=1e-4", "Learning-Rate", "'policy.optimizer.kwargs.lr'"),
        ("value.optimizer.lr=1e-4", "value.optimizer.lr", "'value.optimizer.kwargs.lr'"),
        ("train.batch_size=8", "train.batch_size", "'policy.train_global_batch_size'"),
        ("num_generations=8", "num_generations", "'grpo.num_generations_per_prompt'"),
        ("max_completion_length=8", "max_completion_length", "'policy.generation.max_new_tokens'"),
        ("temperature=0.7", "temperature", "'policy.generation.temperature'"),
        ("beta=0.1", "beta", "'loss_fn.reference_policy_kl_penalty'"),
        ("model=x", "model", "'policy.model_name'"),
        ("seed=1", "seed", "'grpo.seed'"),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr", "'policy.optimizer.kwargs.lr'"),
        ("trainer={total_epochs: 2, logger: [wandb]}", "trainer.total_epochs", "'grpo.max_num_epochs'"),
        ("wandb_project=x", "wandb_project", "logger.wandb_enabled"),
        ("logger.comet_enabled=true", "logger.comet_enabled", "metrics.jsonl"),
        ("report_to=none", "report_to", "logger.mlflow_enabled"),
        ("reward_fn=a.b", "reward_fn", "'env.NAME.kind'"),
        ("reward_weights=[1, 2]", "reward_weights", "'env.NAME.rewards'"),
    ],
)
def test_another_librarys_name_suggests_ours(given, key, meant):
    first, *others = config.inspect("tiny_grpo", [given]).problems
    assert (first.key, first.code) == (key, "unknown-key") and meant in first.message
    assert len(others) == ("trainer" in given)


@pytest.mark.parametrize("given", ["num_generations", "grpo.num_generations", "num_generations_per_promt", "beta"])
def test_only_keys_of_this_recipe_are_suggested(given):
    """A key of another algorithm is named with the reason why it has no place here."""
    (problem,) = config.inspect("tiny_sft", [f"{given}=8"]).problems
    assert (problem.key, problem.code) == (given, "unknown-key")
    assert "did you mean" not in problem.message and "the algorithm is sft" in problem.message
    assert "'sft." not in problem.message


def test_every_suggestion_is_a_key_that_the_recipe_reads():
    for name, algorithm in itertools.product(aliases.ALIASES, ALGORITHMS):
        readers = unused_keys.Readers(algorithm, "dtensor")
        said = readers.hint(name)
        if "did you mean" in said:
            first = said.split("'")[1].replace("env.NAME.", "env.*.")
            assert first in KEYS or KWARGS in first, (name, algorithm)
            assert readers.unread(first) is None, (name, algorithm)


def test_another_librarys_section_in_place_of_a_value_suggests_ours():
    (problem,) = config.inspect("tiny_grpo", ["algorithm.kl_ctrl.kl_coef=0.1"]).problems
    assert (problem.key, problem.code) == ("algorithm", "wrong-type")
    assert "'loss_fn.reference_policy_kl_penalty'" in problem.message


def test_beta_of_dpo_suggests_dpos_key():
    (problem,) = config.inspect("tiny_dpo", ["beta=0.1"]).problems
    assert "'dpo.reference_policy_kl_penalty'" in problem.message


def test_megatrons_own_key_is_suggested_where_it_is_read():
    chosen = ["policy.megatron_cfg.enabled=true", "policy.optimizer.lr=1e-4"]
    assert "'policy.optimizer.kwargs.lr'" in config.inspect("tiny_grpo", chosen).problems[0].message
    own = [*chosen, "policy.megatron_cfg.optimizer.weight_decay=0.0"]
    assert "'policy.megatron_cfg.optimizer.lr'" in config.inspect("tiny_grpo", own).problems[0].message


def test_a_derived_algorithms_own_section_is_suggested(monkeypatch):
    monkeypatch.setitem(aliases.ALGORITHMS, "derived", aliases.ALGORITHMS["grpo"])
    monkeypatch.setattr(aliases, "ONLINE", (*aliases.ONLINE, "derived"))
    names = {name: aliases.equivalents("scale_rewards", name, lambda key: 0) for name in ("derived", "ppo")}
    assert names == {"derived": ["derived.normalize_rewards"], "ppo": ["grpo.normalize_rewards"]}
