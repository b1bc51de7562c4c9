"""What a proposal may contain: all of this project's kernels, their mutations, and nothing that reaches beyond one."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

from rocm_sd import kernels
from rocm_sd.agents.mutations import KINDS, config_mutations, kernel_mutations
from rocm_sd.kernels.configs.geglu import GegluConfig
from rocm_sd.kernels.hip.toolchain import SOURCES
from rocm_sd.kernels.proposed import NotAllowed, checked, checked_hip, jit_functions, spliced

MODULES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(kernels.__file__).parent / "triton").glob("*.py"))
    if "@triton.jit" in path.read_text(encoding="utf-8")
}
GEGLU = MODULES["geglu"]


def functions(module):
    lines = module.split("\n")
    found = jit_functions(module).values()
    return "\n\n\n".join("\n".join(lines[each.decorator_list[0].lineno - 1 : each.end_lineno]) for each in found)


def geglu(line):
    """The kernel with one line more in its body."""
    return functions(GEGLU).replace("    value *= _gelu(gate)\n", f"    value *= _gelu(gate)\n    {line}\n")


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_of_this_project_is_allowed_and_put_back_as_it_was(name):
    own = MODULES[name]
    assert spliced(own, checked(functions(own), own)) == own


@pytest.mark.parametrize("name", [name for name in MODULES if name != "compiling_process"])
def test_every_mutation_is_allowed_and_changes_something(name):
    own = MODULES[name]
    changed = dict(kernel_mutations(functions(own)))
    assert changed
    for why, text in changed.items():
        assert why.split(":")[0] in KINDS
        assert checked(text, own) != checked(functions(own), own)


def test_configs_next_to_one_are_others_and_above_zero():
    config = GegluConfig(256, 4, 1)
    found = [each for _, each in config_mutations(config)]
    assert config.to_dict() not in found
    assert {"block_f": 512, "rows": 4, "warps": 1} in found
    assert {"block_f": 128, "rows": 8, "warps": 1} in found
    assert all(min(each.values()) >= 0 for each in found)


HOSTILE = {
    "import os": "an import",
    "value = open('/etc/passwd')": "the name open",
    "value = __import__('os')": "the name __import__",
    "value = eval('1')": "the name eval",
    "value = value.__class__": "the attribute __class__",
    "value = tl.core": "tl.core",
    "value = tl.core.triton": "the attribute triton",
    "value = tl.extra": "tl.extra",
    "value = triton.runtime": "triton.runtime",
    "tl.device_print('x', value)": "print nothing",
    "tl.static_print(value)": "print nothing",
    "tl.inline_asm_elementwise('', '', [value], tl.float32, True, 1)": "assembly",
    "tl.atomic_add(y, value)": "the same bits",
    "value = (lambda: value)()": "something that has no name",
    "value = [each for each in x]": "a comprehension",
    "value = f'{value}'": "a formatted string",
    "tl = value": "the name tl is taken",
    "global GLOBAL": "a global",
    "with value: pass": "a with block",
    "value = min(*x)": "a starred expression",
    "value = tl.load(**x)": "arguments by **",
    "value = 2 ** 99999999999999999999": "64 bits",
    "value = b'bytes'": "type bytes",
    "for i in x: pass": "a loop over anything but",
    "raise value": "a raise",
    "del value": "a del",
    "value.data.write": "whose value nobody uses",
    "def inner(): pass": "a function within a function",
    "value = launch": "the name launch",
    "value = Bound": "the name Bound",
    "getattr = 0": "the name getattr is taken",
    "if F == 1: getattr = 0": "the name getattr is taken",
    "for print in range(1): value = value": "the name print is taken",
    "if F == 1: ceil_div = 0": "the name ceil_div is taken",
    "value = value" + " + value" * 1500: "nested more than 100 levels deep",
    "value = " + "-" * 150 + "value": "nested more than 100 levels deep",
    "value = 'a' * 3; value = '" + "b" * 70 + "'": "a text of 70 characters",
}


@pytest.mark.parametrize("line", HOSTILE)
def test_what_no_kernel_needs_is_refused_with_its_word(line):
    with pytest.raises(NotAllowed) as refused:
        checked(geglu(line), GEGLU)
    assert HOSTILE[line] in refused.value.message
    assert "(line " in refused.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "replaces none"),
        ("import os\n", "an import outside"),
        ("x = 1\n", "Assign outside"),
        ("def _geglu(x): pass\n", "must have the decorator"),
        ("@triton.jit\n@evil\ndef _geglu(x): pass\n", "must have the decorator"),
        ("@triton.jit\ndef launch(x): pass\n", "the name launch is taken"),
        ("@triton.jit\ndef _geglu(x): pass\n", "must have the parameters"),
        ("@triton.jit\ndef _gelu(g: open): pass\n", "annotated with open"),
        ("@triton.jit\ndef _gelu(g=print()): pass\n", "is no constant"),
        ("@triton.jit\ndef _gelu(*g): pass\n", "another kind"),
        ("@triton.jit\ndef _gelu(g) -> print(): pass\n", "annotated with what it returns"),
        ("@triton.jit\nclass _gelu: pass\n", "a class outside"),
        ("@triton.jit\nasync def _gelu(g): pass\n", "an async function"),
        ("x = 1; \\\n@triton.jit\ndef _gelu(g): return g\n", "cannot be parsed"),
        ("(" * 5000, "cannot be parsed"),
        ("@triton.jit\ndef _gelu(g):\n\x0c    return g\n", "control characters"),
        ("@triton.jit\ndef _gelu(g):\n    return g\u2028import os\n", "control characters"),
        ("a" * 70000, "70000 characters"),
        ("\x00", "control characters"),
    ],
)  # fmt: skip
def test_what_is_no_kernel_is_refused(text, why):
    with pytest.raises(NotAllowed, match=why.replace("(", r"\(")):
        checked(text, GEGLU)


def test_helpers_are_new_functions_before_the_first_that_is_replaced():
    text = functions(GEGLU) + "\n\n\n@triton.jit\ndef _double(v):\n    return v + v\n"
    made = spliced(GEGLU, checked(text, GEGLU))
    names = [each.name for each in ast.parse(made).body if isinstance(each, ast.FunctionDef)]
    assert names[0] == "_double"
    assert set(names) - {"_double"} == {
        each.name for each in ast.parse(GEGLU).body if isinstance(each, ast.FunctionDef)
    }


def test_whatever_triton_would_find_unassigned_is_no_name_of_a_proposals_own():
    code_generator = pytest.importorskip("triton.compiler.code_generator")
    assert set(code_generator.CodeGenerator.builtin_namespace) <= set(dir(builtins))


@pytest.mark.parametrize("source", sorted(path.stem for path in SOURCES.glob("*.hip")))
def test_every_hip_source_is_allowed_in_its_own_place(source):
    own = (SOURCES / f"{source}.hip").read_text(encoding="utf-8")
    assert checked_hip(own, own) == own


@pytest.mark.parametrize(
    ("added", "why"),
    [
        ('#include "/etc/passwd"', "the directive"),
        ("#define launch evil", "the directive"),
        ("# embed </etc/passwd>", "the directive"),
        ('asm volatile("s_sleep 1");', "asm"),
        ("int x = __builtin_trap();", "__builtin_trap"),
        ("import std;", "import"),
        ("_Pragma(x)", "_Pragma"),
        ('const char* text = "text";', '"text"'),
        ("int x; \\\n int y;", "continued lines"),
        ("%:include <x>", "digraphs"),
        ('const char* s = "//"; asm("s_sleep 1");', '"//"'),
        ('const char* s = "/*";\n#include "/etc/passwd"\nconst char* t = "*/";', "the directive"),
        ("// '\nint x = '/*';\n#include </etc/passwd>\nint y = '*/';", "the directive"),
        ('auto s = R"(//)";', "a text with a prefix"),
        ('int x = ";\nasm("s_sleep 1");', "that does not end"),
        ("int x = 1'000;", "that does not end"),
        ("int \\u0061sm = 0;", "that does not end"),
        ("/* int x;", "that does not end"),
        ("int x; \\ \t\n int y;", "continued lines"),
        ("#inc\\ \nlude </etc/passwd>", "continued lines"),
        ("int x; /*\n*/ #include </etc/passwd>", "the directive"),
    ],
)
def test_what_a_compiler_would_read_from_elsewhere_is_refused(added, why):
    own = (SOURCES / "layout_copy.hip").read_text(encoding="utf-8")
    with pytest.raises(NotAllowed, match=why):
        checked_hip(own + f"\n{added}\n", own)
    with pytest.raises(NotAllowed, match="leaves out"):
        checked_hip("int nothing;\n", own)
