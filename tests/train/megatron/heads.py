"""Value models, and values, entropies and chosen tokens of Hugging Face's eager models in float64.

Every sequence of `cases.sequences()` has K candidates for each token, as a teacher would give them.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.models.hugging_face import meta_model, on_disk
from pipeline.types import LossOutput, Outputs, PackedBatch, TopK
from tests.models.cases import configs
from tests.train import cases

FAMILIES = ("llama", "qwen3_tied", "qwen3_moe")
K = 3


@functools.cache
def candidates() -> tuple[torch.Tensor, ...]:
    """Return candidates of each sequence [L, K] int64."""
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(0, cases.VOCABULARY, (length, K), generator=generator) for length in cases.LENGTHS)


def pack(chosen: list[int]) -> PackedBatch:
    """Pack sequences with a teacher's tokens."""
    batch = cases.pack(chosen)
    tokens = torch.cat([candidates()[i] for i in chosen])
    return dataclasses.replace(batch, teacher=TopK(tokens, torch.zeros(tokens.shape)))


def value_loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    return LossOutput((outputs.values * batch.advantages).sum() / sum(cases.LENGTHS), {})


def mixed_loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    return LossOutput(_mixed(outputs.logprobs, outputs.entropy, outputs.top_k.logprobs, batch.advantages), {})


def _mixed(logprobs, entropy, chosen, weights) -> torch.Tensor:
    """Return a loss with every kind of output, each with another weight."""
    columns = torch.tensor([0.5, -1.0, 2.0], dtype=chosen.dtype)
    return (logprobs * weights + entropy * weights.cos() + (chosen @ columns) * weights.square()).sum() / sum(cases.LENGTHS)


# ---- checkpoints and what is expected of them ---------------------------------------------------------------------------


def value_models(folder: Path) -> Path:
    return folder / "values"


def write(folder: Path) -> None:
    """Write a value model of each family to `folder/values`, and the expected outputs next to each model of `folder`."""
    for family in FAMILIES:
        _write_value_model(family, value_models(folder) / family)
        _write_outputs(folder / family)


def _write_value_model(family: str, folder: Path) -> None:
    torch.manual_seed(4)
    config = configs()[family]
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    model = _eager(AutoModelForSequenceClassification, folder)
    values, total = [], 0.0
    for tokens, weights in cases.sequences():
        found = model.score(model.model(tokens[None]).last_hidden_state)[0, :, 0]
        values.append(found.detach())
        total = total + (found * weights).sum() / sum(cases.LENGTHS)
    total.backward()
    gradients = on_disk(model, {name: tensor.grad for name, tensor in model.named_parameters()})
    save_file({"values": torch.cat(values), "loss": total.detach()[None], **_named(gradients)}, folder / "outputs.st")


def _write_outputs(folder: Path) -> None:
    model = _eager(AutoModelForCausalLM, folder)
    found: dict[str, list[torch.Tensor]] = {"entropy": [], "chosen": [], "likely": [], "likely_logprobs": []}
    total = 0.0
    for (tokens, weights), wanted in zip(cases.sequences(), candidates(), strict=True):
        logits = model(tokens[None]).logits[0, :-1] / cases.TEMPERATURE
        everything = logits.log_softmax(-1)
        likely = everything.topk(K)
        outputs = {
            "entropy": -(everything.exp() * everything).sum(-1),
            "chosen": everything.gather(-1, wanted[1:]),
            "likely": likely.indices,
            "likely_logprobs": likely.values,
        }
        logprobs = _shifted(everything.gather(-1, tokens[1:, None])[:, 0])
        shifted = {name: _shifted(tensor) for name, tensor in outputs.items()}
        total = total + _mixed(logprobs, shifted["entropy"], shifted["chosen"], weights.double())
        for name, tensor in shifted.items():
            found[name].append(tensor.detach())
    total.backward()
    gradients = on_disk(meta_model(AutoConfig.from_pretrained(folder)), {n: p.grad for n, p in model.named_parameters()})
    tensors = {name: torch.cat(parts) for name, parts in found.items()}
    save_file({**tensors, "loss": total.detach()[None], **_named(gradients)}, folder / "outputs.st")


def _shifted(predicted: torch.Tensor) -> torch.Tensor:
    """Return values per token, none for the first one."""
    return torch.cat([predicted.new_zeros(1, *predicted.shape[1:]), predicted])


def _eager(kind: type, folder: Path):
    return kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )


def _named(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"gradient.{name}": tensor.contiguous() for name, tensor in gradients.items()}


@dataclasses.dataclass(frozen=True)
class Expected:
    outputs: dict[str, list[torch.Tensor]]  # of each sequence [L, ...]
    gradients: dict[str, torch.Tensor]  # by names on disk
    loss: float

    def of(self, name: str, chosen: list[int]) -> torch.Tensor:
        return torch.cat([self.outputs[name][i] for i in chosen])


def expected(model: Path) -> Expected:
    tensors = load_file(model / "outputs.st")
    loss = tensors.pop("loss").item()
    gradients = {n.removeprefix("gradient."): tensors.pop(n) for n in list(tensors) if n.startswith("gradient.")}
    return Expected({name: list(t.split(cases.LENGTHS)) for name, t in tensors.items()}, gradients, loss)
