"""SFT: the mean negative log-likelihood of counted tokens."""

import torch

from pipeline.algorithms.loss import sft_loss
from pipeline.types import LossOutput, Outputs
from tests.algorithms.packed import Packed, assert_split_invariant, differences, random_packed

LENGTHS = (5, 3, 7, 2)


def loss_of(packed: Packed) -> LossOutput:
    return sft_loss(Outputs(logprobs=packed.leaf), packed.batch, packed.counts)


def reference_loss(logits: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Return torch's cross-entropy on padded rows, with label -100 where the mask is False."""
    labels = torch.where(packed.batch.loss_mask, packed.batch.tokens, -100)
    rows = torch.nn.utils.rnn.pad_sequence(logits.split(packed.batch.lengths), batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(labels.split(packed.batch.lengths), batch_first=True, padding_value=-100)
    return torch.nn.functional.cross_entropy(rows.flatten(0, 1), padded.flatten())


def largest_differences() -> dict[str, tuple[int, float, float]]:
    def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        packed = random_packed(LENGTHS, seed)
        logits = torch.randn(len(packed.leaf), 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        logits.requires_grad_()
        logprobs = logits.log_softmax(-1).gather(-1, packed.batch.tokens[:, None])[:, 0]
        loss = sft_loss(Outputs(logprobs=logprobs), packed.batch, packed.counts).loss
        return loss, reference_loss(logits, packed), logits

    return {"SFT": differences(map(case, range(10)))}


def test_against_the_reference():
    ((cases, loss, gradient),) = largest_differences().values()
    assert cases == 10 and loss < 1e-14 and gradient < 1e-14


def test_loss_by_hand():
    packed = random_packed((3, 2))
    with torch.no_grad():
        packed.leaf.copy_(torch.tensor([0.0, -1.0, -2.5, 0.0, -0.5]))
        packed.batch.loss_mask.copy_(torch.tensor([False, True, True, False, True]))
    out = loss_of(packed)
    assert out.loss.item() == 4 / 3 and out.metrics == {}


def test_gradcheck():
    packed = random_packed(LENGTHS)
    assert torch.autograd.gradcheck(lambda x: sft_loss(Outputs(logprobs=x), packed.batch, packed.counts).loss, (packed.leaf,))


def test_the_split_and_order_of_sequences_do_not_matter():
    packed = random_packed(LENGTHS)

    def share(piece: Packed) -> LossOutput:
        return sft_loss(Outputs(logprobs=piece.logprobs), piece.batch, packed.counts)

    assert_split_invariant(packed, ([[0], [1, 2, 3]], [[3, 1], [2, 0]], [[2], [0], [3], [1], []]), share, atol=1e-15)
