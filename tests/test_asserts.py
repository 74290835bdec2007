"""Each test asserts something also where the values that it loops over are none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
SAME_LENGTH = ("enumerate", "reversed", "sorted", "list", "tuple", "set", "dict", "items", "values", "keys")
SAME_LENGTH += ("product", "permutations", "combinations")


def _is_written(node: ast.expr, written: set[str]) -> bool:
    """Return whether the source shows that there are values: literals, ranges, names of such, parameters of the test."""

    def nested(value: ast.expr) -> bool:
        return _is_written(value, written)

    match node:
        case ast.Tuple(elts) | ast.List(elts) | ast.Set(elts):
            return any(nested(element.value) if isinstance(element, ast.Starred) else True for element in elts)
        case ast.Dict(keys):
            return bool(keys)
        case ast.Constant(value):
            return bool(value)
        case ast.Name(name) | ast.Attribute(attr=name):
            return name in written or name.isupper()
        case ast.BinOp(left, ast.Add() | ast.BitOr(), right):
            return nested(left) or nested(right)
        case ast.IfExp(_, one, other):
            return nested(one) and nested(other)
        case ast.Call(ast.Name("range"), arguments):
            return all(isinstance(argument, ast.Constant | ast.Name | ast.UnaryOp) for argument in arguments)
        case ast.Call(ast.Name("zip"), arguments, keywords):
            strict = any(keyword.arg == "strict" and ast.unparse(keyword.value) == "True" for keyword in keywords)
            return (any if strict else all)(nested(argument) for argument in arguments)
        case ast.Call(ast.Attribute(value, name), []) if name in SAME_LENGTH:
            return nested(value)
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), [_, *_] as arguments) if name in SAME_LENGTH:
            return all(nested(argument) for argument in arguments if not isinstance(argument, ast.Constant))
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            return all(nested(generator.iter) and not generator.ifs for generator in node.generators)
    return False


def _can_be_empty(test: ast.expr, written: set[str]) -> bool:
    """Return whether no values meet the condition: all(... for ...), not any(... for ...), not [... for ...]."""
    match test:
        case ast.Call(ast.Name("all"), [argument]) | ast.UnaryOp(ast.Not(), ast.Call(ast.Name("any"), [argument])):
            return isinstance(argument, COMPREHENSIONS) and not _is_written(argument, written)
        case ast.UnaryOp(ast.Not(), argument) | ast.Compare(argument, [ast.Eq()], [ast.List([]) | ast.Dict([])]):
            iterated = [generator.iter for generator in argument.generators] if isinstance(argument, COMPREHENSIONS) else []
            return any(not _is_written(values, written) for values in iterated)
        case ast.BoolOp(ast.And(), values):
            return all(_can_be_empty(value, written) for value in values)
    return False


def _checks(statements: list[ast.stmt], written: set[str], in_loop: bool = False) -> Iterator[bool]:
    """Yield, for each check in these statements, whether it is skipped where a computed value is empty."""
    for statement in statements:
        match statement:
            case ast.Assert(test):
                yield in_loop or _can_be_empty(test, written)
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                (written.add if _is_written(value, written) else written.discard)(name)
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                written.update(
                    name.id
                    for name, value in zip(names, values, strict=False)
                    if isinstance(name, ast.Name) and _is_written(value, written)
                )
            case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name))) if "assert" in name or name == "fail":
                yield in_loop
            case ast.For(iter=values, body=body, orelse=orelse):
                skipped = in_loop or not _is_written(values, written)
                yield from _checks(
                    body, written | {node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)}, skipped
                )
                yield from _checks(orelse, written, in_loop)
            case ast.With(items, body):
                called = {ast.unparse(item.context_expr).split("(")[0].split(".")[-1] for item in items}
                yield from [in_loop] * len(called & {"raises", "warns", "refused"})
                yield from _checks(body, written, in_loop)
            case ast.If() | ast.While() | ast.Try():
                for block in (statement.body, statement.orelse, getattr(statement, "finalbody", [])):
                    yield from _checks(block, written, in_loop)
                for handler in getattr(statement, "handlers", []):
                    yield from _checks(handler.body, written, in_loop)


def _parameters(test: ast.FunctionDef) -> set[str]:
    """Return the parameters that pytest.mark.parametrize sets."""
    marks = [
        ast.unparse(mark.args[0])
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and "parametrize" in ast.unparse(mark.func) and mark.args
    ]
    return {argument.arg for argument in test.args.args if any(argument.arg in mark for mark in marks)}


def _tests() -> Iterator[tuple[str, ast.FunctionDef, set[str]]]:
    """Yield (file:line name, function, constants of its file) of each test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        constants: set[str] = set()
        for statement in tree.body:
            match statement:
                case ast.Assign([ast.Name(name)], value) if _is_written(value, constants):
                    constants.add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node, constants | _parameters(node)


@pytest.mark.parametrize(
    ("body", "skipped"),
    [
        ("for x in computed(): assert x", [True]),
        ("found = computed()\nassert found\nfor x in found: assert x", [False, True]),
        ("for x in (1, 2): assert x", [False]),
        ("for x in range(3):\n  for y in computed(x): assert y", [True]),
        ("assert all(x for x in computed())", [True]),
        ("assert all(x in found for x in ('a', 'b'))", [False]),
        ("assert not [x for x in computed() if x]", [True]),
        ("assert [x for x in FILES if bad(x)] == []", [False]),
        ("with pytest.raises(ValueError): computed()", [False]),
        ("if x:\n  assert_close(x, y)", [False]),
    ],
)
def test_the_scan(body, skipped):
    assert list(_checks(ast.parse(body).body, set())) == skipped


def test_no_test_passes_with_nothing_to_compare():
    tests = list(_tests())
    checks = {name: list(_checks(function.body, written)) for name, function, written in tests}
    assert len(checks) > 2000
    assert [name for name, skipped in checks.items() if skipped and all(skipped)] == []
