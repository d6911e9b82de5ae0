"""`GET /metrics`, read by a parser as strict as the format's page; and the dashboard's queries against what it has."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from api.auth.policy import Role, Scope
from api.metrics.exposition import CONTENT_TYPE, Family, Histogram, page
from core import HOME
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.relay import EventBatch, relay
from core.jobs.lifecycle.submit import submit
from core.jobs.policies import nodes
from tests.support.world import World, world

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL},?)*)\}})? (NaN|[+-]Inf|-?[0-9.e+-]+)")
GPU = {"vendor": "amd", "arch": "gfx942", "name": "MI300X", "memory_bytes": 206141652992}
Series = dict[tuple[tuple[str, str], ...], float]


def parsed(text: str) -> dict[str, tuple[str, dict[str, Series]]]:
    """Family → (kind, sample → labels → value). Fails for whatever the format does not allow."""
    assert text.endswith("\n") and "\r" not in text
    families: dict[str, tuple[str, dict[str, Series]]] = {}
    helped: set[str] = set()
    now = ""
    for line in text.splitlines():
        if found := re.fullmatch(rf"# HELP ({NAME}) \S.*", line):
            assert found[1] not in helped, f"told twice: {line}"
            helped.add(found[1])
            now = found[1]
        elif found := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line):
            assert found[1] == now and now not in families, f"not behind its HELP, or twice: {line}"
            families[now] = (found[2], {})
        else:
            found = SAMPLE.fullmatch(line)
            assert found, f"no sample: {line!r}"
            kind, samples = families[now]
            endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert found[1] in [now + ending for ending in endings], f"not of {now}: {line}"
            labels = tuple(sorted(re.findall(LABEL, found[2] or "")))
            assert len({name for name, _ in labels}) == len(labels), line
            series = samples.setdefault(found[1], {})
            assert labels not in series, f"a series twice: {line}"
            series[labels] = float(found[5].replace("Inf", "inf"))
    for name, (kind, samples) in families.items():
        if kind == "histogram" and samples:
            _whole(name, samples)
    return families


def _whole(name: str, samples: dict[str, Series]) -> None:
    """Buckets that grow up to +Inf, which is the count."""
    buckets: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for labels, value in samples[f"{name}_bucket"].items():
        bound = float(dict(labels)["le"].replace("Inf", "inf"))
        buckets.setdefault(tuple(one for one in labels if one[0] != "le"), {})[bound] = value
    assert set(buckets) == set(samples[f"{name}_count"]) == set(samples[f"{name}_sum"])
    for labels, counts in buckets.items():
        values = [counts[bound] for bound in sorted(counts)]
        assert values == sorted(values) and max(counts) == math.inf
        assert values[-1] == samples[f"{name}_count"][labels]


@pytest.fixture(scope="module")
def here(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """`lab`: one job has succeeded, one runs on a GPU, two wait for their model; `rivals`: one has succeeded."""
    with world(tmp_path_factory.mktemp("metrics") / "data", database_url) as made:
        with made.database.write() as session:
            live = {"busy_percent": 97, "used_bytes": 5}
            slots: list[dict[str, Any]] = [
                {"id": "gpu-a", "kind": "gpu", "gpu": {**GPU, "index": 0, "live": live}},
                {"id": "gpu-b", "kind": "gpu", "gpu": {**GPU, "index": 1}},
            ]
            nodes.register(session, "box", "worker-x", "0.1.0", slots, [])
            job_id = submit(session, made.lab.owner, made.spec(made.lab.file)).id
            won = claim(session, "worker-x", "box", Slot("p", "prepare"), 600)
            assert won is not None
            finish(session, won.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
            won = claim(session, "worker-x", "box", Slot("gpu-a", "gpu", "amd", "gfx942", GPU["memory_bytes"]), 600)  # type: ignore[arg-type]
            assert won is not None and won.token.job_id == job_id
            running(session, won.token)
            lines: list[dict[str, Any]] = [
                {"type": "metrics", "step": step, "values": {"loss": 3.0 - step, "tokens_per_second": 100.5 * step}}
                for step in (1, 2)
            ]
            lines.append({"type": "progress", "step": 2, "total_steps": 50})
            told = [{"seq": number, "time": time.time(), **line} for number, line in enumerate(lines, 1)]
            assert relay(session, won.token, EventBatch(0, told))
            for _ in range(2):
                submit(session, made.lab.owner, made.spec(made.lab.file))
        made.webhook(made.lab)
        made.running = job_id  # type: ignore[attr-defined]
        yield made


def scraped(here: World) -> dict[str, tuple[str, dict[str, Series]]]:
    reply = here.ask("GET", "/metrics", here.caller("root", None, Scope.BOX, box_admin=True).key)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == CONTENT_TYPE
    return parsed(reply.text)


def value(families: dict[str, tuple[str, dict[str, Series]]], name: str, **labels: str) -> float:
    """The sum of the series with these labels; fails when there is none."""
    family = next(family for family in families if name == family or name.removeprefix(family) in _ENDINGS)
    found = [number for series, number in families[family][1][name].items() if labels.items() <= dict(series).items()]
    assert found, (name, labels)
    return sum(found)


_ENDINGS = ("_bucket", "_sum", "_count")


@pytest.mark.both_databases
def test_it_says_what_there_is(here: World) -> None:
    seen = scraped(here)
    assert value(seen, "eft_jobs", project="lab", status="succeeded") == 1
    assert value(seen, "eft_jobs", project="lab", status="running") == 1
    assert value(seen, "eft_jobs", project="rivals", status="succeeded") == 1
    assert value(seen, "eft_queue_jobs", project="lab", phase="prepare") == 2
    busy = seen["eft_gpu_utilization_ratio"][1]["eft_gpu_utilization_ratio"]
    assert busy == {(("gpu", "box/0"), ("node", "box")): 0.97}
    assert value(seen, "eft_gpu_memory_used_bytes", gpu="box/0") == 5, "nothing is said of the other GPU"
    assert all(dict(labels)["project"] == "lab" for labels in seen["eft_queue_jobs"][1]["eft_queue_jobs"])
    assert value(seen, "eft_job_wait_seconds_count", project="lab") == 2
    assert value(seen, "eft_job_wait_seconds_count", project="rivals") == 1
    assert value(seen, "eft_job_wait_seconds_bucket", le="+Inf") == 3
    assert value(seen, "eft_gpu_in_use", gpu="box/0") == 1 and value(seen, "eft_gpu_in_use", gpu="box/1") == 0
    assert value(seen, "eft_gpu_memory_bytes", gpu="box/1", vendor="amd") == GPU["memory_bytes"]
    assert value(seen, "eft_gpu_state", state="busy") == value(seen, "eft_gpu_state", state="free") == 1
    running = {"job": here.running, "project": "lab", "gpu": "box/0"}  # type: ignore[attr-defined]
    assert value(seen, "eft_job_step", **running) == 2 and value(seen, "eft_job_planned_steps", **running) == 50
    assert value(seen, "eft_job_loss", **running) == 1.0
    assert {dict(labels)["name"] for labels in seen["eft_job_loss"][1]["eft_job_loss"]} == {"same name"}
    assert value(seen, "eft_job_tokens_per_second", **running) == 201.0
    assert value(seen, "eft_webhook_deliveries", project="lab", state="dead") == 1
    assert value(seen, "eft_node_heartbeat_age_seconds", node="box") < 600
    jobs = {dict(labels).get("job") for _, samples in seen.values() for series in samples.values() for labels in series}
    assert jobs <= {None, here.running}, "series a job only for what runs"  # type: ignore[attr-defined]


def test_latencies_are_those_of_routes(here: World) -> None:
    key = here.caller("member", Role.MEMBER, Scope.READ).key
    for _ in range(3):
        assert here.ask("GET", f"/jobs/{here.lab.job}", key).status_code == 200
    assert here.ask("GET", f"/jobs/job-{'0' * 26}", key).status_code == 404
    for number in range(3):
        assert here.ask("GET", f"/nothing/{number}", key).status_code == 404
    seen = scraped(here)
    name = "eft_http_request_duration_seconds_count"
    assert value(seen, name, route="/jobs/{job_id}", method="GET", status="2xx") == 3
    assert value(seen, name, route="/jobs/{job_id}", status="4xx") == 1
    assert value(seen, name, route="unmatched", status="4xx") == 3
    assert not any("nothing" in text or here.lab.job in text for text in map(str, seen.values()))


def test_it_is_for_admins_of_the_box(here: World) -> None:
    reply = here.ask("GET", "/metrics", here.caller("admin", Role.ADMIN, Scope.ADMIN).key)
    assert reply.json()["error"]["code"] == "box_admin_only"
    assert here.ask("GET", "/metrics").status_code == 401


def test_a_key_for_scraping_is_made_by_an_admin_of_the_box_and_by_nobody_else(here: World) -> None:
    boss = here.caller("boss", Role.MEMBER, Scope.BOX, box_admin=True)
    wish = {"json": {"name": "prometheus", "scope": "metrics"}}
    key = here.ask("POST", "/keys", boss.key, **wish).json()["key"]
    assert here.ask("GET", "/metrics", key).status_code == 200
    assert here.ask("GET", "/me", key).json()["error"]["code"] == "missing_scope"
    assert here.ask("POST", "/keys", key, json={"name": "more"}).status_code == 403
    narrow = here.caller("boss", Role.MEMBER, Scope.WRITE).key
    refused = here.ask("POST", "/keys", narrow, **wish)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope"), "it would gain a right"
    plain = here.ask("POST", "/keys", here.caller("member", Role.MEMBER, Scope.WRITE).key, **wish)
    assert plain.status_code == 403


def test_names_that_break_a_line_do_not() -> None:
    family = Family("eft_x", "gauge", "back\\slash")
    family.add(math.inf, project='a "b"\\\n}')
    family.add(math.nan)
    histogram = Histogram((0.5, 1.0))
    for number in (0.1, 0.5, 0.7, 9.0):
        histogram.observe(number)
    times = Family("eft_y", "histogram", "y")
    times.add_histogram(histogram, route="/")
    seen = parsed(page([family, times]))
    assert seen["eft_x"][1]["eft_x"][("project", 'a \\"b\\"\\\\\\n}'),] == math.inf
    assert [value(seen, "eft_y_bucket", le=bound) for bound in ("0.5", "1", "+Inf")] == [2, 3, 4]
    assert value(seen, "eft_y_sum") == pytest.approx(10.3)


def test_the_dashboard_asks_for_what_there_is(here: World) -> None:
    """Each name in a query is a sample of a scrape (or of a family that is empty here), each label one of its own."""
    seen = scraped(here)
    names = {
        family + ending for family, (kind, _) in seen.items() for ending in (_ENDINGS if kind == "histogram" else ("",))
    }
    labels: dict[str, set[str]] = {}
    for _, samples in seen.values():
        for name, series in samples.items():
            labels[name] = {label for one in series for label, _ in one}
    dashboard = json.loads((HOME / "deploy" / "grafana" / "eft.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 12
    asked = set()
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            stat = panel["type"] == "stat" and query.startswith("sum(") and " / " not in query
            assert not stat or query.endswith(" or vector(0)"), f"{panel['title']}: No data on an idle box"
            assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
            used = set(re.findall(r"\beft_\w+", query))
            assert used and used <= names, (panel["title"], used - names)
            asked |= used
            wanted = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', query))
            for group in re.findall(r"by \(([^)]*)\)", query):
                wanted |= {label.strip() for label in group.split(",")}
            wanted |= set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"instance", "job"}
            for name in used & set(labels):
                missing = wanted - labels[name]
                assert not missing, (panel["title"], name, missing)
    (project,) = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert project["query"]["query"] == "label_values(eft_jobs, project)"
    families = {name for name in names if not name.endswith(("_bucket", "_sum", "_count"))}
    assert families - asked <= {"eft_build_info"}, "everything that is measured is shown"
