"""AMD's pseudocode as a tree: statements and expressions of the language in which ISA guides state instructions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

TOKEN = re.compile(
    r"(?P<cast>\d+'[UIFB](?![\w]))|(?P<number>(?:\d+')?(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)(?:ULL|LL|U|F)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|<<|>>|<>|<=|>=|==|!=|&&|\|\||[-+|&^]=|[-+*/%&|^~!<>=?:;,.(){}\[\]])"
)
LEVELS = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!=", "<>"], ["<", "<=", ">", ">="], ["<<", ">>"], ["+", "-"],
          ["*", "/"], ["**"]]  # fmt: skip
ENDS = frozenset({"endif", "elsif", "else", "endfor", ")", ""})


class Node(NamedTuple):
    what: str
    parts: tuple[Any, ...]


class Reader:
    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        self.tokens = [(m.lastgroup, m[0]) for m in TOKEN.finditer(text)]
        assert "".join(t for _, t in self.tokens) == re.sub(r"\s", "", text), "something is no word of the language"
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        word = self.next
        assert expected in (None, word), f"{expected} expected, {word} found"
        self.at += 1
        return word

    def taken(self, word: str) -> bool:
        if self.next != word:
            return False
        self.at += 1
        return True

    def statements(self) -> list[Node]:
        found = []
        while self.next not in ENDS:
            if not self.taken(";"):
                found.append(self.statement())
        return found

    def statement(self) -> Node:
        if self.taken("if"):
            branches = []
            word = "elsif"
            while word == "elsif":
                condition = self.expression()
                self.take("then")
                branches.append((condition, self.statements()))
                word = self.take()
            otherwise = self.statements() if word == "else" else []
            if word == "else":
                self.take("endif")
            return Node("if", (branches, otherwise))
        if self.taken("for"):
            name, _, first, _, last = self.take(), self.take("in"), self.expression(), self.take(":"), self.expression()
            self.take("do")
            body = self.statements()
            self.take("endfor")
            return Node("for", (name, first, last, body))
        if self.taken("declare"):
            name, _, size = self.take(), self.take(":"), int(self.take().split("'")[0])
            count = int(self.take()) if self.taken("[") else None
            if count is not None:
                self.take("]")
            return Node("declare", (name, size, count))
        if self.taken("return"):
            return Node("return", (self.expression(),))
        target = self.postfix()
        sign = self.take()
        if self.taken("lambda"):
            self.take("(")
            names = [self.take()]
            while self.taken(","):
                names.append(self.take())
            self.take(")")
            self.take("(")
            body = self.statements()
            self.take(")")
            return Node("lambda", (target.parts[0], names, body))
        value = self.expression()
        return Node("assign", (target, value if sign == "=" else Node("binary", (sign[:-1], target, value))))

    def expression(self) -> Node:
        condition = self.binary(0)
        if not self.taken("?"):
            return condition
        yes = self.expression()
        self.take(":")
        return Node("choice", (condition, yes, self.expression()))

    def binary(self, level: int) -> Node:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.next in LEVELS[level]:
            left = Node("binary", (self.take(), left, self.binary(level + 1)))
        return left

    def unary(self) -> Node:
        if self.next in ("-", "+", "~", "!"):
            return Node("unary", (self.take(), self.unary()))
        return self.postfix()

    def postfix(self) -> Node:
        found = self.primary()
        while True:
            if self.taken("."):
                found = Node("type", (found, self.take()))
            elif self.taken("["):
                first = self.expression()
                last = self.expression() if self.taken(":") else None
                self.take("]")
                found = Node("bits", (found, first, last))
            elif self.next == "(" and found.what == "name":
                found = Node("call", (found.parts[0], self.arguments("(", ")")))
            else:
                return found

    def arguments(self, opening: str, closing: str) -> list[Node]:
        self.take(opening)
        found = [self.expression()]
        while self.taken(","):
            found.append(self.expression())
        self.take(closing)
        return found

    def primary(self) -> Node:
        kind, word = self.tokens[self.at]
        if word == "{":
            return Node("join", (self.arguments("{", "}"),))
        self.at += 1
        if word == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if kind == "cast":
            size, letter = word.split("'")
            return Node("cast", (int(size), letter, *self.arguments("(", ")")))
        return Node("number" if kind == "number" else "name", (word,))


@lru_cache(maxsize=512)
def read(text: str) -> list[Node]:
    reader = Reader(text)
    found = reader.statements()
    assert not reader.next, f"{reader.next} is not expected here"
    return found
