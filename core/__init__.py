"""What eft is made of: spec, plan, jobs, database, storage and (apart, in `core.train`) the trainer."""

from pathlib import Path

__version__ = "0.1.0"

HOME = Path(__file__).resolve().parent.parent
"""The checkout (or image folder) this code runs from; the application is never installed as a package."""
