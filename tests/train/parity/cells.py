"""Cells of the parity table: what train ranks do, and how they report it.

One start of ranks computes many cells of one layout. Rank 0 appends a line of JSON before and after each cell, so that a cell
that raises is known, and the others are started again without it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config import LoRAConfig, RecipeError, refuse
from pipeline.config.parallelism import check_expert_layout
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.train_backend import TrainBackend
from tests.train import adapters as fsdp_adapters
from tests.train import cases, ranks
from tests.train.float64 import Float64
from tests.train.megatron import adapters as megatron_adapters
from tests.train.megatron import layouts
from tests.train.parity import references
from tests.train.parity.references import Difference, Reference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA = LoRAConfig(True, dim=3, alpha=7)
Layout = ranks.Layout | layouts.Layout


@dataclass(frozen=True)
class Cell:
    family: str
    adapted: bool = False
    precision: str = "float32"


@dataclass(frozen=True)
class Found:
    """What became of a cell: differences, or the key that refuses it, or an error."""

    difference: Difference | None = None
    floor: Difference | None = None
    refused: str = ""
    error: str = ""


def measured(layout: Layout, cells: list[Cell], folder: Path) -> dict[Cell, Found]:
    """Return what became of each cell at this layout. folder: of `references.write`."""
    found: dict[Cell, Found] = {}
    report = folder / f"cells-{type(layout).__module__}-{layout.name}.jsonl"
    while pending := [cell for cell in cells if cell not in found]:
        report.unlink(missing_ok=True)
        error = ""
        try:
            ranks.run(functools.partial(_measure, pending, report), layout, folder)
        except Exception as raised:
            error = next((line for line in reversed(str(raised).splitlines()) if line.strip()), type(raised).__name__)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        for line in lines:
            found[Cell(**line["cell"])] = _read(line) if "refused" in line else Found(error=error)
        if not lines:
            return found | {cell: Found(error=error or "no cell was computed") for cell in pending}
    return found


def _read(line: dict[str, Any]) -> Found:
    values = {name: line[name] and Difference(**line[name]) for name in ("difference", "floor")}
    return Found(**values, refused=line["refused"])


def _measure(cells: list[Cell], report: Path, layout: Layout, folder: Path) -> None:
    for cell in cells:
        _write(report, {"cell": asdict(cell)})
        try:
            found = measure(cell, layout, folder)
        except RecipeError as error:
            found = Found(refused=error.problems[0].key)
        finally:
            if isinstance(layout, layouts.Layout):
                layouts.release()
        dist.barrier()
        _write(report, {"cell": asdict(cell), **asdict(found)})


def _write(report: Path, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measure(cell: Cell, layout: Layout, folder: Path) -> Found:
    """Return the differences of one step. Raises RecipeError for what the product refuses. Collective."""
    model = folder / cell.family
    of = _Megatron(layout) if isinstance(layout, layouts.Layout) else _FSDP(layout)
    with Float64() if cell.precision == "float64" else contextlib.nullcontext():
        trained = of.backend(cell, model)
        theirs = _adapted(of, trained, model) if cell.adapted else of.reference(model)
        chosen = ranks.shares(layout)[trained.data_rank]
        batches = [cases.pack(members) for members in chosen]
        logprobs = [
            part
            for members, outputs in zip(chosen, trained.forward(batches), strict=True)
            for part in outputs.logprobs.split([cases.LENGTHS[i] for i in members])
        ]
        metrics = trained.step(batches, cases.loss).metrics
        gradients = of.gradients(trained)
        gradients = {name: gradient for name, gradient in gradients.items() if name in theirs.gradients}
        found = theirs.difference(logprobs, gradients, [i for members in chosen for i in members])
    near = 1e-5 if cell.precision == "float32" else 1e-6  # metrics are float32 in any precision
    assert abs(metrics["loss"] - theirs.loss) < near * max(1, abs(theirs.loss)), (metrics["loss"], theirs.loss)
    assert abs(metrics["grad_norm"] / theirs.norm - 1) < near, (metrics["grad_norm"], theirs.norm)
    everywhere = torch.tensor([found.logprob, found.gradient], dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return Found(Difference(*everywhere.tolist()), theirs.floor)


class _FSDP:
    def __init__(self, layout: ranks.Layout):
        self._layout = layout

    def backend(self, cell: Cell, model: Path) -> FSDPBackend:
        """Return a backend: with adapters on all layers, or on attention where the model's experts allow no more."""
        policy = cases.policy(model, precision=cell.precision)
        if not cell.adapted:
            return ranks.backend(policy, self._layout)
        try:
            return ranks.backend(policy, self._layout, lora_cfg=LORA)
        except RecipeError as error:
            if not error.problems[0].key.endswith("match_all_linear"):
                raise
        some = replace(LORA, match_all_linear=False, target_modules=ATTENTION)
        return ranks.backend(policy, self._layout, lora_cfg=some)

    def reference(self, model: Path) -> Reference:
        return Reference.load(model / "reference.st")

    def shake(self, trained: FSDPBackend) -> tuple[dict[str, torch.Tensor], float, dict[str, str]]:
        """Change the adapters, and return (adapters by names on disk, scale, copies)."""
        fsdp_adapters.shake(trained)
        held = {name: ranks.full(p).clone() for name, p in trained._model.hf.named_parameters() if ".lora_" in name}
        return fsdp_adapters.stored(trained, held), trained._model.adapters.spec.scale, {}

    def gradients(self, trained: FSDPBackend) -> dict[str, torch.Tensor]:
        found = ranks.gradients(trained)
        return fsdp_adapters.stored(trained, found) if trained._model.adapters else found


class _Megatron:
    def __init__(self, layout: layouts.Layout):
        self._layout = layout

    def backend(self, cell: Cell, model: Path) -> MegatronBackend:
        """Return a backend: with adapters on all linear layers, or on attention where the model allows no more."""
        policy = cases.policy(model, precision=cell.precision)
        policy.megatron_cfg = self._layout.megatron()
        if "experts" in json.dumps(list(json.loads((model / "config.json").read_text()))):
            refuse(check_expert_layout(policy))  # what submission checks: some of these layouts would be silently wrong
        if not cell.adapted:
            return layouts.backend(policy, self._layout)
        try:
            return layouts.backend(policy, self._layout, peft=megatron_adapters.LORA)
        except RecipeError as error:
            if not error.problems[0].key.startswith("policy.megatron_cfg.peft."):
                raise
        some = replace(megatron_adapters.LORA, target_modules=["linear_qkv", "linear_proj"])
        return layouts.backend(policy, self._layout, peft=some)

    def reference(self, model: Path) -> Reference:
        return references.stored(Reference.load(model / "reference.st"), model)

    def shake(self, trained: MegatronBackend) -> tuple[dict[str, torch.Tensor], float, dict[str, str]]:
        adapters = megatron_adapters.shake(trained)
        copied = {other: name for name, others in trained._adapters.copies.items() for other in others}
        return adapters, trained._adapters.spec.scale, copied

    def gradients(self, trained: MegatronBackend) -> dict[str, torch.Tensor]:
        return self._layout.gradients(trained)


def _adapted(of: _FSDP | _Megatron, trained: TrainBackend, model: Path) -> Reference:
    """Change the adapters, and return the reference with these. The first layout computes it."""
    adapters, scale, copies = of.shake(trained)
    digest = hashlib.sha256(repr([(name, scale, tensor.tolist()) for name, tensor in sorted(adapters.items())]).encode())
    place = model.parent / "adapted" / f"{model.name}-{digest.hexdigest()[:16]}"
    if dist.get_rank() == 0 and not (place / "reference.st").exists():
        references.adapted(model, adapters, scale, copies, place).save(place / "reference.st")
    dist.barrier()
    return Reference.load(place / "reference.st")
