"""The registries of algorithms and trackers refuse a class that is not complete."""

import re
import sys
import types
from dataclasses import make_dataclass

import pytest

from pipeline.algorithms.algorithm import Algorithm
from pipeline.seams.registered_class import load


@pytest.mark.parametrize(("package", "base"), [("pipeline.algorithms", Algorithm), ("pipeline.trackers", object)])
@pytest.mark.parametrize(
    ("kind", "section", "says"),
    [
        ("Confidence", None, "CLASSES['made']: got 'Confidence'; expected a {of} in {folder}/made.py"),
        ("Made", None, "Made.Section: got None; expected a dataclass with the keys of made"),
        ("Made", make_dataclass("Keys", [("bonus", float)]), "Keys.bonus: got no default; expected one"),
    ],
)
def test_an_incomplete_class_is_refused(monkeypatch, package, base, kind, section, says):
    of = "subclass of Algorithm" if base is Algorithm else "class"
    module = types.ModuleType(f"{package}.made")
    module.Made = type("Made", (base,), {"Section": section} if section else {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(TypeError, match=re.escape(says.format(of=of, folder=package.replace(".", "/")))):
        load(package, "made", kind, base)
