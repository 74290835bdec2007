"""Read a tokenizer from its files without transformers, for checks before submission, which must not import torch.

`FileTokenizer` has the part of transformers' interface that `pipeline.data` uses, and treats the files as transformers does:
special tokens of tokenizer_config.json that tokenizer.json lacks get new ids; only the post-processor of tokenizer.json adds
BOS and EOS, so `add_bos_token` has no effect; jinja2 renders templates in the same sandbox.

Not handled: tokenizers without tokenizer.json; special tokens that only a tokenizer's class names.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.config import TokenizerConfig
from pipeline.data.columns import Message
from pipeline.data.templates import KEY, SETTINGS, ChosenTemplate, choose_template, folder_template
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

VOCABULARY, SPECIAL_TOKENS = "tokenizer.json", "special_tokens_map.json"
TOKENIZER_FILES = (VOCABULARY, "tokenizer.model", "vocab.json")
"""A folder with a tokenizer has one of these."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The tokens of a text."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]  # (begin, end) of each token in the text, in characters

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class FileTokenizer:
    """A tokenizer.json with its settings and chat template."""

    def __init__(self, folder: Path, config: TokenizerConfig, key: str = KEY) -> None:
        """Read the files in `folder`. key: the recipe's key of the chat template. Raises RecipeError if one cannot be read."""
        self.name_or_path = str(folder)
        settings = _settings(folder)
        self._tokenizer = read_tokenizer(folder / VOCABULARY)
        named = {name: _content(settings[name]) for name in NAMES if settings.get(name)}
        self.special_tokens_map: dict[str, str] = {name: text for name, text in named.items() if text}
        self._add_missing(settings, self.special_tokens_map.values())
        template, source = folder_template(folder)
        chosen = choose_template(config, template, key)
        self.chosen = ChosenTemplate(chosen.template, str(source)) if chosen.template is template and source else chosen
        self.chat_template = chosen.template

    def _add_missing(self, settings: Mapping[str, Any], named: Sequence[str] | Any) -> None:
        library = _load_library()
        listed = settings.get("added_tokens_decoder") or {}
        try:
            tokens: list[AddedToken] = [library.AddedToken(**listed[id]) for id in sorted(listed, key=int)]
        except (TypeError, ValueError) as error:
            path = f"{self.name_or_path}/{SETTINGS}"
            raise RecipeError(Problem(path, "bad-format", f"added_tokens_decoder: {error}")) from None
        tokens += [library.AddedToken(text, special=True) for text in named]
        present = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        if missing := [token for token in tokens if token.content not in present]:
            self._tokenizer = library.Tokenizer.from_str(self._tokenizer.to_str())  # others share the one that was read
            self._tokenizer.add_tokens(missing)

    # ---- transformers' interface --------------------------------------------------------------------------------------------

    @property
    def vocabulary_file(self) -> Path:
        """The path of tokenizer.json."""
        return Path(self.name_or_path) / VOCABULARY

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    is_fast = True  # a tokenizer.json gives offsets

    def __call__(self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> EncodedText:
        """Return the tokens of a text and, if they are asked for, their positions."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return EncodedText(encoding.ids, encoding.offsets if return_offsets_mapping else [])

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return self._tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens, including the special ones, by id."""
        return self._tokenizer.get_added_tokens_decoder()

    def convert_tokens_to_ids(self, text: str) -> int | None:
        """Return the id of a token, or of the unknown token if the vocabulary lacks the token."""
        id = self._tokenizer.token_to_id(text)
        return self.unk_token_id if id is None else id

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """Return the text of a token."""
        return self._tokenizer.id_to_token(id)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    bos_token = property(lambda self: self.special_tokens_map.get("bos_token"))
    eos_token = property(lambda self: self.special_tokens_map.get("eos_token"))
    unk_token = property(lambda self: self.special_tokens_map.get("unk_token"))
    pad_token = property(lambda self: self.special_tokens_map.get("pad_token"))
    bos_token_id = property(lambda self: self._id("bos_token"))
    eos_token_id = property(lambda self: self._id("eos_token"))
    unk_token_id = property(lambda self: self._id("unk_token"))
    pad_token_id = property(lambda self: self._id("pad_token"))

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template that renders a conversation. Raises ValueError if there is no template or none of this name."""
        template = self.chat_template
        if isinstance(template, dict):
            name = chat_template or ("tool_use" if tools is not None and "tool_use" in template else "default")
            if name in template:
                return template[name]
            if chat_template is None:
                raise ValueError(f"the tokenizer has no default chat template; it has: {', '.join(sorted(template))}")
        if (text := chat_template or template) is None or isinstance(text, dict):
            raise ValueError("the tokenizer has no chat template")
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Return a rendered conversation: its text, its tokens, or an `EncodedText`, by `tokenize` and `return_dict`."""
        template = _compile_template(self.get_chat_template(chat_template, tools))
        arguments = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = template.render(**arguments, **{**self.special_tokens_map, **variables})
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Callers share it, so do not change it. Raises RecipeError."""
    try:
        with user_files.open_file(path) as file:  # the library that reads it would wait for a pipe
            status = os.fstat(file.fileno())
        if status.st_size > user_files.MAX_JSON:
            raise OSError(errno.EFBIG, f"got {status.st_size:,} bytes; expected at most {user_files.MAX_JSON:,} bytes")
    except OSError as error:
        raise RecipeError(Problem(str(path), "unreadable", error.strerror or str(error))) from None
    return _read_tokenizer(str(path), status.st_mtime_ns, status.st_size)


def _load_library():
    import tokenizers  # slow; only recipes with a tokenizer.json need it

    return tokenizers


@functools.lru_cache(maxsize=4)
def _read_tokenizer(path: str, _changed: int, _size: int) -> Tokenizer:
    try:
        return _load_library().Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises plain Exception
        message = f"not a tokenizer: {error}. Try to fetch the model again"
        raise RecipeError(Problem(path, "bad-format", message)) from None


def _settings(folder: Path) -> dict[str, Any]:
    """Return the keys of tokenizer_config.json, and the keys of special_tokens_map.json (older transformers) that it lacks."""
    settings: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, SETTINGS):
        if (path := folder / name).exists():
            try:
                read = json.loads(user_files.read_text(path))
                settings |= {key: value for key, value in read.items() if name == SETTINGS or key in NAMES}
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise RecipeError(Problem(str(path), "bad-format", f"not the settings of a tokenizer: {error}")) from None
    return settings


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders {% generation %} blocks as their content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON, without escaping HTML's characters as jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compile_template(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    environment.filters["tojson"] = _to_json
    environment.globals.update(functions)
    return environment.from_string(template)
