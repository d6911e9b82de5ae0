"""`python -m tests.support.templates_child < {name: template} as JSON`: each rendered under a bound on memory, told one
a line as [name, outcome, seconds of processor time, what was written]. A process that memory kills tells nothing more.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from core.errors import DataError
from core.train.render.jinja import sandbox
from core.train.render.jinja.template import Asked, ChatTemplate

MEMORY = 1 << 30
"""Bytes beyond what the interpreter has: less than half of what any of the cases asks for."""
SECONDS = 1.0
MESSAGES = [{"role": "user", "content": "a" * 1000}, {"role": "assistant", "content": "b" * 1000}]


def main() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sandbox.MAX_SECONDS = SECONDS
    for name, source in json.load(sys.stdin).items():
        began, text = time.process_time(), ""
        try:
            text = ChatTemplate(source, {}, name="it").text(Asked(MESSAGES, (), 1), MESSAGES)
            outcome = "rendered"
        except DataError as error:
            outcome = error.message
        except sandbox.TemplateError as error:
            outcome = f"no template: {error}"
        except MemoryError:
            outcome = "out of memory"
        print(json.dumps([name, outcome, time.process_time() - began, text[:1000]]), flush=True)


if __name__ == "__main__":
    main()
