"""A judge model on engines of the job, which rank 0 asks as it asks the policy's engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeline.algorithms.served_models import JudgeConfig
from pipeline.config import PolicyConfig
from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.data.judge_chat import JudgeChat
from pipeline.environments.llm_judge import AGAIN_TEMPERATURE
from pipeline.evaluation.judge import JudgeReply, JudgeRequest
from pipeline.roles import GenerateRole
from pipeline.rpc import RpcGroup
from pipeline.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineJudge:
    """A judge on engines of the job. A reply depends on the seed, the task, and the request's index and attempt."""

    def __init__(
        self,
        engines: Sequence[RpcGroup[GenerateRole]],
        section: JudgeConfig,
        policy: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind to the judge's engines, one group of ranks each. policy, tokenizer: of the judge.

        check: a function that is called before each wait. Raises RecipeError if the judge has no chat template, or one that
        leaves out the user's message.
        """
        self._chat = JudgeChat(tokenizer, policy.tokenizer.chat_template_kwargs, "evaluate.judge.tokenizer.chat_template")
        self._dispatch = Dispatcher(engines, seed, 1, None)
        self._section, self._tokenizer, self._check = section, tokenizer, check
        self._room = policy.generation.vllm_cfg.max_model_len
        self._open: dict[tuple[str, int], str] = {}  # (purpose, index) -> id of the request
        self._refused: list[JudgeReply] = []

    def submit(self, requests: Sequence[JudgeRequest]) -> None:
        """Send requests to the judge without waiting for the replies."""
        prompts: dict[tuple[str, int], list[Prompt]] = {}
        for request in requests:
            tokens = self._chat.encode([{"role": "user", "content": request.prompt}])
            if len(tokens) >= self._room:
                failure = (
                    f"the judge's prompt has {len(tokens)} tokens, and evaluate.judge.max_total_sequence_length is {self._room}"
                )
                self._refused.append(JudgeReply(request.id, failure=failure))
                continue
            purpose = f"judge/{request.task}/{request.id.rpartition('/')[2]}"
            self._open[purpose, request.index] = request.id
            prompts.setdefault((purpose, request.attempt), []).append(Prompt(request.index, tokens, "", {}))
        for (purpose, attempt), group in prompts.items():
            self._dispatch.send(group, RolloutSpec(purpose, 1, self._sampling(attempt)))

    def take(self, wait: bool) -> list[JudgeReply]:
        """Return the replies that have arrived. With `wait`, wait for at least one reply if a request is open."""
        replies, self._refused = self._refused, []
        self._check()
        if self._open:
            self._dispatch.receive(block=False)
            replies += self._take_replies()
        while wait and self._open and not replies:
            self._check()
            self._dispatch.receive()
            replies += self._take_replies()
        return replies

    def close(self) -> None:
        """Do nothing: the engines end with the job."""

    def _take_replies(self) -> list[JudgeReply]:
        purposes = {purpose for purpose, _ in self._open}
        return [self._reply(purpose, group) for purpose in sorted(purposes) for group in self._dispatch.take(purpose)]

    def _reply(self, purpose: str, group: RolloutGroup) -> JudgeReply:
        (rollout,) = group.rollouts
        text = str(self._tokenizer.decode(rollout.tokens, skip_special_tokens=True))
        name, failure = self._open.pop((purpose, group.prompt.index)), rollout.failure
        return JudgeReply(name, text, rollout.finish, failure, busy=bool(failure))

    def _sampling(self, attempt: int) -> Sampling:
        section = self._section
        return Sampling(AGAIN_TEMPERATURE if attempt else 0.0, 1.0, 0, section.max_new_tokens)
