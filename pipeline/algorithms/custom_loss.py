"""The policy's loss as a user's function: `loss_fn.custom` has its dotted path, `loss_fn.custom_kwargs` its arguments.

    def loss(outputs, batch, counts, **kwargs) -> LossOutput, or the loss as a scalar tensor

The arguments and the result are those of `Algorithm.loss`: types.py describes them. The result is this microbatch's share: a
sum over its tokens, divided by a count of the whole optimizer step (`reductions.masked_share` does both). Then gradients do not
depend on microbatches, packing or the parallel layout. That is the function's promise; a mean over `batch` breaks it.

`outputs` and `batch` have the inputs that the recipe's algorithm computes for its own loss. So keys of `loss_fn` and of the
algorithm still choose them: `batch.reference_logprobs` needs loss_fn.reference_policy_kl_penalty above 0, `outputs.entropy`
loss_fn.log_entropy, and `batch.old_logprobs` several updates in a step (it is None if the old policy is the current one).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from pipeline.recipe import user_code

if TYPE_CHECKING:
    from pipeline.algorithms.algorithm import Loss, Needs
    from pipeline.algorithms.sections import LossConfig
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch

SIGNATURE = "def loss(outputs, batch, counts, **kwargs)"
LENGTHS = (3, 5, 4, 2)
"""Lengths of the sequences of a dry call."""


def of_recipe(config: LossConfig) -> Loss | None:
    """Return the user's loss; None if the recipe names none. Raises errors of the import.

    The loss raises TypeError or ValueError if the function returns no loss.
    """
    if config.custom is None:
        return None
    path, function, kwargs = config.custom, user_code.load(config.custom), config.custom_kwargs

    def loss(outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        return checked(path, function(outputs, batch, counts, **kwargs))

    return loss


def checked(path: str, result: Any) -> LossOutput:
    """Return what the function at `path` returned as a LossOutput. Raises TypeError or ValueError if it is no loss."""
    import torch  # submission may lack it

    from pipeline.types import LossOutput

    output = LossOutput(result, {}) if isinstance(result, torch.Tensor) else result
    if not isinstance(output, LossOutput) or not isinstance(output.loss, torch.Tensor):
        shown = "None" if result is None else f"a {type(result).__name__}"
        raise TypeError(f"loss_fn.custom: {path} returned {shown}; expected a LossOutput, or a scalar tensor")
    if output.loss.shape != ():
        shape = tuple(output.loss.shape)
        raise ValueError(f"loss_fn.custom: {path} returned a loss of shape {shape}; expected a scalar. Try masked_share")
    wrong = [name for name, value in output.metrics.items() if not isinstance(value, torch.Tensor) or value.requires_grad]
    if wrong:
        raise TypeError(f"loss_fn.custom: {path}: metric {wrong[0]}: expected a tensor without a graph. Try .detach()")
    return output


def problem(function: Any, kwargs: Collection[str]) -> tuple[str, str] | None:
    """Return (code, why an object is not a loss with these kwargs), or None if it is. Does not call it."""
    if inspect.isclass(function) or not callable(function):
        got = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        return "wrong-type", f"got {got}; expected a function: {SIGNATURE}"
    if inspect.iscoroutinefunction(function):
        return "wrong-type", f"got an async function; expected {SIGNATURE}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature to check
        return None
    for names, code, expected in (
        ((), "wrong-type", "(outputs, batch, counts, **kwargs)"),
        (kwargs, "unknown-key", "loss_fn.custom_kwargs that fit"),
    ):
        try:
            signature.bind(None, None, None, **dict.fromkeys(names))
        except TypeError as error:
            if code == "wrong-type" and kwargs and "missing a required" in str(error):
                continue  # the kwargs may give it
            return code, f"got parameters {signature}; expected {expected}: {error}"
    return None


def dry_call(path: str, function: Callable[..., Any], kwargs: dict[str, Any], needs: Needs, together: int = 1) -> str | None:
    """Return why a loss fails on a tiny batch on the CPU, in two microbatches too, or None if it works. Imports torch.

    The batch has the inputs that `needs` names. together: sequences that stay in one microbatch, 2 for pairs.
    """
    import torch

    from pipeline.types import GlobalCounts

    def gradient(cuts: Collection[Collection[int]]) -> torch.Tensor:
        logits = torch.linspace(-2.0, -0.1, sum(LENGTHS), requires_grad=True)
        for cut in cuts:
            batch, outputs = _tiny(cut, logits, needs)
            counts = GlobalCounts(sum(LENGTHS) - len(LENGTHS), len(LENGTHS), len(LENGTHS))
            loss = checked(path, function(outputs, batch, counts, **kwargs)).loss
            if not loss.requires_grad:
                raise ValueError("its loss has no gradient: it does not depend on `outputs` with their graph")
            loss.backward()
        gradient = logits.grad
        assert gradient is not None
        if not gradient.isfinite().all():
            raise ValueError("its gradient is not finite on log-probs from -2 to -0.1")
        return gradient

    try:
        whole, parts = (
            gradient([range(len(LENGTHS))]),
            gradient([range(place, place + together) for place in range(0, len(LENGTHS), together)]),
        )
    except Exception as error:
        return f"a call on a tiny batch raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        return (
            "its gradient depends on the microbatches; expected a sum over tokens, divided by counts.tokens or"
            " counts.sequences. Try pipeline.algorithms.reductions.masked_share"
        )
    return None


def _tiny(cut: Collection[int], logits: Any, needs: Needs) -> tuple[PackedBatch, Outputs]:
    """Return a batch of some of the sequences of LENGTHS, and outputs that depend on `logits` [T]."""
    import torch

    from pipeline.types import Outputs, PackedBatch, TopK

    begins = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    where = torch.cat([torch.arange(begins[place], begins[place] + LENGTHS[place]) for place in cut])
    lengths = tuple(LENGTHS[place] for place in cut)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    fixed = torch.linspace(-1.5, -0.3, sum(LENGTHS))[where]
    top_k = TopK(torch.zeros(len(where), 2, dtype=torch.int64), torch.log(torch.full((len(where), 2), 0.4)))
    batch = PackedBatch(
        tokens=positions,
        positions=positions,
        cu_seqlens=ends,
        lengths=lengths,
        loss_mask=positions > 0,
        generate_logprobs=fixed,
        advantages=torch.where(where % 2 == 0, 1.0, -0.5),
        rewards=torch.ones(len(lengths)),
    )
    batch = dataclasses.replace(
        batch,
        old_logprobs=fixed if needs.old else None,
        reference_logprobs=fixed if needs.reference else None,
        teacher=top_k if needs.teacher_top_k else None,
        teacher_logprobs=fixed if needs.teacher_logprobs else None,
    )
    learned = logits[where]
    if needs.head == "values":
        return batch, Outputs(values=learned)
    of_top_k = TopK(top_k.tokens, learned[:, None] + top_k.logprobs) if needs.teacher_top_k else None
    return batch, Outputs(learned, -learned if needs.entropy else None, of_top_k)
