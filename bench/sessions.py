"""What sessions cost: `python -m bench.sessions [--only verbs|parking|samples|together|drawn …]`, on a tiny model.

- `verbs`: a verb beyond its computation. The same verbs in turn over HTTP through API, database, worker and child, and
  straight into a child over its socket, which is the computation alone. The overhead is the difference of each pair.
- `parking`: how long a parked session takes to answer again, and how long it takes to be parked, against the first
  answer of a new session.
- `samples`: so many samples wait at once, each with a request that waits for its result, while one after the other is
  sent: the time until a sample is accepted, and the API's memory. With `--unanswered` it ends when all are accepted.
  `--before DIR` measures so, in turn, what is accepted by another checkout.
- `together`: recipes in sessions of one base at once, which share a process, against the same one after the other, each
  in a session of its own, start-up counted. The bits have to be the same.
- `drawn`: samples of several sessions of one child, each with an adapter of its own, asked for at once, which are drawn
  in one batch, against the same ones asked for one after the other. The bits have to be the same. `--model` is another
  model than the tiny one.

On a busy machine times say little: the processor time of API, worker and children is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from eft.sync.client import Client
from eft.sync.sessions import TrainingSession

from tests.support import models, session
from tests.support.service import ROOT, Service, wait_for
from tests.support.session import SessionRanks, examples

ROW = list(range(10, 74))
METHOD = {"type": "lora", "r": 8}
SPEC: dict[str, Any] = {"precision": "fp32", "resources": {"accelerator": "cpu"}}
LIMITS = {"EFT_MAX_CONNECTIONS": "16384", "EFT_MAX_CONNECTIONS_PER_ADDRESS": "8192", "EFT_MAX_SESSIONS": "0"}
TICKS = os.sysconf("SC_CLK_TCK")


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def ticks(pid: int, *, of_ended: bool = False) -> int:
    """Processor time of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return sum(int(one) for one in fields[11 : 15 if of_ended else 13])


def processor(service: Service) -> dict[str, float]:
    """Seconds of processor time that API and worker have taken, and the worker's children."""
    worker = service.pid("worker")
    children = sum(ticks(pid) for pid, command in service.processes().items() if " core.train" in command)
    ended = ticks(worker, of_ended=True) - ticks(worker)
    found = {"api": ticks(service.pid("api")), "worker": ticks(worker), "children": ended + children}
    return {name: count / TICKS for name, count in found.items()}


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def verbs(service: Service, folder: Path, count: int) -> dict[str, float]:
    tiny = models.folder() / "tiny"
    times: dict[str, list[float]] = {"http": [], "socket": []}
    order = session.order(tiny, folder / "peer")
    with (
        Client(service.note()["url"], service.key) as client,
        client.session(model=str(tiny), method=METHOD, **SPEC) as ours,
        SessionRanks(folder / "peer-run", order, 1, cold=True) as peer,
    ):
        peer.ask("create", model="a", method=METHOD)
        batch = [{"tokens": ROW}]
        for number in range(count + 10):
            if number == 10:
                before = processor(service)
            http = timed(lambda: ours.forward_backward(batch))
            alone = timed(lambda: peer.ask("forward_backward", examples(ROW), model="a"))
            if number >= 10:  # the first ones wake both sides
                times["http"].append(http)
                times["socket"].append(alone)
        after = processor(service)
    times["overhead"] = [one - other for one, other in zip(times["http"], times["socket"], strict=True)]
    found = {f"processor_{name}_ms": 1000 * (after[name] - before[name]) / count for name in ("api", "worker")}
    for name, values in times.items():
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = quantiles(values)
    return found


def parking(service: Service, runs: int) -> dict[str, float]:
    tiny = str(models.folder() / "tiny")
    cold, back, parked = list[float](), list[float](), list[float]()
    with Client(service.note()["url"], service.key, patience=300) as client:
        for _ in range(runs):
            began = time.perf_counter()
            with client.session(model=tiny, method=METHOD, **SPEC) as one:
                one.forward_backward([{"tokens": ROW}])
                cold.append(time.perf_counter() - began)
                one.step(0.01)
                began = time.perf_counter()
                client.sessions.park(one.id)
                wait_for(lambda: one.status()["status"] == "parked", 120, "the session to be parked", every=0.02)
                parked.append(time.perf_counter() - began)
                back.append(timed(lambda: one.forward_backward([{"tokens": ROW}])) / 1000)
    ratios = [one / other for one, other in zip(back, cold, strict=True)]
    found = {"cold_s": statistics.median(cold), "back_s": statistics.median(back), "park_s": statistics.median(parked)}
    return found | {"back_to_cold": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def resident(pid: int) -> tuple[float, float]:
    """Memory of a process now and at its most, MB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))
    return now, most


def samples(service: Service, count: int, *, answered: bool = True) -> dict[str, float]:
    """A first sample is long, so that none is answered before all are sent. `answered`: the answers are waited for."""
    tiny = str(models.folder() / "tiny")
    acknowledged = list[float]()

    async def poll(path: str, position: int) -> bool:
        """By a connection of its own, without a library: 2,000 of them are to cost this process little."""
        address = httpx.URL(str(service.note()["url"]))
        while True:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            head = f"GET {path}/{position}?wait=30 HTTP/1.1\r\nHost: {address.host}\r\nConnection: close\r\n"
            writer.write(f"{head}Authorization: Bearer {service.key}\r\n\r\n".encode())
            answer, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            status = json.loads(body)["status"] if answer.startswith(b"HTTP/1.1 200") else "refused"
            if status != "waiting":
                return bool(status == "done")

    async def send(path: str) -> int:
        headers = {"Authorization": f"Bearer {service.key}"}
        url = str(service.note()["url"])
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as sender:
            polls = list[asyncio.Task[bool]]()

            for seq in range(count):
                asked = {"op": "generate", "model": "a", "max_tokens": 8, "seed": seq, "stop_token_ids": []}
                if seq == 0:
                    asked |= {"max_tokens": 480, "num_samples": 1024}
                body = {"seq": 10 + seq, "operation": asked, "arrays": {"tokens": ROW[:8], "lengths": [8]}}
                began = time.perf_counter()
                reply = await sender.post(path, json=body)
                acknowledged.append(1000 * (time.perf_counter() - began))
                reply.raise_for_status()
                polls.append(asyncio.create_task(poll(path, reply.json()["position"])))
                await asyncio.sleep(0)
            waiting = sum(not one.done() for one in polls)
            if not answered:
                for one in polls:
                    one.cancel()
                return waiting
            for number, good in enumerate(await asyncio.gather(*polls)):
                assert good, f"sample {number} was not answered"
            return waiting

    with (
        Client(service.note()["url"], service.key, patience=300) as client,
        client.session(model=tiny, method=None, **SPEC) as ours,
    ):
        ours.create("a", METHOD)
        before = processor(service)
        began = time.perf_counter()
        in_flight = asyncio.run(send(f"/sessions/{ours.id}/operations"))
        seconds = time.perf_counter() - began
        after = processor(service)
    p50, p99 = quantiles(acknowledged)
    now, most = resident(service.pid("api"))
    found = {"samples": count, "in_flight_at_the_end_of_sending": in_flight, "accepted_p50_ms": p50}
    found |= {"accepted_p99_ms": p99, "api_mb": now, "api_most_mb": most, "all_answered_s": seconds}
    return found | {f"processor_{name}_ms": 1000 * (after[name] - before[name]) / count for name in before}


def accepted(before: Path, count: int, runs: int) -> dict[str, float]:
    """Samples of this checkout and of another one, in turn, each by this file over the modules of the checkout."""
    names = ("accepted_p50_ms", "accepted_p99_ms", "processor_api_ms")
    found = dict[str, list[float]]()
    for _ in range(runs):
        for whose, folder in {"before": before, "now": ROOT}.items():
            asked = ["--only", "samples", "--samples", str(count), "--unanswered"]
            told = subprocess.run(
                [sys.executable, "-P", __file__, *asked],  # -P: `queue` is a module of this folder
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(folder)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            seen = json.loads(told.splitlines()[-1])["samples"]
            print(
                f"accepted   {whose:6} load {os.getloadavg()[0]:5.1f}", {name: seen[name] for name in names}, flush=True
            )
            for name in names:
                found.setdefault(f"{whose}_{name}", []).append(seen[name])
    ratios = [now / then for now, then in zip(found[f"now_{names[2]}"], found[f"before_{names[2]}"], strict=True)]
    middle = {name: statistics.median(values) for name, values in found.items()}
    return middle | {"processor": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def recipe(one: TrainingSession, number: int, steps: int) -> list[float]:
    one.create("a", METHOD, seed=number)
    losses = []
    for step in range(steps):
        rows = [{"tokens": ROW[at : at + 24]} for at in (number, number + step % 8)]
        losses.append(one.forward_backward(rows, model="a").loss)
        one.step(0.01, max_grad_norm=1.0, model="a")
        one.generate([ROW[:8]], max_tokens=8, seed=step, stop_token_ids=[], model="a")
    return losses


def together(service: Service, count: int, steps: int, runs: int) -> dict[str, float]:
    tiny = str(models.folder() / "tiny")
    clock, busy = list[float](), list[float]()

    def run(client: Client, number: int, told: dict[int, list[float]]) -> None:
        with client.session(model=tiny, method=None, patience=600, **SPEC) as one:
            told[number] = recipe(one, number, steps)

    def measured(act: Callable[[], None]) -> tuple[float, float]:
        before, began = processor(service), time.perf_counter()
        act()
        seconds = time.perf_counter() - began
        time.sleep(3.0)  # the last child leaves
        return seconds, sum(processor(service).values()) - sum(before.values())

    with Client(service.note()["url"], service.key, patience=600) as client:
        for _ in range(runs):
            alone, shared = dict[int, list[float]](), dict[int, list[float]]()

            def in_turn(told: dict[int, list[float]] = alone) -> None:
                for number in range(count):
                    run(client, number, told)

            def at_once(told: dict[int, list[float]] = shared) -> None:
                threads = [threading.Thread(target=run, args=(client, number, told)) for number in range(count)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

            (after_another, work), (beside, work_beside) = measured(in_turn), measured(at_once)
            assert alone == shared, "a session came to other losses beside others"
            clock.append(beside / after_another)
            busy.append(work_beside / work)
            print(
                f"together {beside:.1f} s ({work_beside:.1f} of processors), in turn {after_another:.1f} ({work:.1f})"
            )
    found = {"sessions": count, "steps": steps, "clock": statistics.median(clock), "clock_least": min(clock)}
    found |= {"clock_most": max(clock), "processor": statistics.median(busy), "processor_least": min(busy)}
    return found | {"processor_most": max(busy)}


def drawn(folder: Path, model: Path, sessions: int, asks: int, tokens: int, runs: int) -> dict[str, float]:
    order = session.order(model, folder / "drawn").model_copy(update={"pass_tokens": 4096})
    clock, busy = list[float](), list[float]()
    with SessionRanks(folder / "drawn-run", order, 1, cold=True) as child:
        users = [child, *(child.beside(f"guest-{n}", folder / f"guest-{n}") for n in range(1, sessions))]
        for number, user in enumerate(users):
            user.ask("create", model="a", method=METHOD, seed=number)
            user.ask("forward_backward", examples(ROW), model="a")
            user.ask("step", model="a", learning_rate=0.01)
        wishes = [
            (user, {"model": "a", "max_tokens": tokens, "seed": number, "stop_token_ids": []})
            for number in range(asks)
            for user in users
        ]

        def ask(*, at_once: bool) -> tuple[list[list[int]], float, float]:
            before, began = ticks(child.ranks[0].pid), time.perf_counter()
            if at_once:
                found = child.ask_together([(user, "generate", examples(ROW[:16]), wish) for user, wish in wishes])
            else:
                found = [user.ask("generate", examples(ROW[:16]), **wish)[1] for user, wish in wishes]
            seconds, work = time.perf_counter() - began, (ticks(child.ranks[0].pid) - before) / TICKS
            return [one["tokens"].tolist() for one in found], seconds, work

        ask(at_once=False)
        ask(at_once=True)
        for _ in range(runs):
            (alone, after_another, work), (beside, together, less) = ask(at_once=False), ask(at_once=True)
            assert alone == beside, "an answer came to other bits beside others"
            clock.append(together / after_another)
            busy.append(less / work)
            print(f"at once {together:.2f} s ({less:.2f} of processors), in turn {after_another:.2f} ({work:.2f})")
    found = {
        "sessions": sessions,
        "samples": len(wishes),
        "in_turn_processor_s": work,
        "clock": statistics.median(clock),
    }
    found |= {"processor": statistics.median(busy), "processor_least": min(busy), "processor_most": max(busy)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sessions", description=__doc__.partition("\n")[0])
    parts = ("verbs", "parking", "samples", "together", "drawn")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--verbs", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--unanswered", action="store_true", help="end `samples` when all are accepted")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, for `samples` alone")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of each recipe of `together`")
    parser.add_argument("--runs", type=int, default=3, help="of `parking`, `together` and `drawn`")
    parser.add_argument("--model", type=Path, default=models.folder() / "tiny", help="of `drawn`")
    parser.add_argument("--tokens", type=int, default=32, help="of each sample of `drawn`")
    given = parser.parse_args()
    figures: dict[str, Mapping[str, float]] = {}
    if given.before is not None:
        figures["accepted"] = accepted(given.before, given.samples, given.runs)
        print(json.dumps({"bench": "sessions"} | figures))
        return
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), {"EFT_MODEL_ROOTS": str(models.folder())} | LIMITS)
        try:
            if {*given.only} - {"drawn"}:
                service.start()
            for part in given.only:
                match part:
                    case "verbs":
                        found = verbs(service, Path(folder), given.verbs)
                    case "parking":
                        found = parking(service, given.runs)
                    case "samples":
                        found = samples(service, given.samples, answered=not given.unanswered)
                    case "together":
                        found = together(service, given.sessions, given.steps, given.runs)
                    case _:
                        found = drawn(Path(folder), given.model, given.sessions, 2, given.tokens, given.runs)
                figures[part] = {name: round(value, 3) for name, value in found.items()}
                for name, value in figures[part].items():
                    print(f"{part:10} {name:34} {value:10.3f}", flush=True)
        finally:
            service.stop()
    print(json.dumps({"bench": "sessions"} | figures))


if __name__ == "__main__":
    main()
