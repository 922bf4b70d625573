"""Rewrites what of a .cu or .cuh is no C++: `__shared__` variables and `kernel<<<...>>>(...)`."""

import re
import sys
from pathlib import Path

EXTERN_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];")
SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?([^;]+);")


def declarators(text: str) -> list[str]:
    """The parts of a declaration between the commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<[(") - (c in ">])")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def shared(match: re.Match[str]) -> str:
    """A reference to memory of the block's for each variable."""
    first, *others = declarators(
        re.sub(r">>", "> >", match[1]) if "<" in match[1] and "[" not in match[1] else match[1]
    )
    kind, first = re.fullmatch(r"(.*?[\w>])\s+(\w+\s*(?:\[.*)?)", first, re.DOTALL).groups()
    lines = []
    for variable in [first, *others]:
        name, extent = re.fullmatch(r"\s*(\w+)\s*(.*)", variable, re.DOTALL).groups()
        lines.append(
            f"static char {name}_site; typedef {kind} {name}_type{extent}; "
            f"{name}_type &{name} = emulation::shared<{name}_type>(&{name}_site);"
        )
    return " ".join(lines)


def launches(text: str) -> str:
    """kernel<T><<<a, b>>>(c) becomes emulation::Configured{a, b}([=](auto... x) { kernel<T>(x...); }, c)."""
    while (at := text.find("<<<")) >= 0:
        start = at - 1
        while text[start].isspace():
            start -= 1
        if text[start] == ">":
            depth = 0
            while True:
                depth += (text[start] == ">") - (text[start] == "<")
                start -= 1
                if depth == 0:
                    break
        while text[start].isalnum() or text[start] in "_:":
            start -= 1
        start += 1
        kernel = text[start:at].strip()
        close = text.index(">>>", at)
        configuration = text[at + 3 : close]
        text = (
            f"{text[:start]}emulation::Configured{{{configuration}}}"
            f"([=](auto... x) {{ {kernel}(x...); }}, {text[close + 3 :].lstrip()[1:]}"
        )
    return text


def translate(text: str) -> str:
    text = text.replace("MAX_GRID = 65535", "MAX_GRID = 9")  # so that the loops over what a grid leaves are run
    text = EXTERN_SHARED.sub(r"\1 *const \2 = (\1 *)emulation::shared_memory(nullptr, 0, 0);", text)
    return launches(SHARED.sub(shared, text))


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    for file in [*source.rglob("*.cu"), *source.rglob("*.cuh"), *source.rglob("*.h")]:
        to = target / file.relative_to(source)
        if file.parent.name == "ptx":  # include/ptx stands for them
            continue
        text = translate(file.read_text())
        if not to.exists() or to.read_text() != text:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text)
