"""Models of the parity table, and what Hugging Face's eager model computes for them in float64."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipeline.models.hugging_face import meta_model, on_disk
from tests.models import cases as megatron_cases
from tests.train import attention_models, cases
from tests.train.megatron import adapters

MEGATRON = megatron_cases.FAMILIES
FSDP = (*MEGATRON, *(name for name in attention_models.configs() if name not in MEGATRON))


@dataclass(frozen=True)
class Difference:
    """The largest differences from a reference."""

    logprob: float
    gradient: float  # as a share of the largest gradient


@dataclass(frozen=True)
class Reference:
    """Log-probs and gradients of a model in float64."""

    logprobs: list[torch.Tensor]  # of each sequence [L]
    gradients: dict[str, torch.Tensor]
    loss: float
    floor: Difference | None = None  # of Hugging Face's eager model in float32

    @classmethod
    def of(cls, model: Path, dtype: torch.dtype = torch.float64) -> Reference:
        """Return what Hugging Face's eager model computes. Gradients have the names of its parameters."""
        logprobs, gradients, loss = cases.eager(model, dtype)
        return cls(logprobs, gradients, loss.item())

    @property
    def norm(self) -> float:
        return torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm().item()

    def difference(self, logprobs: list[torch.Tensor], gradients: dict[str, torch.Tensor], chosen: list[int]) -> Difference:
        """Return differences of log-probs of the `chosen` sequences, and of all gradients."""
        assert gradients.keys() == self.gradients.keys(), gradients.keys() ^ self.gradients.keys()
        of_logprobs = [(ours.double() - self.logprobs[i]).abs().max() for i, ours in zip(chosen, logprobs, strict=True)]
        of_gradients = [(ours.double() - self.gradients[name]).abs().max() for name, ours in gradients.items()]
        largest = max(gradient.abs().max() for gradient in self.gradients.values())
        found = torch.stack(of_logprobs).max(), torch.stack(of_gradients).max() / largest
        assert largest > 0.01 and not any(value.isnan() for value in found)
        return Difference(*(value.item() for value in found))

    def with_floor(self, rounded: Reference) -> Reference:
        """Return the same with the differences of the same model in float32."""
        floor = self.difference(rounded.logprobs, rounded.gradients, list(range(len(cases.LENGTHS))))
        return Reference(self.logprobs, self.gradients, self.loss, floor)

    def save(self, file: Path) -> None:
        """Write a safetensors file."""
        tensors = {f"gradient.{name}": tensor.contiguous() for name, tensor in self.gradients.items()}
        assert self.floor is not None
        file.with_suffix(".json").write_text(json.dumps({"loss": self.loss, "floor": asdict(self.floor)}))
        save_file({"logprobs": torch.cat(self.logprobs), **tensors}, file)

    @classmethod
    def load(cls, file: Path) -> Reference:
        """Read what `save` wrote."""
        tensors, record = load_file(file), json.loads(file.with_suffix(".json").read_text())
        logprobs = list(tensors.pop("logprobs").split(cases.LENGTHS))
        gradients = {name.removeprefix("gradient."): tensor for name, tensor in tensors.items()}
        return cls(logprobs, gradients, record["loss"], Difference(**record["floor"]))


def write(folder: Path, families: list[str]) -> None:
    """Write a checkpoint and a reference of each family."""
    megatron_cases.write_models(folder, [family for family in families if family in MEGATRON])
    attention_models.write(folder, [family for family in families if family not in MEGATRON])
    for family in families:
        model = folder / family
        Reference.of(model).with_floor(Reference.of(model, torch.float32)).save(model / "reference.st")


def stored(reference: Reference, model: Path) -> Reference:
    """Return the reference with gradients by the names on disk."""
    gradients = on_disk(meta_model(AutoConfig.from_pretrained(model)), reference.gradients)
    return Reference(reference.logprobs, gradients, reference.loss, reference.floor)


def adapted(model: Path, tensors: dict[str, torch.Tensor], scale: float, copies: dict[str, str], place: Path) -> Reference:
    """Return the reference of a model with adapters, with gradients of `tensors`.

    tensors: adapters by names on disk. copies: {name: name of the adapter that it is a copy of}. place: an empty folder.
    """
    found = [
        Reference(one.logprobs, one.gradients, one.loss)
        for dtype in (torch.float64, torch.float32)
        for one in [adapters.expected_of(model, tensors, scale, copies, place / str(dtype), dtype)]
    ]
    return found[0].with_floor(found[1])
