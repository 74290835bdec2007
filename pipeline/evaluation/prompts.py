r"""Render the prompts of a task as tokens: system message, worked examples, the question, and the beginning of the answer.

Without a chat template a prompt is one text, in lm-evaluation-harness's form. With one worked example, whose target is " 4":
    Question: 2+2?\nAnswer: 4\n\nQuestion: 3+5?\nAnswer:
With a chat template, each worked example is two turns, or all examples are in the user's message (few_shot_as_turns).
answer_prefix begins the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.data.chat import unknown_text
from pipeline.data.plain_text import PlainText
from pipeline.data.rendering import ChatTemplate
from pipeline.data.templates import check_template, check_tools
from pipeline.evaluation.questions import Message, Question
from pipeline.evaluation.task_data import TaskData
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BETWEEN_EXAMPLES = "\n\n"
SHOWN_IDS = 3  # questions named in a message


def encode(
    name: str,
    task: TaskConfig,
    data: TaskData,
    policy: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[Prompt], list[str]]:
    """Return (prompts in the order of the questions, warnings).

    With data.bad_records=drop, questions that cannot be rendered are left out. Warnings are of dropped questions, of prompts
    that leave less room than max_new_tokens, so that answers may be cut earlier, and of text that the tokenizer does not know.
    Raises RecipeError, which names the questions, if prompts leave no room for an answer or the chat template refuses them.
    """
    encoder = PromptEncoder(name, task, policy.tokenizer, tokenizer, tools)
    prompts: list[Prompt] = []
    sizes: dict[str, int] = {}  # question's id -> tokens of its prompt
    for question in data.questions:
        with data.dropped.dropping():
            prompts.append(encoder.prompt(question, data.examples.get(question.id, ())))
            sizes[question.id] = len(prompts[-1].tokens)
    data.dropped.check(len(prompts))
    room = policy.generation.vllm_cfg.max_model_len
    longest = max(sizes.values(), default=0)
    hint = f"Try policy.max_total_sequence_length={longest + task.max_new_tokens}"
    if overlong := {id: size for id, size in sizes.items() if size >= room}:
        ids = ", ".join(f"{id} ({size} tokens)" for id, size in list(overlong.items())[:SHOWN_IDS])
        message = f"{len(overlong)} of {len(sizes)} prompts leave no room for an answer in max_model_len {room}: {ids}"
        raise RecipeError(Problem(f"evaluate.tasks.{name}.data", "too-large", f"{message}. {hint}"))
    warnings = data.dropped.warnings
    if cut := sum(size + task.max_new_tokens > room for size in sizes.values()):
        warning = f"{cut} of {len(sizes)} prompts leave room for fewer tokens than max_new_tokens {task.max_new_tokens}"
        warnings.append(f"{warning}. {hint}")
    if unknown := unknown_text(prompts, tokenizer):
        warnings.append(unknown)
    return prompts, warnings


class PromptEncoder:
    """Renders and tokenizes the questions of one task."""

    def __init__(
        self,
        name: str,
        task: TaskConfig,
        config: TokenizerConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Prepare the template. tools: JSON schemas that prompts show, if a question has none of its own.

        Raises RecipeError if the task needs a chat template that renders the user's messages and the tools, and the tokenizer
        has none.
        """
        self._key, self._task, self._tokenizer = f"evaluate.tasks.{name}", task, tokenizer
        self._plain, self._template = PlainText(tokenizer), ChatTemplate(tokenizer, config.chat_template_kwargs)
        tools = () if "tools" in (config.chat_template_kwargs or {}) else tools
        if task.apply_chat_template and not tokenizer.chat_template:
            message = f"got true, and the tokenizer {tokenizer.name_or_path} has no chat template. Try false"
            raise RecipeError(Problem(f"{self._key}.apply_chat_template", "missing-value", message))
        if task.apply_chat_template:
            check_template(tokenizer, config.chat_template_kwargs)
            check_tools(tokenizer, config.chat_template_kwargs, tools)
        self._tools: dict[str, Any] = {"tools": [*tools]} if tools else {}

    def prompt(self, question: Question, examples: Sequence[Question] = ()) -> Prompt:
        """Return the prompt of a question. The environment gets `Question.task`, and the prompt as "messages" or "text"."""
        context: dict[str, Any] = {}
        if self._task.apply_chat_template:
            context["messages"] = self.messages(question, examples)
            if options := self._tools | question.template_options:
                context["template_options"] = options
        else:
            context["text"] = self.text(question, examples)
        tokens = self.tokenize(self.text(question, examples))
        if not len(tokens):
            raise self._bad_record(question, "the prompt is empty: it has no tokens, and the tokenizer adds no BOS token")
        return Prompt(question.index, tokens, self._task.env_name or "", {**context, **question.task})

    def text(self, question: Question, examples: Sequence[Question] = ()) -> str:
        """Return the text that the model reads. Raises RecipeError, naming the question, if the chat template refuses it."""
        if not self._task.apply_chat_template:
            system = "".join(part for part in (self._task.system_prompt, question.description) if part)
            return system + self._in_one_text(question, examples, self._task.answer_prefix)
        messages = self.messages(question, examples)
        continued = messages[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not continued, "continue_final_message": continued}
        try:
            rendered = self._template.text(messages, **{**self._tools, **question.template_options, **options})
        except ValueError as error:
            raise self._bad_record(question, str(error)) from error
        return rendered + (self._task.answer_prefix or "")

    def messages(self, question: Question, examples: Sequence[Question] = ()) -> list[Message]:
        """Return the conversation that the chat template renders, without answer_prefix."""
        parts = [part for part in (self._task.system_prompt, question.description.strip()) if part]
        begin = [{"role": "system", "content": "\n\n".join(parts)}] if parts else []
        if not self._task.few_shot_as_turns:
            if isinstance(question.prompt, str):
                return [*begin, {"role": "user", "content": self._in_one_text(question, examples, None)}]
            if examples:
                raise self._bad_record(question, "its prompt is a conversation; expected few_shot_as_turns=true")
        for example in examples:
            answer = _join(self._task.answer_prefix or "", example.target.lstrip())
            begin += [*_turns(example), {"role": "assistant", "content": answer}]
        turns = _turns(question)
        if begin and begin[0]["role"] == turns[0]["role"] == "system":
            first = {"role": "system", "content": f"{begin[0]['content']}\n\n{turns[0]['content']}"}
            return [first, *begin[1:], *turns[1:]]
        return [*begin, *turns]

    def tokenize(self, text: str) -> np.ndarray:
        """Return the tokens of a text, [P] int32. The tokenizer adds its special tokens only without a chat template."""
        if self._task.apply_chat_template:
            return np.asarray(self._tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)
        return np.asarray(self._plain.tokens(text), dtype=np.int32)

    def _in_one_text(self, question: Question, examples: Sequence[Question], prefix: str | None) -> str:
        """Return the worked examples and the question as one text. prefix: the answer's beginning, or None."""
        begin = self._task.answer_prefix
        before = [
            _join(_join(self._bare(example), begin), example.target.lstrip()) if begin else self._bare(example) + example.target
            for example in examples
        ]
        return "".join(text + BETWEEN_EXAMPLES for text in before) + _join(self._bare(question), prefix or "")

    def _bare(self, question: Question) -> str:
        if not isinstance(question.prompt, str):
            raise self._bad_record(question, "its prompt is a conversation, which needs apply_chat_template=true")
        return question.prompt

    def _bad_record(self, question: Question, problem: str) -> RecipeError:
        return RecipeError(Problem(f"{self._key}.data", "bad-record", f"question {question.id or question.index}: {problem}"))


def _turns(question: Question) -> list[Message]:
    return [{"role": "user", "content": question.prompt}] if isinstance(question.prompt, str) else list(question.prompt)


def _join(before: str, after: str) -> str:
    """Join two texts by a space. Add no space if one text is empty or white space is already between them."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return before + after
    return f"{before} {after}"
