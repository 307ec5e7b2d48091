"""The rules of CONTRIBUTING.md about imports and style, as far as ruff does not check them."""

import ast
import graphlib
from pathlib import Path

from smallgpt_jax.__main__ import COMMANDS

PACKAGE = Path(__file__).parents[2] / "smallgpt_jax"
SOURCES = {
    path.relative_to(PACKAGE)
    .with_suffix("")
    .as_posix()
    .replace("/", ".")
    .removesuffix(".__init__"): path.read_text()
    for path in PACKAGE.rglob("*.py")
}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]
# From the top layer down: a module imports its own layer and those below.
LAYERS = (
    ("__main__", *COMMANDS),
    ("cli",),
    ("verification",),
    ("comparison",),
    ("report",),
    ("planning", "diagnosis", "evaluation", "conversion"),
    ("training",),
    ("objectives", "inference"),
    ("run",),
    ("optim", "data", "models"),
    ("ops",),
    ("devices",),
    ("analysis",),  # reads no run and no model: only the record of a comparison
    ("storage", "config"),
    ("errors", "formatting", "output"),
)


def imports_of(name: str) -> set[str]:
    modules = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("smallgpt_jax").removeprefix(".")
            parts = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            modules |= {part if part in SOURCES else module for part in parts}
    return modules & SOURCES.keys() - {"__init__", name}


def test_imports_go_one_way_and_not_in_a_circle():
    layer_of = {part: number for number, parts in enumerate(LAYERS) for part in parts}
    graph = {name: imports_of(name) for name in SOURCES.keys() - {"__init__"}}
    assert sum(map(len, graph.values())) > 500
    assert [
        (name, imported)
        for name, modules in graph.items()
        for imported in modules
        if layer_of[imported.split(".")[0]] < layer_of[name.split(".")[0]]
    ] == []
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_functions_and_docstrings_are_short():
    functions = [node for node in NODES if isinstance(node, ast.FunctionDef)]
    assert [
        function.name for function in functions if function.end_lineno - function.lineno >= 110
    ] == []
    documented = [
        node.body[0]
        for node in NODES
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        and ast.get_docstring(node, clean=False) is not None
    ]
    lines = sum(docstring.end_lineno - docstring.lineno + 1 for docstring in documented)
    assert 0 < lines <= 0.125 * sum(len(source.splitlines()) for source in SOURCES.values())


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assert_no(breaks_rule) -> None:
    """`breaks_rule` is a function of a node."""
    assert [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if breaks_rule(node)
    ] == []


def inside(node) -> list:
    return [inner for inner in ast.walk(node) if inner is not node]


def test_a_comprehension_contains_neither_another_nor_an_assignment():
    complex_parts = (*COMPREHENSIONS, ast.NamedExpr)
    assert_no(
        lambda node: (
            isinstance(node, COMPREHENSIONS)
            and any(isinstance(inner, complex_parts) for inner in inside(node))
        )
    )


def test_names_say_what_was_found():
    assert_no(lambda node: isinstance(node, ast.Name) and node.id == "found")
    assert_no(lambda node: isinstance(node, ast.arg) and node.arg == "found")


def test_text_is_not_multiplied_by_a_condition():
    """As in " " * is_last. Numbers such as 3 and len(x) are no conditions."""

    def is_text(node) -> bool:
        is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return is_constant or isinstance(node, ast.JoinedStr)

    def breaks_rule(node) -> bool:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            return False
        operands = [node.left, node.right]
        numbers = (ast.Constant, ast.Call, ast.BinOp)
        others = [operand for operand in operands if not is_text(operand)]
        return len(others) == 1 and not isinstance(others[0], numbers)

    assert_no(breaks_rule)


def test_few_functions_have_more_than_six_arguments():
    def has_many(node) -> bool:
        if not isinstance(node, ast.FunctionDef):
            return False
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len([x for x in arguments if x.arg not in ("self", "cls")]) > 6

    functions = [node for node in NODES if has_many(node)]
    # `compare`, and three whose signatures transformers fixes
    assert len(functions) <= 4, [function.name for function in functions]


def test_few_modules_are_directly_in_the_package():
    """They are commands, and what all parts use."""
    assert (
        len([name for name in SOURCES if "." not in name and (PACKAGE / f"{name}.py").exists()])
        <= 20
    )


# Modules that execute what they read, or import those that do.
UNSAFE_MODULES = {
    *("pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal"),
    *("shelve", "dbm", "sqlitedict", "yaml"),
}
SAFE_ARGUMENTS = {  # of functions that unpickle without them
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def test_nothing_is_unpickled_or_evaluated():
    """A file of a workdir, a store or a record may come from somebody who means harm."""
    imported = set()
    for node in NODES:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert "json" in imported and not imported & UNSAFE_MODULES

    unsafe = []
    for call in (node for node in NODES if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("eval", "exec", "__import__"):
            unsafe.append(name)
        if name.endswith("simple_evaluate") and "use_cache" in arguments:  # of pickles
            unsafe.append(f"{name} with use_cache")
        if name in SAFE_ARGUMENTS:
            argument, value = SAFE_ARGUMENTS[name]
            if arguments.get(argument) != str(value):
                unsafe.append(f"{name} without {argument}={value}")
    assert unsafe == []


def test_text_files_are_utf8_in_every_locale():
    """Python's default is the encoding of the locale."""
    calls = [
        (name, node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    without = []
    for name, call in calls:
        function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        given = {keyword.arg for keyword in call.keywords}
        encodings = {"read_text": 1, "write_text": 2}  # arguments, up to the encoding
        if (
            function in encodings
            and "encoding" not in given
            and len(call.args) < encodings[function]
        ):
            without.append((name, call.lineno))
    assert without == [] and len(calls) > 5000
