"""Answer an agent's requests with vLLM's serving classes, over the engine client of its episode.

vLLM parses the request, renders the chat template, parses reasoning and tool calls by the model's format, and writes OpenAI's
and Anthropic's answers and streams. Between the two it asks `_EpisodeEngine` for a completion, which draws it as any rollout
does. So the answers are those of `vllm serve`, but the tokens before a turn are exact (`conversation_tree.py`).

Temperature, top_p and top_k are the recipe's, because the loss learns from that distribution; those of requests have no effect.
A request that changes the distribution in another way (a grammar, a penalty, a forced tool call) is refused; `strict` of a tool
has no effect. A stream is sent when its turn is complete.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override
from vllm.config import DeviceConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from pipeline.data.call_parsers import parser_for
from pipeline.models.hugging_face import engine_overrides
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.rollout.agents.conversation_tree import AgentTurn, ConversationTree, Message, text_of
from pipeline.rollout.engine_client import DrawnTurn, EngineClient

if TYPE_CHECKING:
    from pipeline.config import PolicyConfig
    from pipeline.data.observations import Observations

CONTINUES = "hetstep_history"
"""Key of an engine input under which `_ExactRenderer` leaves the request's history."""
NAME = "policy"
"""Name of the served model."""


@dataclass(frozen=True)
class _History:
    """The messages of a request, and the turn that they continue."""

    messages: list[Message]
    tools: Any
    turn: DrawnTurn | None
    parse: Any  # (text, tokens) -> the message that an agent gets


@dataclass(frozen=True)
class ServedEpisode:
    """An episode whose requests are answered, and what its agent was told."""

    engine: EngineClient
    tree: ConversationTree = field(default_factory=ConversationTree)


EPISODE: ContextVar[ServedEpisode] = ContextVar("episode")
"""The episode of the request that the current task answers."""


class PolicyServing:
    """vLLM's handlers of requests, which all episodes of an engine share. Built before judges are forked.

    Callers set EPISODE first.
    """

    def __init__(self, policy: PolicyConfig, chat_template: str | None, observations: Observations | None) -> None:
        """Read the model's configuration and tokenizer. observations: encodes replies; None if episodes have one turn."""
        arguments = AsyncEngineArgs(
            model=policy.model_name,
            tokenizer=policy.tokenizer.name,
            max_model_len=policy.generation.vllm_cfg.max_model_len,
            dtype=policy.precision,
            hf_overrides=engine_overrides(policy),
            language_model_only=True,
            generation_config="vllm",
        )
        model_config = arguments.create_model_config()
        if model_config.hf_config.model_type == "gpt_oss":  # vLLM renders its messages without the chat template
            message = "got a model of gpt-oss with an environment of agents; expected another model, or kind tools"
            raise RecipeError(Problem("policy.model_name", "unsupported", message))
        model_config.quantization = None  # no weights here, and no GPU: environment ranks may have none
        tool_parser = policy.generation.tool_parser or parser_for(chat_template or "")
        reasoning_parser = policy.generation.reasoning_parser
        options: dict[str, Any] = {
            "request_logger": None,
            "chat_template": chat_template,
            "chat_template_content_format": "auto",
            "enable_auto_tools": tool_parser is not None,
            "tool_parser": tool_parser,
            "default_chat_template_kwargs": policy.tokenizer.chat_template_kwargs or {},
        }
        client: Any = _EpisodeEngine(VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu")))
        self.models = OpenAIServingModels(client, [BaseModelPath(name=NAME, model_path=model_config.model)])
        parts = client, self.models
        renderer = _ExactRenderer(observations, model_config, client.renderer, reasoning_parser=reasoning_parser, **options)
        renderer.warmup()  # so that judges share what it loads
        options["reasoning_parser"] = reasoning_parser or ""
        self.chat = OpenAIServingChat(*parts, "assistant", online_renderer=renderer, **options)
        self.messages = AnthropicServingMessages(*parts, "assistant", online_renderer=renderer, **options)
        self.responses = OpenAIServingResponses(*parts, renderer, **options)
        self.completions = OpenAIServingCompletion(*parts, online_renderer=renderer, request_logger=None)


class _ExactRenderer(OnlineRenderer):
    """Renders a request, and replaces the tokens of a history that the policy has seen by those that it has seen."""

    def __init__(self, observations: Observations | None, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._observations = observations

    @override
    async def preprocess_chat(self, request: Any, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        for tool in request.tools or ():
            getattr(tool, "function", tool).strict = False  # a grammar of the arguments, which some clients ask for by default
        rendered: Any = await super().preprocess_chat(request, messages, *args, **kwargs)
        conversation, (engine_input,) = rendered
        tools, history = kwargs.get("tool_dicts"), list(map(_with_text, conversation))
        parser_class, options = self.parser, dict(self.default_chat_template_kwargs)
        tokens = np.asarray(engine_input["prompt_token_ids"], np.int32)

        def parse(text: str, drawn: list[int]) -> Message:
            if parser_class is None:
                return {"role": "assistant", "content": text}
            parser = parser_class(
                self.renderer.get_tokenizer(), request.tools, chat_template_kwargs=options, model_config=self.model_config
            )
            _, content, calls = parser.parse(text, request, self.enable_auto_tools, drawn)
            functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or ()]
            return {"role": "assistant", "content": content or "", **({"tool_calls": functions} if functions else {})}

        turn = None
        if found := EPISODE.get().tree.find(history, tools, tokens):
            said, end = found
            turn, reply = said.turn, tokens[len(said.turn.before) + len(said.turn.tokens) :]
            if end < len(history):
                reply = self._encode(said, history[end:], tools)
            engine_input["prompt_token_ids"] = np.concatenate([turn.before, turn.tokens, reply]).tolist()
        engine_input[CONTINUES] = _History(history, tools, turn, parse)
        return conversation, [engine_input]

    def _encode(self, said: AgentTurn, replies: list[Message], tools: Any) -> np.ndarray:
        """Return the tokens between a turn of the policy and its next turn."""
        if self._observations is None:
            raise VLLMValidationError("the episode has had its turns (max_rollout_turns)")
        return self._observations.tokens(replies, int(said.turn.tokens[-1]), said.message, tools)


class _EpisodeEngine:
    """vLLM's engine client over the engine clients of episodes. It has what the serving classes use."""

    errored, is_running, is_stopped = False, True, False
    dead_error = RuntimeError("the engine has ended")
    input_processor = None

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse several answers to one request."""
        _check_count(n)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Draw a turn and yield it: at once, or token by token for a stream."""
        _check_distribution(sampling_params)
        episode, tokens = EPISODE.get(), np.asarray(prompt["prompt_token_ids"], np.int32)
        history: _History | None = prompt.get(CONTINUES)
        before = history.turn if history else episode.tree.find_tokens(tokens)
        reply = tokens[len(before.before) + len(before.tokens) :] if before else None
        most = episode.engine.settings.sampling.max_new_tokens
        options: Any = {"stop": sampling_params.stop or None, "max_new_tokens": min(sampling_params.max_tokens or most, most)}
        if before is not None:
            turn = await episode.engine.generate(before, reply, **options)
        else:
            turn = await episode.engine.generate(tokens, **options)
        outputs = list(self._outputs(turn, sampling_params, request_id))
        if history is None:
            episode.tree.add_tokens(turn)
        else:
            text = "".join(output.outputs[0].text for output in outputs)
            episode.tree.add(history.messages, history.tools, AgentTurn(turn, history.parse(text, turn.tokens.tolist())))
        for output in outputs:
            yield output

    def _outputs(self, turn: DrawnTurn, asked: SamplingParams, request_id: str) -> Iterator[RequestOutput]:
        """Yield a turn in vLLM's form: whole, or for a stream token by token."""
        before, drawn = turn.before.tolist(), turn.tokens.tolist()
        params = SamplingParams(
            stop=turn.stop or None,
            skip_special_tokens=asked.skip_special_tokens,
            spaces_between_special_tokens=asked.spaces_between_special_tokens,
            include_stop_str_in_output=asked.include_stop_str_in_output,
        )
        core = EngineCoreRequest(request_id, before, None, params, None, 0.0, None, None, None)
        detokenizer = IncrementalDetokenizer.from_new_request(self.renderer.get_tokenizer(), core)
        is_stream = asked.output_kind == RequestOutputKind.DELTA
        pieces = [[token] for token in drawn] if is_stream else [drawn]
        at = 0
        for piece in pieces:
            at += len(piece)
            finished = at == len(drawn)
            detokenizer.update(piece, finished and turn.finish == "stop" and not turn.stop)
            text = detokenizer.get_next_output_text(finished, is_stream)
            logprobs = None if asked.logprobs is None else self._logprobs(piece, turn.logprobs[at - len(piece) : at])
            output = CompletionOutput(0, text, piece, None, logprobs)
            if finished:
                output.finish_reason, output.stop_reason = turn.finish, turn.stop or None
            yield RequestOutput(request_id, None, before, None, [output], finished)

    def _logprobs(self, tokens: list[int], logprobs: np.ndarray) -> list[dict[int, Logprob]]:
        texts = convert_ids_list_to_tokens(self.renderer.get_tokenizer(), tokens)
        return [
            {token: Logprob(float(logprob), decoded_token=text)}
            for token, logprob, text in zip(tokens, logprobs, texts, strict=True)
        ]


def _with_text(message: Any) -> Message:
    """Return a message whose content is a text, as our encoder of replies and the comparison of histories want it."""
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else dict(message)


DISTRIBUTION = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "ignore_eos")
"""Sampling parameters that change the distribution and must have their defaults."""
CONSTRAINTS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words")
"""Sampling parameters that constrain the answer and must be absent."""
DEFAULTS = SamplingParams()


def _check_count(n: int) -> None:
    if n != 1:
        raise VLLMValidationError(f"n: got {n}; expected 1. Try {n} requests", parameter="n", value=n)


def _check_distribution(asked: SamplingParams) -> None:
    """Raise VLLMValidationError if a request asks for another distribution than the policy's, or for more than it has."""
    changed = [name for name in DISTRIBUTION if getattr(asked, name) != getattr(DEFAULTS, name)]
    changed += [name for name in CONSTRAINTS if getattr(asked, name)]
    for name in changed:
        hint = " Try tool_choice=auto" if name == "structured_outputs" else ""
        message = f"{name}: expected no value, since the policy learns from its own distribution.{hint}"
        raise VLLMValidationError(message, parameter=name)
    _check_count(asked.n)
    if asked.prompt_logprobs is not None or (asked.logprobs or 0) > 1:
        raise VLLMValidationError("logprobs: expected those of the sampled tokens alone. Try top_logprobs=0")
