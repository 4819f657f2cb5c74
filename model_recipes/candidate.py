"""An operator's kernel as one file, and what can be seen in it without running it.

    source = read_candidate(Path("fast_norm.py"))
    faults = check(source, {"forward": 5, "backward": 7})

A candidate is one Python file of arithmetic. It may import torch, triton and a few harmless
modules, hold constants and functions, and carry C++ in one string constant named ``CPP``; its
functions are then called as ``native("name", ...)``. Everything that could reach out of that
(processes, files, clocks, frames, module attributes, state) is refused by name here: necessary,
never sufficient. ``zm verify`` stops it at run time as well and compares what comes out.

A file that states a ``CONTRACT`` and ``MODULES`` brings an operator of its own (:mod:`.extension`).
It may also import the package's operators, and may not cut the gradient, which is autograd's.
In a draft, any other file says in ``SERVES`` which registered contract it is for.
"""

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.errors import UsageError

MOST_BYTES = 200_000
LONGEST_TEXT, MOST_ELEMENTS = 2000, 256
IMPORTS = frozenset(
    ("__future__", "collections.abc", "math", "torch", "torch.nn", "torch.nn.functional", "triton",
     "triton.language", "typing")
)  # fmt: skip


KERNELS = "zeromismatch.kernels."
OPERATORS = frozenset(
    ("linear", "gated", "rmsnorm", "rotary", "embedding", "reference.exp", "reference.fma")
)
"""What an operator of its own may import from ``zeromismatch.kernels``."""
OWN_ENTRIES: Mapping[str, int | None] = {"forward": None}
"""What such a file defines: ``forward(module, x, ...)``."""


def _by_rule(table: Mapping[str, str]) -> dict[str, str]:
    return {word: rule for rule, words in table.items() for word in words.split()}


MODULES = _by_rule(
    {
        "process": "os subprocess multiprocessing pty signal posix _posixsubprocess",
        "thread": "threading concurrent asyncio _thread queue",
        "network": "socket ssl http urllib requests httpx aiohttp",
        "file": "io pathlib shutil tempfile pickle shelve mmap glob",
        "clock": "time datetime timeit",
        "reflection": "sys gc inspect importlib builtins ctypes types weakref operator",
        "state": "functools contextvars",
        "reference": "zeromismatch kernels tests",
    }
)
NAMES = _by_rule(
    {
        "code": "eval exec compile __import__",
        "file": "open input print",
        "reflection": "globals locals vars getattr delattr dir type object super breakpoint id "
        "hash memoryview",
        "patch": "setattr",
    }
)
ATTRIBUTES = _by_rule(
    {
        "environment": "environ getenv putenv",
        "file": "load save hub serialization from_file fromfile tofile load_library",
        "code": "compile jit fx ops classes cpp_extension vmap inline_asm_elementwise "
        "extern_elementwise",
        "process": "multiprocessing distributed spawn",
        "thread": "futures",
        "clock": "profiler Event benchmark testing globaltimer clock64",
        "order": "atomic_add atomic_max atomic_min atomic_cas atomic_xchg atomic_and atomic_or "
        "atomic_xor",
        "reflection": "os sys builtins importlib inspect gc ctypes modules utils types f_back",
        "settings": "backends use_deterministic_algorithms autocast manual_seed seed random "
        "set_num_threads set_num_interop_threads set_default_dtype set_default_device "
        "set_float32_matmul_precision set_grad_enabled set_flush_denormal set_rng_state",
        "patch": "overrides library set_ resize_ swap_tensors register_module_forward_hook",
        "state": "data_ptr untyped_storage storage lru_cache cache",
        "deferred": "register_hook requires_grad_ Stream stream current_stream CUDAGraph Function",
    }
)
TRITON = {"tl": "triton.language", "triton": "triton"}
"""Names that mean these modules in every file: what they are called by decides what may be used."""
OF_TRITON = frozenset(("triton.jit", "tl.load", "triton.language.load"))
_CUTS = frozenset(("detach", "no_grad", "inference_mode", "requires_grad", "data"))
INCLUDES = frozenset(
    ("algorithm", "array", "bit", "cmath", "cstddef", "cstdint", "cstring", "immintrin.h", "limits",
     "arm_neon.h", "omp.h", "type_traits", "utility")
)  # fmt: skip
CPP_WORDS = re.compile(
    r"\b(?:asm|__asm\w*|system|popen|v?fork|clone|exec[lv]\w*|dlopen|dlsym|getenv|setenv|putenv|"
    r"f?open(?:at)?|fdopen|freopen|socket|connect|pthread\w*|thread|jthread|async|syscall|signal|"
    r"sigaction|mmap|mprotect|kill|sleep|usleep|nanosleep|clock\w*|gettimeofday|chrono|rdtsc|"
    r"__rdtsc\w*|thread_local|atexit|constructor|ifstream|ofstream|environ|abort|longjmp|"
    r"_?exit|try|catch|volatile|attribute|__attribute__|embed)\b|##|%:|\?\?"
)
SYMBOL = re.compile(r'extern\s+"C"\s+void\s+(\w+)\s*\([^;{}()]*\)\s*\{')
_NO_WALK = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rule that the file breaks. ``rule``: as ``zm verify --rules`` names it."""

    rule: str
    detail: str
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A candidate as text. ``cpp``: its C++, or None; ``symbols``: the functions in it.

    declared: its ``CONTRACT``, where it brings an operator of its own; modules: its ``MODULES``;
    serves: its ``SERVES``.
    """

    path: Path
    text: str
    tree: ast.Module | None
    fault: str | None
    cpp: str | None = None
    symbols: tuple[str, ...] = ()
    declared: Mapping[str, Any] | None = None
    modules: tuple[str, ...] = ()
    serves: str | None = None


def read_candidate(path: Path) -> Source:
    """Read a candidate; UsageError where there is no such file, or it is a link."""
    if path.is_symlink() or not path.is_file():
        raise UsageError(f"{path.name} is not a file; give the path of one Python file")
    return parse_candidate(path, path.read_bytes())


def parse_candidate(path: Path, content: bytes) -> Source:
    """A candidate from the bytes of its file; ``fault`` says where they are no Python."""
    if len(content) > MOST_BYTES:
        fault = f"has {len(content)} bytes"
        return Source(path=path, text="", tree=None, fault=fault)
    try:
        text = content.decode("utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        fault = f"does not parse: {str(error)[:200]}"
        return Source(path=path, text="", tree=None, fault=fault)
    held = dict(_literals(tree))
    cpp, declared, modules = held.get("CPP"), held.get("CONTRACT"), held.get("MODULES")
    named, serves = modules if isinstance(modules, tuple) else (), held.get("SERVES")
    return Source(
        path=path, text=text, tree=tree, fault=None,
        cpp=cpp if isinstance(cpp, str) else None,
        symbols=tuple(SYMBOL.findall(cpp)) if isinstance(cpp, str) else (),
        declared=declared if isinstance(declared, dict) else None,
        modules=tuple(str(name) for name in named),
        serves=serves if isinstance(serves, str) else None,
    )  # fmt: skip


def _literals(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Constants of the file that say something about it; what is no literal is left out."""
    for node in tree.body:
        name = _assigned(node)
        if name in ("CPP", "CONTRACT", "MODULES", "SERVES"):
            with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError):
                yield name, ast.literal_eval(node.value)  # type: ignore[attr-defined]


def _assigned(node: ast.stmt) -> str | None:
    """The name of a plain assignment."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def granted(source: Source) -> list[tuple[str, str, str]]:
    """(module below ``zeromismatch.kernels``, name in it, name here) of an operator's imports."""
    return [
        (str(node.module).removeprefix(KERNELS), alias.name, alias.asname or alias.name)
        for node in _grants(source) for alias in node.names
    ]  # fmt: skip


def without_grants(source: Source) -> str:
    """The text with those imports blanked: where this package is out of reach, names are handed."""
    lines = source.text.split("\n")
    for node in _grants(source):
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[number - 1] = ""
    return "\n".join(lines)


def _grants(source: Source) -> list[ast.ImportFrom]:
    if source.declared is None or source.tree is None:
        return []
    return [
        node for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(KERNELS)
    ]  # fmt: skip


def check(source: Source, entries: Mapping[str, int | None]) -> tuple[Fault, ...]:
    """Every rule that the file breaks; ``entries``: wanted function -> number of parameters.

    None stands for ``(module, x, ...)`` of an operator of the file's own.
    """
    if source.tree is None:
        return (Fault(rule="syntax", detail=source.fault or "does not parse"),)
    own = source.declared is not None
    found = [*_entries(source.tree, entries), *_top_level(source.tree, own=own)]
    allowed = {
        id(node) for node in _grants(source)
        if str(node.module).removeprefix(KERNELS) in OPERATORS
    }  # fmt: skip
    for node in ast.walk(source.tree):
        if id(node) in allowed:
            continue
        line = getattr(node, "lineno", 0)
        found += [
            Fault(rule=rule, detail=detail, where=f"line {line}")
            for rule, detail in _node(node)
        ]
        if own and isinstance(node, ast.Attribute) and node.attr in _CUTS:
            detail = f"uses {ast.unparse(node)[:60]}, and its gradient comes from autograd"
            found.append(Fault(rule="gradient", detail=detail, where=f"line {line}"))
    if source.cpp is not None:
        found += _cpp(source.cpp)
    return tuple(dict.fromkeys(found))


def _entries(tree: ast.Module, entries: Mapping[str, int | None]) -> Iterator[Fault]:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not ast.get_docstring(tree):
        yield Fault(rule="docstring", detail="the file has no docstring", where="line 1")
    for name, count in entries.items():
        if name not in functions:
            yield Fault(rule="entry", detail=f"does not define {name}")
            continue
        node = functions[name]
        where = f"line {node.lineno}"
        own = node.args
        others = own.vararg or own.kwarg or own.kwonlyargs
        given = len(own.posonlyargs) + len(own.args)
        if (given < 2 if count is None else given != count) or others:
            detail = f"{name} must take {count} positional parameters, like the reference"
            detail = detail if count else f"{name} must take the module and its tensors"
            yield Fault(rule="entry", detail=detail, where=where)
        if not ast.get_docstring(node):
            yield Fault(rule="docstring", detail=f"{name} has no docstring", where=where)


def _top_level(tree: ast.Module, *, own: bool) -> Iterator[Fault]:
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for index, node in enumerate(tree.body):
        where = f"line {node.lineno}"
        docstring = index == 0 and isinstance(node, ast.Expr)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            continue
        if own and _assigned(node) == "CONTRACT":
            continue  # a literal, or it would not be one of its own
        if isinstance(node, ast.ClassDef):
            yield Fault(rule="deferred", detail=f"defines class {node.name}", where=where)
        elif not (isinstance(node, ast.Assign | ast.AnnAssign) and _constant(node.value)):
            detail = "does more at import than define functions and constants"
            yield Fault(rule="state", detail=detail, where=where)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            detail = f"keeps {node.attr} on function {ast.unparse(node.value)}"
            yield Fault(rule="state", detail=detail, where=f"line {node.lineno}")


def _constant(node: ast.expr | None) -> bool:
    """Numbers, text, tuples of them, dtypes, tl.constexpr: nothing that can be changed later."""
    match node:
        case ast.Constant() | ast.Name():
            return True
        case ast.Attribute():
            return True
        case ast.Tuple():
            return all(_constant(each) for each in node.elts)
        case ast.UnaryOp():
            return _constant(node.operand)
        case ast.BinOp():
            return _constant(node.left) and _constant(node.right)
        case ast.Call():
            return ast.unparse(node.func).endswith("constexpr") and all(map(_constant, node.args))
        case _:
            return False


def _node(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from _imports(node)
        case ast.Name(id=name) if name in NAMES:
            yield NAMES[name], f"uses {name}"
        case ast.Name(id=name) if name.startswith("__"):
            yield "reflection", f"uses {name}"
        case ast.Attribute(attr=name):
            if name.startswith("_"):
                yield "reflection", f"reaches for .{name}"
            elif name in ATTRIBUTES and ast.unparse(node) not in OF_TRITON:
                yield ATTRIBUTES[name], f"uses {ast.unparse(node)[:60]}"
            if isinstance(node.ctx, ast.Store | ast.Del):
                yield "patch", f"assigns to {ast.unparse(node)[:60]}"
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in TRITON:
            yield "patch", f"gives {name} another meaning"
        case ast.Global() | ast.Nonlocal():
            yield "state", f"declares {', '.join(node.names)} {type(node).__name__.lower()}"
        case ast.Try() | ast.TryStar():
            yield "swallow", "catches exceptions"
        case ast.Yield() | ast.YieldFrom():
            yield "deferred", "is a generator"
        case ast.AsyncFunctionDef() | ast.Await():
            yield "thread", "is asynchronous"
        case ast.FunctionDef():
            yield from _function(node)
        case ast.Constant(value=str() | bytes() as text) if _is_data(text):
            yield "weights", f"holds a literal of {len(text)} characters"
        case ast.Tuple() | ast.List() | ast.Set() if len(node.elts) > MOST_ELEMENTS:
            yield "weights", f"holds a literal of {len(node.elts)} elements"
        case ast.Dict() if len(node.keys) > MOST_ELEMENTS:
            yield "weights", f"holds a literal of {len(node.keys)} elements"
        case _:
            return


def _is_data(text: str | bytes) -> bool:
    return len(text) > LONGEST_TEXT and not (isinstance(text, str) and SYMBOL.search(text))


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    base = getattr(node, "module", None) or ""
    names = [base] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level:
        yield "reference", "imports relative to this package"
        return
    for name in names:
        if name not in IMPORTS:
            yield MODULES.get(name.split(".")[0], "import"), f"imports {name}"
    for alias in node.names:
        called = alias.asname or (alias.name if base else alias.name.split(".")[0])
        full = f"{base}.{alias.name}" if base else alias.name
        if called in TRITON and full.split(".")[0] != "triton":
            yield "patch", f"gives {called} another meaning"
        if called == "tl" and full != TRITON["tl"]:
            yield "patch", "gives tl another meaning"
    for alias in node.names if isinstance(node, ast.ImportFrom) else ():
        if alias.name == "*":
            yield "import", f"imports everything of {base}"
        elif alias.name in ATTRIBUTES and f"{base}.{alias.name}" not in ("triton.jit",):
            yield ATTRIBUTES[alias.name], f"imports {base}.{alias.name}"
        elif alias.name.startswith("_"):
            yield "reflection", f"imports {base}.{alias.name}" if base != "__future__" else ""


def _function(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for decorator in node.decorator_list:
        name = ast.unparse(decorator).split("(")[0]
        if name not in ("triton.jit", "jit"):
            yield "state", f"{node.name} is wrapped by {name}"
    for default in [*node.args.defaults, *node.args.kw_defaults]:
        if default is not None and not _constant(default):
            yield "state", f"{node.name} has a mutable default"


def _cpp(text: str) -> Iterator[Fault]:
    joined = text.replace("\\\n", "")
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", joined, flags=re.DOTALL)
    if re.search(r"\bextern\b", SYMBOL.sub("", bare)):
        yield Fault(rule="native", detail="C++ declares what it does not define")
    if not SYMBOL.search(bare):
        yield Fault(rule="native", detail='CPP defines no extern "C" void function')
    for line in re.findall(r"^\s*#\s*(\w+)([^\n]*)", bare, flags=re.MULTILINE):
        header = re.match(r'\s*[<"]([^>"]+)[>"]', line[1])
        if line[0] == "include" and (header is None or header.group(1) not in INCLUDES):
            yield Fault(rule="native", detail=f"C++ includes {line[1].strip()[:40]}")
    for word in dict.fromkeys(CPP_WORDS.findall(bare)):
        yield Fault(rule="native", detail=f"C++ uses {word}")
