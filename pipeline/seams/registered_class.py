"""Import a class that a registry lists by the name of its file, and check it: an algorithm, a tracker."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any


def load(package: str, name: str, kind: str, base: type[Any] = object) -> type[Any]:
    """Return the class `kind` of the file `name` of a package, with its keys of the recipe in `Section`.

    Raises TypeError if it is no subclass of `base`, and for a Section that is no dataclass, or whose fields lack defaults: a
    recipe need not have the section.
    """
    module = import_module(f"{package}.{name}")
    registered = getattr(module, kind, None)
    if not (isinstance(registered, type) and issubclass(registered, base)):
        expected_kind = "class" if base is object else f"subclass of {base.__name__}"
        expected = f"a {expected_kind} in {package.replace('.', '/')}/{name}.py"
        raise TypeError(f"{package}.CLASSES['{name}']: got '{kind}'; expected {expected}")
    section = getattr(registered, "Section", None)
    if not (isinstance(section, type) and is_dataclass(section)):
        raise TypeError(f"{module.__name__}.{kind}.Section: got {section}; expected a dataclass with the keys of {name}")
    for field in fields(section):
        if field.default is MISSING and field.default_factory is MISSING:
            key = f"{module.__name__}.{section.__name__}.{field.name}"
            raise TypeError(f"{key}: got no default; expected one. Try None, which a check of the recipe refuses")
    return registered
