"""What a verb of a session costs beyond its computation: `python -m bench.sessions [--verbs N]`.

The same verbs on the same tiny model, in turn: over HTTP through API, database, worker and child, and straight into a
child over its socket, which is the computation alone. The overhead is the difference of each pair, at the median and at
the 99th percentile. On a busy machine these times say little: the processor time that API and worker take for a verb is
told too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from eft.sync.client import Client

from tests.support import models, session
from tests.support.service import Service
from tests.support.session import SessionChild, examples

ROW = list(range(10, 74))
METHOD = {"type": "lora", "r": 8}


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def processor(service: Service) -> dict[str, float]:
    """Seconds of processor time that API and worker have taken."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for name in ("api", "worker"):
        fields = Path(f"/proc/{service.pid(name)}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def measure(folder: Path, verbs: int) -> dict[str, list[float]]:
    """Milliseconds of each verb: `http`, `socket`, and their difference pair by pair; of API and worker, the mean of
    their processor time."""
    tiny = models.folder() / "tiny"
    service = Service(folder, {"EFT_MODEL_ROOTS": str(tiny.parent)})
    found: dict[str, list[float]] = {"http": [], "socket": []}
    try:
        service.start()
        client = Client(service.note()["url"], service.key)
        spec = {"precision": "fp32", "resources": {"accelerator": "cpu"}}
        order = session.order(tiny, folder / "peer")
        with (
            client.session(model=str(tiny), method=METHOD, **spec) as ours,
            SessionChild(folder / "peer-run", order) as peer,
        ):
            peer.hello()
            peer.ask("create", model="a", method=METHOD)
            batch = [{"tokens": ROW}]
            for number in range(verbs + 10):
                if number == 10:
                    before = processor(service)
                http = timed(lambda: ours.forward_backward(batch))
                alone = timed(lambda: peer.ask("forward_backward", examples(ROW), model="a"))
                if number >= 10:  # the first ones wake both sides
                    found["http"].append(http)
                    found["socket"].append(alone)
            took = {name: seconds - before[name] for name, seconds in processor(service).items()}
        client.close()
    finally:
        service.stop()
    for name, seconds in took.items():
        found[f"processor_{name}"] = [1000 * seconds / verbs]
    found["overhead"] = [one - other for one, other in zip(found["http"], found["socket"], strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sessions", description=__doc__)
    parser.add_argument("--verbs", type=int, default=300)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), given.verbs)
    figures: dict[str, float] = {}
    for name in [name for name in found if name.startswith("processor")]:
        figures[f"{name}_ms"] = round(found.pop(name)[0], 2)
        print(f"{name:16} {figures[f'{name}_ms']:6.2f} ms a verb")
    for name, values in found.items():
        cuts = statistics.quantiles(values, n=100)
        figures |= {f"{name}_p50_ms": round(statistics.median(values), 2), f"{name}_p99_ms": round(cuts[98], 2)}
        print(f"{name:9} p50 {statistics.median(values):7.2f} ms   p99 {cuts[98]:7.2f} ms")
    print(json.dumps({"bench": "sessions", "verbs": given.verbs} | figures))


if __name__ == "__main__":
    main()
