"""What the environment says to eft that eft does not use: misspelt variables, folders that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from box.doctor.report import Report
from core.settings import Settings

BESIDE_SETTINGS = frozenset(
    {"EFT_API_KEY", "EFT_HOME", "EFT_KERNELS", "EFT_LAUNCHER", "EFT_RANKS", "EFT_RANKS_FENCE", "EFT_START"}
    | {"EFT_TRACEBACK", "EFT_URL", "EFT_HARDWARE_SMOKE"}
)
"""Variables of the client, the images, the trainer and the Makefile."""
LIKENESS = 0.75
"""How like a name has to be (difflib's ratio) to be offered."""


def look(report: Report, settings: Settings, environ: Mapping[str, str]) -> None:
    unknown(report, environ)
    for variable, folders in (("EFT_DATA_ROOTS", settings.data_roots), ("EFT_MODEL_ROOTS", settings.model_roots)):
        for folder in folders:
            if not folder.expanduser().is_dir():
                report.add(
                    "note", "settings", f"{variable}: there is no folder {folder}; jobs cannot use a path below it"
                )


def unknown(report: Report, environ: Mapping[str, str]) -> None:
    """Names the variables that no setting has, each with the nearest one that exists."""
    known = {f"EFT_{name.upper()}" for name in Settings.model_fields}
    known |= {f"{name}_FILE" for name in known} | BESIDE_SETTINGS
    for name in sorted(environ):
        if not name.startswith("EFT_") or name.upper() in known or name.startswith("EFT_TEST_"):
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=LIKENESS)
        meant = f"; did you mean {near[0]}?" if near else " (docs/settings.md has them all)"
        report.add("note", "settings", f"{name} is not a setting of eft, and nothing reads it{meant}")
