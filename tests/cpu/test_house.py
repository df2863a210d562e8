"""The rules of the house that a machine can check: sizes, direction of imports, no broad except,
few public names."""

import ast
import functools
import io
import sys
import tokenize
from pathlib import Path

import pytest
import torch

import packgraph

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "packgraph"
FILES = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
RANKS = {
    "torch_internals": -1,
    "packing": 0,
    "graphs": 1,
    "ops": 1,
    "mamba": 2,
    "moe": 2,
    "offloading": 2,
    "parallel": 3,
    "models": 4,
    "viz": 5,
    "integrations": 5,
    "train": 6,
    "verification": 7,
    "bench": 8,
    "commands": 9,
    "cli": 10,
}
# Planners decide, as pure functions of host facts, and lie beside what they plan.
PLANNERS = (
    "packing/buckets/*",
    "graphs/checkpointed.py",
    "graphs/stages.py",
    "graphs/memory/budget.py",
    "moe/stash/plan.py",
    "offloading/simulate.py",
    "offloading/plan.py",
    "offloading/rules.py",
    "offloading/search.py",
    "ops/attention/kind.py",
    "parallel/context/plan.py",
    "parallel/context/build.py",
    "parallel/context/request.py",
    "parallel/layout.py",
    "parallel/pipeline/chunks.py",
    "parallel/pipeline/schedule.py",
    "viz/*",
)
# Lines of code, without docstrings, comments and empty lines; of functions without the signature,
# with one argument a line where they do not fit into one.
MOST_LINES, MOST_FUNCTION_LINES, MOST_NAMES = 600, 90, 24
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
BROAD = ("Exception", "BaseException")


@functools.cache
def parse_once(path: Path) -> ast.Module:
    """Of the package, which many tests look through."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def trees_go():
    yield
    parse_once.cache_clear()  # collectors of garbage, which many tests wait for, walk through them


def parse(path: Path) -> ast.Module:
    return parse_once(path) if SOURCE in path.parents else parse_once.__wrapped__(path)


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imported_names(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    """Every import in a module, wherever it stands, as dotted names."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}; name the package"
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def code_lines(path: Path) -> int:
    """Or all lines, where they are few enough."""
    source = path.read_text(encoding="utf-8")
    if (lines := source.count("\n") + 1) <= MOST_LINES:
        return lines
    code, texts = set[int](), set[int]()
    for node in ast.walk(parse(path)):
        if is_text(node):
            texts.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - texts)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = [node for node in function.body if not is_text(node)]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_files_are_short():
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in FILES
        if (count := code_lines(path)) > MOST_LINES
    ]
    assert not long


def test_functions_are_short():
    long = [
        f"{place(path, node)} {node.name}: {count} lines"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (count := body_lines(node)) > MOST_FUNCTION_LINES
    ]
    assert not long


def test_every_room_has_a_rank():
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms <= set(RANKS), "say in docs/decisions and here where the new room stands"


def test_imports_run_downward():
    upward = []
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room == "__init__":
            continue
        for node, name in imported_names(parse(path)):
            parts = name.split(".")
            if parts[0] != "packgraph" or len(parts) < 2 or parts[1] in (room, "__init__"):
                continue
            other = parts[1]
            assert other in RANKS, (
                f"{place(path, node)} imports {name}: import it from its room, not from the top"
            )
            if RANKS[other] >= RANKS[room]:
                upward.append(f"{place(path, node)}: {room} imports {other}")
    assert not upward


def imports_at_once(path: Path) -> set[str]:
    """Dotted names that a module imports as it is imported itself."""
    found, waiting = set[str](), [parse(path)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update(name for _, name in imported_names(ast.Module([node], [])))
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            ):
                waiting.append(node)
    return found


def test_words_are_read_without_torch():
    """Help and mistakes are answered at once: what reads the words of a command imports nothing but
    Python and modules like it."""
    modules = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path
        for path in SOURCE.rglob("*.py")
    }
    waiting, importer = ["packgraph.cli", "packgraph.commands"], dict[str, str]()
    while waiting:
        module = waiting.pop()
        for name in imports_at_once(modules[module]):
            parts = name.split(".")
            assert parts[0] in {*sys.stdlib_module_names, "packgraph"}, (
                f"{module}, imported by {importer.get(module)}, imports {name}"
            )
            packages = (".".join([*parts[:end], "__init__"]) for end in range(1, len(parts)))
            for home in (name, ".".join(parts[:-1]), *packages):
                if home in modules and home not in importer:
                    importer[home] = module
                    waiting.append(home)
    assert "packgraph.train.config.sections" in importer


def test_graphs_know_their_backends_in_one_place():
    """What only one backend, or only compiled stages need, is chosen in `graphs/choose.py` and used
    by nobody else."""
    graphs, inner = SOURCE / "graphs", ("cuda", "recorder", "compiled")
    knowing = {
        str(path.relative_to(graphs))
        for path in graphs.rglob("*.py")
        for _, name in imported_names(parse(path))
        for folder in inner
        if name.startswith(f"packgraph.graphs.{folder}.") and path.parent.name != folder
    }
    assert knowing == {"choose.py"}


def planners():
    return sorted(
        {path for pattern in PLANNERS for path in SOURCE.glob(pattern) if path.suffix == ".py"}
    )


def test_planners_are_where_they_are_said_to_be():
    assert all(any(SOURCE.glob(pattern)) for pattern in PLANNERS)


def test_planners_never_touch_a_device_and_import_planners_only():
    touching, known = (
        [],
        {"torch_internals"}
        | {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in planners()},
    )
    for path in planners():
        tree = parse(path)
        touching += [
            place(path, node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and ast.unparse(node.value) == "torch"
        ]
        for node, name in imported_names(tree):
            module = name.removeprefix("packgraph.")
            ours = name.startswith("packgraph.") and not name.startswith("packgraph.packing.")
            unplanned = ours and module not in known and module.rpartition(".")[0] not in known
            if name.startswith("torch.cuda") or unplanned:
                touching.append(f"{place(path, node)}: {name}")
    assert not touching


def private_names(tree: ast.AST) -> set[str]:
    """Attributes with an underscore that classes of a module give their objects."""
    found = set()
    for node in (
        part for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for part in ast.walk(kind)
    ):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_module_reads_private_attributes_of_other_modules_objects():
    trees = {path: parse(path) for path in SOURCE.rglob("*.py")}
    mine = {path: private_names(tree) for path, tree in trees.items()}
    of_torch = {
        *dir(torch.Tensor),
        *vars(torch.nn.Module()),
        "_schema",
    }  # ours may be called like these
    ours = set().union(*mine.values()) - of_torch
    others = {path: ours - names for path, names in mine.items()}
    found = [
        f"{place(path, node)}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in others[path]
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and ast.unparse(node.value).split(".")[0] != "torch"
    ]
    assert not found


# Attributes with an underscore of objects of PyTorch and Python, outside of the places that are
# there for them. It only goes down: a name that several modules need stands in torch_internals.py.
MOST_FOREIGN = 30


def test_private_names_of_pytorch_stand_in_one_place():
    found = [
        f"{place(path, node)}: {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in ("torch_internals.py", "graphs/cuda/backend.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ("_C", "_replace", "_fields", "_asdict")
        # os._exit, sys._getframe and sys._current_frames are documented.
        and ast.unparse(node.value) not in ("self", "cls", "super()", "os", "sys")
    ]
    assert MOST_FOREIGN - 5 <= len(found) <= MOST_FOREIGN, "\n".join(found)


# Words of a language of our own, in the names of folders and modules, and of classes and public
# functions.
GONE_FOLDERS = {"plan", "diagnose", "offload", "pull", "rows", "grouped"}
GONE_FILES = {
    "guard",
    "effects",
    "refusals",
    "claim",
    "steady",
    "rehearsal",
    "lanes",
    "vote",
    "votes",
    "kept",
    "unused",
    "flight",
    "spans",
    "board",
    "disagreements",
    "repeat",
    "sharing",
    "apart",
    "side",
    "moments",
    "pace",
    "contest",
    "company",
    "ways",
    "ssd_ways",
    "moe_ways",
    "engine",
    "forget",
}
GONE_NAMES = {
    "HostReadGuard",
    "Watch",
    "HostEffects",
    "Refusal",
    "refusal",
    "Passed",
    "Made",
    "Claim",
    "Ticket",
    "Steady",
    "Rehearsal",
    "rehearse",
    "Lanes",
    "EmulatedLanes",
    "RecordedLanes",
    "CudaLanes",
    "make_lanes",
    "captured_lanes",
    "StoreVote",
    "KeptCapacities",
    "Piece",
    "pieces_of",
    "Home",
    "Homes",
    "Flight",
    "free_unused",
    "SpanPlan",
    "Span",
    "plan_spans",
    "Repeats",
    "Apart",
    "verify_apart",
    "Side",
    "Pace",
    "moments",
    "Contest",
    "Company",
    "Board",
    "fewest_waves",
    "CornerSet",
    "PullPlan",
    "plan_pull",
    "Sharing",
    "disagreements",
    "Offload",
    "forget",
    "forget_all",
}


def test_names_are_those_of_the_field():
    old = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.stem in GONE_FILES or GONE_FOLDERS.intersection(path.relative_to(SOURCE).parts[:-1])
    ]
    old += [
        f"{place(path, node)}: {node.name}"
        for path in SOURCE.rglob("*.py")
        for node in parse(path).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in GONE_NAMES
    ]
    assert not old


def test_public_classes_have_names_of_their_own():
    named: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in named.items() if len(files) > 1} == {}


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and goes on; cleaning up and raising again is allowed."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return not raises_again and any(kind is None or ast.unparse(kind) in BROAD for kind in kinds)


def test_no_broad_except():
    broad = [
        place(path, node)
        for path in FILES
        if "except" in path.read_text(encoding="utf-8")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert not broad


@pytest.mark.parametrize(
    ("text", "broad"),
    [
        ("except Exception: pass", True),
        ("except: pass", True),
        ("except (ValueError, Exception): pass", True),
        ("except ValueError: pass", False),
        ("except BaseException:\n    x = 1\n    raise", False),
    ],
)
def test_broad_except_is_recognized(text, broad):
    (handler,) = ast.parse(f"try:\n    pass\n{text}").body[0].handlers
    assert is_broad(handler) == broad


def test_public_names_are_few():
    public = set(packgraph.__all__)
    assert (
        {"Capacity", "PackedBatch", "pack", "graph", "eager", "CaptureError"}
        <= public
        <= set(dir(packgraph))
    )
    assert all(getattr(packgraph, name).__name__ == name for name in public)
    typed = {
        alias.asname
        for node in ast.walk(parse(SOURCE / "__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("packgraph")
    }
    assert typed == public, "type checkers must see what users see"
    assert len(public) <= MOST_NAMES


def test_modules_say_what_they_are_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCE.rglob("*.py")
        if parse(path).body and not ast.get_docstring(parse(path))
    ]
    assert not silent


# Statements without docstrings, by room; of tests and benchmarks as a whole. They only go down: who
# adds some deletes others, and who deletes some writes the new figure here.
STATEMENTS = {
    "torch_internals": 70,
    "__init__": 45,
    "packing": 1054,
    "graphs": 7426,
    "ops": 2059,
    "mamba": 1277,
    "moe": 1591,
    "offloading": 1324,
    "parallel": 3296,
    "models": 1783,
    "viz": 337,
    "integrations": 1619,
    "train": 9389,
    "verification": 842,
    "bench": 486,
    "commands": 238,
    "cli": 121,
    "tests": 45846,
    "benchmarks": 5398,
}
SLACK = 40  # statements that a budget may lie above what there is


def statements(path: Path) -> int:
    nodes = [*ast.walk(parse(path))]
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(map(is_text, nodes))


def test_statements_are_within_their_budgets():
    found = dict.fromkeys(STATEMENTS, 0)
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        room = room_of(path) if room == "src" else room
        found[room] = found.get(room, 0) + statements(path)
    above = {room: count for room, count in found.items() if count > STATEMENTS.get(room, 0)}
    below = {room: count for room, count in found.items() if count < STATEMENTS[room] - SLACK}
    assert not above, "delete as much as was added"
    assert not below, "lower the budget to what there is"
