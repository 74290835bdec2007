"""How old is what a step trains on. The age of a token: the step, less the version of the weights that drew it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.types import RolloutGroup


def staleness(groups: Sequence[RolloutGroup], step: int, max_age: int) -> dict[str, float]:
    """Over the tokens that the policy drew: mean and highest age, and how many tokens have each age up to `max_age`.

    A rollout's first token is its oldest, so the highest age is also that of the rollout that was begun first. Raises
    RuntimeError if it is above `max_age`, which the buffer does not let happen.
    """
    tokens = [0] * (max_age + 1)
    for group in groups:
        for span in (span for rollout in group.rollouts for span in rollout.spans):
            age = step - span.version
            if not 0 <= age <= max_age:
                raise RuntimeError(f"prompt {group.prompt.index}: tokens of version {span.version} came to step {step}")
            tokens[age] += span.tokens
    drawn = max(1, sum(tokens))
    return {
        "async/age_mean": sum(age * n for age, n in enumerate(tokens)) / drawn,
        "async/age_max": float(max((age for age, n in enumerate(tokens) if n), default=0)),
        **{f"async/tokens_age_{age}": float(n) for age, n in enumerate(tokens)},
    }
