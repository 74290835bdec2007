"""Command lines of `key=value`: what a command keeps for itself, and what overrides the recipe."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.config import RecipeError


def split(arguments: list[str], own: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(values of the command's own keys, all other arguments as they are). Raises RecipeError for what is not key=value."""
    special: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            raise RecipeError(f"{argument!a} on the command line is not UTF-8")
        key, equals, value = argument.partition("=")
        if not equals:
            raise RecipeError(f"'{argument}' on the command line is not key=value")
        if key in own:
            special[key] = value
        else:
            overrides.append(argument)
    return special, overrides
