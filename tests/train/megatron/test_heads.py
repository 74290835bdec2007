"""Compare values, entropies and chosen tokens with Hugging Face's eager models in float64; hold several models."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.models.hugging_face import SCORE
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.train_backend import ModelRole
from pipeline.types import Outputs, PackedBatch
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import heads, layouts
from tests.train.megatron.layouts import CP2, DP2, EP2, ONE, PP2, TP2, TP2_SP, Layout

VALUES, EVERYTHING = ModelRole(head="values"), ModelRole(entropy=True)
ALL = list(range(len(cases.LENGTHS)))


@pytest.fixture(scope="module")
def head_models(models) -> Path:
    heads.write(models)
    return models


def families(layout: Layout) -> list[str]:
    return [family for family in heads.FAMILIES if family in layout.families]


def batches(trained: MegatronBackend, layout: Layout) -> tuple[list[list[int]], list[PackedBatch]]:
    """Return (the sequences of each batch of this rank, the batches)."""
    chosen = ranks.shares(layout)[trained.data_rank]
    return chosen, [heads.pack(members) for members in chosen]


def check_gradients(trained: MegatronBackend, expected: heads.Expected) -> None:
    """Check a step's gradients, which are equal on replicas."""
    ours, replicas = layouts.gradients(trained)
    ranks.assert_near(ours, expected.gradients, 5e-6)
    assert replicas < 1e-6


def check_values(layout: Layout, folder: Path, family: str) -> None:
    model = heads.value_models(folder) / family
    expected = heads.expected(model)
    trained = layouts.backend(cases.policy(model), layout, VALUES)
    layouts.check_weights_are_the_files(trained, model)
    chosen, mine = batches(trained, layout)
    for members, found in zip(chosen, trained.forward(mine), strict=True):
        assert found.values.dtype == torch.float32 and found == Outputs(values=found.values)
        assert (found.values - expected.of("values", members)).abs().max() < 1e-5
    metrics = trained.step(mine, heads.value_loss).metrics
    assert metrics["loss"] == pytest.approx(expected.loss, abs=1e-6)
    norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    check_gradients(trained, expected)


def check_outputs(layout: Layout, folder: Path, family: str) -> None:
    """Check entropies and the candidates' log-probs, and the gradient of all outputs together."""
    expected = heads.expected(folder / family)
    trained = layouts.backend(cases.policy(folder / family), layout, EVERYTHING)
    chosen, mine = batches(trained, layout)
    for members, batch, found in zip(chosen, mine, trained.forward(mine), strict=True):
        assert (found.entropy - expected.of("entropy", members)).abs().max() < 1e-5
        assert (found.top_k.logprobs - expected.of("chosen", members)).abs().max() < 1e-5
        inside = batch.positions > 0
        assert torch.equal(found.top_k.tokens[inside], batch.teacher.tokens[inside])
    for members, found in zip(chosen, trained.forward(mine, top_k=heads.K), strict=True):
        assert torch.equal(found.top_k.tokens, expected.of("likely", members))
        assert (found.top_k.logprobs - expected.of("likely_logprobs", members)).abs().max() < 1e-5
    metrics = trained.step(mine, heads.mixed_loss).metrics
    assert metrics["loss"] == pytest.approx(expected.loss, abs=1e-5)
    check_gradients(trained, expected)


def check_drawn_head(layout: Layout, folder: Path) -> None:
    """Check a critic from a language model's checkpoint: its head equals the other backend's random one, whatever the
    layout.
    """
    family = "qwen3_moe" if layout.ep > 1 else "qwen3_tied"
    theirs = FSDPBackend(cases.policy(folder / family), dist.group.WORLD, seed=7, role=VALUES)
    expected = {name: tensor.clone() for name, tensor in theirs.weights()}
    ours = ranks.weights(layouts.backend(cases.policy(folder / family), layout, VALUES))
    assert SCORE in ours and "lm_head.weight" not in ours
    assert ours.keys() == expected.keys()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, expected[name])]


def check_side_by_side(layout: Layout, folder: Path) -> None:
    """Check that a policy learns the same to the last bit with a critic and a frozen teacher in the process, and these as
    well.
    """
    family = families(layout)[-1]
    policy, critic = cases.policy(folder / family), cases.policy(heads.value_models(folder) / family)
    alone = layouts.backend(policy, layout, EVERYTHING)
    chosen, mine = batches(alone, layout)
    expected = [alone.step(mine, heads.mixed_loss).metrics for _ in range(2)]
    critic_alone = layouts.backend(critic, layout, VALUES)
    expected_of_critic = [critic_alone.step(mine, heads.value_loss).metrics for _ in range(2)]

    policy_beside = layouts.backend(policy, layout, EVERYTHING)
    critic_beside = layouts.another(critic, layout, VALUES)
    teacher = layouts.another(cases.policy(folder / family), layout, ModelRole(trained=False, offload=True))
    found, found_of_critic, taught = [], [], []
    for _ in range(2):
        taught.append(teacher.forward(mine, top_k=heads.K))
        found.append(policy_beside.step(mine, heads.mixed_loss).metrics)
        found_of_critic.append(critic_beside.step(mine, heads.value_loss).metrics)
    assert found == expected
    assert found_of_critic == expected_of_critic
    theirs = heads.expected(folder / family)
    for once, again, members in zip(*taught, chosen, strict=True):
        assert torch.equal(once.top_k.tokens, theirs.of("likely", members))
        assert torch.equal(once.top_k.logprobs, again.top_k.logprobs)
    with pytest.raises(ValueError, match=r"ModelRole\(trained=False\)"):
        teacher.step(mine, heads.mixed_loss)
    assert not any(parameter.requires_grad or hasattr(parameter, "main_grad") for parameter in teacher._stage.parameters())


def save(layout: Layout, folder: Path) -> None:
    """Save each value model after two steps, with the next two."""
    for family in families(layout):
        trained = layouts.backend(cases.policy(heads.value_models(folder) / family), layout, VALUES)
        two_steps(trained, layout)
        saved = folder / "saved-values" / family
        trained.shards().write(saved, dist.get_rank())
        metrics = two_steps(trained, layout)
        if dist.get_rank() == 0:
            (saved / "after.json").write_text(json.dumps(metrics))


def two_steps(trained: MegatronBackend, layout: Layout) -> list[dict[str, float]]:
    _, mine = batches(trained, layout)
    return [trained.step(mine, heads.value_loss).metrics for _ in range(2)]


def check_resumed(layout: Layout, folder: Path) -> None:
    """Check that it resumes in any layout, to the last bit in its own."""
    for family in families(layout):
        trained = layouts.backend(cases.policy(heads.value_models(folder) / family), layout, VALUES)
        trained.load(folder / "saved-values" / family)
        metrics = two_steps(trained, layout)
        after = json.loads((folder / "saved-values" / family / "after.json").read_text())
        assert metrics == (after if layout == TP2_SP else [pytest.approx(m, rel=1e-5) for m in after]), family


def everything(layout: Layout, folder: Path) -> None:
    for family in families(layout):
        check_values(layout, folder, family)
        check_outputs(layout, folder, family)
    for check in (check_drawn_head, check_side_by_side, check_resumed):
        check(layout, folder)


def outputs_and_resumed(layout: Layout, folder: Path) -> None:
    check_outputs(layout, folder, "qwen3_moe")
    check_resumed(layout, folder)


@pytest.fixture(scope="module")
def saved(head_models) -> Path:
    ranks.run(save, TP2_SP, head_models)
    return head_models


def test_a_cut_head_resumes(saved):
    ranks.run(outputs_and_resumed, TP2_SP, saved)


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP2_SP, CP2, PP2, EP2], ids=lambda layout: layout.name)
def test_layouts(saved, layout):
    ranks.run(everything, layout, saved)


@pytest.mark.long
@pytest.mark.parametrize("layout", [DP2, *layouts.OF_FOUR_RANKS], ids=lambda layout: layout.name)
def test_more_layouts(saved, layout):
    ranks.run(everything, layout, saved)


@pytest.mark.parametrize("family", heads.FAMILIES)
@pytest.mark.parametrize("check", [check_values, check_outputs])
def test_one_rank(head_models, realm, check, family):
    check(ONE, head_models, family)


def test_policies_and_critics_start_from_one_checkpoint(head_models, realm):
    """A critic starts from a policy's checkpoint, and from a value model's, whose files differ."""
    causal, values = head_models / "llama", heads.value_models(head_models) / "llama"
    files = load_file(causal / "model.safetensors")
    policy = ranks.weights(layouts.backend(cases.policy(causal)))
    critic = ranks.weights(layouts.backend(cases.policy(causal), role=VALUES))
    assert policy.keys() - critic.keys() == {"lm_head.weight"} and critic.keys() - policy.keys() == {SCORE}
    assert all(torch.equal(tensor, files[name]) for name, tensor in policy.items())
    assert all(torch.equal(tensor, files[name]) for name, tensor in critic.items() if name != SCORE)
    layouts.check_weights_are_the_files(layouts.backend(cases.policy(values), role=VALUES), values)


def test_an_offloaded_model_gives_the_same_outputs(head_models, realm):
    """test_cuda.py checks a real GPU's memory."""
    trained = layouts.backend(cases.policy(head_models / "qwen3_moe"))
    frozen = layouts.another(cases.policy(head_models / "qwen3_moe"), role=ModelRole(trained=False, offload=True))
    batch = heads.pack(ALL)
    for _ in range(2):
        ours, theirs = frozen.forward([batch])[0], trained.forward([batch])[0]
        assert torch.equal(ours.logprobs, theirs.logprobs)
    layouts.check_weights_are_the_files(frozen, head_models / "qwen3_moe")
    for call in (frozen.shards, lambda: frozen.load(head_models)):
        with pytest.raises(ValueError, match=r"ModelRole\(trained=False\)"):
            call()


def test_models_of_one_process_share_a_layout(head_models, realm):
    layouts.backend(cases.policy(head_models / "llama"))
    layouts.another(cases.policy(head_models / "qwen3_moe"), role=VALUES)
    with refused(("policy.megatron_cfg.tensor_model_parallel_size", "contradiction")):
        layouts.another(cases.policy(head_models / "llama"), TP2)
    with refused(("policy.megatron_cfg.context_parallel_size", "contradiction")):
        layouts.another(cases.policy(head_models / "llama"), CP2)


def test_a_value_head_has_no_token_outputs(head_models, realm):
    trained = layouts.backend(cases.policy(head_models / "llama"), role=VALUES)
    with pytest.raises(ValueError, match="does not predict tokens"):
        trained.forward([heads.pack(ALL)], top_k=2)
