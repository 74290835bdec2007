"""A model for lm-evaluation-harness (lm_eval 0.4.13, an optional package) whose requests this evaluation's engines answer.

Texts are tokenized as in the harness's own Hugging Face model: a context begins with the tokenizer's special tokens, a context
that is too long loses its first tokens, and the harness's own function cuts an answer's text. Each answered request is kept
under a hash of its tokens and parameters, so a restart asks only the missing requests.

Likelihood requests are computed in units that depend on the tasks alone. The seed of a sampled answer follows from its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports] optional package
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports] as above
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import (  # pyright: ignore[reportMissingImports] as above
    get_rolling_token_windows,
    make_disjoint_window,
)

from pipeline.algorithms.evaluate import LmEvalConfig
from pipeline.config import Recipe
from pipeline.coordination.dispatch import RolloutSpec
from pipeline.data.plain_text import PlainText
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.questions import Answer
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import LikelihoodRequest, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "evaluate.lm_eval"
PURPOSE = "lm_eval"
UNIT_TOKENS = 1 << 16
"""Tokens of a unit of likelihood requests, which one engine computes alone. They fill several engine batches."""
INDEX_DIGITS = 12  # hexadecimal digits of a request's hash, whose number is its prompt's index

Scored = tuple[float, bool]
"""The log-likelihood of a continuation, and whether greedy sampling would draw it."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A request for one sampled answer."""

    key: str
    context: str
    tokens: np.ndarray  # [P] int32
    sampling: Sampling


class EnginesLM(TemplateLM):
    """Answers the harness's requests with the engines."""

    def __init__(
        self,
        recipe: Recipe,
        config: LmEvalConfig,
        tokenizer: PreTrainedTokenizerBase,
        engines: Engines,
        answers: AnswerLog,
        task: str | None = None,
    ) -> None:
        """Bind to the engines. answers: the kept answers, to which new answers are added. task: the suite's, for messages.

        Raises RecipeError for a tokenizer with neither a beginning-of-sequence nor an end-of-sequence token.
        """
        super().__init__()
        self.tokenizer: Any = tokenizer
        self._longest = recipe.policy.generation.vllm_cfg.max_model_len  # tokens of a text
        self.max_length: int = self._longest - 1
        """Maximum number of input tokens of a text. The last token of a text is only scored, never an input."""
        self._config, self._seed = config, recipe.evaluate.seed
        task_keys = (f"evaluate.tasks.{task}.{name}" for name in ("data", "max_new_tokens", "format"))
        own_keys = (f"{KEY}.tasks", f"{KEY}.gen_kwargs.max_gen_toks", f"{KEY}.gen_kwargs")
        self._data_key, self._tokens_key, self._sampling_key = task_keys if task else own_keys
        self._template_kwargs = recipe.policy.tokenizer.chat_template_kwargs or {}
        self._begin = PlainText(tokenizer).begin
        special: list[Any] = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
        if not special:
            message = f"got {tokenizer.name_or_path}, which has neither a beginning-of-sequence nor an end-of-sequence token;"
            message += " expected one of them, as the context of a whole text"
            raise RecipeError(Problem("policy.tokenizer.name", "unsupported", message))
        self._prefix: int = special[0]
        self._prefix_text = str(tokenizer.decode([self._prefix]))
        self._engines, self._answers = engines, answers
        self._sizes: list[int] = []  # tokens of each text to score
        self._kept = {answer.question: answer for answer in answers.all()}
        self.drawn: dict[str, Answer] = {}
        """`request_key` of a request's arguments -> its sampled answer, for the requests of this call of the harness."""

    @property
    def warnings(self) -> list[str]:
        """The warning of texts that lose their first tokens, as a list of one text; empty if none is too long."""
        if not (cut := sum(size > self._longest for size in self._sizes)):
            return []
        message = f"{cut} of {len(self._sizes)} texts have more than {self._longest} tokens and lose their first tokens"
        return [f"{message}. Try policy.max_total_sequence_length={max(self._sizes)}"]

    # ---- what the harness asks of a tokenizer -------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that is the context of a text without a context."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text. add_special_tokens: None adds the special tokens unless the text begins with them."""
        begins = not string.startswith(self._prefix_text) if add_special_tokens is None else add_special_tokens
        return [*(self._begin if begins else ()), *self.tokenizer(string, add_special_tokens=False).input_ids]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's cache."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template for the harness's records, or "" if the argument is False."""
        return self.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. add_generation_prompt: False if the last message begins the answer."""
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        options |= {"continue_final_message": not add_generation_prompt, **self._template_kwargs}
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except jinja2.exceptions.TemplateError:  # of a template without the role `system`
            messages = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(messages, **options)

    # ---- likelihood ---------------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Scored]:
        return self._scores([self._scorable(*request) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        windows = [
            [
                (("", ""), *make_disjoint_window(window))
                for window in get_rolling_token_windows(self.tok_encode(*request.args), self._prefix, self.max_length, 1)
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for text_windows in windows for window in text_windows]))
        return [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]

    def _scorable(self, words: tuple[str, str], context: Sequence[int], continuation: Sequence[int]) -> LikelihoodRequest:
        if not 0 < len(continuation) <= self.max_length:
            message = f"the continuation {words[1][:60]!r} has {len(continuation)} tokens; expected 1 to {self.max_length}"
            raise RecipeError(Problem(self._data_key, "bad-record", message))
        tokens = np.array([*context, *continuation], np.int32)
        self._sizes.append(len(tokens))
        tokens = tokens[-self._longest :]
        first = len(tokens) - len(continuation)
        return LikelihoodRequest(_hash(["likelihood", tokens.tolist(), first]), tokens, first)

    def _scores(self, requests: Sequence[LikelihoodRequest]) -> list[Scored]:
        """Return the score of each request. Equal requests are asked once. A unit is always asked whole."""
        units = list(_units({request.id: request for request in requests}.values()))
        missing = [unit for unit in units if not all(request.id in self._kept for request in unit)]
        for i, likelihoods in self._engines.likelihoods(missing):
            for request, likelihood in zip(missing[i], likelihoods, strict=True):
                if request.id not in self._kept:
                    score = float(np.sum(likelihood.logprobs, dtype=np.float64))
                    self._keep(Answer(request.id, 0, score, {"greedy": float(likelihood.greedy.all())}))
        answers = [self._kept[request.id] for request in requests]
        return [(float(answer.score or 0.0), bool(answer.metrics["greedy"])) for answer in answers]

    def _keep(self, answer: Answer) -> None:
        self._answers.add(answer)
        self._kept[answer.question] = answer

    # ---- generation ---------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each request's answer, up to the stop text that ends it."""
        drawings, untils, repetitions = [], [], {}
        for request in requests:
            context, arguments = request.args
            sampling, until = self._sampling(arguments)
            tokens = self._prompt(context, sampling.max_new_tokens)
            key = _hash(["generate", tokens.tolist(), *_values(sampling)])
            if sampling.temperature > 0:  # each repetition is an answer of its own
                repetitions[key] = repetitions.get(key, -1) + 1
                key = _hash([key, repetitions[key]])
            drawings.append(_Drawing(key, context, tokens, sampling))
            untils.append(until)
            self.drawn[request_key(request.args)] = Answer(key, 0, None)
        self._draw({drawing.key: drawing for drawing in drawings if drawing.key not in self._kept}.values())
        self.drawn = {name: self._kept.get(answer.question, answer) for name, answer in self.drawn.items()}
        texts = [self._kept[drawing.key].text for drawing in drawings]
        thinking = self._config.think_end_token
        return [postprocess_generated_text(text, until, thinking) for text, until in zip(texts, untils, strict=True)]

    def _draw(self, drawings: Iterable[_Drawing]) -> None:
        alike: dict[Sampling, list[_Drawing]] = {}
        for drawing in drawings:
            alike.setdefault(drawing.sampling, []).append(drawing)
        for sampling, members in alike.items():
            by_index = {int(drawing.key[:INDEX_DIGITS], 16): drawing for drawing in members}
            prompts = [Prompt(index, drawing.tokens, "", {}) for index, drawing in by_index.items()]
            for group in self._engines.generate(prompts, RolloutSpec(PURPOSE, 1, sampling), self._seed):
                self._keep(self._answer(by_index[group.prompt.index], group.rollouts[0]))

    def _answer(self, drawing: _Drawing, rollout: Rollout) -> Answer:
        text = str(self.tokenizer.decode(rollout.tokens, skip_special_tokens=True))
        prompt, count = drawing.context, rollout.drawn_tokens
        return Answer(drawing.key, 0, 0.0, prompt=prompt, text=text, tokens=count, finish=rollout.finish)

    def _prompt(self, context: str, max_new_tokens: int) -> np.ndarray:
        """Return as many last tokens of a context as leave room for the answer, [P] int32. Raises RecipeError for no room."""
        room = self.max_length - max_new_tokens
        if room < 1:
            message = f"got a task with max_gen_toks {max_new_tokens}; expected fewer than {self.max_length} tokens"
            hint = f"Try a larger policy.max_total_sequence_length, or a smaller {self._tokens_key}"
            raise RecipeError(Problem(self._tokens_key, "too-large", f"{message}. {hint}"))
        return np.asarray(self.tok_encode(context) or [self.prefix_token_id], np.int32)[-room:]

    def _sampling(self, arguments: dict[str, Any]) -> tuple[Sampling, list[str]]:
        """Return (sampling parameters, stop texts) of a request. Raises RecipeError for keys that the engines lack."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self._config.max_gen_toks))
        eos = str(self.tokenizer.decode([self.eot_token_id]))
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        most, sampled, temperature = options.pop("max_gen_toks"), options.pop("do_sample"), options.pop("temperature", 0.0)
        top_p, top_k = options.pop("top_p", 1.0), options.pop("top_k", 0)
        if unknown := [name for name, value in options.items() if value is not None]:
            message = f"a task sets {', '.join(unknown)}, which the engines do not support; expected until, max_gen_toks,"
            raise RecipeError(Problem(self._sampling_key, "unsupported", f"{message} do_sample, temperature, top_p or top_k"))
        greedy = not sampled or temperature == 0
        stop = tuple(text for text in until if text)
        narrowed = (0.0, 1.0, 0) if greedy else (float(temperature), float(top_p), max(0, int(top_k or 0)))
        return Sampling(*narrowed, max_new_tokens=most, stop=stop), until


def request_key(arguments: Sequence[Any]) -> str:
    """Return the hash of a request's arguments, which are its context and its generation parameters."""
    return _hash(list(arguments))


def _values(sampling: Sampling) -> list[Any]:
    return [sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, list(sampling.stop)]


def _hash(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:32]


def _units(requests: Iterable[LikelihoodRequest]) -> Iterator[list[LikelihoodRequest]]:
    """Yield the requests as units of successive requests with at least UNIT_TOKENS tokens, except for the last unit."""
    unit, size = [], 0
    for request in requests:
        unit.append(request)
        size += len(request.tokens)
        if size >= UNIT_TOKENS:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit
