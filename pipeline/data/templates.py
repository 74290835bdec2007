"""Decide which chat template a model uses, and check that it renders the user's text.

A recipe's `tokenizer.chat_template` is the text of a Jinja template, the path of a file with one, a folder whose tokenizer has
one, or the name of one of several templates of the tokenizer. null and `default` mean the tokenizer's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from pipeline.config import TokenizerConfig
from pipeline.data.turn_ends import QUESTION, RENDER_ERRORS
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import is_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "policy.tokenizer.chat_template"
TEMPLATE_FILE, NAMED_TEMPLATES, SETTINGS = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
MAX_BYTES = 4 << 20  # of a file with a template; published ones have some thousand

Template = str | dict[str, str] | None
"""A tokenizer's `chat_template`: a template, several by name, or none."""


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """The template that applies, and where it comes from."""

    template: Template
    source: str  # a path, "the recipe", or "the tokenizer"

    @property
    def digest(self) -> str:
        """The first digits of the SHA-256 of the template."""
        text = self.template if isinstance(self.template, str) else json.dumps(self.template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def choose_template(config: TokenizerConfig, default: Template, key: str = KEY) -> ChosenTemplate:
    """Return the template that a recipe names, else `default`, the tokenizer's own.

    Raises RecipeError, about the recipe's `key`, for a text that is neither a template, nor the path of one, nor a name in
    `default`.
    """
    choice = config.chat_template
    if choice is None or choice.lower() == "default":
        return ChosenTemplate(default, "the tokenizer")
    if is_template(choice):
        return ChosenTemplate(choice, "the recipe")
    if isinstance(default, dict) and choice in default:
        return ChosenTemplate(default[choice], f"the tokenizer, by the name {choice}")
    path = Path(choice)
    if path.is_dir():
        template, source = folder_template(path)
        if template is None:
            message = f"got {choice}; expected a folder whose tokenizer has a chat template. Try the path of a template"
            raise RecipeError(Problem(key, "missing-value", message))
        return ChosenTemplate(template, str(source))
    return ChosenTemplate(_read(path, key, list(default) if isinstance(default, dict) else ()), str(path))


def folder_template(folder: Path) -> tuple[Template, Path | None]:
    """Return (chat template, its path) of the tokenizer in a folder; (None, None) if it has none.

    The choice among several files is that of transformers. Raises RecipeError for a file that cannot be read.
    """
    named = {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if (default := folder / TEMPLATE_FILE).exists():
        named["default"] = default
    if named:
        texts: dict[str, str] = {name: _read(path, str(path)) for name, path in named.items()}
        return (texts["default"], default) if [*texts] == ["default"] else (texts, folder / NAMED_TEMPLATES)
    if not (path := folder / SETTINGS).exists():
        return None, None
    try:
        templates = json.loads(_read(path, str(path))).get("chat_template")
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecipeError(Problem(str(path), "bad-format", f"not the settings of a tokenizer: {error}")) from None
    return (templates, path) if templates else (None, None)


def check_template(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None, key: str = KEY
) -> None:
    """Raise RecipeError, about the recipe's `key`, if a template has a syntax error or omits the user's text from prompts.

    Other errors of the template pass: they may depend on the record, such as a missing system prompt.
    """
    messages = [{"role": "user", "content": QUESTION}]
    options = {**(template_kwargs or {}), "tokenize": False, "add_generation_prompt": True}
    try:
        text = str(tokenizer.apply_chat_template(messages, **options))
    except jinja2.TemplateSyntaxError as error:  # of every conversation, unlike other errors
        message = f"line {error.lineno}: {error.message}; expected a Jinja template"
        raise RecipeError(Problem(key, "bad-format", message)) from None
    except RENDER_ERRORS:
        return
    if QUESTION not in text:
        excerpt = text if len(text) <= 80 else f"{text[:80]}..."
        message = f"renders the prompt {QUESTION!r} as {excerpt!r}; expected the user's text in it. Try a Jinja template with"
        raise RecipeError(Problem(key, "unsupported", f"{message} {{{{ message['content'] }}}}, the path of one, or null"))


def check_tools(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None,
    tools: Sequence[dict[str, Any]],
    key: str = KEY,
) -> None:
    """Raise RecipeError, about the recipe's `key`, if a template does not render the names of tools. Other errors pass."""
    if not tools:
        return
    names = [str(tool.get("function", {}).get("name", "")) for tool in tools]
    messages = [{"role": "user", "content": QUESTION}]
    options: Any = {**(template_kwargs or {}), "tokenize": False, "add_generation_prompt": True}
    try:
        texts = [str(tokenizer.apply_chat_template(messages, **{**options, "tools": shown})) for shown in (None, [*tools])]
    except RENDER_ERRORS:
        return
    if missing := [name for name in names if texts[0].count(name) == texts[1].count(name)]:
        message = f"does not show the tool {missing[0]} of the prompts' environment; expected a template that renders tools"
        remedy = "Try the path of one, or env.NAME.kwargs.in_prompts=true if prompts describe tools and their format"
        raise RecipeError(Problem(key, "unsupported", f"{message}. {remedy}"))


def _read(path: Path, key: str, names: Sequence[str] = ()) -> str:
    """Return the text of a template's file. names: the names of the tokenizer's own templates, for a message."""
    try:
        return user_files.read_text(path, MAX_BYTES)
    except FileNotFoundError:
        named = f"one of the tokenizer's own ({', '.join(names)})" if names else "null for the tokenizer's own"
        message = f"got {str(path)!r}; expected a Jinja template, or the path of a file or folder with one. Try {named}"
        raise RecipeError(Problem(key, "file-not-found", message)) from None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(Problem(key, "unreadable", f"{path}: {reason}")) from None
