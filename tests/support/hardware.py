"""Boxes that are not here: sysfs and /dev as a text fixture describes them."""

from __future__ import annotations

from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "unit" / "fixtures" / "hardware"


def unpack(name: str, root: Path) -> Path:
    path: Path | None = None
    for line in (FIXTURES / f"{name}.txt").read_text().splitlines(keepends=True):
        if line.startswith("==="):
            path = root / line[4:].strip()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        elif path is not None:
            with path.open("a") as file:
                file.write(line)
    return root
