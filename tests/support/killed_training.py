"""`python -m core.train` by `tests.support.killed`: all that a run imports is there before the first try is forked."""

from __future__ import annotations

from core.train import __main__ as trainer

with trainer.importing():
    import core.train.recipe
    from core.train.entry.standby import imports

    imports()

main = trainer.main
__all__ = ["core", "main"]
