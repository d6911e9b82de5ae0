"""`python -m tests.support.chaos --seed 7 --minutes 30 --database postgres` (`make chaos`): a storm, and its report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

from tests.support.chaos.processes import ROOT, new_seed
from tests.support.chaos.run import Outcome, Plan, Run, facts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="the same seed does the same things (default: a new one)")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--fault-every", type=float, default=12.0, metavar="SECONDS")
    parser.add_argument("--wish-every", type=float, default=12.0, metavar="SECONDS")
    parser.add_argument("--share-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, help="report without its ending (default: below bench/results)")
    given = parser.parse_args()
    plan = Plan(
        seed=new_seed() if given.seed is None else given.seed,
        seconds=60 * given.minutes,
        database=given.database,
        fault_every=given.fault_every,
        wish_every=given.wish_every,
        share_every=given.share_every,
        scale=3.0,
        grace=5.0,
        drain_seconds=1200.0,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing stays behind, however it is ended
    print(f"seed {plan.seed}, {given.minutes:g} minutes, {plan.database}", flush=True)
    outcome = Run(plan).go()
    day = time.strftime("%Y-%m-%d", time.gmtime())
    base = given.output or ROOT / "bench" / "results" / f"chaos-{plan.database}-{day}"
    text = report(outcome)
    base.with_suffix(".json").write_text(json.dumps(facts(outcome) | {"hardware": hardware()}, indent=1) + "\n")
    base.with_suffix(".txt").write_text(text)
    print(text)
    return 1 if outcome.violations else 0


def report(outcome: Outcome) -> str:
    """In Markdown."""
    plan, found = outcome.plan, facts(outcome)
    lines = [
        f"# Chaos: {plan.seconds / 60:g} minutes on {plan.database}, seed {plan.seed}",
        "",
        f"`make chaos SEED={plan.seed} MINUTES={plan.seconds / 60:g} DB={plan.database}`, {hardware()}; two workers "
        f"with {plan.slots} CPU slots each, leases of {plan.lease:g} s, trainers fenced after {plan.fence:g} s; "
        f"a fault every {plan.fault_every:g} s, a wish every {plan.wish_every:g} s and slots, nodes or quotas taken or "
        f"given back every {plan.share_every:g} s on average.",
        "",
        "| what | |",
        "|---|---|",
    ]
    for name, value in found.items():
        if name in ("seed", "database", "checks", "violations"):
            continue
        words = ", ".join(f"{key}: {number}" for key, number in value.items()) if isinstance(value, dict) else value
        lines.append(f"| {name} | {words or 'none'} |")
    lines += ["", "| invariant | looked at | violations |", "|---|---|---|"]
    lines += [f"| {name} | {check.looked} | {len(check.violations)} |" for name, check in outcome.checks.items()]
    if outcome.violations:
        lines += ["", f"## Violations (all is kept in {outcome.folder})", ""]
        lines += [f"- {words}" for words in outcome.violations[:200]]
        lines += ["", "## Actions", "", "```", *outcome.log, "```"]
    return "\n".join(lines) + "\n"


def hardware() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
