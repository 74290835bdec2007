"""Command lines of `key=value`: what a command keeps for itself, and what overrides the recipe."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.config import RecipeError

FOREIGN = "-+~"  # what keys begin with on other commands: options, and Hydra's overrides


def split(arguments: list[str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(values of the command's own keys, all other arguments as they are). Raises RecipeError for what is not key=value."""
    special: dict[str, str] = {}
    overrides = []
    for number, argument in enumerate(arguments):
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            raise RecipeError(f"{argument!a} on the command line is not UTF-8")
        key, equals, value = argument.partition("=")
        if not equals or key.startswith(tuple(FOREIGN)):
            following = arguments[number + 1] if number + 1 < len(arguments) else None
            why = "begins with what no key begins with" if equals else "is not key=value"
            raise RecipeError(f"'{argument}' on the command line {why}; {_instead(argument, following, own)}")
        if key in own:
            special[key] = value
        else:
            overrides.append(argument)
    return special, overrides


def _instead(argument: str, following: str | None, own: Collection[str]) -> str:
    """The key=value that may be meant by another command's way to say it."""
    option, equals, value = argument.partition("=")
    key = option.lstrip(FOREIGN)
    if key == option:
        return f"try recipe={argument}" if "recipe" in own else "try key=value"
    key = "recipe" if key in ("config", "config-path", "config-name") and "recipe" in own else key.replace("-", "_")
    if option.startswith("~"):
        value = "null"
    elif not equals:
        value = "true" if following is None or "=" in following or following.startswith(tuple(FOREIGN)) else following
    return f"try {key}={value}"
