"""Start train ranks as processes of a larger world, which has one more rank that takes no part.

`run` starts them; what each train rank does is a function of this module, called SPMD with (layout, folder).
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from pipeline.config import DTensorConfig, PolicyConfig
from pipeline.models.precision import served_dtype
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import Loss, ModelRole, TrainBackend
from pipeline.types import Outputs, PackedBatch
from tests import fork_server
from tests.train import cases

SCHEDULER = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 10}}


@dataclass(frozen=True)
class Layout:
    data: int  # data-parallel ranks, over all replicas
    tensor: int
    context: int = 1
    replicas: int = 1
    sequence: bool = False
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context

    @property
    def name(self) -> str:
        sizes = {"hsdp": self.replicas, "dp": self.data, "cp": self.context, "tp": self.tensor, "ep": self.expert}
        return "-".join([*(f"{k}{size}" for k, size in sizes.items() if size > 1), *(["sp"] if self.sequence else [])]) or "one"

    def backend(self, policy: PolicyConfig, role: ModelRole | None = None, **changes) -> FSDPBackend:
        """Return this rank's backend. changes: of `policy.dtensor_cfg`."""
        return backend(policy, self, role, **changes)

    def gradients(self, trained: FSDPBackend) -> dict[str, torch.Tensor]:
        return gradients(trained)

    def eager(self, model: Path) -> Expected:
        return cases.eager(model)

    def dtensor(self, **changes) -> DTensorConfig:
        sizes = {
            "tensor_parallel_size": self.tensor,
            "context_parallel_size": self.context,
            "data_parallel_replicate_size": self.replicas,
            "sequence_parallel": self.sequence,
            "expert_parallel_size": self.expert,
        }
        return DTensorConfig(**sizes, **changes)


def run(work, layout, folder: Path) -> None:
    """Run `work(layout, folder)` on every train rank. Raises what any of them raised."""
    with_bystander = layout.ranks + 1
    with tempfile.TemporaryDirectory() as meeting:
        fork_server.run(_process, (with_bystander, work, layout, folder, Path(meeting) / "store"), with_bystander)


def _process(rank: int, size: int, work, layout: Layout, folder: Path, store: Path) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)  # to compile takes minutes where others use the cores
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    world = dist.group.WORLD
    realm = dist.new_group(list(range(layout.ranks)))
    if rank < layout.ranks:
        dist.group.WORLD = realm
        work(layout, folder)
    dist.barrier(group=world)
    dist.group.WORLD = world
    dist.destroy_process_group()


def backend(policy: PolicyConfig, layout: Layout = Layout(1, 1), role: ModelRole | None = None, **dtensor) -> FSDPBackend:
    policy.dtensor_cfg = layout.dtensor(**dtensor)
    return FSDPBackend(policy, dist.group.WORLD, seed=7, role=role or ModelRole())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(trained: FSDPBackend) -> dict[str, torch.Tensor]:
    """Return the full gradients; they stay until the next step."""
    return {name: full(parameter.grad) for name, parameter in trained._model.hf.named_parameters() if parameter.requires_grad}


def weights(trained: TrainBackend) -> dict[str, torch.Tensor]:
    """Return all weights in full on rank 0, and empty tensors elsewhere."""
    return {name: tensor.clone() for name, tensor in trained.weights()}


def shares(layout, batches: int = 2) -> list[list[list[int]]]:
    """Return the sequences of each batch of each data-parallel rank."""
    order = list(range(len(cases.LENGTHS)))
    cuts = layout.data * batches
    parts = [order[i::cuts] for i in range(cuts)]
    return [parts[rank :: layout.data] for rank in range(layout.data)]


def batches(trained: TrainBackend, layout, count: int = 2) -> list[PackedBatch]:
    """Return this rank's share of all sequences."""
    return [cases.pack(chosen, trained.device) for chosen in shares(layout, count)[trained.data_rank]]


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Assert that every tensor is equal up to `tolerance` of the largest entry of all."""
    assert ours.keys() == theirs.keys()
    largest = max(t.abs().max().item() for t in theirs.values())
    assert largest > 0.01  # the comparison would be empty otherwise
    worst = {name: (ours[name].double() - theirs[name].double()).abs().max().item() / largest for name in theirs}
    name = max(worst, key=worst.get)
    assert worst[name] < tolerance, f"{name} is off by {worst[name]:.1e} of the largest entry"


Expected = tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]
"""(log-probs of each sequence [L], gradients by name, loss) of a model in float64."""


def check_step(
    trained: TrainBackend, layout, expected: Expected, tolerance: float, of_logprobs: float = 1e-5, gradients=None
) -> dict[str, float]:
    """Compare log-probs, loss, every gradient and their norm of one step with those expected, and return its metrics.

    tolerance: of gradients, as a share of the largest entry. gradients: a function of `trained`; None: those of the layout.
    """
    logprobs, theirs, total = expected
    packed = batches(trained, layout)
    for chosen, ours in zip(shares(layout)[trained.data_rank], trained.forward(packed), strict=True):
        assert ours.logprobs.dtype == torch.float32 and ours == Outputs(ours.logprobs)
        assert (ours.logprobs.cpu() - torch.cat([logprobs[i] for i in chosen])).abs().max() < of_logprobs
    metrics = trained.step(packed, cases.loss).metrics
    assert_near((gradients or layout.gradients)(trained), theirs, tolerance)
    norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm().item()
    assert abs(metrics["grad_norm"] / norm - 1) < tolerance
    assert abs(metrics["loss"] - total.item()) < 1e-6 * max(1, abs(total.item()))
    return metrics


def check_against_eager(trained: TrainBackend, layout, model: Path, tolerance: float = 2e-6) -> None:
    """Compare log-probs, loss, metrics, every gradient and their norm of one step with HF eager."""
    expected = layout.eager(model)
    metrics, every = check_step(trained, layout, expected, tolerance), torch.cat(expected[0])
    assert metrics.keys() == {"loss", "grad_norm", "lr", "logprob", "logprob_min", "logprob_max"}
    assert abs(metrics["logprob"] - every.mean().item()) < 1e-5
    assert abs(metrics["logprob_min"] - every.min().item()) < 1e-5
    assert metrics["logprob_max"] == max(weights.max().item() for _, weights in cases.sequences())
    assert metrics["lr"] == 1e-3


# ---- checks of train ranks ----------------------------------------------------------------------------------------------


def some_families(chosen: Sequence[str], layout: Layout, folder: Path) -> None:
    for family in chosen:
        model = folder / family
        trained = backend(cases.policy(model), layout)
        assert (trained.data_size, trained.data_rank) == (layout.data, dist.get_rank() // (layout.tensor * layout.context))
        check_weights_are_the_files(trained, model)
        check_against_eager(trained, layout, model, cases.tolerance(family))
    for family in ("qwen3_tied", "qwen3_moe"):
        if family in chosen:
            check_random_weights(layout, folder, family)
            check_bfloat16(layout, folder, family)
            check_save_and_load(layout, folder, family)
    check_activation_checkpointing(layout, folder)
    check_clipping_and_refusal(layout, folder)


def families(layout: Layout) -> list[str]:
    """Return the families that train at this layout: tensor parallelism does not split experts."""
    return [family for family in cases.FAMILIES if layout.tensor == 1 or family not in cases.MIXTURES]


def check_weights_are_the_files(trained: TrainBackend, model: Path) -> None:
    ours = weights(trained)
    files = load_file(model / "model.safetensors")
    assert ours.keys() == files.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, files[name]) if dist.get_rank() == 0 else tensor.numel() == 0
    cases.check_all_held(cases.check_layout(trained, files))


def check_random_weights(layout: Layout, folder: Path, family: str) -> None:
    """Check that they do not depend on the layout, and equal transformers' from that seed."""
    trained = backend(cases.policy(folder / family, random_init=True), layout)
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(cases.configs()[family], dtype=torch.float32)
    for name, parameter in trained._model.hf.named_parameters():
        assert torch.equal(full(parameter), expected.get_parameter(name)), name


def check_activation_checkpointing(layout: Layout, folder: Path, family: str = "qwen3") -> None:
    """Check that gradients with recomputation are the same to the last bit."""
    found = []
    for on, granularity in ((False, "full"), (True, "full"), (True, "selective")):
        settings = {"activation_checkpointing": on, "recompute_granularity": granularity}
        trained = backend(cases.policy(folder / family), layout, **settings)
        trained.step(batches(trained, layout), cases.loss)
        found.append(gradients(trained))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]) and torch.equal(gradient, found[2][name]), name


def check_bfloat16(layout: Layout, folder: Path, family: str) -> None:
    """Check that outputs in bfloat16 are near, and that the updated weights are float32."""
    logprobs, expected, _ = cases.eager(folder / family)
    trained = backend(cases.policy(folder / family, precision="bfloat16"), layout)
    mine = shares(layout)[trained.data_rank]
    batches = [cases.pack(chosen) for chosen in mine]
    ours = torch.cat([outputs.logprobs for outputs in trained.forward(batches)])
    theirs = torch.cat([logprobs[i] for chosen in mine for i in chosen])
    assert 0 < (ours - theirs).abs().max() < 0.5
    trained.step(batches, cases.loss)
    assert_near(gradients(trained), expected, 0.1)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in trained._model.parameters() if p.requires_grad)
    assert all(tensor.dtype == served_dtype(name, torch.bfloat16) for name, tensor in trained.weights())


def check_clipping_and_refusal(layout: Layout, folder: Path) -> None:
    trained = backend(cases.policy(folder / "qwen3", max_grad_norm=0.01), layout)
    packed = batches(trained, layout)
    assert trained.step(packed, cases.loss).metrics["grad_norm"] > 0.02
    clipped = torch.stack([g.norm() for g in gradients(trained).values()]).norm()
    assert abs(clipped / 0.01 - 1) < 1e-5

    def broken(outputs, batch):
        output = cases.loss(outputs, batch)
        # On one data rank only, yet all must refuse.
        return type(output)(output.loss * (torch.nan if trained.data_rank == 0 else 1.0), output.metrics)

    before = [full(p).clone() for p in trained._model.parameters()]
    try:
        trained.step(packed, broken)
    except FloatingPointError:
        assert all(torch.equal(a, full(p)) for a, p in zip(before, trained._model.parameters(), strict=True))
    else:
        raise AssertionError("a gradient that is not finite was taken")
    trained.step(packed, cases.loss)
    assert all(p.isfinite().all() for p in map(full, trained._model.parameters()))


def check_save_and_load(
    layout: Layout,
    folder: Path,
    family: str,
    role: ModelRole | None = None,
    loss: Loss = cases.loss,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **dtensor,
) -> None:
    """Check that after an interruption after two steps the next two are the same to the last bit.

    changes: of the policy.
    """

    def new() -> FSDPBackend:
        return backend(cases.policy(folder / family, scheduler=SCHEDULER, **changes), layout, role, **dtensor)

    trained = new()
    packed = batches(trained, layout)

    def two_steps(trained: FSDPBackend) -> tuple:
        metrics = [cases.learn(trained, packed, loss) for _ in range(2)]
        return metrics, torch.rand(3), [full(p).clone() for p in trained._model.parameters()]

    two_steps(trained)
    saved = folder / saved_by(layout, family)
    trained.shards().write(saved, dist.get_rank())
    later = trained.shards(copy=True)
    expected = two_steps(trained)
    later.write(folder / "later", dist.get_rank())
    rank = f"train-rank{dist.get_rank():05d}"
    for name in (f"{rank}.safetensors", f"{rank}.json"):
        assert (folder / "later" / name).read_bytes() == (saved / name).read_bytes()
    for other in (new(), trained):  # in a new process, and back in the old one
        other.load(saved)
        metrics, drawn, parameters = two_steps(other)
        assert metrics == expected[0]
        assert torch.equal(drawn, expected[1])
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected[2], strict=True))
    dist.barrier()
    if dist.get_rank() == 0:
        check_written_once(saved)
        (saved / "after.json").write_text(json.dumps(metrics))


def check_goes_on(trained: TrainBackend, layout, saved: Path) -> None:
    """Check that what ranks of another layout saved goes on at this one as it did at theirs."""
    trained.load(saved)
    after = json.loads((saved / "after.json").read_text())
    assert after
    for theirs in after:
        ours = cases.learn(trained, batches(trained, layout))
        assert ours["lr"] == theirs["lr"]
        assert abs(ours["loss"] - theirs["loss"]) < 1e-6
        assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) < 1e-5


def check_written_once(folder: Path) -> None:
    """Check that no two ranks wrote the same part of a tensor. Each writes its own counts of steps."""
    records = [json.loads(path.read_text())["tensors"] for path in folder.glob("train-rank*.json")]
    parts = [entry for record in records for entry in record.values() if entry["size"] and 0 not in entry["size"]]
    boxes = [(entry["name"], *entry["offset"]) for entry in parts]
    assert len(boxes) == len(set(boxes)) > 0


def saved_by(layout: Layout, family: str) -> str:
    """Return the folder that `check_save_and_load` writes, with the metrics of the two steps after it."""
    return f"saved-{family}-{layout.name}"


def train_and_save(layout: Layout, folder: Path) -> None:
    """Save each family of `cases.EXPORTED`.

    All ranks write `checkpoint`; rank 0 writes `weights.safetensors` (as the backend exports them) and
    `logprobs.safetensors` (of each sequence).
    """
    for family, precision in cases.EXPORTED.items():
        train_and_save_one(layout, folder / family, folder / "exported" / family, precision)


def train_and_save_one(layout: Layout, model: Path, place: Path, precision: str = "float32") -> None:
    trained = backend(cases.policy(model, precision=precision), layout)
    trained.step(batches(trained, layout), cases.loss)
    trained.shards().write(place / "checkpoint", dist.get_rank())
    full_weights = weights(trained)
    logprobs = trained.forward([cases.pack(list(range(len(cases.LENGTHS))))])[0].logprobs
    if dist.get_rank() == 0:
        save_file(full_weights, place / "weights.safetensors")
        save_file({"logprobs": logprobs}, place / "logprobs.safetensors")
