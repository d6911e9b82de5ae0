"""The dashboard's sign-in and pages, behind the application in this process; what needs a browser is in
test_dashboard_browser.py."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from sqlalchemy import delete, select, update

from api.auth.last_use import LastUse
from api.auth.policy import Role, Scope, policy_of
from api.web import render, sessions, words
from api.web.pages import family, new_router
from api.web.router import ROUTERS
from core.db.tables import ApiKey, Audit, Job, Metric
from core.spec.axes.export import Export, about, formats
from core.spec.run.folder import LOG_FILE, ROLLOUTS, rollout_file, rollout_tokens_file
from tests.support.world import Caller, World, world

MARKUP = "<script>alert(1)</script> \"'&"
OPEN = {"/", "/ui", "/ui/", "/ui/signin", "/ui/static/{name:path}"}
"""What answers without a session."""
NONE = "/ui/{path:path}"
"""Every address that has no page."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("dashboard") / "data") as made:
        yield made


@pytest.fixture(scope="module")
def boss(here: World) -> Caller:
    return here.caller("boss", Role.ADMIN, Scope.BOX, box_admin=True)


def sign_in(here: World, key: str, where: str = "", **headers: str) -> Any:
    reply = here.ask("POST", "/ui/signin", data={"key": key, "next": where}, headers=headers)
    here._client.cookies.clear()
    return reply


def session_of(here: World, caller: Caller) -> dict[str, str]:
    """Headers of a browser that this caller has signed in with."""
    reply = sign_in(here, caller.key, **{"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko Firefox/140.0"})
    assert reply.status_code == 303, reply.text
    secret = re.match(r"eft_session=([^;]+)", reply.headers["set-cookie"])
    assert secret is not None
    here.secrets.append(secret[1])
    return {"cookie": f"{sessions.COOKIE}={secret[1]}"}


def token(headers: dict[str, str]) -> dict[str, str]:
    return {**headers, sessions.TOKEN_HEADER: sessions.token(headers["cookie"].partition("=")[2])}


def row_of(here: World, headers: dict[str, str]) -> ApiKey:
    prefix = headers["cookie"].partition("=")[2].split("_")[1]
    with here.database.read() as session:
        return session.execute(select(ApiKey).where(ApiKey.prefix == prefix)).scalar_one()


def change(here: World, headers: dict[str, str], **values: Any) -> None:
    with here.database.write() as session:
        session.execute(update(ApiKey).where(ApiKey.id == row_of(here, headers).id).values(**values))


def routes() -> list[APIRoute]:
    found = [route for router in ROUTERS for route in router.routes]
    assert all(isinstance(route, APIRoute) for route in found)
    return found  # type: ignore[return-value]


def pages() -> list[str]:
    """Paths of all pages that ask for a session."""
    return sorted(route.path for route in routes() if route.path not in OPEN and route.path != NONE)


def of_lab(here: World, path: str) -> str:
    """The path of a page with things of the lab in it."""
    for name, value in (("job", here.lab.job), ("file", here.lab.file), ("model", here.lab.model)):
        path = path.replace(f"{{{name}_id}}", value)
    return path


def test_signing_in_and_out(here: World, boss: Caller) -> None:
    reply = sign_in(here, boss.key, "box")
    cookie = reply.headers["set-cookie"].lower()
    assert (reply.status_code, reply.headers["location"]) == (303, "../ui/box")
    assert "httponly" in cookie and "samesite=lax" in cookie and "path=/" in cookie and "secure" not in cookie
    assert boss.key not in cookie

    headers = session_of(here, boss)
    page = here.ask("GET", "/ui/jobs", headers=headers)
    assert page.status_code == 200 and "boss" in page.text
    assert page.headers["content-security-policy"] == render.POLICY and page.headers["cache-control"] == "no-store"

    listed = here.ask("GET", "/keys", headers=headers).json()["data"]
    assert listed[0]["name"] == "browser: Firefox on Linux" and listed[0]["session"] is True
    assert [key["session"] for key in listed if key["id"] == row_of(here, headers).made_with] == [False]
    with here.database.read() as session:
        assert session.execute(select(Audit).where(Audit.action == "session.begin")).scalars().all()

    assert here.ask("POST", "/ui/signout", headers=headers).status_code == 403  # without the page's token
    assert here.ask("POST", "/ui/signout", headers=token(headers)).status_code == 204
    assert here.ask("GET", "/ui/jobs", headers=headers).headers["location"] == "../ui/signin?next=jobs&why=ended"
    assert here.ask("GET", "/me", headers=headers).status_code == 401


@pytest.mark.parametrize("key", ["", "eft_", "no key", "eft_" + "x" * 5000])
def test_a_wrong_key_is_told_and_begins_nothing(here: World, key: str) -> None:
    reply = sign_in(here, key)
    assert reply.status_code in (401, 413) and "set-cookie" not in reply.headers
    assert len(key) > 4000 or "not known here" in reply.text


def test_a_sign_in_that_another_site_sends_is_refused(here: World, boss: Caller) -> None:
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
        assert sign_in(here, boss.key, **headers).status_code == 403
    assert sign_in(here, boss.key, **{"sec-fetch-site": "same-origin", "origin": "http://api"}).status_code == 303


@pytest.mark.parametrize(
    "where", ["//evil.example", "https://evil.example", "/\\evil", "../../x", "javascript:alert(1)"]
)
def test_signing_in_leads_to_no_other_place(here: World, boss: Caller, where: str) -> None:
    assert sign_in(here, boss.key, where).headers["location"] == "../ui/jobs"


def test_changes_ask_for_the_token_and_reads_do_not(here: World, boss: Caller) -> None:
    headers, path = session_of(here, boss), f"/projects/{here.lab.id}"
    assert here.ask("GET", path, headers=headers).status_code == 200
    for given in (headers, {**headers, sessions.TOKEN_HEADER: "0" * 64}):
        reply = here.ask("PATCH", path, headers=given, json={"preemptible": False})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "missing_csrf_token")
    assert here.ask("PATCH", path, headers=token(headers), json={"preemptible": False}).status_code == 200


def test_a_session_is_no_api_key_and_an_api_key_no_session(here: World, boss: Caller) -> None:
    headers = session_of(here, boss)
    assert here.ask("GET", "/me", headers["cookie"].partition("=")[2]).status_code == 401
    assert here.ask("GET", "/me", headers={"cookie": f"{sessions.COOKIE}={boss.key}"}).status_code == 401
    reply = here.ask("POST", f"/keys/{row_of(here, headers).id}/rotate", boss.key, json={})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, "key_id")


def test_a_session_ends_with_its_key(here: World) -> None:
    member = here.caller("leaving", Role.MEMBER, Scope.WRITE)
    headers = session_of(here, member)
    here.ask("DELETE", f"/keys/{row_of(here, headers).made_with}", member.key)
    assert here.ask("GET", "/me", headers=headers).status_code == 401


def test_an_idle_session_ends_and_a_used_one_goes_on(here: World, boss: Caller) -> None:
    headers = session_of(here, boss)
    row = row_of(here, headers)
    assert row.expires_at is not None and row.session_until is not None
    idle = here.settings.session_idle_hours * 3600
    assert row.expires_at == pytest.approx(row.created_at + idle, abs=5)
    change(here, headers, expires_at=row.expires_at - 3000)
    uses = LastUse(here.database, idle_seconds=idle)
    with here.database.read() as session:
        from api.auth import service

        principal = service.authenticate(session, headers["cookie"].partition("=")[2])
    assert principal is not None
    uses.note(principal)
    uses.write()
    assert row_of(here, headers).expires_at == pytest.approx(row.created_at + idle, abs=5)

    change(here, headers, session_until=row.created_at + 60)
    uses.note(principal)
    uses.write()  # never beyond its latest end; what is further is left alone
    change(here, headers, expires_at=row.created_at - 1)
    uses.note(principal)
    uses.write()
    assert row_of(here, headers).expires_at == row.created_at - 1, "a session that is over stays over"
    assert here.ask("GET", "/me", headers=headers).status_code == 401
    assert here.ask("GET", f"/ui/jobs/{here.lab.job}?step=0", headers=headers).status_code == 303


def test_the_oldest_of_too_many_sessions_ends(here: World) -> None:
    member = here.caller("many", Role.MEMBER, Scope.WRITE)
    every = [session_of(here, member) for _ in range(sessions.MOST + 1)]
    assert here.ask("GET", "/me", headers=every[0]).status_code == 401
    assert here.ask("GET", "/me", headers=every[1]).status_code == 200


def test_no_page_opens_without_a_session(here: World) -> None:
    found = pages()
    assert len(found) >= 5 and "/ui/jobs/{job_id}" in found
    for path in found:
        method = "POST" if path == "/ui/signout" else "GET"
        reply = here.ask(method, of_lab(here, path))
        assert reply.status_code == 303 and "/ui/signin?next=" in reply.headers["location"], path
    for route in routes():
        assert (policy_of(route).scope is None) is (route.path in OPEN), route.path


def test_pages_refuse_as_the_api_does(here: World) -> None:
    viewer, left = here.caller("viewer", Role.VIEWER, Scope.READ), here.caller("left", None, Scope.BOX)
    headers = session_of(here, viewer)
    page = here.ask("GET", f"/ui/jobs/{here.lab.job}", headers=headers)
    assert page.status_code == 200 and "data-sends=" not in page.text
    assert here.ask("POST", f"/jobs/{here.lab.job}/pause", headers=token(headers)).status_code == 403
    other = here.ask("GET", f"/ui/jobs/{here.rivals.job}", headers=headers)
    assert other.status_code == 404 and here.rivals.job not in re.sub(r"no job `[^`]*`", "", other.text)
    assert here.ask("GET", "/ui/jobs", headers=session_of(here, left)).status_code == 403
    for path in (
        f"/ui/compare?job={here.rivals.job}",
        f"/ui/new?clone={here.rivals.job}",
        f"/ui/files/{here.rivals.file}",
        f"/ui/models/{here.rivals.model}",
    ):
        assert here.ask("GET", path, headers=headers).status_code == 404, path
    people = here.ask("GET", "/ui/people", headers=headers).text
    assert "Users of the box" not in people and "Latest changes" not in people
    metrics = here.caller("prometheus", Role.ADMIN, Scope.METRICS, box_admin=True)
    assert sign_in(here, metrics.key).status_code == 403


class _Sources(HTMLParser):
    """Everything that a page loads or would run."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(given.get("src") or given.get("href") or "")
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.inline += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def test_names_with_markup_stay_text_and_nothing_is_inline_or_from_elsewhere(here: World, boss: Caller) -> None:
    headers = session_of(here, boss)
    with here.database.write() as session:
        session.execute(update(Job).where(Job.id == here.lab.job).values(name=MARKUP, reason=MARKUP))
    shown = [of_lab(here, path) for path in pages()]
    for path in shown:
        if path in ("/ui/changes", "/ui/signout"):
            continue
        query = f"?job={here.lab.job}" if path == "/ui/compare" else ""
        reply = here.ask("GET", path + query, headers=headers)
        assert reply.status_code == 200, (path, reply.text)
        assert "<script>alert" not in reply.text, path
        found = _Sources()
        found.feed(reply.text)
        assert not found.inline, (path, found.inline)
        assert found.loads and all(re.match(r"(\.\./)+ui/static/", one) for one in found.loads), (path, found.loads)
    assert "&lt;script&gt;alert(1)" in here.ask("GET", "/ui/jobs", headers=headers).text
    nowhere = here.ask("GET", "/ui/nothing/<b>x", headers=headers)
    assert nowhere.status_code == 404 and "there is no page" in nowhere.text.lower() and "<h1>Not found" in nowhere.text
    assert here.ask("GET", "/ui/nothing").status_code == 303
    queries = ("/ui/jobs?show=%3Cb%3Ex&name=%22x", "/ui/jobs?after=nothing")
    for path in (*queries, "/ui/jobs/job-x", "/ui/jobs/<b>x", "/ui/nothing/<b>x"):
        assert "<b>x" not in here.ask("GET", path, headers=headers).text


def test_what_pages_load_is_small_and_what_its_list_says() -> None:
    files = [path for path in render.STATIC.iterdir() if path.suffix in render.TYPES]
    assert sum(path.stat().st_size for path in files) <= 150_000
    listed = (render.STATIC / "vendored.txt").read_text()
    for name, package, digest in re.findall(r"^(\S+\.(?:js|css)) +(\S+@\S+) .* ([0-9a-f]{64})$", listed, re.MULTILINE):
        found = render.static_file(name)
        assert found is not None and digest.startswith(found[1]), f"{name} is not that of {package}"
        assert (render.STATIC / "licences" / f"{package.partition('@')[0].lower()}.txt").exists()
    assert len(re.findall("@", listed)) == 4


def test_files_are_kept_by_their_hash(here: World) -> None:
    name = render.environment().globals["static"]("eft.css")
    reply = here.ask("GET", f"/ui/{name}")
    assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert here.ask("GET", "/ui/static/eft.css").headers["cache-control"] == "no-cache"
    for path in ("vendored.txt", "..%2frender.py", "nothing.js", "licences"):
        assert here.ask("GET", f"/ui/static/{path}").status_code == 404


@pytest.mark.parametrize(
    ("path", "root"), [("/", "./"), ("/ui/jobs", "../"), ("/ui/jobs/job-x", "../../"), ("/ui", "./")]
)
def test_links_are_relative_so_that_any_prefix_works(path: str, root: str) -> None:
    assert render.to_root(path) == root


def test_a_metric_as_a_column_is_of_the_latest_attempt_at_each_step(here: World, boss: Caller) -> None:
    job = here.lab.job
    rows = [(1, 1, 5.0), (2, 1, 9.0), (2, 2, 2.0), (3, 2, 3.0)]  # the second attempt did step 2 again
    with here.database.write() as session:
        owner = {"owner_id": here.lab.owner.user_id, "project_id": here.lab.id, "job_id": job, "name": "loss/mine"}
        session.add_all(Metric(**owner, step=step, attempt=n, value=value, time=0.0) for step, n, value in rows)
    page = here.ask("GET", "/ui/jobs?metric=loss/mine", headers=session_of(here, boss)).text
    row = page[page.index(f'<tr id="{job}"') :].partition("</tr>")[0]
    assert re.findall(r'data-sort="(\d\.\d)"', row) == ["3.0", "2.0", "5.0"], "last, smallest, largest"
    told = here.ask("GET", f"/jobs/{job}/metrics?names=loss/mine&points=100", boss.key)
    assert told.json() == {"loss/mine": [[1, 5.0], [2, 2.0], [3, 3.0]]}
    with here.database.write() as session:
        session.execute(delete(Metric).where(Metric.name == "loss/mine"))
    again = here.ask("GET", f"/jobs/{job}/metrics?names=loss/mine&points=100", boss.key)
    assert again.json() == told.json(), "the job is over, so that its curves are kept"


def test_a_long_line_of_the_log_is_cut_on_the_page(here: World, boss: Caller) -> None:
    job = here.ask("GET", f"/jobs/{here.lab.job}", boss.key).json()
    log = here.layout.attempt(here.lab.job, job["attempt"]) / LOG_FILE
    before = log.read_bytes()
    address, headers = f"/ui/jobs/{here.lab.job}", session_of(here, boss)
    pages = []
    for length in (900_000, 20_000_000):
        log.write_bytes(b"x" * length + b"\nlast line\n")
        pages.append(here.ask("GET", address, headers=headers).text)
    log.write_bytes(before)
    assert "898,000 characters more)\nlast line" in pages[0]
    assert all(len(page) < 100_000 and "last line" in page for page in pages)


def test_rollouts_are_sorted_and_filtered_over_the_whole_step(here: World, boss: Caller) -> None:
    job = here.ask("GET", f"/jobs/{here.lab.job}", boss.key).json()
    folder = here.layout.attempt(here.lab.job, job["attempt"]) / ROLLOUTS
    headers, path = session_of(here, boss), f"/ui/jobs/{here.lab.job}/rollouts"
    assert "No rollouts." in here.ask("GET", path, headers=headers).text
    folder.mkdir()
    for number in (0, 1):
        lines = [
            {"line": at, "sample": 0, "prompt": f"question {at} {MARKUP}", "completion": f"says {at}", "tokens": 2,
             "finished": True, "rewards": {"mine": at / 1000}, "reward": at / 1000, "advantage": -0.5}
            for at in range(250)
        ]  # fmt: skip
        lines[1] |= {"line": 0, "sample": 1, "prompt": lines[0]["prompt"]}
        lines[7] |= {"completion": "x" * 900_000 + MARKUP, "finished": False, "unscored": {"mine": f"late {MARKUP}"}}
        (folder / rollout_file(number)).write_text("".join(json.dumps(line) + "\n" for line in lines))

    tokens = [{"words": ["says ", str(at)], "sampler": [-0.5, -at / 1000]} for at in range(250)]
    (folder / rollout_tokens_file(1)).write_text("".join(json.dumps(line) + "\n" for line in tokens))

    def shown(query: str) -> str:
        reply = here.ask("GET", path + query, headers=headers)
        assert reply.status_code == 200 and MARKUP not in reply.text, query
        return str(reply.text)

    def places(text: str) -> list[int]:
        return [int(one) for one in re.findall(r"prompt, line (\d+)", text)]

    newest = shown("")
    assert "Step 2, 250 answers" in newest and "step=1&" in newest and "Next step" not in newest
    assert places(newest) == [0, *range(2, 40)] and len(newest) < 100_000 and "(cut)" in newest
    together = newest.partition("</article>")[0]
    assert "says 0" in together and "says 1" in together and "says 2" not in together, "answers to one prompt"
    assert "mine: not scored: late &lt;script&gt;" in newest and "(900,029 characters)" in newest
    assert places(shown("?step=1&sort=best")) == list(range(249, 209, -1))
    assert places(shown("?sort=worst&offset=240")) == list(range(240, 250))
    assert places(shown("?words=SAYS+249")) == [249]
    assert "No answer of this step has these words." in shown("?words=nothing")
    wanted = re.search(r'data-tokens="(jobs/[^"]+)"', shown("?sort=best"))
    assert wanted, "the place of the best answer, whatever the order of the page"
    (told,) = here.ask("GET", f"/{html.unescape(wanted[1])}", boss.key).json()["data"]
    assert told["completion"] == "says 249" and told["detail"]["sampler"] == [-0.5, -0.249]
    assert told["detail"]["words"] == ["says ", "249"] and told["detail"]["trainer"] is None
    older = here.ask("GET", f"/jobs/{here.lab.job}/rollouts?step=1&tokens=true", boss.key).json()["data"]
    assert older[0]["completion"] == "says 0" and older[0]["detail"] is None, "of a release before it"
    assert here.ask("GET", f"{path}?step=9", headers=headers).status_code == 404
    assert here.ask("GET", f"{path}?sort=length", headers=headers).status_code == 422
    away = here.ask(
        "GET",
        f"/ui/jobs/{here.rivals.job}/rollouts",
        headers=session_of(here, here.caller("peer", Role.VIEWER, Scope.READ)),
    )
    assert away.status_code == 404
    shutil.rmtree(folder)


def test_a_recipe_is_written_over_a_file_of_the_project(here: World, boss: Caller) -> None:
    headers = session_of(here, boss)
    for name in new_router.recipes():
        reply = here.ask("GET", f"/ui/new?recipe={name}&file=file-0123", headers=headers)
        file = re.search(r"<textarea[^>]*>(.*?)</textarea>", reply.text, re.DOTALL)
        assert file, name
        spec = yaml.safe_load(html.unescape(file[1]))
        if name in ("task", "game"):
            assert spec == yaml.safe_load(new_router.recipes()[name])  # they have no file
        else:
            assert "file-0123" in json.dumps(spec["data"]["train"]) and "eval" not in spec["data"], name
        assert "short" in reply.text and spec["version"] == 1
    refused = here.ask("GET", "/ui/new?recipe=nothing", headers=headers)
    assert refused.status_code == 404 and "grpo" in refused.text


def test_the_lineage_of_a_model_is_drawn_without_boxes_over_one_another() -> None:
    def one(job: str, parent: str | None) -> dict[str, Any]:
        spec = {"type": "job", "id": parent} if parent else {"type": "hub", "id": "org/base"}
        return {"job": job, "name": None, "stage": "sft", "method": "lora", "model": {"spec": spec}, "parent": parent}

    lineage = [one("job-2", "job-1"), one("job-1", None)]
    made = [one("job-3", "job-2"), one("job-4", "job-2"), one("job-5", "job-4"), one("job-6", "job-3")]
    drawing = family.draw("base", lineage, made, {"job-1": "model-1", "job-2": "model-2"})
    places = {member.key: (member.x, member.y) for member in drawing.members}
    assert len(set(places.values())) == len(places) == 7
    parents = {member.key: member.parent for member in drawing.members}
    assert parents == {
        "base": None, "job-1": "base", "job-2": "job-1", "job-3": "job-2", "job-4": "job-2", "job-5": "job-4",
        "job-6": "job-3",
    }  # fmt: skip
    assert all(places[parent][0] < places[key][0] for key, parent in parents.items() if parent)
    assert len(drawing.lines) == 6 and [member.key for member in drawing.members if member.here] == ["job-2"]
    assert all(x + family.WIDTH < drawing.width and y + family.HEIGHT < drawing.height for x, y in places.values())
    assert drawing.members[2].link == "models/model-2" and drawing.members[3].link is None


def test_words() -> None:
    assert [words.duration(n) for n in (0, 59, 200, 4000, 90000, 300000)] == [
        "0 s", "59 s", "3 min 20 s", "1 h 6 min", "25 h", "3 d 11 h",
    ]  # fmt: skip
    assert [words.number(n) for n in (None, 3, 1234567, 4.7734, 1e-5, float("nan"), float("inf"), True)] == [
        "–", "3", "1,234,567", "4.773", "1e-05", "NaN", "∞", "True",
    ]  # fmt: skip
    assert [words.size(n) for n in (None, 0, 999, 36256, 25_753_026_560)] == ["–", "0 B", "999 B", "36.3 kB", "25.8 GB"]
    assert words.plain([{"type": "number", "name": None}]) == '[{"type": "number", "name": null}]'
    one, two = {"a": {"b": 1, "c": []}, "d": True}, {"a": {"b": 1, "c": [2]}, "d": 1, "e": None}
    assert words.changed([one, two]) == [("a.c", ["[]", "[2]"]), ("d", ["true", "1"]), ("e", ["–", "null"])]
    assert Path(render.HERE, "templates", "shell.html").is_file()


def test_a_job_with_rewards_says_them_before_its_loss() -> None:
    job: dict[str, Any] = {"status": "succeeded", "reason": "finished", "progress": {"step": 3, "total_steps": 9}}
    job |= {"result": {"train_loss": -1e-9}}
    job |= {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:09Z"}
    rewards = (0.5, 0.0, 0.75)
    assert words.now(job, None, rewards) == "Done in 9 s: reward 0.5 (of all steps 0 to 0.75)."
    assert words.figure(job, rewards) == ("reward", 0.5) and words.figure(job) == ("train_loss", -1e-9)
    running = words.now(job | {"status": "running", "reason": "runs on box-1"}, "training", rewards)
    assert running == "Trains, step 3 of 9 (33 %), reward 0.5 (of all steps 0 to 0.75); runs on box-1."
    judged = job | {"result": {"eval_after": {"eval_reward": 1.0, "eval_loss": 2.0}}}
    assert words.figure(judged, rewards) == ("eval_reward", 1.0) and "held-out reward to 1" in words.now(judged)


def test_the_form_and_the_exports_are_those_of_the_spec() -> None:
    assert new_router.axis("stage")[0] == "sft" and {"dpo", "grpo", "process_reward"} < set(new_router.axis("stage"))
    assert new_router.axis("method")[0] == "lora" and {"qlora", "full", "auto"} < set(new_router.axis("method"))
    wishes = [TypeAdapter(Export).validate_python(wish) for _, wish in formats()]
    assert [about(one).folder for one in wishes] == [folder for folder, _ in formats()]
    kinds = {arm.model_fields["type"].default for arm in get_args(get_args(Export)[0])}
    assert {one.type for one in wishes} == kinds - {"lm_eval"}, "a score asks for a task"
