"""The load-balancing loss of one sequence equals Megatron-Core's and transformers' functions."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from pipeline.train.load_balancing import BalancedRows, LoadBalancing


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_one_sequence_equals_megatron_and_transformers(scores, realm):
    tokens, experts, chosen, coefficient = 7, 6, 2, 0.3
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1)).requires_grad_()
    went, p = compute_routing_scores_for_aux_loss(logits, chosen, scores)
    theirs = switch_load_balancing_loss_func(p, went.sum(0), tokens, chosen, experts, coefficient)
    (expected,) = torch.autograd.grad(theirs, logits, retain_graph=True)
    balancing = LoadBalancing(coefficient, 1, [])
    rows = BalancedRows(torch.zeros(tokens, dtype=torch.int64), torch.tensor([1 / tokens**2, 0]))
    output = balancing.attach(torch.zeros(tokens, 1, requires_grad=True), p, went.bool(), chosen, rows, 0, True)
    (found,) = torch.autograd.grad(output.sum(), logits)
    torch.testing.assert_close(found, expected)
    value = balancing.metrics(dist.group.WORLD, torch.device("cpu"))["moe_aux_loss"]
    torch.testing.assert_close(coefficient * value, theirs.item())
    if scores == "softmax":  # transformers does not divide by k, and has one loss for all layers
        layers = tuple(logits.detach().clone().requires_grad_() for _ in range(3))
        of_all = load_balancing_loss_func(layers, experts, chosen)
        torch.testing.assert_close(chosen * value, of_all.item())
        of_one, *_ = torch.autograd.grad(of_all, layers)
        torch.testing.assert_close(of_one, chosen / len(layers) * expected / coefficient)
