"""Import and check a class that a registry lists by the name of its file, such as an algorithm or a tracker."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any


def load(package: str, name: str, kind: str, base: type[Any] = object) -> type[Any]:
    """Return the class `kind` in the file `name` of a package. Its attribute `Section` has its keys of the recipe.

    Raises TypeError if the class is not a subclass of `base`, or for its Section as `check_section` does.
    """
    module = import_module(f"{package}.{name}")
    registered = getattr(module, kind, None)
    if not (isinstance(registered, type) and issubclass(registered, base)):
        expected_kind = "class" if base is object else f"subclass of {base.__name__}"
        expected = f"a {expected_kind} in {package.replace('.', '/')}/{name}.py"
        raise TypeError(f"{package}.CLASSES['{name}']: got '{kind}'; expected {expected}")
    check_section(registered, name)
    return registered


def check_section(registered: type[Any], name: str) -> None:
    """Raise TypeError if the Section of a class is not a dataclass or has a field without a default.

    A recipe may lack the section `name`, so all its keys need defaults.
    """
    module, section = registered.__module__, getattr(registered, "Section", None)
    if not (isinstance(section, type) and is_dataclass(section)):
        expected = f"expected a dataclass with the keys of {name}"
        raise TypeError(f"{module}.{registered.__name__}.Section: got {section}; {expected}")
    for field in fields(section):
        if field.default is MISSING and field.default_factory is MISSING:
            key = f"{module}.{section.__name__}.{field.name}"
            raise TypeError(f"{key}: got no default; expected one. Try None, which a check of the recipe refuses")
