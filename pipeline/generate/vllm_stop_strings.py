"""Find stop strings in vLLM, which has no tokenizer here, by an object in place of each request's detokenizer.

vLLM then ends the request as it does for its own stop strings. This works on every rank alike and with batches in flight, and
vLLM drops drafted tokens after the string with their log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.config import TokenizerConfig
from pipeline.data.stop_strings import StopStrings


class _StopDetokenizer(IncrementalDetokenizer):
    """Collects the tokens of a request until they complete a stop string."""

    def __init__(self, finder: StopStrings, stop: Sequence[str]) -> None:
        super().__init__()
        self._finder, self._stop = finder, stop

    @override
    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        super().update(new_token_ids, stop_terminated)
        match = self._finder.find(self.token_ids, len(new_token_ids), self._stop)
        if match is None:
            return None
        del self.token_ids[match.length :]
        return match.string


class StopWatch:
    """Watches requests for their stop strings. The first request with stop strings loads the tokenizer."""

    def __init__(self, tokenizer: TokenizerConfig) -> None:
        self._finder = StopStrings(tokenizer)

    def watch(self, engine: LLMEngine, internal_id: str, stop: Sequence[str]) -> None:
        """Let a request that was just added end at its first stop string. internal_id: vLLM's own id of the request."""
        if stop:
            engine.output_processor.request_states[internal_id].detokenizer = _StopDetokenizer(self._finder, stop)
