"""Draw one token per row, such that a row's draws depend only on its own seed and positions.

Gumbel-max: argmax(log p - log E) with E ~ Exp(1) independent per token is a draw from p. E is a pure function of (seed,
position, token), computed by SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014; its
constants are below). So no request keeps a generator, and one pass of tensor arithmetic serves all rows.
"""

from __future__ import annotations

import torch


def _to_signed(value: int) -> int:
    """Return the int64 with the bits of the unsigned 64-bit `value`; torch's int64 arithmetic wraps, so only bits matter."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _to_signed(0x9E3779B97F4A7C15)
_MIX_1 = _to_signed(0xBF58476D1CE4E5B9)
_MIX_2 = _to_signed(0x94D049BB133111EB)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of `x`; torch's own shift keeps the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of `x`, elementwise on int64."""
    x = (x ^ _shift(x, 30)).mul_(_MIX_1)
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Exp(1) draws [R, vocab_size] float32.

    seeds: [R] int64. positions: [R] int64; 0 is a request's first draw.
    """
    stream = _mix(_mix(seeds) + (positions + 1) * _GAMMA)
    counter = torch.arange(1, vocab_size + 1, device=seeds.device).mul_(_GAMMA)
    bits = _mix(stream[:, None] + counter)
    # The top 32 bits: small E wins the argmax, and -log1p(-u) keeps u's full resolution there.
    uniform = _shift(bits, 32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_()


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return logits [R, V] with -inf outside each row's top k and then outside its smallest set of probability top p.

    top_k: [R] int64. top_p: [R]. All logits that equal the least logit of a set belong to the set, as on the train ranks.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    outside = ordered < ordered.gather(-1, top_k[:, None] - 1)
    probabilities = ordered.masked_fill(outside, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # exclusive sum, so that the first token is always kept
    floor = ordered.masked_fill(outside | (before >= top_p[:, None]), torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < floor, -torch.inf)


def sample(
    logits: torch.Tensor,  # [R, V], any float type
    temperature: torch.Tensor | None,  # [R] float32; 0 is greedy; None: all greedy
    seeds: torch.Tensor,  # [R] int64
    positions: torch.Tensor,  # [R] int64, tokens drawn before
    top_k: torch.Tensor | None,  # [R] int64, V where there is no limit; None: no row has one
    top_p: torch.Tensor | None,  # [R] float32; given together with top_k
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [R] int64 and their log-probs [R] float32 under the sampling distribution (greedy rows: temperature 1)."""
    logits = logits.float()
    if temperature is None:
        logprobs = logits.log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        greedy = temperature == 0
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
        if top_k is not None and top_p is not None:
            logits = keep_top(logits, top_k, top_p)
        logprobs = logits.log_softmax(-1)
        noise = exponential_noise(seeds, positions, logits.shape[-1]).log_().mul_(~greedy[:, None])
        tokens = (logprobs - noise).argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
