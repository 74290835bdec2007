"""Save in one layout and resume in any: bitwise in the same one, within 1e-5 in the others."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.boxes import whole
from pipeline.config import MegatronOptimizerConfig, MegatronSchedulerConfig, OptimizerConfig
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.shards import read_shards
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, DP2, EP2, ONE, PP2, TP2_SP, Layout

FAMILIES = ("qwen2", "qwen3_tied", "qwen3_moe", "deepseek_v3")
FROZEN = ("deepseek_v3",)  # whose router does not train; its bias never does


def build(folder: Path, family: str, layout: Layout = ONE, **changes) -> MegatronBackend:
    """Return a backend with clipping and a changing learning rate."""
    policy = cases.policy(folder / family, **{"scheduler": ranks.SCHEDULER, "max_grad_norm": 0.5, **changes})
    return layouts.backend(policy, layout, freeze_moe_router=family in FROZEN)


def three_steps(trained: MegatronBackend, layout: Layout) -> list[dict[str, float]]:
    return [cases.learn(trained, ranks.batches(trained, layout)) for _ in range(3)]


def save(layout: Layout, folder: Path) -> None:
    """Save each family after three steps, with the next three and the random numbers that followed."""
    for family in FAMILIES:
        trained = build(folder, family, layout)
        three_steps(trained, layout)
        for local in trained._local.values():
            if not local.tensor.requires_grad:
                local.tensor.detach().mul_(1.25)  # else it would be what a fresh backend has anyway
        saved = folder / "saved" / family
        trained.shards().write(saved, dist.get_rank())
        drawn = torch.rand(3).tolist()
        weights, metrics = ranks.weights(trained), three_steps(trained, layout)
        if dist.get_rank() == 0:
            save_file(weights, saved / "weights.st")
            (saved / "after.json").write_text(json.dumps({"metrics": metrics, "drawn": drawn}))


@pytest.fixture(scope="module")
def saved(models) -> Path:
    ranks.run(save, TP2_SP, models)
    return models


def resume(families: Iterable[str], layout: Layout, folder: Path) -> None:
    for family in families:
        check_resumed(layout, folder, family)


def check_resumed(layout: Layout, folder: Path, family: str) -> None:
    trained = build(folder, family, layout)
    trained.load(folder / "saved" / family)
    after = json.loads((folder / "saved" / family / "after.json").read_text())
    assert (torch.rand(3).tolist() == after["drawn"]) == (layout == TP2_SP)
    weights = ranks.weights(trained)
    if dist.get_rank() == 0:
        assert_equal(weights, load_file(folder / "saved" / family / "weights.st"))
    metrics = three_steps(trained, layout)
    if layout == TP2_SP:
        assert metrics == after["metrics"]
        return
    off = [
        (step, name, ours[name], value)
        for step, (ours, theirs) in enumerate(zip(metrics, after["metrics"], strict=True))
        for name, value in theirs.items()
        if abs(ours[name] - value) > 1e-4 * max(abs(value), 0.01)  # sums in another order, and the updates that follow
    ]
    assert not off, f"{family}: {off}"


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


QUICK = {TP2_SP: FAMILIES, PP2: ("qwen3_tied",)}
FULL = {DP2: FAMILIES, PP2: FAMILIES, CP2: FAMILIES, EP2: ("qwen3_moe", "deepseek_v3")}


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_a_resumed_run_equals_the_uninterrupted_one(saved, layout):
    ranks.run(functools.partial(resume, QUICK[layout]), layout, saved)


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL, ids=lambda layout: layout.name)
def test_a_resumed_run_of_every_family_equals_the_uninterrupted_one(saved, layout):
    ranks.run(functools.partial(resume, FULL[layout]), layout, saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumes_at_one_rank(saved, realm, family):
    check_resumed(ONE, saved, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_the_optimizer_state(saved, realm, family):
    """Without it, the next steps differ."""
    trained = build(saved, family)
    trained.load(saved / "saved" / family)
    trained._optimizer.restore(0, 0, {})
    metrics = three_steps(trained, ONE)
    after = json.loads((saved / "saved" / family / "after.json").read_text())["metrics"]
    assert metrics[0]["loss"] == pytest.approx(after[0]["loss"], rel=1e-5)
    assert abs(metrics[1]["loss"] / after[1]["loss"] - 1) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_files_hold_hugging_face_tensors(saved, family):
    reader, records = read_shards(saved / "saved" / family)
    assert [record["ranks"] for record in records] == [2, 2]
    expected = load_file(saved / "saved" / family / "weights.st")
    frozen = {name for name in expected if name.endswith(("mlp.gate.weight", "e_score_correction_bias"))}
    frozen = frozen if family in FROZEN else set()
    names = {kind: {n.split(".", 2)[2] for n in reader.shapes if n.startswith(f"optimizer.{kind}.")} for kind in MOMENTS}
    assert names == {kind: expected.keys() - frozen for kind in MOMENTS}
    ours = {name: reader.read(f"model.{name}", whole(tuple(tensor.shape))) for name, tensor in expected.items()}
    assert_equal(ours, expected)
    everything = {f"model.{n}" for n in expected} | {f"optimizer.{kind}.{n}" for kind in MOMENTS for n in names[kind]}
    assert reader.shapes.keys() - everything == {"random.torch.0", "random.torch.1"}


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_a_checkpoint_that_does_not_fit_is_refused(saved, realm, tmp_path):
    trained = build(saved, "qwen3_tied")
    before = ranks.weights(trained)
    with refused(("policy.model_name", "contradiction")):
        trained.load(saved / "saved" / "qwen2")
    other = OptimizerConfig(kwargs={"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1})
    with pytest.raises(ValueError, match=r"policy\.optimizer: .*other settings.*'lr': 0\.001.*-> .*'lr': 0\.002"):
        build(saved, "qwen3_tied", optimizer=other).load(saved / "saved" / "qwen3_tied")
    with pytest.raises(ValueError, match=r"policy\.optimizer: .*other settings.*total_iters.* -> .*'scheduler': None"):
        build(saved, "qwen3_tied", scheduler=None).load(saved / "saved" / "qwen3_tied")
    (tmp_path / "train-rank00000.json").write_bytes((saved / "saved" / "qwen3_tied" / "train-rank00000.json").read_bytes())
    with pytest.raises(ValueError, match=r"got 1 train-rank.*expected 2"):
        trained.load(tmp_path)
    assert_equal(ranks.weights(trained), before)


def test_megatrons_own_settings_resume_to_the_last_bit(models, realm, tmp_path):
    """Check weight decay of some parameters only, and a schedule with its own count."""

    def fresh() -> MegatronBackend:
        optimizer = MegatronOptimizerConfig(lr=1e-3, weight_decay=0.3, clip_grad=0.5)
        scheduler = MegatronSchedulerConfig(lr_decay_style="cosine", lr_decay_iters=9, lr_warmup_iters=4)
        return layouts.backend(cases.policy(models / "qwen3"), optimizer=optimizer, scheduler=scheduler)

    trained = fresh()
    three_steps(trained, ONE)
    trained.shards().write(tmp_path, dist.get_rank())
    expected = three_steps(trained, ONE)
    assert len({metrics["lr"] for metrics in expected}) == 3
    for other in (fresh(), trained):  # in a new process, and back in the old one
        other.load(tmp_path)
        assert three_steps(other, ONE) == expected
