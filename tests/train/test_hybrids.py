"""Check tensor and sequence parallelism of models with states: against Hugging Face eager, over checkpoints, with dropout."""

import functools

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.config import LoRAConfig
from pipeline.train import tensor_parallel
from pipeline.train.expert_parallel import expert_modules
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.sequence_resets import mixers
from tests.train import adapters, attention_models, cases, ranks
from tests.train.ranks import Layout

pytestmark = pytest.mark.usefixtures("realm")
HYBRIDS = tuple(attention_models.hybrids())
TP2, TP2_SP = Layout(1, 2), Layout(1, 2, sequence=True)
SAVED = "nemotron_h"
# Linear layers outside of mixers, experts and the head that stay whole.
WHOLE = {
    "qwen3_5_moe_text": {"shared_expert_gate"},
    "qwen3_next": {"shared_expert_gate"},
    "jamba": {"router"},
    # Projections of a layer's own after the shared attention, and MLPs with an adapter of each layer.
    "zamba2": {"linear", "gate_up_proj", "0", "1", "down_proj"},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_attention_and_mlps_are_cut(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(attention_models.configs()[name])
    cut = set(tensor_parallel.expand(model))
    others = {id(part) for block in (*mixers(model), *expert_modules(model).values()) for part in block.modules()}
    linear = {n for n, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in others}
    assert {n.rpartition(".")[2] for n in linear - cut - {"lm_head"}} == WHOLE.get(name, set())
    assert not any(id(model.get_submodule(n)) in others for n in cut) or name.startswith("qwen3_")


def over_ranks(names, layout: Layout, folder) -> None:
    for name in names:
        trained = ranks.backend(cases.policy(folder / name), layout, activation_checkpointing=name == "bamba")
        ranks.check_weights_are_the_files(trained, folder / name)
        ranks.check_against_eager(trained, layout, folder / name, 3e-6)
    if SAVED in names:
        ranks.check_save_and_load(layout, folder, SAVED)
        check_adapters_of_mixers(layout, folder)


def adapted(layout: Layout, folder, dropout: float) -> FSDPBackend:
    """Return a backend with adapters of mixers and attention."""
    names = ["in_proj", "out_proj", "q_proj"]
    lora = LoRAConfig(True, dim=3, alpha=7, dropout=dropout, match_all_linear=False, target_modules=names)
    trained = ranks.backend(cases.policy(folder / SAVED), layout, lora_cfg=lora)
    adapters.shake(trained)
    return trained


def check_adapters_of_mixers(layout: Layout, folder) -> None:
    """Write gradients at this layout. With dropout, check that ranks which compute other sequences draw the same afterwards."""
    trained = adapted(layout, folder, 0.0)
    trained.step(ranks.batches(trained, layout), cases.loss)
    found = ranks.gradients(trained)
    trained = adapted(layout, folder, 0.5)
    torch.manual_seed(trained.data_rank)
    trained.step(ranks.batches(trained, layout), cases.loss)
    drawn = [torch.empty(2) for _ in range(layout.ranks)]
    dist.all_gather(drawn, torch.tensor([trained.data_rank, torch.rand(())]))
    assert len({tuple(row.tolist()) for row in drawn}) == layout.data
    if dist.get_rank() == 0:
        save_file(found, folder / f"adapted-{layout.name}.safetensors")


SOME = (SAVED, "qwen3_5_text", "qwen3_next", "granitemoehybrid", "zamba2")
LAYOUTS = [
    pytest.param(TP2, ("bamba",), id="tp2"),
    pytest.param(TP2, tuple(n for n in HYBRIDS if n != "bamba"), id="tp2, others", marks=pytest.mark.full),
    pytest.param(TP2_SP, SOME, id="tp2-sp", marks=pytest.mark.full),
    pytest.param(TP2_SP, tuple(n for n in HYBRIDS if n not in SOME), id="tp2-sp, others", marks=pytest.mark.long),
    pytest.param(Layout(1, 2, context=2), (SAVED, "lfm2"), id="cp2-tp2", marks=pytest.mark.long),
    pytest.param(Layout(2, 2), HYBRIDS, id="dp2-tp2", marks=pytest.mark.long),
    pytest.param(Layout(1, 2, context=2, sequence=True), (SAVED, "qwen3_5_text"), id="cp2-tp2-sp", marks=pytest.mark.long),
    pytest.param(Layout(2, 2, replicas=2, sequence=True), (SAVED,), id="hsdp2-dp2-tp2-sp", marks=pytest.mark.long),
    pytest.param(Layout(1, 2, expert=2), ("qwen3_next", "jamba", "lfm2_moe"), id="tp2-ep2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "names"), LAYOUTS)
def test_layout(layout, names, tmp_path):
    attention_models.write(tmp_path, names)
    ranks.run(functools.partial(over_ranks, names), layout, tmp_path)
    if SAVED not in names:
        return
    trained = ranks.backend(cases.policy(tmp_path / SAVED, scheduler=ranks.SCHEDULER))
    ranks.check_goes_on(trained, Layout(1, 1), tmp_path / ranks.saved_by(layout, SAVED))
    alone = adapted(Layout(1, 1), tmp_path, 0.0)
    alone.step(ranks.batches(alone, Layout(1, 1)), cases.loss)
    ranks.assert_near(load_file(tmp_path / f"adapted-{layout.name}.safetensors"), ranks.gradients(alone), 3e-6)
