"""The error that every check of a recipe raises."""

from __future__ import annotations


class RecipeError(ValueError):
    """Something in the recipe is wrong; the message says what, where, and what would be right."""
