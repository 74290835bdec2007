"""GPUs of a machine that a local run takes."""

import functools

import pytest

from launch.executors import gpus, selection
from launch.executors.components import components
from launch.executors.local import rank_environments
from launch.plan import placement
from pipeline import config
from pipeline.config import Loaded, colocated
from tests.problems import named, refused

TINY = sorted(path.stem for path in config.RECIPES.glob("tiny_*.yaml"))
COUNTS = (0, 1, 2, 4, 8)
NO_WAY = ("cluster.train.gpus_per_node", "too-large")


@pytest.fixture
def on(monkeypatch):
    """Return place(number of GPUs, recipe, overrides): the recipe as placed on a machine with that many GPUs."""
    return functools.partial(place, monkeypatch)


def place(patch: pytest.MonkeyPatch, count: int, name: str, *overrides: str) -> Loaded:
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(gpus, "count", lambda: (count, "nvidia-smi"))
    patch.setattr(placement, "torch_has_cuda", lambda: True)
    return placement.place_on_gpus(config.inspect(name, ["cluster.executor=local", *overrides]))


def device(environment: dict[str, str]) -> str:
    """Return the GPU that a rank takes of those that it sees: the one at its local rank."""
    shown = environment["CUDA_VISIBLE_DEVICES"]
    return shown.split(",")[int(environment["HETSTEP_LOCAL_RANK"])] if shown else "CPU"


def devices(loaded: Loaded) -> str:
    """Return the GPU of each rank, one component after the other; "colocated" if components share them."""
    parts, found = components(loaded.recipe), []
    for name in parts:
        own = [each for each in rank_environments(parts) if each["HETSTEP_COMPONENT"] == name]
        found.append(f"{name} {' '.join(map(device, own))}")
    return ", ".join(found) + (", colocated" if colocated(loaded.recipe) else "")


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("count", [pytest.param(count, marks=[pytest.mark.full] * (count in (2, 4))) for count in COUNTS])
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


def test_options_for_slurm_do_not_matter(on):
    loaded = on(1, "tiny_grpo", "cluster.generate.sbatch_options={nodelist: n1}")
    assert not loaded.problems and devices(loaded) == "train 0, generate 0, colocated"


def test_the_note_names_the_keys(on):
    (note,) = on(1, "tiny_grpo").notes
    assert note.startswith(
        "this machine has 1 GPU according to nvidia-smi: policy.generation.colocated.enabled=true cluster.generate.gpus"
    )


def test_a_recipe_that_gives_gpus_decides(on):
    loaded = on(4, "tiny_grpo", "cluster.train.gpus_per_node=0")
    assert devices(loaded) == "train CPU CPU, generate CPU CPU" and not loaded.notes


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", False), ("2.13.0", True), ("2.13.0+cu130", True)])
def test_whether_torch_can_use_gpus(monkeypatch, version, cuda):
    monkeypatch.setattr(placement.metadata, "version", lambda _: version)
    assert placement.torch_has_cuda() == cuda


@pytest.mark.parametrize("key", ["gpu=h200", "partition=x", "mem=10G"])
def test_common_properties_of_colocated_recipes(on, key):
    assert devices(on(1, "tiny_grpo", f"cluster.train.{key}")) == "train 0, generate 0, colocated"


def test_a_colocated_recipe_keeps_its_ranks(on):
    shared = "policy.generation.colocated.enabled=true"
    assert devices(on(8, "tiny_grpo", shared, "cluster.generate.ranks_per_node=1")) == "train 0 1, generate 0, colocated"


def test_keys_of_the_command_line_are_not_changed(on):
    for given in ("policy.generation.colocated.enabled=false", "cluster.train.ranks_per_node=2"):
        assert named(on(1, "tiny_grpo", given).problems) == {NO_WAY}
    assert named(on(1, "tiny_async", "grpo.async_grpo.enabled=true").problems) == {NO_WAY}


def test_a_colocated_run_is_synchronous_and_serves_its_own_rewards(on, tmp_path):
    assert not on(2, "tiny_async").recipe.grpo.async_grpo.enabled and on(4, "tiny_async").recipe.grpo.async_grpo.enabled
    apart = tmp_path / "apart.yaml"
    apart.write_text("defaults: tiny_grpo_rm\nenv: {reward: {served_by: reward}}\n")
    assert devices(on(8, str(apart))) == "train 0 1, generate 2 3, reward 4"
    judged = on(2, str(apart)).recipe
    assert judged.env["reward"].served_by == "train" and colocated(judged)


def test_a_layout_that_needs_more_gpus_is_refused(on):
    loaded = on(1, "tiny_sft", "policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=2")
    (problem,) = loaded.problems
    assert named([problem]) == {NO_WAY}
    assert (
        "fits this machine's 1 GPU according to nvidia-smi: policy.megatron_cfg.tensor_model_parallel_size: got"
        in problem.message
    )


def test_a_job_with_gpus_for_only_some_components_is_refused():
    found = placement.problems(config.load("tiny_grpo", ["cluster.train.gpus_per_node=2"]))
    assert named(found) == {("cluster.generate.gpus_per_node", "needs-gpu")}
    assert not list(placement.problems(config.load("tiny_sft", ["cluster.train.gpus_per_node=2"])))


def test_more_ranks_than_gpus_on_a_node_are_refused():
    with refused(("cluster.train.ranks_per_node", "too-large")):
        config.load("tiny_grpo", ["cluster.train.gpus_per_node=1", "cluster.generate.gpus_per_node=2"])


def test_more_gpus_on_a_node_than_it_usually_has_are_noted():
    shared = ["cluster.share_nodes=true", "cluster.train.gpus_per_node=12", "cluster.generate.gpus_per_node=4"]
    (note,) = placement.notes(config.load("llama8b_grpo", shared))
    keys = "cluster.train.gpus_per_node + cluster.generate.gpus_per_node"
    assert note == f"{keys}: got 16 on each node; nodes with h100 usually have 8"
    assert not list(placement.notes(config.load("llama8b_grpo")))
    assert not list(placement.notes(config.load("llama8b_grpo", ["cluster.train.gpu=gb200", "cluster.train.gpus_per_node=16"])))


def test_keys_of_slurm_on_the_command_line_are_noted_in_a_local_run():
    slurm = [
        "cluster.train.partition=long",
        "cluster.generate.sbatch_options={hold: null}",
        "cluster.sbatch_options={reservation: x}",
    ]
    both = ["cluster.train.nodes=1", "cluster.train.gpu=h200", "cluster.time_min=5", "cluster.generate.env_vars={A: b}"]
    origins = config.inspect("tiny_grpo", [*slurm, *both]).origins
    (note,) = selection.notes(selection.ExecutorChoice("local"), origins)
    assert note.startswith(
        "cluster.train.partition, cluster.generate.sbatch_options.hold, cluster.sbatch_options.reservation: no"
    )
    assert not [*selection.notes(selection.ExecutorChoice("slurm"), origins)]
    assert not [*selection.notes(selection.ExecutorChoice("local"), config.inspect("tiny_grpo", both).origins)]
