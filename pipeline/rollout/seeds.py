"""Seeds of completions. They depend on the run's seed and on what is drawn alone, not on engines, ranks or time."""

from __future__ import annotations

import hashlib


def sampling_seed(seed: int, purpose: str, prompt: int, sample: int, turn: int = 0) -> int:
    """Return the seed of a completion, in [0, 2**63). It depends on the arguments alone, not on the engine or its requests."""
    return _hashed(f"{seed}/{purpose}/{prompt}/{sample}" + (f"/{turn}" if turn else ""))


def derived_seed(seed: int, draw: int, context: bytes = b"") -> int:
    """Return the seed of another draw of an episode, in [0, 2**63).

    seed: of the episode. draw: number of earlier draws after the same tokens. context: these tokens.
    """
    return _hashed(f"{seed}/{draw}/{hashlib.blake2b(context, digest_size=8).hexdigest()}")


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
