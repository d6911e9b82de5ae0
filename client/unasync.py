"""Write the synchronous client, client/eft/sync/, from the asynchronous one, client/eft/aio/.

`python client/unasync.py` writes, `--check` fails when a file is stale. Both clients have the same surface and the same
behaviour because there is one text of them. Names of asynchronous things become those of their synchronous twins,
`async` and `await` go; nothing else changes, so what stands in aio/ must be right in both readings.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "eft" / "aio"
TARGET = SOURCE.parent / "sync"
BY_HAND = {"__init__.py", "io.py"}
"""What differs for a reason."""
NAMES = {
    "asynccontextmanager": "contextmanager",
    "AsyncIterator": "Iterator",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "aread": "read",
    "aiter_bytes": "iter_bytes",
    "aio": "sync",
}
"""Beside every name that begins with `Async`, which loses that."""


def name(text: str) -> str:
    return NAMES.get(text) or (text[5:] if re.match(r"Async[A-Z]", text) else text)


def translate(source: str) -> str:
    """One module, unformatted."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    out: list[str] = []
    position = (1, 0)
    depth: list[int] = []  # of brackets, at each open Awaitable[
    level = skip = 0
    for at, token in enumerate(tokens):
        text, (row, column) = token.string, token.start
        if row > position[0]:
            out.append("\n" * (row - position[0]))
            position = (row, 0)
        out.append(" " * (column - position[1]))
        position = token.end
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            if token.type == tokenize.INDENT:
                out.append(text)
            elif text:
                out.append("\n")
                position = (row + 1, 0)
            continue
        if skip:
            skip -= 1
            continue
        match token.type, text:
            case tokenize.NAME, "async" | "await":
                position = tokens[at + 1].start  # the blank behind it goes too
            case tokenize.NAME, "Awaitable" if tokens[at + 1].string == "[":
                depth.append(level)
                skip, level = 1, level + 1
                position = tokens[at + 2].start
            case tokenize.NAME, "Awaitable" if tokens[at + 1].string == ",":  # in an import
                skip = 1
                position = tokens[at + 2].start
            case tokenize.NAME, _:
                out.append(name(text))
            case tokenize.OP, "[":
                level += 1
                out.append(text)
            case tokenize.OP, "]":
                level -= 1
                if depth and depth[-1] == level:
                    depth.pop()
                else:
                    out.append(text)
            case tokenize.STRING, _:
                out.append(re.sub(r"\bAsync(?=[A-Z])|\basync (?=with|for)|\bawait ", "", text))
            case _:
                out.append(text)
    return "".join(out)


def generated() -> dict[str, str]:
    """File name → text, formatted."""
    pages = {}
    for path in sorted(SOURCE.glob("*.py")):
        if path.name in BY_HAND:
            continue
        text = translate(path.read_text(encoding="utf-8"))
        text = f"# Written by client/unasync.py from ../aio/{path.name}: change that one.\n{text}"
        pages[path.name] = _formatted(text, TARGET / path.name)
    return pages


def _formatted(text: str, path: Path) -> str:
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format", "--quiet"]):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ruff"), *command, "--stdin-filename", str(path), "-"],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        text = done.stdout
    return text


def main() -> int:
    pages = generated()
    there = {path.name: path.read_text(encoding="utf-8") for path in TARGET.glob("*.py") if path.name not in BY_HAND}
    stale = sorted(name for name in pages.keys() | there.keys() if pages.get(name) != there.get(name))
    for name in stale:
        if "--check" in sys.argv[1:]:
            print(f"client/eft/sync/{name} is stale: run `python client/unasync.py`", file=sys.stderr)
        elif name in pages:
            (TARGET / name).write_text(pages[name], encoding="utf-8")
            print(f"client/eft/sync/{name} written")
        else:
            (TARGET / name).unlink()
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
