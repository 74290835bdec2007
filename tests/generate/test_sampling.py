"""Sampling: the noise and the truncation of a draw."""

import numpy as np
import torch

from pipeline.generate.sampling import exponential_noise, keep_top, sample


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, in plain integers."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_noise_is_splitmix64():
    seed, position = 2**63 - 12345, 7
    # The reference value of the published generator from state 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]
    mixed = splitmix64(seed - 0x9E3779B97F4A7C15, 1)[0]
    bits = splitmix64(splitmix64(mixed, position + 1)[-1], 5)
    expected = [-np.log1p(-((b >> 32) + 0.5) * 2.0**-32) for b in bits]
    noise = exponential_noise(torch.tensor([seed]), torch.tensor([position]), 5)[0]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=1e-6)


def test_draws_follow_the_distribution():
    rows = 200_000
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for seeds, positions in (
        (torch.arange(rows), torch.zeros(rows, dtype=torch.int64)),  # neighbouring seeds
        (torch.full((rows,), 3), torch.arange(rows)),  # neighbouring positions
    ):
        tokens, logprobs = sample(probabilities.log().expand(rows, 4), torch.ones(rows), seeds, positions, None, None)
        counts = torch.bincount(tokens, minlength=4)
        chi_square = ((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum()
        assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001; the draws are fixed, so the result is deterministic
        torch.testing.assert_close(logprobs, probabilities.log()[tokens])
        pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        expected = (rows - 1) * torch.outer(probabilities, probabilities).flatten()
        assert ((pairs - expected) ** 2 / expected).sum() < 37.70  # 15 degrees, p = 0.001


def test_top_k_then_top_p():
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log().repeat(4, 1)
    kept = keep_top(logits, torch.tensor([4, 2, 4, 3]), torch.tensor([1.0, 1.0, 0.6, 0.5]))
    # Row 3: of 4/9, 3/9, 2/9 the first two exceed one half.
    assert (kept > -torch.inf).tolist() == [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]
    assert torch.equal(kept[0], logits[0])


def test_greedy_and_random_rows_in_one_batch():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    temperature = torch.tensor([0.0, 0.5, 0.0, 0.5])
    tokens, logprobs = sample(logits, temperature, torch.arange(4), torch.zeros(4, dtype=torch.int64), None, None)
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[tokens[0]])
    torch.testing.assert_close(logprobs[1], (logits[1] / 0.5).log_softmax(-1)[tokens[1]])
