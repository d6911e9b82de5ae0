"""The dashboard in Chromium, over one running service: what somebody in a lab does with it, and what happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.auth import keys
from core.db.engine import Database
from core.storage.layout import Layout
from tests.support.browser import MISSING, Browser, browser, programs
from tests.support.service import ROOT, Service, running, wait_for

pytestmark = pytest.mark.skipif(programs() is None, reason=f"THE DASHBOARD IS NOT TESTED, for want of {MISSING}")

MARKUP = "<img src=x onerror=alert(1)><b>bold</b> & co"
AXE = Path(sys.prefix, "axe/axe_playwright_python/axe.min.js")
"""axe-core, installed by `make test` (locks/axe.in). A test that needs it fails without it."""
SERIOUS = """const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => done(violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`)));"""
FAULTS = (ROOT / "tests/support/readable.js").read_text()
"""A script that lists what keeps somebody from reading a page."""
PICTURES = os.environ.get("EFT_TEST_PICTURES")
"""A folder for the pictures of the documentation: docs/images."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    yield from running(tmp_path_factory.mktemp("browser"), {"EFT_MODEL_ROOTS": str(models)})


@pytest.fixture(scope="module")
def rows(service: Service) -> Path:
    path = service.folder / f"rows {'x' * 180}.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"say {n} {MARKUP}", "completion": f" {n}"}) + "\n" for n in range(40))
    )
    return path


@pytest.fixture(scope="module")
def window(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(str(service.client.base_url), tmp_path_factory.mktemp("profile")) as made:
        made.size(1440, 900)
        sign_in(made, service.key)
        yield made


def sign_in(window: Browser, key: str) -> None:
    window.forget() if window.path.startswith("/") else None
    window.go("ui/signin?next=box")
    window.type("input[name=key]", key)
    window.click("button.main")
    window.find("header.bar")
    assert window.path == "/ui/box"


def picture(window: Browser, name: str) -> None:
    if PICTURES:
        time.sleep(1)  # what is drawn in the next frames
        Path(PICTURES, f"dashboard-{name}.png").write_bytes(window.picture())


def tables(service: Service) -> closing[sqlite3.Connection]:
    """The service's own database, in which changes count at once."""
    return closing(sqlite3.connect(service.data / "eft.db", timeout=30, isolation_level=None))


def come_back(window: Browser) -> None:
    """As somebody does who left the tab open over night."""
    window.run("document.dispatchEvent(new Event('visibilitychange'))")


def job_file(models: Path, file_id: str, **more: Any) -> dict[str, Any]:
    return {
        "model": str(models / "tiny"),
        "data": {"train": file_id, "split": {"type": "hash", "eval_fraction": 0.2}},
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"max_steps": 12, "per_device_train_batch_size": 2, "max_length": 256},
        "evaluation": {
            "at_start": True,
            "eval_steps": 6,
            "samples": {"type": "greedy", "rows": 1, "max_new_tokens": 4},
        },
        "checkpoint": {"type": "disk", "save_steps": 100},
        **more,
    }


@pytest.fixture(scope="module")
def done(service: Service, window: Browser, rows: Path, models: Path) -> list[str]:
    """Two jobs that have succeeded: one from the form, with its data uploaded on the page; one beside it."""
    bad = service.folder / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n')
    window.go("ui/files")
    window.choose("#choose", bad)
    window.click("#send")
    window.wait_for_text("#report", "line 1")
    window.choose("#choose", rows)
    window.click("#send")
    window.wait_for_text("#report", "40 good rows")
    window.click("#report a")
    window.wait_for_text("#rows", "say 0")
    file_id = window.path.rpartition("/")[2]

    window.go(f"ui/new?file={file_id}")
    window.wait_for_text("#checked", "model")  # it is missing, and that is said
    window.type("[data-path=name]", "from the form")
    window.type("[data-path=model]", str(models / "tiny"))
    window.type("[data-path='optimizer.learning_rate']", "0.001")
    window.type("[data-path='training.num_train_epochs']", "0.5")
    window.type("[data-path='training.max_length']", "0")
    window.wait_for_text("#checked", "training.max_length")
    assert window.run("return document.getElementById('submit').disabled")
    window.type("[data-path='training.max_length']", "256")
    window.wait_for_text("#checked", "The spec is good and the job fits.")
    window.click("#submit")
    window.wait(lambda: window.path.startswith("/ui/jobs/job-"), "the page of the job")
    first = window.path.rpartition("/")[2]
    window.wait_for_text("#sentence", "Done in", 300)  # without loading the page again
    window.wait(lambda: window.run("return eft.charts.get('loss')?.lines[0]?.xs.length > 0"), "the loss curve")
    second = service.submit(job_file(models, file_id, name="second"))
    service.wait(second, "succeeded")
    return [first, second]


def test_a_job_from_the_form_is_followed_to_its_end(service: Service, window: Browser, done: list[str]) -> None:
    window.go(f"ui/jobs/{done[0]}")
    assert window.text("h1") == "from the form"
    assert "adapter_model.safetensors" in window.text("#results") and "done" in window.text("#timeline")
    window.go(f"ui/jobs/{done[1]}?step=0")
    window.wait_for_text("#samples", "step 0")
    assert MARKUP in window.text("#samples") and not window.all("#samples b, img[src=x]")
    window.type("#more", "total_tok")
    window.find("#plot-total-tokens canvas")
    window.run("const s = document.getElementById('axis'); s.value = 'time'; s.dispatchEvent(new Event('input'))")
    window.wait(lambda: window.run("return eft.charts.get('loss').u.series[0].label") == "time", "the axis of time")
    window.wait_for_text("#planned", "Peak planned on")
    window.click("#show-rows")
    window.wait_for_text("#trained-rows", "learned", 60)
    assert MARKUP in window.text("#trained-rows") and window.all("#trained-rows mark")
    window.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP in a network
    window.click("[data-copy^='eft show']")
    window.wait_for_text("[data-copy^='eft show']", "Copied")
    window.type("#find", "evaluating")
    assert window.all("#log-lines mark")


def test_pages_are_readable_at_every_width_and_in_both_colours(
    service: Service, window: Browser, done: list[str]
) -> None:
    compare = f"ui/compare?job={done[0]}&job={done[1]}"
    file_id = service.job(done[0])["spec"]["data"]["train"]["id"]
    found = unreadable(
        window,
        "ui/jobs?metric=loss",
        f"ui/jobs/{done[1]}",
        "ui/box",
        compare,
        "ui/new",
        "ui/files",
        f"ui/files/{file_id}",
        "ui/people",
        "ui/jobs/none",
        "ui/nothing",
        "ui/models",
        "ui/try",
        f"ui/models/{done[0].replace('job-', 'model-')}",
    )
    database = Database(f"sqlite:///{service.data / 'eft.db'}")
    nobodys = keys.create(database, project="empty", user="eve", name="test")
    database.dispose()
    assert nobodys is not None
    sign_in(window, nobodys)
    found |= unreadable(window, *(f"ui/{page}" for page in ("jobs", "models", "files", "people", "new", "signin")))
    sign_in(window, service.key)
    assert not found, json.dumps({str(key): value for key, value in found.items()}, indent=1)
    messages = [one for one in window.messages() if "status of 4" not in one]  # a refused dry run, a job that is none
    assert not messages, "nothing that the policy of contents refused, and no error"


def unreadable(window: Browser, *paths: str) -> dict[tuple[str, int, bool], list[str]]:
    """What keeps somebody from reading these pages, by page, width and colour."""
    found, axe = {}, AXE.read_text(encoding="utf-8")
    for path in paths:
        window.go(path)
        for width in (390, 1440, 3840):
            window.size(width, 900)
            for dark in (False, True):
                window.dark(dark)
                faults = window.run(FAULTS)
                if width < 2000 and dark == (width == 390):  # each width and each colour once
                    window.run(axe)
                    faults += window.run_async(SERIOUS)
                if faults:
                    found[path, width, dark] = faults
    window.size(1440, 900)
    window.dark(False)
    return found


def test_two_jobs_beside_each_other(window: Browser, done: list[str]) -> None:
    window.go("ui/jobs?metric=eval_loss")
    assert all(float(cell) > 0 for cell in window.text("#jobs tbody tr").split("\t")[-6:-3])
    for job_id in done:
        window.click(f"input[value='{job_id}']")
    window.click("#compare")
    window.find("#plot-loss canvas")
    assert "optimizer.learning_rate" in window.text("#differences") and "model.path" not in window.text("#differences")
    assert "samples.rows" not in window.text("#differences")
    folded = window.run(
        "const t = document.getElementById('partly'); return [t.closest('details').open, t.textContent]"
    )
    assert not folded[0] and "samples.rows" in folded[1]
    assert len(window.all("#legend li")) == 2
    line = "return getComputedStyle(document.querySelector('#legend i')).backgroundColor"
    before = window.run(line)
    window.dark(True)
    window.wait(lambda: window.run(line) != before, "the legend in the colours of the lines")
    window.dark(False)
    window.wait_for_text("#figures", "eval_loss")
    picture(window, "compare")


def test_the_model_of_a_job_is_tagged_and_its_lineage_shown(window: Browser, done: list[str]) -> None:
    window.go("ui/models")
    assert len(window.all("#models tbody tr")) == 2
    window.go(f"ui/models/{done[0].replace('job-', 'model-')}")
    assert "from the form" in window.text("h1") and "adapter" in window.text("#formats")
    window.type("#new-tag", "production")
    window.click("#add-tag button")
    window.wait_for_text("#about", "production")
    window.click("[data-untag=production]")
    window.wait(lambda: "production" not in window.text("#about"), "the tag to go")
    assert len(window.all("svg.family rect")) == 2 and len(window.all("svg.family path")) == 1
    window.click(".end a[href*='ui/try']")
    window.type("#message", f"say 1 {MARKUP}")
    window.type("#tokens", "4")
    window.click("#plain")
    window.click("#ask")
    window.wait(
        lambda: (
            window.run(
                "return [...document.querySelectorAll('.state')].filter((p) => /tokens in/.test(p.textContent)).length"
            )
            == 2
        ),
        "model and base to answer",
        60,
    )
    window.type(".trial input", "nothing")
    window.click("#ask")
    window.wait_for_text(".state.away", "no model `nothing`")


def test_pause_restart_and_resume_while_a_page_is_open(
    service: Service, window: Browser, rows: Path, models: Path
) -> None:
    training = {"max_steps": 4000, "per_device_train_batch_size": 2, "max_length": 256}
    spec = job_file(models, service.upload(rows), name="long", training=training)
    job_id = service.submit({**spec, "evaluation": {"type": "held_out", "eval_steps": 1000}})
    window.go(f"ui/jobs/{job_id}")
    window.wait_for_text("#sentence", "step ", 240)
    window.click("[data-sends$='/pause']")
    window.wait_for_text("#sentence", "Paused at step", 240)
    assert window.text("[data-sends$='/resume']") == "Resume", "though the button had the keyboard as it was Pause"
    picture(window, "job")
    _change_in_two_tabs(service, window, job_id)
    _look_closely(service, window, job_id)

    os.kill(service.pid("api"), signal.SIGSTOP)  # it hangs: its connections stay open, and nothing comes
    try:
        window.wait_for_text("#banner", "does not answer", 30)
    finally:
        os.kill(service.pid("api"), signal.SIGCONT)
    window.wait(lambda: not window.text("#banner"), "the notice to go")

    os.kill(service.pid("api"), signal.SIGKILL)
    window.wait_for_text("#banner", "does not answer", 30)
    wait_for(lambda: _answers(service), 60, "the API to be back")
    reply = service.client.post(f"/jobs/{job_id}/resume")
    assert reply.status_code == 200, reply.text
    window.wait_for_text("#sentence", "step ", 240)
    window.wait(lambda: not window.text("#banner"), "the notice to go")
    window.click("[data-sends$='/cancel']")
    window.accept()
    service.wait(job_id, "cancelled")
    window.wait_for_text("#sentence", "Cancelled", 30)
    thinned = Layout(service.data).curves(job_id)
    wait_for(thinned.exists, 30, "the worker to have thinned out the long curve")
    window.wait(lambda: window.run("return eft.ended === true"), "the end of the stream")
    seen = window.run("return eft.seen")
    last = service.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000}).json()["data"][-1][
        "seq"
    ]
    assert seen == list(range(seen[0], last + 1)), "no event is missed and none comes twice"

    window.click("[data-sends$='/retry']")
    window.wait(lambda: "/ui/jobs/job-" in window.path and job_id not in window.path, "the page of the retry")
    again = window.path.rpartition("/")[2]
    assert service.client.post(f"/jobs/{again}/cancel").status_code == 200
    service.wait(again, "cancelled")
    window.wait_for_text("#sentence", "Cancelled", 30)
    assert service.client.delete(f"/jobs/{again}").status_code == 200
    come_back(window)
    window.wait_for_text("#banner", "no longer there: it was deleted")


def test_slots_are_held_and_drained_on_the_page(service: Service, window: Browser, rows: Path, models: Path) -> None:
    window.go("ui/box")
    window.type("#new-hold input[name=for]", f"bob {MARKUP}")
    window.type("#new-hold input[name=why]", "a notebook")
    later = "const i = document.querySelector('#new-hold [name=until]'); i.value = arguments[0]"
    window.run(later, time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() + 7200)))
    window.click("#new-hold button")
    window.wait_for_text("#held", f"held for bob {MARKUP}, a notebook, by admin, until")
    window.wait_for_text("#box", "held")
    (hold,) = service.client.get("/holds").json()["data"]
    assert hold["for"] == f"bob {MARKUP}" and hold["until"] is not None
    window.click("#held button")
    window.wait(lambda: not window.all("#held"), "the hold to end")

    window.click(f"[aria-label^='Drain {service.environment['EFT_NODE']}']")
    window.accept("a new fan")
    window.wait_for_text("#held", "drained, a new fan")
    window.click("[aria-label^='Put ']")
    window.wait(lambda: not window.all("#held"), "the slot to be back")
    window.click("[data-sends$='/drain']:not([data-body])")
    window.accept("cleaning")
    window.wait_for_text("#box", "Drained: cleaning")
    _change_the_order(service, window, rows, models)
    window.click("[data-sends$='/undrain']")
    window.wait(lambda: "Drained" not in window.text("#box"), "the node to be back")
    assert service.client.get("/gpus").json()["data"][0]["state"] == "free"


def _change_the_order(service: Service, window: Browser, rows: Path, models: Path) -> None:
    """By mouse and by keyboard, which stays on the button as its row moves; and a maintenance is cancelled."""
    file_id = service.upload(rows)
    first, second = (service.submit(job_file(models, file_id, name=name)) for name in ("one", "two"))

    def order() -> list[str]:
        return [link.rpartition("/")[2] for link in window.run(links)]

    links = "return [...document.querySelectorAll('section td.name a')].map((one) => one.href)"
    opened = service.client.post("/sessions", json={"model": str(models / "tiny")}).json()["id"]
    window.wait(lambda: order() == [first, second], "both in the queue", 60)
    window.wait_for_text("section:has(td.name)", f"session {opened[-6:]}")  # which has no page of a job, and no buttons
    assert not window.all(f"[data-sends*='{opened}'], a[href*='{opened}']")
    service.client.post(f"/sessions/{opened}/close").raise_for_status()
    up, down = "[aria-label='Raise the priority of two']", "[aria-label='Lower the priority of two']"
    window.click(up)
    window.wait(lambda: order() == [second, first], "the second one first")
    window.press(up, "\ue007")
    window.wait(lambda: service.job(second)["priority"] == 2, "the key")
    window.wait(
        lambda: window.run("return document.activeElement.ariaLabel") == "Raise the priority of two", "the focus"
    )
    asked = "return JSON.parse(document.querySelector(arguments[0]).dataset.body).priority"
    for shown in (1, 0):  # the page has other reasons to be new
        window.click(down)
        window.wait(lambda shown=shown: window.run(asked, down) == shown - 1, "the priority of before")
    window.wait(lambda: order() == [first, second], "the order of before")
    assert window.run("return document.activeElement.ariaLabel") == "Lower the priority of two", "though its row moved"
    for job_id in (first, second):
        service.client.post(f"/jobs/{job_id}/cancel")

    plan = {"from": "2100-12-24T10:00:00Z", "until": "2100-12-24T12:00:00Z", "why": "a new fan"}
    assert service.client.post("/maintenance", json=plan).status_code == 201
    window.run("eft.refresh()")
    window.wait_for_text("#held", "Maintenance of all nodes")
    window.click("[aria-label='Cancel this maintenance']")
    window.wait(lambda: not window.all("#held"), "the maintenance to go")
    assert not service.client.get("/maintenance").json()["data"]


def _change_in_two_tabs(service: Service, window: Browser, job_id: str) -> None:
    """What one tab changes, the other shows; what comes too late is refused in words. It ends as it began: paused."""
    first = window.showing
    second = window.tab(f"ui/jobs/{job_id}")
    window.click("[data-sends$='/resume']")
    window.show(first)
    window.wait_for_text("#sentence", "step ", 240)
    window.wait(lambda: "Paused" not in window.text("#sentence"), "the other tab's change", 240)
    window.click("[data-sends$='/pause']")
    service.wait(job_id, "paused")
    window.show(second)
    window.wait_for_text("#sentence", "Paused at step", 240)
    window.run_async("eft.send(`jobs/${arguments[0]}/retry`, 'POST').then(arguments[1])", job_id)
    window.wait_for_text("#banner", "paused")
    window.close(then=first)


def _look_closely(service: Service, window: Browser, job_id: str) -> None:
    """Of a curve with more points than a page shows, the part that one looks at is asked for anew, with all of them."""
    job = service.job(job_id)
    owner = "SELECT owner_id, project_id FROM jobs WHERE id = ?"
    with tables(service) as rows:
        own = rows.execute(owner, (job_id,)).fetchone()
        told = ((job_id, "wave", step, job["attempt"], step % 7, 0.0, *own) for step in range(1, 6001))
        insert = "INSERT INTO metrics (job_id, name, step, attempt, value, time, owner_id, project_id)"
        rows.execute("BEGIN")
        rows.executemany(f"{insert} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", told)
        rows.execute("COMMIT")
    window.type("#more", "wave")
    known = "const line = eft.charts.get('wave')?.lines[0]; return line ? line.xs.length : 0"
    window.wait(lambda: 500 < window.run(known) <= 1500, "the thinned curve")
    window.press("#plot-wave .area", "++++")
    chart = "const { lines, view } = eft.charts.get('wave');"
    within = f"{chart} return lines[0].xs.filter((x) => x >= view[0] && x <= view[1])"

    def all_points() -> bool:
        steps = window.run(within)
        return len(steps) > 300 and steps == list(range(steps[0], steps[0] + len(steps)))

    window.wait(all_points, "every step of the part")
    asked = "return performance.getEntriesByType('resource').map((one) => one.name).filter((name) => /wave/.test(name))"
    assert re.search("first_step=[0-9]+&last_step=[0-9]+", window.run(asked)[-1])
    window.press("#plot-wave .area", "0")
    window.wait(lambda: 500 < window.run(known) <= 1500, "the whole curve")
    window.click("#log-x")  # then the middle of the axis is the geometric mean of its ends
    middle = "const { u, view } = eft.charts.get('wave'); return [u.posToVal(u.over.clientWidth / 2, 'x'), ...view]"
    window.wait(lambda: window.run(middle) == pytest.approx([6000**0.5, 1, 6000], rel=0.01), "the logarithmic axis")
    window.press("#plot-wave .area", "+")
    window.wait(lambda: window.run(middle) == pytest.approx([6000**0.5, 6000**0.25, 6000**0.75], rel=0.01), "a half")
    window.press("#plot-wave .area", "0")
    window.click("#log-x")
    window.type("#more", " ")


def test_a_curve_has_a_gap_where_a_run_diverged(service: Service, window: Browser, rows: Path, models: Path) -> None:
    training = {"max_steps": 60, "per_device_train_batch_size": 2, "max_length": 256, "max_grad_norm": 1e9}
    spec = job_file(models, service.upload(rows), name="diverges", method={"type": "full"})
    spec |= {"optimizer": {"learning_rate": 10}, "training": {**training, "precision": "fp16"}}
    spec["evaluation"] = {"at_start": True, "eval_steps": 60}
    job_id = service.submit(spec)
    service.wait(job_id, "failed")
    window.go(f"ui/jobs/{job_id}")
    window.wait_for_text("#sentence", "at step")
    assert re.search("Failed: the (loss|gradient) became (nan|-?inf) at step", window.text("#sentence"))
    found = window.wait(
        lambda: re.search("no finite loss (at step|in [0-9]+ steps)", window.text("#plot-loss .end")),
        "the gap in words",
    )
    assert found and window.run("return eft.charts.get('loss').lines[0].ys.includes(null)")
    window.go("ui/jobs?metric=loss")
    window.dark(True)
    picture(window, "jobs")  # of all that these tests have made
    window.dark(False)


def _answers(service: Service) -> bool:
    try:
        return service.client.get("/healthz").status_code == 200
    except Exception:
        return False


def test_people_are_added_changed_and_limited(service: Service, window: Browser) -> None:
    window.messages()  # those of the tests before, in which the API was killed
    window.go("ui/people")
    window.type("#new-user input[name=name]", f"bob {MARKUP}")
    window.click("#new-user button")
    window.wait_for_text("#users", MARKUP)
    window.type("#new-member input[name=user]", f"bob {MARKUP}")
    window.click("#new-member button")
    window.wait_for_text("#members", MARKUP)
    role = "select[data-field=role][aria-label^='Role of bob']"
    window.run(
        "const s = document.querySelector(arguments[0]); s.value = 'viewer'; "
        "s.dispatchEvent(new Event('change', { bubbles: true }))",
        role,
    )
    window.wait(lambda: roles(service) == {"viewer"}, "the role of bob")
    window.type("#new-key input[name=name]", "for bob")
    window.run("document.querySelector('#new-key select[name=user]').selectedIndex = 1")
    window.type("#new-key input[name=expires_in_days]", "2.5")
    window.click("#new-key button:not([type])")
    window.wait_for_text("#made", "The key for bob")
    shown = window.text("#made code")
    assert (
        httpx.get(f"{service.client.base_url}/me", headers={"authorization": f"Bearer {shown}"}).json()["role"]
        == "viewer"
    )
    window.wait_for_text("#keys", "for bob")
    window.type("#new-limit input[name=name]", "nobody here")
    window.type("#new-limit input[name=value]", "2")
    window.click("#new-limit button")
    window.wait_for_text("#banner", "nobody here")
    window.type("#new-limit input[name=name]", "default")
    window.click("#new-limit button")
    window.wait(lambda: window.all("[aria-label='Remove shares of default']"), "the limit")
    window.click("[aria-label='Remove shares of default']")
    window.wait(lambda: not window.all("[aria-label='Remove shares of default']"), "the limit to go")
    window.click("[aria-label^='Disable bob']")
    window.accept()
    window.wait(lambda: window.all("[aria-label^='Enable bob']"), "bob to be disabled")
    assert httpx.get(f"{service.client.base_url}/me", headers={"authorization": f"Bearer {shown}"}).status_code == 401
    window.click("[aria-label^='Remove bob']")
    window.accept()
    window.wait(lambda: MARKUP not in window.text("#members"), "bob to leave")
    assert not [one for one in window.messages() if "status of 4" not in one]


def roles(service: Service) -> set[str]:
    """Roles of all but the admins."""
    listed = service.client.get(f"/projects/{service.client.get('/me').json()['project']['id']}/members").json()["data"]
    return {one["role"] for one in listed} - {"admin"}


def test_a_revoked_key_and_a_job_that_is_none(service: Service, window: Browser, done: list[str]) -> None:
    window.go("ui/jobs/job-00000000000000000000000000")
    assert "Not found" in window.text("h1")
    made = service.client.post("/keys", json={"name": "for a while"}).json()
    sign_in(window, made["key"])
    window.go(f"ui/jobs/{done[0]}")
    service.client.delete(f"/keys/{made['id']}")
    window.run("eft.refresh()")
    window.wait_for_text("#banner", "You are signed out")
    window.click("#banner a")
    window.find("input[name=key]")
    assert window.path.startswith(f"/ui/signin?next=jobs%2F{done[0]}")
    window.type("input[name=key]", service.key)
    window.click("button.main")
    window.wait_for_text("#sentence", "Done in")
    with tables(service) as rows:
        rows.execute("UPDATE api_keys SET expires_at = 1 WHERE session_until IS NOT NULL")
    come_back(window)
    window.wait_for_text("#banner", "You are signed out")
    window.click("#banner a")
    window.type("input[name=key]", service.key)
    window.click("button.main")
    window.wait_for_text("#sentence", "Done in")
    window.click("#signout")
    window.wait_for_text("main", "You are signed out")
    assert window.cookie("eft_session") is None
