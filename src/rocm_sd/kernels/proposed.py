"""Kernel text that somebody proposes: what it may contain, and the module that it makes with this project's launcher.

    functions = checked(text, module_text)        # {name: source}, or NotAllowed: one sentence
    module_text = spliced(module_text, functions) # an op's kernel module with these functions in place of its own

A proposal is functions of Triton and nothing else: they replace those of an op's kernel module by name, with the same
parameters, or help them. The launcher stays the project's own, so that a proposal decides neither what is allocated nor
how large a grid is. What is allowed is listed, and everything else is refused: no import, no attribute but those of
`triton.language` and of tensors in the lists below, no file, no network, nothing that Python runs outside of a kernel.

Nothing here runs a proposal or imports it.
"""

from __future__ import annotations

import ast
import builtins
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["NotAllowed", "checked", "checked_hip", "jit_functions", "spliced"]

# The longest kernel module of this project has 20 KB.
_MOST_CHARACTERS = 64 * 1024
_MOST_NODES = 20_000
_MOST_DEEP = 100  # of nodes within one another; this project's kernels have 15, and Python's own stack ends at some 200
_LONGEST_TEXT = 64  # of a string within a kernel: names of cache modifiers and precisions
_DECORATOR = "triton.jit"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

# Of triton.language. Left out: what prints, what embeds assembly, what reaches other modules, and atomics.
_OF_LANGUAGE = """
    abs add advance arange argmax argmin associative_scan assume bfloat16 broadcast broadcast_to cast cat cdiv ceil
    clamp constexpr cos cumsum debug_barrier div_rn dot erf exp exp2 expand_dims flip float16 float32 float64
    float8e4b8 float8e4nv float8e5 floor fma full gather histogram int1 int16 int32 int64 int8 interleave join load
    log log2 max max_constancy max_contiguous maximum min minimum multiple_of num_programs permute pointer_type
    program_id range ravel reduce reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn static_assert static_range
    store sum swizzle2d trans uint16 uint32 uint64 uint8 umulhi view where xor_sum zeros zeros_like
"""
_LANGUAGE = frozenset(_OF_LANGUAGE.split())
# Of tensors, pointers and types.
_OF_TENSORS = """
    T abs broadcast_to cast dtype element_ty expand_dims is_bf16 is_fp16 is_fp32 is_fp64 is_floating is_int is_ptr max
    min permute primitive_bitwidth reshape shape split sum to trans type value view
"""
_MEMBERS = frozenset(_OF_TENSORS.split())
_BUILTINS = frozenset({"range", "min", "max", "abs", "float", "int", "bool", "len"})
# Triton looks a name up where a branch that it leaves out has assigned it: among globals, then among Python's own.
_PYTHONS_OWN = frozenset(dir(builtins))
_REASONS = {
    "device_print": "kernels print nothing",
    "static_print": "kernels print nothing",
    "device_assert": "kernels assert nothing while they run; use static_assert",
    "inline_asm_elementwise": "assembly cannot be checked",
    "extra": "what lies there is not the language's own",
}
_ATOMIC = "the same input must give the same bits, and atomics add in any order"

_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.While, ast.Return, ast.Pass,
)  # fmt: skip
_EXPRESSIONS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Constant, ast.Name, ast.Attribute,
    ast.Subscript, ast.Slice, ast.Tuple, ast.List,
)  # fmt: skip
# What stands within those: contexts, operators, the parts of a call and of a signature.
_PARTS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.keyword, ast.arguments, ast.arg)
_WORDS = {
    ast.Import: "an import", ast.ImportFrom: "an import", ast.ClassDef: "a class", ast.Lambda: "a lambda",
    ast.JoinedStr: "a formatted string", ast.With: "a with block", ast.Try: "a try block", ast.Raise: "a raise",
    ast.Global: "a global", ast.Nonlocal: "a nonlocal", ast.Delete: "a del", ast.Starred: "a starred expression",
    ast.NamedExpr: "an assignment in an expression", ast.ListComp: "a comprehension", ast.DictComp: "a comprehension",
    ast.SetComp: "a comprehension", ast.GeneratorExp: "a comprehension", ast.Yield: "a yield", ast.Await: "an await",
    ast.AsyncFunctionDef: "an async function", ast.FunctionDef: "a function within a function", ast.Dict: "a dict",
}  # fmt: skip


_FOLDER = Path(__file__).parent / "triton"
# As a kernel's source names the package, and its language.
_TRITON = "triton"
_PACKAGES = frozenset({"tl", _TRITON})
_KERNELS = re.compile(r"rocm_sd\.kernels\.triton\.(\w+)")
# Of this project's own modules, and never changed.
_read = lru_cache(maxsize=32)(ast.parse)


class NotAllowed(RocmSdError):
    """A proposal that contains what no kernel needs."""

    def __init__(self, why: str, line: int | None = None) -> None:
        where = f" (line {line})" if line else ""
        super().__init__(f"The proposal is not allowed: {why}{where}.", hint="See docs/improve.md for what it may use.")


def jit_functions(module: str) -> dict[str, ast.FunctionDef]:
    """The kernels of a module's text, and their helpers, by name."""
    return {
        each.name: each
        for each in _read(module).body
        if isinstance(each, ast.FunctionDef) and [ast.unparse(d) for d in each.decorator_list] == [_DECORATOR]
    }


def checked(text: str, module: str) -> dict[str, str]:
    """The functions of a proposal for that module's text, by name; raises NotAllowed."""
    text = text.replace("\r\n", "\n")
    proposed = list(_functions(text))
    known = jit_functions(module)
    taken = _names_of(module) - set(known)
    functions: dict[str, str] = {}
    for function in proposed:
        name, line = function.name, function.lineno
        if name in functions:
            raise NotAllowed(f"there are two functions {name}", line)
        if name in taken or name.startswith("__"):
            raise NotAllowed(f"the name {name} is taken", line)
        _require_signature(function, known.get(name))
        functions[name] = "\n".join(_lines(text, function))
    if not set(functions) & set(known):
        raise NotAllowed(f"it replaces none of {', '.join(known)}")
    available = {*known, *functions, *_compile_time_names(module)}
    reached = taken | _PYTHONS_OWN
    for function in proposed:
        _Checker(available, reached).function(function)
    return functions


def spliced(module: str, functions: Mapping[str, str]) -> str:
    """The module's text with these functions in place of its own; new ones stand before the first that is replaced."""
    known = jit_functions(module)
    lines = module.split("\n")
    replaced = sorted((known[name] for name in functions if name in known), key=lambda each: -each.lineno)
    for function in replaced:
        first, last = function.decorator_list[0].lineno - 1, function.end_lineno
        lines[first:last] = functions[function.name].split("\n")
    first = replaced[-1].decorator_list[0].lineno - 1
    new = [line for name, text in functions.items() if name not in known for line in (*text.split("\n"), "", "")]
    lines[first:first] = new
    made = "\n".join(lines)
    if _others(made, functions) != _others(module, functions):
        raise NotAllowed("it changes more of the module than its functions")
    return made


def _others(module: str, functions: Mapping[str, str]) -> list[str]:
    """All of a module's statements but these functions."""
    return [
        ast.dump(each)
        for each in ast.parse(module).body
        if not (isinstance(each, ast.FunctionDef) and each.name in functions)
    ]


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    if len(text) > _MOST_CHARACTERS:
        raise NotAllowed(f"it has {len(text)} characters, and may have {_MOST_CHARACTERS}")
    # A form feed ends a line for some readers of text, and not for Python's parser.
    if _CONTROL.search(text):
        raise NotAllowed("it has control characters")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # A null byte is a ValueError, brackets without end one of the last two.
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise NotAllowed(f"it cannot be parsed: {said}", line) from None
    _require_small(tree)
    for number, statement in enumerate(tree.body):
        if number == 0 and isinstance(statement, ast.Expr) and _is_text(statement.value):
            continue
        if not isinstance(statement, ast.FunctionDef):
            _refuse(statement, "outside of a function")
        if [ast.unparse(each) for each in statement.decorator_list] != [_DECORATOR]:
            raise NotAllowed(f"{statement.name} must have the decorator @{_DECORATOR} and no other", statement.lineno)
        yield statement


def _require_small(tree: ast.Module) -> None:
    """Level by level, since what is nested too deeply must not end whoever walks it by a call for each level."""
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > _MOST_NODES:
            raise NotAllowed(f"it has more than {_MOST_NODES} nodes of syntax")
        if depth > _MOST_DEEP:
            lines = (each.lineno for each in level if isinstance(each, (ast.expr, ast.stmt)))
            raise NotAllowed(f"it is nested more than {_MOST_DEEP} levels deep", next(lines, None))
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def _refuse(node: ast.AST, where: str = "") -> NoReturn:
    what = _WORDS.get(type(node), f"{type(node).__name__}")
    raise NotAllowed(f"{what} {where}".rstrip(), getattr(node, "lineno", None))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _lines(text: str, function: ast.FunctionDef) -> list[str]:
    """With the decorator, which stands on a line of its own: else what stands before it would come along."""
    lines = text.split("\n")
    first, last = function.decorator_list[0].lineno, function.end_lineno
    if lines[first - 1].strip() != f"@{_DECORATOR}":
        raise NotAllowed("a decorator stands on a line of its own", first)
    return lines[first - 1 : last]


def _parameters(function: ast.FunctionDef) -> list[tuple[str, str]]:
    return [(each.arg, ast.unparse(each.annotation) if each.annotation else "") for each in function.args.args]


def _require_signature(function: ast.FunctionDef, before: ast.FunctionDef | None) -> None:
    given, line = function.args, function.lineno
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg:
        raise NotAllowed(f"{function.name} has parameters of another kind than plain ones", line)
    for name, annotation in _parameters(function):
        if annotation not in {"", "tl.constexpr"}:
            raise NotAllowed(f"the parameter {name} is annotated with {annotation}", line)
    if any(not isinstance(default, ast.Constant) for default in given.defaults):
        raise NotAllowed(f"a default of {function.name} is no constant", line)
    if function.returns is not None:
        raise NotAllowed(f"{function.name} is annotated with what it returns", line)
    if before is not None and _parameters(function) != _parameters(before):
        wanted = ", ".join(f"{name}: {kind}" if kind else name for name, kind in _parameters(before))
        raise NotAllowed(f"{function.name} must have the parameters ({wanted}), since its launcher stays", line)


def _names_of(module: str) -> set[str]:
    """Every name that a module's text defines, imports or assigns outside of functions."""
    found: set[str] = set()
    for node in ast.walk(_read(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for statement in _read(module).body:
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            found |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return found


def _compile_time_names(module: str) -> Iterator[str]:
    """What kernels of the module may name besides its kernels: constants, and functions of other kernel modules."""
    for node in _read(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("tl.constexpr("):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.annotation is not None:
            if ast.unparse(node.annotation) == "tl.constexpr" and isinstance(node.target, ast.Name):
                yield node.target.id
        elif isinstance(node, ast.ImportFrom) and (found := _KERNELS.fullmatch(node.module or "")):
            # What else such a module has is Python: launchers, say.
            theirs = jit_functions((_FOLDER / f"{found[1]}.py").read_text(encoding="utf-8"))
            yield from (alias.asname or alias.name for alias in node.names if alias.name in theirs)


class _Checker:
    """Of one function. `available`: the names that it may use without having assigned them; `reached`: those that
    would be found without being assigned, and none of its own may have.
    """

    def __init__(self, available: Iterable[str], reached: Iterable[str]) -> None:
        self._available = frozenset(available) | _BUILTINS
        self._taken = {*_PACKAGES, *self._available, *reached}

    def function(self, function: ast.FunctionDef) -> None:
        local = {each.arg for each in function.args.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local.add(node.id)
        for name in local:
            if name.startswith("__") or name in self._taken:
                raise NotAllowed(f"the name {name} is taken", function.lineno)
        names = self._available | local
        for statement in function.body:
            self._statement(statement, names)

    def _statement(self, statement: ast.stmt, names: frozenset[str]) -> None:
        if not isinstance(statement, _STATEMENTS):
            _refuse(statement)
        if isinstance(statement, ast.Expr):
            if _is_text(statement.value):
                return
            if not isinstance(statement.value, ast.Call):
                raise NotAllowed("an expression whose value nobody uses", statement.lineno)
        if isinstance(statement, ast.For):
            called = ast.unparse(statement.iter.func) if isinstance(statement.iter, ast.Call) else ""
            if called not in {"range", "tl.range", "tl.static_range"}:
                raise NotAllowed("a loop over anything but range, tl.range or tl.static_range", statement.lineno)
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                self._statement(child, names)
            else:
                self._expression(child, names)

    def _expression(self, node: ast.AST, names: frozenset[str]) -> None:
        if isinstance(node, ast.Attribute):
            self._attribute(node, names)
            return
        if isinstance(node, ast.Name):
            if node.id in _PACKAGES:
                raise NotAllowed(f"{node.id} is not a value", node.lineno)
            if node.id not in names:
                raise NotAllowed(f"the name {node.id} is not one that a kernel may use", node.lineno)
        elif isinstance(node, ast.Constant):
            self._constant(node)
        elif isinstance(node, ast.Call) and not isinstance(node.func, (ast.Name, ast.Attribute)):
            raise NotAllowed("a call of something that has no name", node.lineno)
        elif isinstance(node, ast.keyword) and node.arg is None:
            raise NotAllowed("arguments by **", node.value.lineno)
        elif not isinstance(node, (*_EXPRESSIONS, *_PARTS)):
            _refuse(node)
        for child in ast.iter_child_nodes(node):
            self._expression(child, names)

    def _attribute(self, node: ast.Attribute, names: frozenset[str]) -> None:
        name = node.attr
        if isinstance(node.value, ast.Name) and node.value.id == "tl":
            if name.startswith("atomic_"):
                raise NotAllowed(f"tl.{name}: {_ATOMIC}", node.lineno)
            if name not in _LANGUAGE:
                raise NotAllowed(
                    f"tl.{name}: {_REASONS.get(name, 'it is not among what kernels may use')}", node.lineno
                )
            return
        if isinstance(node.value, ast.Name) and node.value.id == _TRITON:
            raise NotAllowed(f"triton.{name}: kernels use triton.language alone", node.lineno)
        if name not in _MEMBERS:
            raise NotAllowed(f"the attribute {name} is not among what kernels may use", node.lineno)
        self._expression(node.value, names)

    @staticmethod
    def _constant(node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            raise NotAllowed(f"a text of {len(value)} characters", node.lineno)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise NotAllowed("a number of more than 64 bits", node.lineno)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise NotAllowed(f"a constant of type {type(value).__name__}", node.lineno)


_HIP_TEXT = r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
_HIP_TOKEN = re.compile(rf"{_HIP_TEXT}|[A-Za-z_]\w*")
# Which of them begins first decides, as for a compiler: within a text nothing is a comment, and the other way round.
_HIP_COMMENT = re.compile(rf"(?P<comment>//[^\n]*|/\*.*?\*/)|{_HIP_TEXT}", re.DOTALL)
# A compiler joins a line with the next, also where blanks end it.
_HIP_CONTINUED = re.compile(r"\\[ \t]*(\n|$)")
_HIP_REFUSED = frozenset({"asm", "import", "module", "export", "_Pragma", "typeof", "embed", "include", "goto"})


def checked_hip(text: str, own: str) -> str:
    """The text of a HIP source in place of `own`; raises NotAllowed.

    It is compiled for a GPU alone. So that a compiler reads nothing but this project's headers for it, its directives
    are those of `own`, and it uses no built-in, no text and no assembly that `own` has not.
    """
    text = text.replace("\r\n", "\n")
    if len(text) > _MOST_CHARACTERS:
        raise NotAllowed(f"it has {len(text)} characters, and may have {_MOST_CHARACTERS}")
    if _CONTROL.search(text) or _HIP_CONTINUED.search(text) or "??" in text or "%:" in text:
        raise NotAllowed("it has control characters, continued lines or digraphs")
    theirs, ours = _without_comments(text), _without_comments(own)
    _require_whole_texts(theirs)
    allowed = {*_directives(ours), "#pragma unroll"}
    # A comment over several lines is a blank to a compiler, and may yet stand before what begins a line.
    for line in (*_directives(theirs), *_directives(_without_comments(text, keep_lines=True))):
        if line not in allowed and not re.fullmatch(r"#pragma unroll( ?\(?\d+\)?)?", line):
            raise NotAllowed(f"the directive {line[:80]}")
    if not set(_directives(ours)) - {"#pragma unroll"} <= set(_directives(theirs)):
        raise NotAllowed("it leaves out a directive of the source that it replaces")
    known = set(_HIP_TOKEN.findall(ours))
    for token in _HIP_TOKEN.findall(theirs):
        special = token[0] in "\"'" or token in _HIP_REFUSED or "__" in token
        if special and token not in known:
            raise NotAllowed(f"{token[:80]}, which the source that it replaces does not use")
    return text


def _without_comments(text: str, *, keep_lines: bool = False) -> str:
    def blank(found: re.Match[str]) -> str:
        if found["comment"] is None:
            return found[0]
        return " " + "\n" * (found[0].count("\n") if keep_lines else 0)

    return _HIP_COMMENT.sub(blank, text)


def _require_whole_texts(text: str) -> None:
    """Whatever is left of a text or a comment that does not end could hide what follows it."""
    rest = re.sub(_HIP_TEXT, '""', text)
    if re.search(r"\w\"", rest):
        raise NotAllowed('a text with a prefix, such as R"')
    rest = rest.replace('""', "")
    for mark in ('"', "'", "\\", "/*"):
        if mark in rest:
            raise NotAllowed(f"{mark} of a text or a comment that does not end")


def _directives(text: str) -> list[str]:
    return [" ".join(line.split()).replace("# ", "#") for line in text.split("\n") if line.lstrip().startswith("#")]
