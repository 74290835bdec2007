"""Checks and limits of requests that both backends share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.types import LikelihoodRequest, Request


def new_token_limit(request: Request, max_model_len: int) -> int:
    """Return how many tokens may be drawn for `request`.

    Raises ValueError, naming the request, if its prompt is empty or leaves no room.
    """
    if not len(request.tokens):
        raise ValueError(f"request {request.id}: the prompt is empty")
    room = max_model_len - len(request.tokens)
    if room < 1:
        raise ValueError(
            f"request {request.id}: a prompt of {len(request.tokens)} tokens leaves no room for a new one"
            f" in max_model_len {max_model_len}"
        )
    return min(room, request.sampling.max_new_tokens)


def check_pending(ids: list[str], pending: Collection[str]) -> None:
    """Raise ValueError, naming the request, if one of `ids` is not pending."""
    for id in ids:
        if id not in pending:
            raise ValueError(f"request {id}: the engine has no such request, or has returned its completion")


def check_likelihoods(requests: Sequence[LikelihoodRequest], max_model_len: int, pending: int) -> None:
    """Raise ValueError, naming the request, if it cannot be scored, and RuntimeError if a request is pending."""
    if pending:
        raise RuntimeError(f"likelihoods: {pending} requests are pending")
    for request in requests:
        length = len(request.tokens)
        if not 1 <= request.first < length:
            got = f"got first={request.first} with {length} tokens"
            raise ValueError(f"request {request.id}: {got}; expected 1 to {length - 1}")
        if length > max_model_len:
            raise ValueError(f"request {request.id}: got {length} tokens; expected at most max_model_len {max_model_len}")
