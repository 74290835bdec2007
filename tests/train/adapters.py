"""Checks of train ranks with adapters. Each is called SPMD with (layout, folder), like those of `ranks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.boxes import whole
from pipeline.config import LoRAConfig
from pipeline.models.hugging_face import on_disk
from pipeline.train.adapters.adapted_experts import stack_for_peft
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.shards import local, local_box
from pipeline.train.train_backend import ModelRole
from tests.train import cases, model_roles, ranks
from tests.train.ranks import Layout

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
CASES = {  # model: its adapters, and which layers those are for
    "qwen3": (LoRAConfig(True, dim=3, alpha=7), LINEAR),
    "qwen3_tied": (
        LoRAConfig(True, dim=4, alpha=4, use_rslora=True, exclude_modules=["gate_proj", "lm_head"]),
        LINEAR - {"gate_proj"},
    ),
    "qwen2": (
        LoRAConfig(
            True, match_all_linear=False, target_modules=["q_proj", "self_attn.o_proj", "up_proj"], dim=2, use_dora=True
        ),
        {"q_proj", "o_proj", "up_proj"},
    ),
    "qwen3_moe": (
        LoRAConfig(True, match_all_linear=False, target_modules=["o_proj", "*.experts.*_proj"], dim=2),
        {"o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
}
EXPERTS = {"qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}  # peft's names of them
JOINT = {"phi3": (LoRAConfig(True, dim=3, alpha=7), {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})}  # joint projections
ADAPTED = CASES | JOINT
SAVED = ("qwen3_tied", "qwen2", "qwen3_moe", "random", "values")
PEFT = {"qwen3_tied": "qwen3_tied", "qwen2": "qwen2", "qwen3_moe": "qwen3_moe", "values": "qwen3"}  # saved ones: models


def backend(model: Path, layout: Layout, role: ModelRole | None = None, precision: str = "float32", **changes) -> FSDPBackend:
    adapters, _ = ADAPTED[model.name]
    return ranks.backend(cases.policy(model, precision=precision, **changes), layout, role, lora_cfg=adapters)


def all_adapters(layout: Layout, folder: Path) -> None:
    some_adapters(tuple(CASES), layout, folder)


def some_adapters(families: Sequence[str], layout: Layout, folder: Path) -> None:
    for family in families:
        check_against_peft(layout, folder, family)
        check_reference_and_merged(layout, folder, family)
        check_served(layout, folder, family)
    if layout.tensor == 1:
        check_bfloat16(layout, folder)
    ranks.check_save_and_load(layout, folder, "qwen3", lora_cfg=ADAPTED["qwen3"][0])


def joint_projections(layout: Layout, folder: Path) -> None:
    for family in JOINT:
        check_against_peft(layout, folder, family)


def check_against_peft(layout: Layout, folder: Path, family: str) -> None:
    """Compare log-probs, loss and every gradient with peft's eager model: at step 0, which equals the base, and with a
    nonzero B.
    """
    trained = backend(folder / family, layout)
    mine, packed = model_roles.batches(trained, layout)
    base, _, _ = cases.eager(folder / family)
    for chosen, found in zip(mine, trained.forward(packed), strict=True):
        assert (found.logprobs - torch.cat([base[i] for i in chosen])).abs().max() < 1e-5
    shake(trained)
    peft = peft_model(folder / family, trained)
    logprobs, total = eager_loss(peft)
    assert min((ours - theirs).abs().max() for ours, theirs in zip(logprobs, base, strict=True) if len(ours) > 1) > 1e-3
    gradients = gradients_of(peft)
    assert {name.split(".lora_")[0].split(".")[-1] for name in gradients} == peft_names(family) | (
        {"experts"} if family in EXPERTS else set()
    )
    held = {name: p for name, p in trained._model.hf.named_parameters() if p.requires_grad}
    ranks.check_step(trained, layout, (logprobs, gradients, total), 5e-6)
    optimized = {id(p) for group in trained._optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in held.values()}
    files = load_file(folder / family / "model.safetensors")
    frozen = {n.replace(".base_layer", ""): p for n, p in trained._model.hf.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ranks.full(p), files[name]) for name, p in frozen.items() if name in files)


def peft_names(family: str) -> set[str]:
    """Return the names of the adapted layers that are modules."""
    return {"o_proj"} if family in EXPERTS else ADAPTED[family][1]


def gradients_of(peft: PeftModel) -> dict[str, torch.Tensor]:
    """Return the gradients of peft's adapters, by our names and in our shapes."""
    found = {ours(name): p.grad for name, p in peft.named_parameters() if p.requires_grad and ".experts." not in name}
    for path, wrapper in stacks(peft):
        a, b = (matrix["default"].weight.grad for matrix in (wrapper.lora_A, wrapper.lora_B))
        found[f"{path}.lora_A_{wrapper.parameter_name}"] = a.unflatten(0, (wrapper.num_experts, -1))
        found[f"{path}.lora_B_{wrapper.parameter_name}"] = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1)
    return found


def stacks(peft: PeftModel) -> Iterator[tuple[str, ParamWrapper]]:
    """Yield (name of the module of experts, peft's adapters of one of its parameters)."""
    for name, module in peft.named_modules():
        if isinstance(module, ParamWrapper):
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), module


def ours(name: str) -> str:
    """Return our name of a parameter of peft's model."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default.", ".")


def shake(trained: FSDPBackend) -> None:
    """Give every B nonzero entries, and change every magnitude, the same at every layout."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in trained._model.hf.named_parameters():
            if ".lora_" not in name or ".lora_A" in name:
                continue
            drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
            if ".lora_B" in name:
                assert ranks.full(parameter).eq(0).all()
            else:
                drawn = (1 + drawn) * ranks.full(parameter)
            local(parameter).copy_(drawn[local_box(parameter).within(whole(tuple(drawn.shape)))])


def peft_model(model: Path, trained: FSDPBackend, **options) -> PeftModel:
    """Return peft's model in float64, with this backend's adapters. options: of peft's LoraConfig. Collective."""
    eager = cases.eager_model(AutoModelForCausalLM, model, torch.float64)
    adapters, _ = ADAPTED[model.name]
    peft = get_peft_model(
        eager,
        LoraConfig(
            r=adapters.dim,
            lora_alpha=adapters.alpha,
            target_modules=peft_names(model.name),
            target_parameters=EXPERTS.get(model.name),
            use_dora=adapters.use_dora,
            use_rslora=adapters.use_rslora,
            **options,
        ),
        autocast_adapter_dtype=False,
    )
    state = {n: ranks.full(p) for n, p in trained._model.hf.named_parameters() if ".lora_" in n}
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_" in name and ".experts." not in name:
                parameter.copy_(state.pop(ours(name)))
        for path, wrapper in stacks(peft):
            a, b = (state.pop(f"{path}.lora_{x}_{wrapper.parameter_name}") for x in "AB")
            for matrix, stacked in zip((wrapper.lora_A, wrapper.lora_B), stack_for_peft(a, b), strict=True):
                matrix["default"].weight.copy_(stacked)
    assert not state
    return peft


def eager_loss(model: torch.nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return (log-probs of each sequence [L], loss), after a backward pass."""
    logprobs, total = cases.logprobs_and_loss(model)
    total.backward()
    return logprobs, total.detach()


def check_reference_and_merged(layout: Layout, folder: Path, family: str) -> None:
    """Check after some steps that the reference is still the base, and that exported weights, also sharded, equal peft's
    merge.
    """
    trained = backend(folder / family, layout, ModelRole(reference=True))
    _, packed = model_roles.batches(trained, layout)
    before = trained.forward(packed)
    base = merged(folder / family, trained)
    rounding = 1e-6 if ADAPTED[family][0].use_dora else 0.0
    cases.check_all_held(cases.check_layout(trained, base, rounding))
    place = folder / f"untouched-{family}-{layout.name}"
    trained.shards().write(place, dist.get_rank())
    dist.barrier()
    for _ in range(2):
        reference = trained.forward(packed, "reference")
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, reference, strict=True))
        trained.step(packed, cases.loss)
    after = trained.forward(packed)
    assert any((a.logprobs - b.logprobs).abs().max() > 1e-3 for a, b in zip(before, after, strict=True))
    expected = merged(folder / family, trained)
    cases.check_all_held(cases.check_layout(trained, expected, 1e-6))
    for name, tensor in trained.weights():
        assert dist.get_rank() != 0 or (tensor - expected[name]).abs().max() < 1e-6
    trained.load(place)
    cases.check_layout(trained, base, rounding)


def check_served(layout: Layout, folder: Path, family: str) -> None:
    """Check that a role that serves adapters gives A and B to a refit, also sharded, and the merged model to an export."""
    trained = backend(folder / family, layout, ModelRole(serves_adapters=True))
    shake(trained)
    held = {name: ranks.full(p) for name, p in trained._model.hf.named_parameters() if ".lora_" in name}
    adapters = stored(trained, held)
    cases.check_all_held(cases.check_layout(trained, adapters))
    served = ranks.weights(trained)
    assert served.keys() == adapters.keys()
    assert all(torch.equal(tensor, adapters[name]) for name, tensor in served.items() if dist.get_rank() == 0)
    expected = merged(folder / family, trained)
    for name, tensor in trained.weights(model=True):
        assert dist.get_rank() != 0 or (tensor - expected[name]).abs().max() < 1e-6


def stored(trained: FSDPBackend, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors of adapters by their names on disk. held: by their names in memory."""
    return {
        piece.name: held[name][piece.target.within(whole(tuple(held[name].shape)))].reshape(piece.source.size)
        for name, pieces in trained._model.adapters.layout.items()
        for piece in pieces
    }


def merged(model: Path, trained: FSDPBackend) -> dict[str, torch.Tensor]:
    """Return the weights merged by peft, by their names on disk, in float32. Collective."""
    whole = peft_model(model, trained).merge_and_unload()
    tied = {"lm_head.weight"} if whole.config.tie_word_embeddings else set()
    return {name: t.float() for name, t in on_disk(whole, whole.state_dict()).items() if name not in tied}


def check_bfloat16(layout: Layout, folder: Path) -> None:
    """Check the base in bfloat16, with adapters and their gradients in float32."""
    trained = backend(folder / "qwen3", layout, precision="bfloat16")
    shake(trained)
    logprobs, _ = eager_loss(peft_model(folder / "qwen3", trained))
    mine, packed = model_roles.batches(trained, layout)
    for chosen, found in zip(mine, trained.forward(packed), strict=True):
        assert 0 < (found.logprobs - torch.cat([logprobs[i] for i in chosen])).abs().max() < 0.5
    trained.step(packed, cases.loss)
    for name, parameter in trained._model.hf.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
        assert (parameter.grad is not None) == (".lora_" in name)
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
    assert {trained.local_tensor(region.tensor).dtype for region in trained.layout()} == {torch.bfloat16}


def save(layout: Layout, folder: Path) -> None:
    """Write `adapted/<layout>/<case>`: checkpoint and weights of a backend after one step."""
    for case in SAVED:
        family = case if case in CASES else "qwen3"
        role = ModelRole("values") if case == "values" else ModelRole()
        trained = backend(folder / family, layout, role, random_init=case == "random")
        _, packed = model_roles.batches(trained, layout)
        trained.step(packed, cases.value_loss if case == "values" else cases.loss)
        place = folder / "adapted" / layout.name / case
        trained.shards().write(place, dist.get_rank())
        weights = ranks.weights(trained)
        if dist.get_rank() == 0:
            save_file(weights, place / "weights.safetensors")
