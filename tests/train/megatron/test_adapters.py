"""Compare adapters on Megatron-Core with peft's model in float64 in every layout, and with FSDP2's; save, load and refuse."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.config import MegatronLoRAConfig
from pipeline.train.adapters.peft_files import export_adapters
from pipeline.train.saved_weights import checkpoint_weights
from pipeline.train.shards import read_shards
from tests.problems import refused
from tests.train import cases, ranks
from tests.train.megatron import adapters
from tests.train.megatron.layouts import CP2, EP2, ONE, PP2, TP2, TP2_EP2_SP, TP2_PP2_SP, TP2_SP, Layout

QUICK = {ONE: ("deepseek_v3",), TP2_SP: ("qwen2",)}
FULL = {
    ONE: ("llama", "qwen3_moe", "qwen2", "qwen3", "deepseek_v3_plain", "glm4", "nemotron_h_moe"),
    TP2: ("llama", "qwen2", "qwen3"),
    TP2_SP: (
        "llama",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "deepseek_v3",
        "deepseek_v3_plain",
        "gemma3_text",
        "glm4",
        "nemotron_h_moe",
    ),
    PP2: ("llama", "qwen2", "qwen3_moe", "deepseek_v3", "gemma3_text"),
    CP2: ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    EP2: ("qwen3_moe", "deepseek_v3"),
    TP2_EP2_SP: ("qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "nemotron_h_moe"),
    TP2_PP2_SP: ("llama", "qwen3_moe", "deepseek_v3"),
}


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
def test_equals_peft(models, layout):
    ranks.run(functools.partial(adapters.check_families, QUICK[layout]), layout, models)


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL, ids=lambda layout: layout.name)
def test_equals_peft_in_every_layout(models, layout):
    ranks.run(functools.partial(adapters.check_families, FULL[layout]), layout, models)


def adapt_attention(config: MegatronLoRAConfig, layout: Layout, folder: Path) -> None:
    adapters.check_equals_eager(folder / "nemotron_h_moe", layout, config, f"attention {layout.name}")


@pytest.mark.full
def test_a_stage_without_adapters_passes_gradients_on(models):
    """The first stage of this hybrid has no attention, and only attention is adapted."""
    config = dataclasses.replace(adapters.LORA, target_modules=["linear_qkv", "linear_proj"])
    ranks.run(functools.partial(adapt_attention, config), PP2, models)


# ---- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(models):
    ranks.run(adapters.save, TP2_SP, models)
    return models


@pytest.mark.parametrize("layout", [ONE, *(pytest.param(one, marks=pytest.mark.full) for one in (TP2_SP, PP2, EP2))])
def test_a_checkpoint_loads_in_any_layout(saved, layout):
    ranks.run(adapters.resume, layout, saved)


@pytest.mark.full
def test_files_hold_adapters_under_the_names_of_every_projection(saved):
    reader, records = read_shards(saved / "adapted" / "qwen2-shared")
    names = {name for name in reader.shapes if not name.startswith(("optimizer.", "random."))}
    layers = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    assert names == {f"adapter.model.layers.{i}.{one}.lora_{x}.weight" for i in range(2) for one in layers for x in "AB"}
    assert records[0]["lora"] == {"dim": 3, "alpha": 7, "random_seed": None}


# ---- exports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, name", adapters.SAVED)
def test_a_checkpoint_is_exported_merged(saved, family, name):
    place = saved / "adapted" / f"{family}-{name}"
    expected, base = load_file(place / "weights.st"), load_file(saved / family / "model.safetensors")
    found = dict(checkpoint_weights(place, cases.policy(saved / family)))
    assert found.keys() == expected.keys()
    assert max((found[one] - tensor).abs().max() for one, tensor in expected.items()) < 1e-6
    changed = {one.split(".")[-2] for one, tensor in found.items() if not torch.equal(tensor, base[one])}
    of_hybrid = {"in_proj", "out_proj"}
    assert changed >= {"q_proj", "up_proj", "down_proj"} | (of_hybrid if family == "nemotron_h_moe" else {"gate_proj"})


@pytest.mark.parametrize("family, name", [one for one in adapters.SAVED if one[1] != "dora" and one[0] != "nemotron_h_moe"])
def test_peft_loads_an_exported_adapter(saved, family, name, tmp_path):
    place = saved / "adapted" / f"{family}-{name}"
    adapters.check_peft_loads(place, saved / family, load_file(place / "weights.st"), tmp_path)


@pytest.mark.parametrize("family, name", [("qwen3_moe", "dora"), ("nemotron_h_moe", "shared")])
def test_peft_has_no_dora_of_experts_and_no_adapters_of_mambas_outputs(saved, tmp_path, family, name):
    with refused(("adapter", "unsupported")):
        export_adapters(saved / "adapted" / f"{family}-{name}", cases.policy(saved / family), tmp_path / "adapter")


# ---- errors -------------------------------------------------------------------------------------------------------------

REFUSED = {
    "typo": ({"target_modules": ["linear_qkv", "linear"]}, "target_modules", "not-a-choice"),
    "excluded typo": ({"exclude_modules": ["q_proj"]}, "exclude_modules", "not-a-choice"),
    "nothing left": ({"exclude_modules": ["*linear_*"]}, "exclude_modules", "contradiction"),
    "both": ({"target_modules": ["linear_fc1", "*.mlp.linear_fc1_up"]}, "target_modules", "contradiction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(models, realm, case):
    changes, key, code = REFUSED[case]
    with refused((f"policy.megatron_cfg.peft.{key}", code)):
        adapters.backend(models / "qwen2", ONE, MegatronLoRAConfig(True, **changes))


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_experts_in_one_tensor_are_refused(models, realm, key):
    names = {"target_modules": ["linear_fc1"]} if key == "target_modules" else {}
    with refused((f"policy.megatron_cfg.peft.{key}", "unsupported")):
        adapters.backend(models / "gpt_oss", ONE, MegatronLoRAConfig(True, **names))


@pytest.mark.full
def test_an_own_a_does_not_load_as_a_shared_one(models, realm, tmp_path):
    own = ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
    trained = adapters.backend(models / "qwen2", ONE, dataclasses.replace(adapters.LORA, target_modules=own))
    trained.shards().write(tmp_path, dist.get_rank())
    with refused(("policy.megatron_cfg.peft.target_modules", "contradiction")):
        adapters.backend(models / "qwen2", ONE, adapters.LORA).load(tmp_path)
