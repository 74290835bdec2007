"""Compare families in all layouts with Hugging Face's eager model in float64: log-probs, loss, metrics, all gradients.

By default every family runs on one rank, and in layouts of several those whose parts these cut differently (the other layouts
are in test_model.py); marked `full`, in every layout.

`python -m tests.train.parity megatron` prints the differences.
"""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronHConfig

from tests.models.cases import HYBRID, SHAPE
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import (
    CP2,
    OF_FOUR_RANKS,
    OF_TWO_RANKS,
    ONE,
    PP2,
    TP2,
    TP2_EP2_SP,
    TP2_SP,
    Layout,
)

# Float32 is good to about 1e-6 of the largest entry; what a layout gets wrong is off by far more.
GRADIENT, LOGPROB = 1e-5, 1e-5
NORM = 1e-6  # of Megatron-Core's, which is summed in float32, from ours
# Four ranks take time, and what they could get wrong that two could not is the same in the others.
OF_EACH_KIND = ("qwen2", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gemma3_text", "gemma4_text", "gpt_oss", "nemotron_h_moe")

# The default tests run these families: tied embeddings where stages and vocabularies are cut, biases and norms of heads where
# those are cut, kinds of RoPE where sequences are cut, and kinds of router where experts are spread.
QUICK = {
    ONE: ONE.families,
    TP2_SP: ("qwen2", "qwen3_tied", "gemma3_text", "gemma4_text", "minimax_m2"),
    CP2: ("llama_yarn", "deepseek_v3", "nemotron_h"),
    TP2_EP2_SP: ("deepseek_v3_plain", "gpt_oss", "nemotron_h_moe"),
}


def check_families(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    for family in families:
        trained = layouts.backend(cases.policy(folder / family), layout)
        layouts.check_weights_are_the_files(trained, folder / family)
        norms = layouts.core_norms(trained)
        ranks.check_against_eager(trained, layout, folder / family, GRADIENT)
        ours = torch.stack([gradient.double().norm() for gradient in layout.gradients(trained).values()]).norm().item()
        assert abs(norms[0] / ours - 1) < NORM, family
        layouts.release()


def check(layout: Layout, folder: Path, families: tuple[str, ...]) -> None:
    assert families
    ranks.run(functools.partial(check_families, families), layout, folder)


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_families(models, layout):
    check(layout, models, QUICK[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", OF_TWO_RANKS, ids=lambda layout: layout.name)
def test_two_ranks_with_every_family(models, layout):
    check(layout, models, layout.families)


@pytest.mark.full
@pytest.mark.parametrize("layout", OF_FOUR_RANKS, ids=lambda layout: layout.name)
def test_four_ranks(models, layout):
    families = tuple(family for family in layout.families if family in OF_EACH_KIND)
    check(layout, models, families)


@pytest.mark.long
@pytest.mark.parametrize("layout", OF_FOUR_RANKS, ids=lambda layout: layout.name)
def test_four_ranks_with_every_family(models, layout):
    check(layout, models, layout.families)


def test_fewer_key_value_heads_than_ranks(tmp_path):
    """Megatron-Core gives both ranks the only head."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path / "multi_query")
    layouts.write_expected(tmp_path / "multi_query")
    check(TP2_SP, tmp_path, ("multi_query",))


@pytest.mark.full
def test_context_parallel_ranks_share_the_heads_of_a_group(tmp_path):
    """HYBRID has fewer groups than heads: with one group, both ranks compute its B and C."""
    torch.manual_seed(3)
    config = NemotronHConfig(**{**SHAPE, **HYBRID, "n_groups": 1}, hybrid_override_pattern="M*-")
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path / "one_group")
    layouts.write_expected(tmp_path / "one_group")
    check(CP2, tmp_path, ("one_group",))


# ---- errors -------------------------------------------------------------------------------------------------------------


def experts_split_otherwise(layout: Layout, folder: Path) -> None:
    trained = layouts.backend(cases.policy(folder / "mixtral"), layout)
    theirs = layouts.expected(folder / "mixtral")
    mine = ranks.batches(trained, layout)
    for chosen, found in zip(ranks.shares(layout)[trained.data_rank], trained.forward(mine), strict=True):
        assert (found.logprobs - theirs.of(chosen)).abs().max() < LOGPROB
    trained.step(mine, cases.loss)
    ours, replicas = layouts.gradients(trained)
    assert replicas > 1e-2
    off = {name: (ours[name] - gradient).abs().max().item() for name, gradient in theirs.gradients.items()}
    assert max(off.values()) > 1e-2
    assert {name for name, by in off.items() if by > 1e-3} == {name for name in off if ".experts." in name}, off


def test_experts_split_otherwise_than_the_rest_are_silently_wrong(models):
    """This is why pipeline/config/parallelism.py refuses it (`check_expert_layout`). If this fails, the check can go."""
    ranks.run(experts_split_otherwise, Layout(tp=2, sp=True, etp=1), models)


def refused(message: str, layout: Layout, folder: Path) -> None:
    with pytest.raises(ValueError, match=f"^policy.megatron_cfg: .*{message}"):
        layouts.backend(cases.policy(folder, random_init=True), layout)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (PP2, {"num_hidden_layers": 3}, "num_layers should be divisible by pipeline_model_parallel_size"),
        (TP2, {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, r"num_attention_heads \(3\)"),
        (TP2, {"intermediate_size": 43}, "43 is not divisible by 2"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_by_key(tmp_path, layout, changes, message):
    LlamaConfig(**{**SHAPE, **changes}).save_pretrained(tmp_path)
    ranks.run(functools.partial(refused, message), layout, tmp_path)
