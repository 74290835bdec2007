"""Muon for sharded matrices, with AdamW for all other parameters.

Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982) updates a matrix by its momentum, orthogonalized by
Newton-Schulz iterations. These need the whole matrix, so each matrix has an owner among the ranks that hold parts of it. The
owner gathers the momentum, orthogonalizes it, and returns to each rank its part, as in arXiv 2502.16982, algorithm 1. Owners
have about equal work. The other steps are elementwise, and each rank computes them on its own parts. The numbers are
torch.optim.Muon's for the whole matrix, to the last bit: its iterations begin with a cast to bfloat16, so the momentum travels
in bfloat16 without a further rounding.

Replicas of the weights (HSDP) orthogonalize the same matrices, so that nothing travels between replicas.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz  # torch has no public names for them
from typing_extensions import override

from pipeline.boxes import Box
from pipeline.train.context_parallel import exchange
from pipeline.train.shards import local, local_box

ROUND = 1 << 24
"""The number of elements that an owner gathers at a time; at least one matrix. Its bfloat16 takes 34 MB."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix within a parameter."""

    box: Box  # of the parameter; of a stack of experts, its first size is 1
    transposed: bool = False  # [in, out] in place of [out, in]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), which adjust_lr_fn reads."""
        rows, columns = self.box.size[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def work(self) -> int:
        """The multiplications of one of its iterations, up to a factor."""
        return min(self.shape) ** 2 * max(self.shape)


Matrices = Mapping[nn.Parameter, Sequence[Matrix]]
MARK = "orthogonalizes"
"""Key of the parameter group of matrices."""


# ---- which rank orthogonalizes what -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MatrixTask:
    """A matrix, and the ranks of a replica that hold parts of it."""

    parameter: nn.Parameter
    matrix: Matrix
    parts: Mapping[int, Box]  # rank in the train component -> its part, a box of the parameter
    owner: int


def _holders(parameter: nn.Parameter, rank: int) -> dict[int, Box]:
    """Return {rank: its box} of the ranks of this rank's replica that hold a parameter."""
    if not isinstance(parameter, DTensor):
        return {rank: local_box(parameter)}
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    sizes = [
        [mesh.get_local_rank(dim)] if isinstance(placement, Replicate) else range(mesh.size(dim))
        for dim, placement in enumerate(parameter.placements)
    ]
    return {
        int(mesh.mesh[place]): local_box(parameter, dict(zip(names, place, strict=True))) for place in itertools.product(*sizes)
    }


def plan_rounds(matrices: Matrices, rank: int) -> list[list[_MatrixTask]]:
    """Return rounds of tasks in which this rank may take part; the first needs no communication.

    All ranks that hold a matrix plan it alike, and all ranks of the component have the same number of rounds, since the same
    parameters are cut in the same way in every replica and on every tensor-parallel rank.
    """
    alone: list[_MatrixTask] = []
    shared: dict[tuple[int, ...], list[tuple[nn.Parameter, Matrix, dict[int, Box]]]] = defaultdict(list)
    for parameter, of_parameter in matrices.items():
        holders, of_expert = _holders(parameter, rank), defaultdict(list)
        for other, box in holders.items() if parameter.dim() > 2 else ():
            for expert in range(box.offset[0], box.offset[0] + box.size[0]):
                of_expert[expert].append(other)  # a stack of many experts on many ranks has few overlaps
        for matrix in of_parameter:
            near = of_expert[matrix.box.offset[0]] if parameter.dim() > 2 else holders
            parts = {other: part for other in near if (part := holders[other].intersect(matrix.box)) is not None}
            if len(parts) == 1:
                alone += [_MatrixTask(parameter, matrix, parts, rank)] if rank in parts else []
            else:
                shared[tuple(holders)].append((parameter, matrix, parts))
    rounds = [alone]
    for of_mesh in shared.values():
        work: Counter[int] = Counter()
        of_owners: dict[int, list[list[_MatrixTask]]] = defaultdict(list)
        for parameter, matrix, parts in sorted(of_mesh, key=lambda item: -item[1].work):  # stable: alike on all ranks
            owner = min(parts, key=lambda other: (work[other], other))
            work[owner] += matrix.work
            own = of_owners[owner]
            if not own or sum(task.matrix.box.numel for task in own[-1]) + matrix.box.numel > ROUND:
                own.append([])
            own[-1].append(_MatrixTask(parameter, matrix, parts, owner))
        rounds += [list(itertools.chain(*tasks)) for tasks in itertools.zip_longest(*of_owners.values(), fillvalue=())]
    return rounds


# ---- the optimizer ------------------------------------------------------------------------------------------------------


class DistributedMuon(torch.optim.Optimizer):
    """torch.optim.Muon for whole matrices, of which each rank may hold a part, and torch.optim.AdamW for other parameters.

    The first parameter group has the matrices and torch.optim.Muon's options, the others have torch.optim.AdamW's.
    """

    def __init__(
        self,
        matrices: Matrices,
        others: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        adamw: Mapping[str, Any],
        device: torch.device | None = None,
    ):
        """others: parameter groups for AdamW. options: of torch.optim.Muon. adamw: options of torch.optim.AdamW.

        device: where matrices are orthogonalized; None: where the parameters are. Raises TypeError or ValueError for options
        that cannot be used.
        """
        checked = torch.optim.Muon([torch.zeros(1, 1)], **options)
        self._adamw = torch.optim.AdamW(others or [torch.zeros(1)], **adamw)
        self._matrices, self._device = matrices, device
        self._rounds: list[list[_MatrixTask]] | None = None
        of_muon = {"params": list(matrices), **checked.defaults, MARK: True}
        groups = [*([of_muon] if matrices else ()), *(self._adamw.param_groups if others else ())]
        super().__init__(groups, {})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have gradients. Collective over the train component. closure: must be None."""
        assert closure is None, "a step has one gradient"
        for group in self.param_groups:
            if MARK in group:
                self._step_matrices(group)
        # `load_state_dict` and schedules replace groups, and a new optimizer may take over this one's state.
        self._adamw.param_groups = [group for group in self.param_groups if MARK not in group]
        self._adamw.state = self.state
        self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            local(state["momentum_buffer"]).lerp_(local(parameter.grad), 1 - momentum)
            local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        if self._rounds is None:
            self._rounds = plan_rounds(self._matrices, dist.get_rank() if dist.is_initialized() else 0)
        alone, *shared = self._rounds
        for task in alone:
            (part,) = task.parts.values()
            self._apply(task, part, _orthogonal(task, self._update(task, part, group), group), group)
        for tasks in shared:
            self._step_round(tasks, group)

    def _step_round(self, tasks: Sequence[_MatrixTask], group: dict[str, Any]) -> None:
        """Gather the matrices of a round at their owners, orthogonalize them there, and apply each rank's part."""
        component = dist.group.WORLD
        assert component is not None  # otherwise no matrix has several holders
        rank, size = component.rank(), component.size()
        held = [task for task in tasks if rank in task.parts]
        owned = [task for task in tasks if task.owner == rank]
        here, there = [0] * size, [0] * size  # elements to and from the owner of each rank's parts, elements of owned matrices
        for task in held:
            here[task.owner] += task.parts[rank].numel
        for task in owned:
            for other, part in task.parts.items():
                there[other] += part.numel
        by_owner = sorted(held, key=lambda task: task.owner)  # stable: each owner's tasks keep their order
        sent = [self._update(task, task.parts[rank], group).flatten() for task in by_owner]
        gathered = exchange(self._joined(sent), component, here, there).split(there)
        taken = [0] * size
        results: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for task in owned:
            momentum = gathered[rank].new_empty(task.matrix.box.size)
            for other, part in task.parts.items():
                entries = gathered[other][taken[other] : taken[other] + part.numel]
                momentum[part.within(task.matrix.box)] = entries.view(part.size)
                taken[other] += part.numel
            result = _orthogonal(task, momentum, group)
            for other, part in task.parts.items():
                results[other].append(result[part.within(task.matrix.box)].flatten())
        returned = exchange(self._joined(list(itertools.chain(*results))), component, there, here)
        sizes = [task.parts[rank].numel for task in by_owner]
        for task, entries in zip(by_owner, returned.split(sizes), strict=True):
            part = task.parts[rank]
            self._apply(task, part, entries.view(part.size), group)

    def _joined(self, flat: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=self._device)

    def _update(self, task: _MatrixTask, part: Box, group: dict[str, Any]) -> torch.Tensor:
        """Return the momentum of this rank's part of a matrix before orthogonalization, in bfloat16 on the device."""
        parameter = task.parameter
        if parameter.grad is None:
            return torch.zeros(part.size, dtype=torch.bfloat16, device=self._device or parameter.device)
        within = part.within(local_box(parameter))
        gradient, buffer = local(parameter.grad)[within], local(self.state[parameter]["momentum_buffer"])[within]
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.bfloat16().to(self._device or update.device)

    def _apply(self, task: _MatrixTask, part: Box, orthogonal: torch.Tensor, group: dict[str, Any]) -> None:
        """Subtract this rank's part of an orthogonalized matrix, times the rate."""
        parameter = task.parameter
        if parameter.grad is not None:
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], torch.Size(task.matrix.shape))
            target = local(parameter)[part.within(local_box(parameter))]
            target.add_(orthogonal.to(target.device), alpha=-rate)


def _orthogonal(task: _MatrixTask, momentum: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return a whole matrix orthogonalized, in the shape of its box. momentum: is overwritten."""
    matrix = momentum.view(task.matrix.box.size[-2:])
    result = _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return result.reshape(task.matrix.box.size)
