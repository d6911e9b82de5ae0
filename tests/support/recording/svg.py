"""Pictures of a terminal as one animated SVG without scripts, which also runs inside an `<img>`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from tests.support.recording.emulator import BLANK, Cell

Picture = tuple[tuple[Cell, ...], ...]
WIDTH, HEIGHT, PAD = 8.4, 19, 14
"""Pixels of a character, of a line, and around."""
PALETTE = {
    "black": "#484f58",
    "red": "#ff7b72",
    "green": "#3fb950",
    "yellow": "#d29922",
    "blue": "#58a6ff",
    "magenta": "#bc8cff",
    "cyan": "#39c5cf",
    "white": "#c9d1d9",
}


def animated(pictures: Sequence[tuple[float, Picture]], title: str) -> str:
    """`pictures`: seconds for which each is shown, and the picture. It begins again after the last one."""
    lines, columns = len(pictures[0][1]), len(pictures[0][1][0])
    width, height = round(columns * WIDTH + 2 * PAD), lines * HEIGHT + 2 * PAD
    total, at, steps = sum(seconds for seconds, _ in pictures), 0.0, []
    for number, (seconds, _) in enumerate(pictures):
        steps.append(f"{100 * at / total:.3f}%{{transform:translateY(-{number * height}px)}}")
        at += seconds
    rows: dict[str, int] = {}  # a line that stands in many pictures is written once
    frames = []
    for number, (_, picture) in enumerate(pictures):
        uses = []
        for line, cells in enumerate(picture):
            drawn = _row(cells)
            if drawn:
                name = rows.setdefault(drawn, len(rows))
                uses.append(f'<use href="#l{name}" y="{number * height + PAD + line * HEIGHT}"/>')
        frames.append("".join(uses))
    defined = "".join(f'<g id="l{name}">{drawn}</g>' for drawn, name in rows.items())
    colors = "".join(f".{name}{{fill:{value}}}" for name, value in PALETTE.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><style>'
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#c9d1d9;"
        f"white-space:pre}}.b{{font-weight:bold}}.d{{opacity:.6}}{colors}"
        f"#reel{{animation:play {total:.2f}s step-end infinite}}@keyframes play{{{''.join(steps)}}}</style>"
        f"<defs>{defined}</defs>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/><g id="reel">{"".join(frames)}</g></svg>\n'
    )


def _row(cells: Sequence[Cell]) -> str:
    """The texts of a line, each as wide as its characters are on a terminal, whatever the font is."""
    found, at = [], 0
    for style, group in groupby(cells, key=lambda cell: cell[1]):
        text = "".join(char for char, _ in group)
        if text.strip():
            start = len(text) - len(text.lstrip())
            shown = text.strip()
            classes = [*(["b"] * style.bold), *(["d"] * style.dim)]
            fill = ""
            if style.color is not None and style.color in PALETTE:
                classes.append(style.color)
            elif style.color is not None:
                fill = f' style="fill:{style.color}"'
            named = f' class="{" ".join(classes)}"' if classes else ""
            found.append(
                f'<text x="{PAD + (at + start) * WIDTH:.1f}" y="14" textLength="{len(shown) * WIDTH:.1f}" '
                f'lengthAdjust="spacingAndGlyphs"{named}{fill}>{escape(shown)}</text>'
            )
        at += len(text)
    return "".join(found)


def still(picture: Picture) -> str:
    """The text of a picture."""
    return "\n".join("".join(char for char, _ in row).rstrip() for row in picture).rstrip()


__all__ = ["BLANK", "Picture", "animated", "still"]
