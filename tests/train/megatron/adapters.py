"""Adapters of every kind on Megatron-Core, and the same adapters merged into Hugging Face's eager model in float64.

The gradient of a merged weight gives those of A, B and the magnitudes. peft itself adapts only modules, not parameters with all
experts; `test_adapters.py` compares with it where it can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.boxes import whole
from pipeline.config import MegatronLoRAConfig
from pipeline.models.hugging_face import meta_model, on_disk
from pipeline.train.adapters.adapted_experts import parameter_of
from pipeline.train.adapters.adapter_weights import initial_a
from pipeline.train.adapters.peft_files import export_adapters
from pipeline.train.adapters.spec import MAGNITUDE, A, B
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.train_backend import ModelRole
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import Layout

LORA = MegatronLoRAConfig(True, dim=3, alpha=7)
DENSE = ["*.mlp.linear_fc1_gate", "*.mlp.linear_fc1_up"]
SHARED_EXPERTS = ["*.shared_experts.linear_fc1_gate", "*.shared_experts.linear_fc1_up"]
EXPERTS = ["*.local_experts.*.linear_fc1"]
OWN = ["linear_q", "linear_k", "linear_v", "linear_proj", *DENSE, *SHARED_EXPERTS, *EXPERTS, "linear_fc2"]
"""Targets with an A for each layer that transformers has: what FSDP2 adapts with match_all_linear."""
SAVED = (("qwen2", "shared"), ("qwen3_moe", "own"), ("qwen3_moe", "dora"), ("nemotron_h_moe", "shared"))
KINDS = {
    "shared": LORA,
    "own": dataclasses.replace(LORA, target_modules=OWN),
    "some": dataclasses.replace(LORA, target_modules=["linear_q", "linear_v", "linear_fc1_up"], use_rslora=True, use_dora=True),
    "dora": dataclasses.replace(LORA, exclude_modules=["*.0.*linear_fc2"], use_dora=True),
}
WHOLE = {  # families whose other modules can have no adapters -> targets
    "gpt_oss": ["linear_qkv", "linear_proj"],
}
JOINT = ("gemma3_text", "gpt_oss", "glm4", "glm4_moe", "nemotron_h_moe")  # compared with a shared A only
LATENT = ["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"]


def kind(name: str, family: str) -> MegatronLoRAConfig:
    """Return adapters of this kind for a family: multi-latent attention has no queries, keys and values to tell apart."""
    config = KINDS[name]
    if family in WHOLE:
        return dataclasses.replace(config, target_modules=WHOLE[family], exclude_modules=[])
    if not config.target_modules:
        return config
    absent = [*(DENSE if family == "mixtral" else ()), *(() if family in layouts.MIXTURES else EXPERTS)]
    kept = [one for one in config.target_modules if one not in absent]
    if not family.startswith("deepseek"):
        return dataclasses.replace(config, target_modules=[one for one in kept if one not in SHARED_EXPERTS])
    latent = [one for one in LATENT if one not in (LATENT[1:3] if family.endswith("plain") else LATENT[:1])]
    kept = [one for one in kept if one not in ("linear_q", "linear_k", "linear_v", "linear_proj")]
    return dataclasses.replace(config, target_modules=[*latent, *kept])


def backend(
    model: Path, layout: Layout, config: MegatronLoRAConfig, role: ModelRole = layouts.TRAINED, **changes
) -> MegatronBackend:
    return layouts.backend(cases.policy(model, **changes), layout, role, peft=config)


def shake(trained: MegatronBackend) -> dict[str, torch.Tensor]:
    """Give every B and every magnitude other values, the same in every layout; return all adapters by name on disk."""
    adapters = trained._adapters
    copied = {other: name for name, others in adapters.copies.items() for other in others}
    found = {}
    files = load_file(Path(trained._policy.model_name) / "model.safetensors")
    for name, shape in adapters.shapes.items():
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        if name.endswith(A):
            found[name] = initial_a(adapters.spec, copied.get(name, name).removesuffix(A), shape[1], seed=7)
        elif name.endswith(B):
            found[name] = 0.05 * torch.randn(shape, generator=generator)
        else:
            norms = weight_of(name.removesuffix(MAGNITUDE), files).norm(dim=1)
            found[name] = norms * (1 + 0.2 * torch.randn(shape, generator=generator))
    mine = {name: local for name, local in trained._local.items() if name not in trained._base}
    trained._fill(lambda name, box: found[name][box.within(whole(tuple(found[name].shape)))], mine)
    return found


def weight_names(layer: str, files: dict[str, torch.Tensor]) -> list[str]:
    """Return the names on disk of a layer's weight: an expert's gate and up projections are two."""
    if f"{layer}.weight" in files:
        return [f"{layer}.weight"]
    parts = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
    parts["up_proj"] = (("up_proj",),)
    path, _, last = layer.rpartition(".")
    for names in parts[last]:
        for place in (path, path.replace(".mlp.", ".block_sparse_moe."), path.replace("model.", "backbone.")):
            if f"{place}.{names[0]}.weight" in files:
                return [f"{place}.{name}.weight" for name in names]
    raise KeyError(layer)


def stacked(layer: str, files: dict[str, torch.Tensor]) -> tuple[str, int] | None:
    """Return (name on disk, expert) of an expert whose weight is a part of a tensor with all experts; else None."""
    name, expert = parameter_of(layer) or ("", 0)
    granite = {".experts.gate_up_proj": ".input_linear.weight", ".experts.down_proj": ".output_linear.weight"}
    names = [name, *(name.replace(ours, theirs) for ours, theirs in granite.items())]
    return next(((one, expert) for one in names if one in files), None)


def weight_of(layer: str, files: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([files[name] for name in weight_names(layer, files)])


def merged(files: dict[str, torch.Tensor], adapters: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Return all weights on disk in float64, merged with adapters under a graph."""
    found = {name: tensor.double() for name, tensor in files.items()}
    for name in adapters:
        if not name.endswith(B):
            continue
        layer = name.removesuffix(B)
        change = scale * adapters[layer + B] @ adapters[layer + A]
        if place := stacked(layer, files):
            assert layer + MAGNITUDE not in adapters  # not needed so far
            whole, expert = place
            change = change if change.shape == files[whole].shape[1:] else change.T
            found[whole] = found[whole] + torch.zeros_like(found[whole]).index_copy(0, torch.tensor([expert]), change[None])
            continue
        weight = weight_of(layer, files).double() + change
        if layer + MAGNITUDE in adapters:
            weight = weight * (adapters[layer + MAGNITUDE] / weight.detach().norm(dim=1))[:, None]
        names = weight_names(layer, files)
        found |= dict(zip(names, weight.split([len(files[one]) for one in names]), strict=True))
    return found


@dataclasses.dataclass(frozen=True)
class Expected:
    logprobs: list[torch.Tensor]  # of each sequence [L]
    gradients: dict[str, torch.Tensor]  # of the adapters' tensors on disk
    loss: float
    weights: dict[str, torch.Tensor]  # merged, float64


def expected(trained: MegatronBackend, adapters: dict[str, torch.Tensor], place: Path) -> Expected:
    """Return what Hugging Face's eager model computes with these adapters. place: an empty folder for the merged model."""
    copied = {other: name for name, others in trained._adapters.copies.items() for other in others}
    return expected_of(Path(trained._policy.model_name), adapters, trained._adapters.spec.scale, copied, place)


def expected_of(
    model: Path,
    adapters: dict[str, torch.Tensor],
    scale: float,
    copied: dict[str, str],
    place: Path,
    dtype: torch.dtype = torch.float64,
) -> Expected:
    """Return what Hugging Face's eager model in `dtype` computes with these adapters.

    copied: {name: the adapter that it is a copy of}. place: an empty folder for the merged model.
    """
    files = load_file(model / "model.safetensors")
    leaves = {name: tensor.double().requires_grad_() for name, tensor in adapters.items()}
    weights = merged(files, {name: leaves[copied.get(name, name)] for name in leaves}, scale)
    place.mkdir(parents=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in weights.items()}, place / "model.safetensors", {"format": "pt"}
    )
    shutil.copyfile(model / "config.json", place / "config.json")
    logprobs, found, total = cases.eager(place, dtype)
    of_weights = on_disk(meta_model(AutoConfig.from_pretrained(place)), found)
    changed = [name for name, tensor in weights.items() if tensor.requires_grad]
    torch.autograd.backward([weights[name] for name in changed], [of_weights[name].double() for name in changed])
    gradients = {name: leaf.grad for name, leaf in leaves.items() if name not in copied}
    return Expected(logprobs, gradients, total.item(), {name: tensor.detach() for name, tensor in weights.items()})


def check_families(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    for family in families:
        for name in ("shared", "dora") if family in JOINT else KINDS:
            check_equals_eager(folder / family, layout, kind(name, family), f"{family} {name} {layout.name}")
            layouts.release()


def check_equals_eager(model: Path, layout: Layout, config: MegatronLoRAConfig, what: str) -> None:
    """Compare log-probs, loss, all gradients and their norm, the reference and the merged weights with the eager model's."""
    trained = backend(model, layout, config, ModelRole(reference=True))
    adapters = shake(trained)
    place = model.parent / "merged" / f"{what.replace(' ', '-')}-{dist.get_rank()}"
    theirs = expected(trained, adapters, place)
    base = layouts.expected(model)
    off_by = 4 if model.name == "gemma3_text" else 1  # in float32, transformers is as far from float64
    chosen, mine = ranks.shares(layout)[trained.data_rank], ranks.batches(trained, layout)
    for sequences, reference in zip(chosen, trained.forward(mine, "reference"), strict=True):
        assert (reference.logprobs - base.of(sequences)).abs().max() < off_by * 1e-5, what
    for name, tensor in trained.weights():
        assert dist.get_rank() != 0 or (tensor - theirs.weights[name]).abs().max() < 1e-6, (what, name)
    cases.check_all_held(cases.check_layout(trained, theirs.weights, 1e-6))
    expected_step = theirs.logprobs, theirs.gradients, torch.tensor(theirs.loss)
    ranks.check_step(trained, layout, expected_step, off_by * 5e-6, off_by * 1e-5)
    check_only_adapters_train(trained)
    cases.check_layout(trained, whole_weights(trained))  # refreshed by the step


def check_only_adapters_train(trained: MegatronBackend) -> None:
    """Check that the base has neither gradients nor optimizer state."""
    of = {id(local.tensor): name for name, local in trained._local.items()}
    updated = {of[id(part.parameter)] for part in trained._optimizer.ranges()}
    assert updated and not updated & trained._base.keys()
    buffered = [p for buffer in (*trained._model.buffers, *trained._model.expert_parallel_buffers) for p in buffer.params]
    assert {of[id(parameter)] for parameter in buffered} == trained._local.keys() - trained._base.keys()


def whole_weights(trained: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return all merged weights on every rank."""
    found = {}
    for name, tensor in trained.weights():
        full = tensor if dist.get_rank() == 0 else torch.empty(trained.shapes[name])
        dist.broadcast(full, 0)
        found[name] = full.clone()
    return found


def save(layout: Layout, folder: Path) -> None:
    """Write `adapted/<family>-<kind>` after three steps: a checkpoint, the weights, and the metrics of the next two steps."""
    for family, name in SAVED:
        trained, place = resumable(folder, family, name, layout), folder / "adapted" / f"{family}-{name}"
        for _ in range(3):
            cases.learn(trained, ranks.batches(trained, layout))
        trained.shards().write(place, dist.get_rank())
        weights = whole_weights(trained)
        metrics = [cases.learn(trained, ranks.batches(trained, layout)) for _ in range(2)]
        if dist.get_rank() == 0:
            save_file(weights, place / "weights.st")
            (place / "after.json").write_text(json.dumps(metrics))


def resumable(folder: Path, family: str, name: str, layout: Layout) -> MegatronBackend:
    return backend(folder / family, layout, kind(name, family), scheduler=ranks.SCHEDULER, max_grad_norm=0.5)


def resume(layout: Layout, folder: Path) -> None:
    """Load what `save` wrote, and take the same steps."""
    for family, name in SAVED:
        trained, place = resumable(folder, family, name, layout), folder / "adapted" / f"{family}-{name}"
        trained.load(place)
        weights, expected = whole_weights(trained), load_file(place / "weights.st")
        off = {one: (weights[one] - tensor).abs().max().item() for one, tensor in expected.items()}
        assert max(off.values()) < 1e-6, off
        base = load_file(folder / family / "model.safetensors")
        assert any(not torch.equal(base[one], tensor) for one, tensor in expected.items())
        for theirs in json.loads((place / "after.json").read_text()):
            ours = cases.learn(trained, ranks.batches(trained, layout))
            for key, value in theirs.items():
                assert abs(ours[key] - value) <= 1e-5 * max(abs(value), 0.01), (family, name, layout.name, key)
        layouts.release()


def check_peft_loads(checkpoint: Path, model: Path, weights: dict[str, torch.Tensor], place: Path) -> None:
    """Compare peft's model with the exported adapters to the merged weights. place: an empty folder."""
    export_adapters(checkpoint, cases.policy(model), place / "adapter")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, place / "model.safetensors", {"format": "pt"})
    shutil.copyfile(model / "config.json", place / "config.json")
    expected = torch.cat(cases.eager(place)[0])
    base = cases.eager_model(AutoModelForCausalLM, model, torch.float64)
    peft = PeftModel.from_pretrained(base, place / "adapter", autocast_adapter_dtype=False).double()
    with torch.no_grad():
        found = torch.cat(cases.logprobs_and_loss(peft)[0])
        with peft.disable_adapter():
            without = torch.cat(cases.logprobs_and_loss(peft)[0])
    assert (found - expected).abs().max() < 1e-5
    assert (without - expected).abs().max() > 1e-3
