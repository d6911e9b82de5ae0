"""What the API and the broker get of the environment that `eft up` was started in: allow-lists, so that a token that is
there for the worker, or for something else altogether, is in no process that answers strangers. The worker gets all of
it, since it alone downloads models and knows the devices; what its children get is in worker/environment.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

BROKER = re.compile(r"PATH|LANG|LC_[A-Z]+|TZ|LD_LIBRARY_PATH")
API = re.compile(
    rf"{BROKER.pattern}|HOME|USER|LOGNAME|TMPDIR|XDG_[A-Z_]+|VIRTUAL_ENV|PYTHON[A-Z]*|OMP_NUM_THREADS|MALLOC_[A-Z_]+"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CREDENTIALS_DIRECTORY|EFT_[A-Z0-9_]+|AWS_[A-Z0-9_]+|PG[A-Z]+"
)
"""With the settings, what finds and opens an object store (AWS_…) and a PostgreSQL (PG…), and what Python reads."""


def of(member: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for one member of the process tree: `api`, `broker` or `worker`."""
    match member:
        case "broker":
            allowed = BROKER
        case "api":
            allowed = API
        case _:
            return dict(environment)
    return {name: value for name, value in environment.items() if allowed.fullmatch(name)}
