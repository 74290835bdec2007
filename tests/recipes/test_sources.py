"""Every shipped recipe has its sources' values, key by key, except for differences with a reason in `claims.yaml`.

A source of NeMo-RL's is translated as an import would be, and both recipes are compared complete with their defaults.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import config
from tests.recipes import sources
from tests.recipes.facts import facts

CLAIMS = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
OURS = ("tiny_", "smollm2_")  # on generated data, without a source
RECIPES = sorted(path.stem for path in config.RECIPES.glob("*.yaml") if not path.stem.startswith(OURS))
NOTHING = "no such key"
Imported = Callable[[str], dict[str, Any]]


@functools.cache
def loaded(name: str) -> dict[str, Any]:
    """Return the values that decide what our recipe learns."""
    return facts(config.load(name))


@dataclass(frozen=True)
class Claim:
    source: sources.Source
    keys: tuple[str, ...]
    values: dict[str, Any]

    def has(self, key: str) -> bool:
        complete = self.source.is_nemo_rls or key in self.values
        return complete and any(fnmatchcase(key, pattern) for pattern in self.keys)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """The values of a source of NeMo-RL's, as imported."""
    folder = tmp_path_factory.mktemp("theirs")
    return functools.cache(lambda name: facts(sources.imported(sources.read(name), folder)))


def claims(name: str, imported: Imported) -> list[Claim]:
    found = []
    for given in CLAIMS["recipes"][name]["sources"]:
        one = given if isinstance(given, dict) else {"name": given, "keys": ["*"]}
        source = sources.read(one["name"])
        values = imported(source.name) if source.is_nemo_rls else dict(source.values)
        found.append(Claim(source, tuple(one["keys"]), values))
    return found


def reasons(name: str) -> dict[str, str]:
    """Return pattern of keys -> why they differ."""
    given = [CLAIMS["reasons"][one] if isinstance(one, str) else one for one in CLAIMS["recipes"][name]["but"]]
    return {pattern: one["why"] for one in given for pattern in one["keys"]}


def differences(ours: dict[str, Any], held_to: list[Claim]) -> dict[str, tuple[Any, Any]]:
    """Return key -> (ours, the source's), for the keys of a source."""
    keys = ours.keys() | {key for claim in held_to for key in claim.values}
    found = {}
    for key in keys:
        claim = next((claim for claim in held_to if claim.has(key)), None)
        if claim is not None and ours.get(key, NOTHING) != claim.values.get(key, NOTHING):
            found[key] = (ours.get(key, NOTHING), claim.values.get(key, NOTHING))
    return found


def test_every_recipe_has_its_sources() -> None:
    assert sorted(CLAIMS["recipes"]) == RECIPES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_values(name: str, imported: Imported) -> None:
    ours, held_to = loaded(name), claims(name, imported)
    unheld = [key for key in ours if not any(claim.has(key) for claim in held_to)]
    assert unheld == []
    found, why = differences(ours, held_to), reasons(name)
    untold = {key: both for key, both in found.items() if not any(fnmatchcase(key, pattern) for pattern in why)}
    assert untold == {}
    assert [pattern for pattern in why if not any(fnmatchcase(key, pattern) for key in found)] == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_header_names_them(name: str) -> None:
    text, path = "", config.RECIPES / f"{name}.yaml"
    while path is not None:
        text += path.read_text()
        parent = yaml.safe_load(path.read_text()).get("defaults")
        path = config.RECIPES / parent if parent else None
    unbroken = text.replace("\n# ", " ")
    assert CLAIMS["recipes"][name]["sources"]
    for given in CLAIMS["recipes"][name]["sources"]:
        source = sources.read(given["name"] if isinstance(given, dict) else given)
        assert source.path in unbroken, source.path


@pytest.mark.parametrize("name", RECIPES)
def test_the_header_says_how_to_sample_and_train_in_turn(name: str) -> None:
    """If a recipe samples ahead, its header names the keys, or another recipe, for sampling in turn."""
    recipe, text = config.load(name), (config.RECIPES / f"{name}.yaml").read_text()
    header = " ".join(line.removeprefix("#") for line in text.splitlines() if line.startswith("#"))
    if config.runs_ahead(recipe):
        other, keys = f"{name}_sync", re.findall(r"[a-z_]+(?:\.[a-z_]+)+=\w[\w.]*", header)
        changed = config.load(other) if other in header else config.load(name, keys)
        assert not config.runs_ahead(changed)
    elif config.generates(recipe) and not config.colocated(recipe) and not recipe.needs:
        assert "in turn" in header


@pytest.mark.parametrize("name", [name for name in sources.names() if not sources.read(name).is_nemo_rls])
def test_a_papers_keys_are_ours(name: str) -> None:
    """Each value is a key of a recipe that claims the source, so that no key is misspelled."""
    claiming = [recipe for recipe, claim in CLAIMS["recipes"].items() if name in claim["sources"]]
    assert claiming
    assert sources.read(name).values.keys() <= loaded(claiming[0]).keys()


def test_a_changed_value_is_found(imported: Imported) -> None:
    """The test above finds values that were once wrong."""
    cases = {
        "llama8b_grpo": ("grpo.async_grpo.max_trajectory_age_steps=2", "grpo.async_grpo.max_trajectory_age_steps"),
        "qwen3_4b_distill": ("policy.optimizer.kwargs.lr=2e-6", "policy.optimizer.lr"),
        "llama8b_sft": ("sft.max_num_epochs=10", "sft.max_num_epochs"),
        "llama8b_dpo": ("policy.optimizer.kwargs={lr: 5e-7, weight_decay: 0.0, betas: [0.9, 0.999]}", "policy.optimizer.betas"),
        "llama8b_reinforce_plus_plus": ("loss_fn.use_kl_in_reward=true", "loss_fn.use_kl_in_reward"),
        "deepseek_v3_grpo": ("policy.megatron_cfg.apply_rope_fusion=null", "policy.megatron_cfg.apply_rope_fusion"),
        "qwen3_32b_grpo": ("loss_fn.force_on_policy_ratio=false", "loss_fn.force_on_policy_ratio"),
    }
    for name, (override, key) in cases.items():
        assert key in differences(facts(config.load(name, [override])), claims(name, imported)), name
