"""Which GPUs of a machine a local run takes. `python -m tests.launch.test_placement` prints the table of the tiny recipes."""

import functools
import sys

import pytest

from launch import gpus, placement
from launch.job import components
from launch.local import rank_environments
from pipeline import config
from pipeline.config import Loaded, colocated

TINY = sorted(path.stem for path in config.RECIPES.glob("tiny_*.yaml"))
COUNTS = (0, 1, 2, 4, 8)


@pytest.fixture
def on(monkeypatch):
    """(number of GPUs, recipe, overrides) -> the recipe as placed on a machine with that many."""
    return functools.partial(place, monkeypatch)


def place(patch: pytest.MonkeyPatch, count: int, name: str, *overrides: str) -> Loaded:
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(gpus, "count", lambda: (count, "nvidia-smi"))
    return placement.placed(config.inspect(name, ["cluster.executor=local", *overrides]))


def device(environment: dict[str, str]) -> str:
    """What a rank takes: of the GPUs that it is shown, the one of its number on the node."""
    shown = environment["CUDA_VISIBLE_DEVICES"]
    return shown.split(",")[int(environment["HETSTEP_LOCAL_RANK"])] if shown else "CPU"


def devices(loaded: Loaded) -> str:
    """The GPU of each rank, a component after the other; "colocated" if components share them."""
    parts, found = components(loaded.recipe), []
    for name in parts:
        own = [each for each in rank_environments(parts) if each["HETSTEP_COMPONENT"] == name]
        found.append(f"{name} {' '.join(map(device, own))}")
    return ", ".join(found) + (", colocated" if colocated(loaded.recipe) else "")


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("count", COUNTS)
def test_every_tiny_recipe_runs_with_no_override(on, name, count):
    loaded = on(count, name)
    assert not loaded.problems
    placed = devices(loaded)
    assert ("CPU" in placed) == (count == 0)
    used = [word for part in placed.split(", ") for word in part.split()[1:]]
    assert count == 0 or colocated(loaded.recipe) or len(set(used)) == len(used)
    assert len(loaded.notes) == (count > 0)


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("tiny_sft", ["train CPU CPU", "train 0", "train 0 1", "train 0 1", "train 0 1"]),
        (
            "tiny_grpo",
            [
                "train CPU CPU, generate CPU CPU",
                "train 0, generate 0, colocated",
                "train 0 1, generate 0 1, colocated",
                "train 0 1, generate 2 3",
                "train 0 1, generate 2 3",
            ],
        ),
    ],
)
def test_where_ranks_go(on, name, placed):
    assert [devices(on(count, name)) for count in COUNTS] == placed


def test_the_note_names_the_keys(on):
    (note,) = on(1, "tiny_grpo").notes
    assert note.startswith("1 GPU by nvidia-smi: policy.generation.colocated.enabled=true cluster.train.nodes=1")


def test_a_recipe_that_gives_gpus_decides(on):
    loaded = on(4, "tiny_grpo", "cluster.train.gpus_per_node=0")
    assert devices(loaded) == "train CPU CPU, generate CPU CPU" and not loaded.notes


def test_what_takes_turns_is_synchronous_and_serves_its_own_rewards(on):
    assert not on(2, "tiny_async").recipe.grpo.async_grpo.enabled and on(4, "tiny_async").recipe.grpo.async_grpo.enabled
    judged = on(2, "tiny_grpo_rm", "cluster.reward.nodes=1", "env.reward.served_by=reward").recipe
    assert judged.env["reward"].served_by == "train" and colocated(judged)


def test_a_layout_that_needs_more_gpus_is_told(on):
    loaded = on(1, "tiny_sft", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=2")
    (problem,) = loaded.problems
    assert problem.startswith("1 GPU by nvidia-smi are too few: policy.megatron_cfg: tensor_model_parallel_size 2 x")


def test_more_ranks_than_gpus_on_a_node_are_refused():
    with pytest.raises(
        config.RecipeError, match=r"cluster.train.ranks_per_node: got 2; expected at most gpus_per_node=1, since"
    ):
        config.load("tiny_grpo", ["cluster.train.gpus_per_node=1"])


def main() -> None:
    print("| recipe |" + "".join(f" {count} GPUs |" for count in COUNTS))
    print("|---|" + "---|" * len(COUNTS))
    with pytest.MonkeyPatch.context() as patch:
        for name in TINY:
            print(f"| {name} | {' | '.join(devices(place(patch, count, name)) for count in COUNTS)} |")


if __name__ == "__main__":
    sys.exit(main())
