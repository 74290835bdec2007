"""Check one step apart from its numbers: memory, precision, errors, frozen parameters, batching of sequences.

Each check runs on one rank by itself and in some layouts of two ranks; marked `full`, in all of them.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.config import MegatronDDPConfig, MegatronSchedulerConfig, OptimizerConfig
from pipeline.data.packing import pack
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.megatron.local_modules import PackedAttention
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.train_backend import ModelRole, TrainBackend
from pipeline.types import TopK
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, EP2, MIXTURES, ONE, PP2, TP2_SP, Layout
from tests.train.ranks import SCHEDULER, assert_near

ALL = list(range(len(cases.LENGTHS)))


def gradients(trained: MegatronBackend, layout: Layout, batches: list | None = None) -> dict[str, torch.Tensor]:
    """Return gradients of one step on all sequences, or on these batches of this rank's."""
    trained.step(ranks.batches(trained, layout) if batches is None else batches, cases.loss)
    return layouts.gradients(trained)[0]


def held(trained: MegatronBackend) -> list[torch.Tensor]:
    """Return copies of all weights of this rank."""
    tensors = [local.tensor for local in trained._local.values()] + [part.main for part in trained._optimizer.ranges()]
    return [tensor.detach().clone() for tensor in tensors]


RECOMPUTED = [  # (settings, whether attention is among what is computed again)
    ({"recompute_granularity": "full"}, True),
    ({"recompute_granularity": "selective"}, True),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, True),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, False),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, False),
]
OF_DEEPSEEK = ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "shared_experts"]}, False)


def check_recomputation(layout: Layout, folder: Path, family: str, cases_: list[tuple[dict, bool]]) -> None:
    """Check that recomputed activations give the same gradients to the last bit."""
    attended = []
    original = PackedAttention.forward

    def counting(self, *args, **kwargs):
        attended.append(self)
        return original(self, *args, **kwargs)

    PackedAttention.forward = counting
    expected = gradients(layouts.backend(cases.policy(folder / family), layout), layout)
    once = len(attended)
    for settings, again in cases_:
        attended.clear()
        trained = layouts.backend(cases.policy(folder / family), layout, activation_checkpointing=True, **settings)
        found = gradients(trained, layout)
        assert len(attended) == once * (2 if again else 1), settings
        assert not [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])], settings
    PackedAttention.forward = original


def check_bfloat16(layout: Layout, folder: Path, family: str, summed: tuple[str, ...] = ("float32",)) -> None:
    """Check that outputs in bfloat16 are near, and that the updated weights are the checkpoint's in float32."""
    expected = layouts.expected(folder / family)
    files = load_file(folder / family / "model.safetensors")
    small = OptimizerConfig(kwargs={"lr": 1e-5, "weight_decay": 0.0})  # far below bfloat16's resolution of most weights
    for dtype in summed:
        policy = cases.policy(folder / family, precision="bfloat16", optimizer=small)
        ddp = MegatronDDPConfig(grad_reduce_in_fp32=dtype == "float32")
        trained = layouts.backend(policy, layout, distributed_data_parallel_config=ddp)
        mine = ranks.batches(trained, layout)
        for chosen, found in zip(ranks.shares(layout)[trained.data_rank], trained.forward(mine), strict=True):
            assert 0 < (found.logprobs - expected.of(chosen)).abs().max() < 0.5
        for name, tensor in trained.weights():
            served = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16  # rounded, it chooses others
            assert tensor.dtype == served, name
            assert dist.get_rank() or torch.equal(tensor, files[name].to(served)), name
        before = [part.main.clone() for part in trained._optimizer.ranges()]
        assert not any(torch.equal(main, main.bfloat16().float()) for main in before)
        assert_near(gradients(trained, layout), expected.gradients, 0.1)
        for part, old in zip(trained._optimizer.ranges(), before, strict=True):
            assert part.parameter.dtype == torch.bfloat16 and part.main.dtype == torch.float32
            assert part.parameter.main_grad.dtype == getattr(torch, dtype)
            assert 0.99e-5 < (part.main - old).abs().max() < 1.01e-5  # Adam's first step is as long as the learning rate


def check_random_weights(layout: Layout, folder: Path, family: str) -> None:
    """Check that they equal the other backend's from this seed."""
    theirs = FSDPBackend(cases.policy(folder / family, random_init=True), dist.group.WORLD, seed=7, role=ModelRole())
    expected = {name: tensor.clone() for name, tensor in theirs.weights()}
    ours = ranks.weights(layouts.backend(cases.policy(folder / family, random_init=True), layout))
    assert ours.keys() == expected.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])]


def check_five_steps(layout: Layout, folder: Path, family: str) -> None:
    """Check that they equal FSDP2's on as many ranks, from the same weights and sequences."""
    settings = {"scheduler": SCHEDULER, "max_grad_norm": 0.5}
    theirs = FSDPBackend(cases.policy(folder / family, **settings), dist.group.WORLD, seed=7, role=ModelRole())
    expected = five_steps(theirs, Layout(dp=layout.ranks))
    found = five_steps(layouts.backend(cases.policy(folder / family, **settings), layout), layout)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        # The loss is a small difference of terms of order 1, so its rounding is theirs: on some processors 2.3e-7.
        off = {name: (a[name], b[name]) for name in b if abs(a[name] - b[name]) > 1e-5 * max(abs(b[name]), 0.05)}
        assert a.keys() == b.keys() and not off, f"{family}, step {step}: {off}"


def five_steps(trained: TrainBackend, layout: Layout) -> list[dict[str, float]]:
    return [cases.learn(trained, ranks.batches(trained, layout)) for _ in range(5)]


def check_reference(layout: Layout, folder: Path, family: str) -> None:
    """Check that the reference keeps its initial log-probs, and that computing them changes nothing."""
    trained = layouts.backend(cases.policy(folder / family), layout, ModelRole(reference=True))
    mine = ranks.batches(trained, layout)
    first = trained.forward(mine)
    trained.step(mine, cases.loss)
    before = held(trained)
    for ours, expected, now in zip(trained.forward(mine, "reference"), first, trained.forward(mine), strict=True):
        assert torch.equal(ours.logprobs, expected.logprobs)
        assert (now.logprobs - expected.logprobs).abs().max() > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(before, held(trained), strict=True))


def check_clipping_and_refusal(layout: Layout, folder: Path, family: str) -> None:
    trained = layouts.backend(cases.policy(folder / family, max_grad_norm=0.01), layout)
    mine = ranks.batches(trained, layout)
    norm = trained.step(mine, cases.loss).metrics["grad_norm"]
    assert norm == pytest.approx(layouts.expected(folder / family).norm, rel=1e-5)
    clipped = torch.stack([g.norm() for g in layouts.gradients(trained)[0].values()]).norm()
    assert clipped == pytest.approx(0.01, rel=1e-4)

    def broken(outputs, batch):
        output = cases.loss(outputs, batch)
        # On one data rank only, yet all must refuse.
        return type(output)(output.loss * (torch.nan if trained.data_rank == 0 else 1.0), output.metrics)

    before, lr = held(trained), trained._optimizer.schedule.lr
    with pytest.raises(FloatingPointError, match="norm is nan"):
        trained.step(mine, broken)
    assert all(torch.equal(a, b) for a, b in zip(before, held(trained), strict=True))
    assert trained._optimizer.schedule.lr == lr and trained._optimizer.updates == 1
    trained.step(mine, cases.loss)
    after = held(trained)
    assert all(tensor.isfinite().all() for tensor in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def check_batching(layout: Layout, folder: Path, family: str) -> None:
    """Check that gradients do not depend on the split of sequences into microbatches, nor on empty microbatches."""
    theirs = layouts.expected(folder / family)
    still = OptimizerConfig(kwargs={"lr": 0.0, "weight_decay": 0.0})
    trained = layouts.backend(cases.policy(folder / family, optimizer=still), layout)
    nothing = pack([], "cpu")
    for count in (1, 8 // layout.dp):
        chosen = [list(reversed(batch)) for batch in reversed(ranks.shares(layout, count)[trained.data_rank])]
        mine = [cases.pack(batch) for batch in chosen]
        for batch, found in zip(chosen, trained.forward(mine), strict=True):
            assert (found.logprobs - theirs.of(batch)).abs().max() < 1e-5
        assert_near(gradients(trained, layout, mine), theirs.gradients, 5e-6)
        assert_near(gradients(trained, layout, [nothing, *mine]), theirs.gradients, 5e-6)
    mine = [nothing, nothing] if trained.data_rank else [cases.pack(ALL), nothing]  # a data rank without any work
    assert_near(gradients(trained, layout, mine), theirs.gradients, 5e-6)


ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mixer.gate.weight", "router.weight", "router.bias")


def check_frozen_router(layout: Layout, folder: Path, family: str) -> None:
    """Check that it stays the same to the last bit, and that all other weights move as if it did not."""
    expected = layouts.expected(folder / family)
    trained = layouts.backend(cases.policy(folder / family), layout, freeze_moe_router=True)
    before = ranks.weights(trained)
    found = gradients(trained, layout)
    router = {name for name in before if name.endswith(ROUTERS)}
    bias = {name for name in before if name.endswith("e_score_correction_bias") or ".indexer." in name}  # constants
    assert router
    assert found.keys() == before.keys() - router - bias
    assert_near(found, {name: expected.gradients[name] for name in found}, 5e-6)
    after = ranks.weights(trained)
    if dist.get_rank() == 0:
        assert {name for name in before if torch.equal(before[name], after[name])} == router | bias


def check_router_bias(layout: Layout, folder: Path) -> None:
    """Check that with a rate each step moves every entry by it towards an even load, equally on all ranks; without one,
    none.
    """
    moved = {}
    for rate in (0.0, 0.01):
        trained = layouts.backend(cases.policy(folder / "deepseek_v3"), layout, moe_router_bias_update_rate=rate)
        before = ranks.weights(trained)
        trained.forward(ranks.batches(trained, layout))  # which does not count
        trained.step(ranks.batches(trained, layout), cases.loss)
        after = ranks.weights(trained)
        moved[rate] = [after[name] - before[name] for name in before if name.endswith("e_score_correction_bias")]
        ours = [local.tensor for name, local in trained._local.items() if name.endswith("expert_bias")]
        for tensor in ours if layout.pp == 1 else ():
            every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(every, tensor)
            assert all(torch.equal(tensor, other) for other in every)
    if dist.get_rank() == 0:
        assert all((change == 0).all() for change in moved[0.0])
        changes = torch.stack(moved[0.01]) / 0.01
        assert ((changes.abs() - 1).abs() < 1e-3).logical_or(changes == 0).all()
        assert (changes > 0.5).any() and (changes < -0.5).any()


# ---- where they run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"])
def test_recomputation(models, realm, family):
    check_recomputation(ONE, models, family, RECOMPUTED + [OF_DEEPSEEK] * (family == "deepseek_v3"))


@pytest.mark.parametrize("family", ["qwen3_tied", pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"])
@pytest.mark.parametrize("check", [check_reference, check_clipping_and_refusal, check_batching])
def test_one_rank(models, realm, check, family):
    check(ONE, models, family)


@pytest.mark.parametrize("family", ["qwen3_tied", pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"])
def test_bfloat16(models, realm, family):
    check_bfloat16(ONE, models, family, summed=("float32", "bfloat16"))


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_random_weights_are_those_of_the_other_backend(models, realm, family):
    check_random_weights(ONE, models, family)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("llama_yarn", marks=pytest.mark.full),
        pytest.param("qwen2", marks=pytest.mark.full),
        pytest.param("qwen3", marks=pytest.mark.full),
        "qwen3_tied",
        "qwen3_moe",
        pytest.param("mixtral", marks=pytest.mark.full),
    ],
)
def test_five_steps_are_those_of_the_other_backend(models, realm, family):
    check_five_steps(ONE, models, family)


@pytest.mark.parametrize("family", MIXTURES)
def test_frozen_router(models, realm, family):
    check_frozen_router(ONE, models, family)


def test_router_bias(models, realm):
    check_router_bias(ONE, models)


# Each is called with (layout, folder, a model that fits the layout and is dense where that can be).
CHECKS = {
    "recomputation": lambda layout, folder, dense: check_recomputation(layout, folder, "qwen3_moe", RECOMPUTED[:2]),
    "bfloat16": check_bfloat16,
    "random weights": lambda layout, folder, dense: check_random_weights(layout, folder, "qwen3_moe"),
    "five steps": check_five_steps,
    "five steps, experts": lambda layout, folder, dense: check_five_steps(layout, folder, "qwen3_moe"),
    "reference": check_reference,
    "clipping": lambda layout, folder, dense: check_clipping_and_refusal(layout, folder, "qwen3_moe"),
    "batching": lambda layout, folder, dense: check_batching(layout, folder, "qwen3_moe"),
    "frozen router": lambda layout, folder, dense: check_frozen_router(layout, folder, "deepseek_v3"),
    "router bias": lambda layout, folder, dense: check_router_bias(layout, folder),
}
QUICK = {
    TP2_SP: ("recomputation", "random weights", "frozen router"),
    PP2: ("five steps", "clipping", "batching"),
}


def run_checks(names: Iterable[str], layout: Layout, folder: Path) -> None:
    for name in names:
        CHECKS[name](layout, folder, "qwen3_tied" if layout.ep == 1 else "mixtral")


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_layouts(models, layout):
    ranks.run(functools.partial(run_checks, QUICK[layout]), layout, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", (*QUICK, CP2, EP2), ids=lambda layout: layout.name)
def test_layouts_with_every_check(models, layout):
    ranks.run(functools.partial(run_checks, tuple(CHECKS)), layout, models)


# ---- unsupported --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name", "code"),
    [
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm", "not-installed"),
        ({"moe_permute_fusion": True}, "moe_permute_fusion", "not-installed"),
        ({"apply_rope_fusion": True}, "apply_rope_fusion", "not-installed"),
        ({"recompute_modules": ["layernorm"]}, "recompute_modules", "not-installed"),
        ({"recompute_modules": ["moe_act"]}, "", "unsupported"),
        ({"model_overrides": {"num_layer": 3}}, "", "unsupported"),
        ({"model_overrides": {"attention_dropout": 0.1}}, "", "unsupported"),
        (
            {"scheduler": MegatronSchedulerConfig(lr_decay_style="cosine")},
            "scheduler.lr_decay_iters",
            "missing-value",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(models, realm, settings, name, code):
    selective = {"activation_checkpointing": True, "recompute_granularity": "selective"}
    with refused((f"policy.megatron_cfg.{name}".rstrip("."), code)):
        layouts.backend(cases.policy(models / "qwen3_moe"), **selective, **settings)


def test_unsupported_configurations_are_refused(models, realm):
    trained = layouts.backend(cases.policy(models / "qwen3"))
    good = cases.pack(ALL)
    with pytest.raises(ValueError, match="'other' is not one of"):
        trained.forward([good], "other")
    with pytest.raises(ValueError, match=r"ModelRole\(reference=True\)"):
        trained.forward([good], "reference")
    with pytest.raises(ValueError, match="at least one batch"):
        trained.step([], cases.loss)
    with pytest.raises(ValueError, match="vocabulary"):
        trained.step([dataclasses.replace(good, tokens=good.tokens + cases.VOCABULARY)], cases.loss)
    beyond = TopK(torch.full((len(good.tokens), 1), cases.VOCABULARY), torch.zeros(len(good.tokens), 1))
    with pytest.raises(ValueError, match="a teacher's tokens do not fit a vocabulary of 61"):
        trained.step([dataclasses.replace(good, teacher=beyond)], cases.loss)
    assert trained.forward([]) == []


def test_quantized_weights_are_refused(models, realm, tmp_path):
    shutil.copytree(models / "llama", tmp_path / "quantized")
    config = json.loads((tmp_path / "quantized/config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "quantized/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantized"):
        layouts.backend(cases.policy(tmp_path / "quantized"))
