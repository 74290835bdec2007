"""Prompts: plain text as lm-evaluation-harness writes it, chat templates, worked examples, prefixes, and lengths."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import RECIPES, DataConfig, DatasetConfig, PolicyConfig, TokenizerConfig, inspect
from pipeline.data.chat import Encoder
from pipeline.evaluation import scores
from pipeline.evaluation.prompts import PromptEncoder, encode
from pipeline.evaluation.questions import Answer, Question
from pipeline.evaluation.task_data import DroppedQuestions, TaskData
from tests.data.test_chat import CHATML, LLAMA3, tokenizer
from tests.problems import refused

THINKING = (  # as Qwen3's
    CHATML.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    )
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
QUESTION = Question("q", "Question: 3+5?\nAnswer:", " 8", {"answer": "8"}, index=7)
EXAMPLES = [Question("a", "Question: 2+2?\nAnswer:", " 4"), Question("b", "Question: 1+1?\nAnswer:", " 2")]


def encoder(template: str | None = CHATML, kwargs: dict | None = None, **keys: Any) -> PromptEncoder:
    task = TaskConfig(apply_chat_template=template is not None, env_name="math", **keys)
    return PromptEncoder("quiz", task, TokenizerConfig(chat_template_kwargs=kwargs), tokenizer(template))


def chatml(*turns: tuple[str, str], ends: str = "<|im_start|>assistant\n") -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns) + ends


def test_prompts_show_the_tools_of_the_environment():
    tool, own = ({"type": "function", "function": {"name": name}} for name in ("add", "look"))
    task = TaskConfig(apply_chat_template=True, env_name="math")
    shows = "{% for t in tools %}{{ t.function.name }}: {% endfor %}" + CHATML
    made = PromptEncoder("quiz", task, TokenizerConfig(), tokenizer(shows), [tool])
    assert made.prompt(QUESTION).task["template_options"] == {"tools": [tool]}
    assert made.text(QUESTION).startswith("add: <|im_start|>")
    assert made.text(replace(QUESTION, template_options={"tools": [own]})).startswith("look: ")
    with refused(("policy.tokenizer.chat_template", "unsupported")):
        PromptEncoder("quiz", task, TokenizerConfig(), tokenizer(CHATML), [tool])


def test_plain_text():
    assert encoder(None).text(QUESTION) == "Question: 3+5?\nAnswer:"
    worked = "Question: 2+2?\nAnswer: 4\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 3+5?\nAnswer:"
    assert encoder(None).text(QUESTION, EXAMPLES) == worked
    described = Question("q", QUESTION.prompt, description="Sums.\n\n")
    assert encoder(None, system_prompt="Be brief. ").text(described, EXAMPLES) == f"Be brief. Sums.\n\n{worked}"


def test_plain_text_with_the_beginning_of_the_answer():
    bare = Question("q", "3+5?", " 8")
    found = encoder(None, answer_prefix="The sum is").text(bare, [Question("a", "2+2?", " 4")])
    assert found == "2+2? The sum is 4\n\n3+5? The sum is"


def test_plain_text_has_the_tokenizers_special_tokens_as_in_training():
    loaded = tokenizer(None)
    found = encoder(None).prompt(QUESTION, EXAMPLES)
    assert found.tokens.tolist() == loaded(encoder(None).text(QUESTION, EXAMPLES)).input_ids
    assert (found.index, found.environment, found.tokens.dtype) == (7, "math", np.int32)
    assert found.task == {"text": encoder(None).text(QUESTION, EXAMPLES), "answer": "8"}


def test_a_chat_template_is_applied_as_in_training():
    for template in (CHATML, LLAMA3):
        trained = Encoder(tokenizer(template), TokenizerConfig(), DataConfig(), DatasetConfig())
        found = encoder(template).prompt(QUESTION)
        assert found.tokens.tolist() == trained.prompt({"input": QUESTION.prompt}).tolist()
        assert found.task == {"messages": [{"role": "user", "content": QUESTION.prompt}], "answer": "8"}


def test_the_systems_message():
    assert encoder(system_prompt="Be brief.").text(QUESTION) == chatml(("system", "Be brief."), ("user", QUESTION.prompt))
    described = Question("q", "3+5?", description="Sums.\n\n")
    assert encoder().text(described) == chatml(("system", "Sums."), ("user", "3+5?"))
    both = chatml(("system", "Be brief.\n\nSums."), ("user", "3+5?"))
    assert encoder(system_prompt="Be brief.").text(described) == both


def test_worked_examples_as_turns_and_in_the_users_message():
    first, second = (example.prompt for example in EXAMPLES)
    turns = [("user", first), ("assistant", "4"), ("user", second), ("assistant", "2"), ("user", QUESTION.prompt)]
    assert encoder().text(QUESTION, EXAMPLES) == chatml(*turns)
    in_one = f"{first} 4\n\n{second} 2\n\n{QUESTION.prompt}"
    assert encoder(few_shot_as_turns=False).text(QUESTION, EXAMPLES) == chatml(("user", in_one))


def test_the_beginning_of_the_answer_continues_the_assistants_turn():
    found = encoder(answer_prefix="The sum is").text(QUESTION, EXAMPLES[:1])
    turns = (("user", EXAMPLES[0].prompt), ("assistant", "The sum is 4"), ("user", QUESTION.prompt))
    assert found == chatml(*turns) + "The sum is"


def test_arguments_of_the_template():
    asked = chatml(("user", QUESTION.prompt))
    assert encoder(THINKING).text(QUESTION) == asked
    assert encoder(THINKING, {"enable_thinking": False}).text(QUESTION) == f"{asked}<think>\n\n</think>\n\n"
    assert encoder(THINKING, {"enable_thinking": True}).text(QUESTION) == asked


def test_conversations():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    asked = Question("q", turns)
    assert encoder().text(asked) == chatml(("user", "a"), ("assistant", "b"), ("user", "c"))
    begun = Question("q", turns[:2])  # the model continues the assistant's turn
    assert encoder().text(begun) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    own = Question("q", [{"role": "system", "content": "own"}, *turns[:1]])
    assert encoder(system_prompt="task's").text(own) == chatml(("system", "task's\n\nown"), ("user", "a"))
    for keys in ({"template": None}, {"few_shot_as_turns": False}):
        with refused(("evaluate.tasks.quiz.data", "bad-record")):
            encoder(**keys).text(asked, EXAMPLES)


def test_a_template_that_refuses_a_message_is_named():
    with refused(("evaluate.tasks.quiz.data", "bad-record")) as error:
        encoder(NO_SYSTEM, system_prompt="Be brief.").text(QUESTION)
    assert "question q: the chat template refuses messages with the roles system, user: System role" in str(error.value)


def test_questions_that_the_template_refuses_are_dropped_and_counted_beside_the_score():
    one = DroppedQuestions(drops=True)
    refused_one = Question("s", [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], index=8)
    read = TaskData((refused_one, QUESTION), {}, one)
    task, policy = TaskConfig(env_name="math", max_new_tokens=1), PolicyConfig(max_total_sequence_length=100)
    policy.generation.vllm_cfg.max_model_len = 100
    made, warnings = encode("quiz", task, read, policy, tokenizer(NO_SYSTEM))
    assert [prompt.index for prompt in made] == [7] and one.count == 1
    assert "dropped 1 bad record (" in warnings[0] and "question s" in warnings[0]
    parts = SimpleNamespace(config=task, warnings=warnings, dropped=one.count, metrics=lambda answers: {"score": {"q": [1.0]}})
    recipe = SimpleNamespace(name="n", policy=SimpleNamespace(model_name="m"), evaluate=SimpleNamespace(run=None, step=None))
    scored = scores.summarize(recipe, {"quiz": (parts, [Answer("q", 0, 1.0)])})
    assert scored["tasks"]["quiz"]["dropped"] == 1 and f"quiz: {warnings[0]}" in scored["warnings"]
    for drops, questions in ((False, (refused_one, QUESTION)), (True, (refused_one,))):
        with refused(("evaluate.tasks.quiz.data", "bad-record")):
            encode("quiz", task, TaskData(questions, {}, DroppedQuestions(drops)), policy, tokenizer(NO_SYSTEM))


def test_a_template_is_needed():
    with refused(("evaluate.tasks.quiz.apply_chat_template", "missing-value")):
        PromptEncoder("quiz", TaskConfig(), TokenizerConfig(), tokenizer(None))


@pytest.fixture(scope="module")
def policy() -> PolicyConfig:
    """Return a policy with room for 40 tokens."""
    loaded = inspect(str(RECIPES / "suites/tiny.yaml"), ["policy.model_name=m", "policy.max_total_sequence_length=40"])
    return loaded.recipe.policy


def encoded(policy: PolicyConfig, lengths: list[int], max_new_tokens: int) -> tuple[list[int], list[str]]:
    loaded: PreTrainedTokenizerBase = tokenizer(None)  # it adds <s>
    questions = tuple(Question(f"q{i}", "1" * (length - 1), index=i) for i, length in enumerate(lengths))
    task = TaskConfig(apply_chat_template=False, max_new_tokens=max_new_tokens)
    prompts, warnings = encode("quiz", task, TaskData(questions, {}), policy, loaded)
    return [len(prompt.tokens) for prompt in prompts], warnings


def test_prompts_that_leave_too_little_room_for_an_answer(policy: PolicyConfig):
    sizes, warnings = encoded(policy, [10, 12], 20)
    assert warnings == [] and sizes == [10, 12]
    _, warnings = encoded(policy, [10, 25, 30], 20)
    assert len(warnings) == 1 and "2 of 3 prompts leave room for fewer tokens than max_new_tokens 20" in warnings[0]
    assert warnings[0].endswith("Try policy.max_total_sequence_length=50")


def test_a_prompt_without_room_for_an_answer_is_refused(policy: PolicyConfig):
    with refused(("evaluate.tasks.quiz.data", "too-large")) as error:
        encoded(policy, [10, 40, 41], 5)
    message = "2 of 3 prompts leave no room for an answer in max_model_len 40: q1 (40 tokens), q2 (41 tokens)"
    assert message in str(error.value) and "Try policy.max_total_sequence_length=46" in str(error.value)


def test_text_that_the_tokenizer_does_not_know_is_a_warning(policy: PolicyConfig):
    task = TaskConfig(apply_chat_template=False, max_new_tokens=5)
    _, warnings = encode("quiz", task, TaskData((Question("q", "1\u2603\u2603"),), {}), policy, tokenizer(None))
    assert len(warnings) == 1 and warnings[0].startswith("2 of 4 tokens are <unk>, which stands for text")
