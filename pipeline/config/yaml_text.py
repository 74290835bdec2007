"""Read and write YAML text as OmegaConf does: 1e-8 is a number, and a date is a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import SafeDumper, SafeLoader
else:
    try:
        from yaml import CSafeDumper as SafeDumper
        from yaml import CSafeLoader as SafeLoader
    except ImportError:  # PyYAML without libyaml
        from yaml import SafeDumper, SafeLoader

MOST_BRACKETS = 1000
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of PyYAML for a text that is not YAML or does not fit its tag; for `!!int a` a ValueError."""


class YAMLLoader(SafeLoader):
    """Loads YAML as OmegaConf does: 1e-8 is a number, and dates are texts."""


YAMLLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YAMLLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)$
        |[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$
        |[-+]?\.(?:inf|Inf|INF)$
        |\.(?:nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


class _YAMLDumper(SafeDumper):
    """Writes YAML with quotes around texts that `YAMLLoader` would otherwise read as another type."""


_YAMLDumper.yaml_implicit_resolvers = YAMLLoader.yaml_implicit_resolvers


def dump(value: Any, on_one_line: bool = False) -> str:
    """Return a value as YAML that loads as the same value, apart from interpolations."""
    width = 1 << 30 if on_one_line else None
    return yaml.dump(
        value, Dumper=_YAMLDumper, default_flow_style=on_one_line, width=width, sort_keys=False, allow_unicode=True
    )


def parse_value(text: str) -> Any:
    """Return the value of the text after `key=` on the command line. Raise ValueError for text that is not YAML."""
    if text.count("[") + text.count("{") > MOST_BRACKETS:  # many take the parser seconds
        raise ValueError(f"got more than {MOST_BRACKETS} brackets; expected a value. Try a YAML file")
    try:
        return yaml.load(text, YAMLLoader)  # a SafeLoader
    except NOT_YAML as error:
        raise ValueError(f"not YAML: {summary(error)}") from None


def summary(error: Exception) -> str:
    """Return the message of an error, shortened to one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        marked = ((error.context, error.context_mark), (error.problem, error.problem_mark))
        at = [f" at line {mark.line + 1}, column {mark.column + 1}" if mark else "" for _, mark in marked]
        error = ValueError(": ".join(f"{what}{where}" for (what, _), where in zip(marked, at, strict=True) if what))
    text = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
    text = text if len(text) <= 200 else f"{text[:196]} ..."
    unreadable = "cannot start any token" in text or "tab character" in text
    return (
        f"{text}. YAML indents with spaces, not tabs; a value that starts with @, % or ` needs quotes" if unreadable else text
    )
