"""Webhooks against a real HTTP server: what is sent, when it is tried again, when it is given up, and to whom never."""

from __future__ import annotations

import ipaddress
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from eft.cli import app
from sqlalchemy import select, update
from typer.testing import CliRunner

from api.auth.policy import Principal, Role, Scope
from api.notices import service
from api.notices.render import chat
from api.notices.sender import Sender
from core.base.addresses import NotAllowed, parse, permitted, resolve
from core.base.post import HttpReply, post
from core.db.tables import Delivery, Job, Webhook
from core.jobs.base.states import Status
from core.jobs.base.transitions import move
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import Failed, Outcome, RetryPolicy, Succeeded, finish
from tests.support.ports import held_port
from tests.support.target import Got, Target, target, until, verifies
from tests.support.world import MODEL, World, world

QUICK = {"webhook_retry_seconds": (0.05, 0.05), "webhook_timeout_seconds": 3.0, "webhook_allow": ("127.0.0.1",)}


@pytest.fixture(scope="module")
def here(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("hooks") / "data", database_url, **QUICK, public_url="https://eft.lab/") as made:
        made.boss = made.caller("admin", Role.ADMIN, Scope.ADMIN)  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def there() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def sender(here: World) -> Iterator[Sender]:
    """Its turns are the test's: no thread of its own runs."""
    with here.database.write() as session:
        session.execute(update(Webhook).values(disabled_at=1.0))
        session.execute(update(Delivery).values(state="dead"))
    made = Sender(here.database, here.settings)
    yield made
    made.close()


def ask(here: World, method: str, path: str, status: int = 200, **more: Any) -> Any:
    reply = here.ask(method, path, here.boss.key, **more)  # type: ignore[attr-defined]
    assert reply.status_code == status, reply.text
    return reply.json()


def hook(here: World, url: str, **wish: Any) -> dict[str, Any]:
    with here.database.write() as session:  # room for one more: a project has a limit of them
        old = session.execute(select(Webhook.id).where(Webhook.disabled_at == 1.0)).scalars().all()
    for webhook_id in old:
        here.ask("DELETE", f"/webhooks/{webhook_id}", here.boss.key)  # type: ignore[attr-defined]
    made: dict[str, Any] = ask(here, "POST", "/webhooks", 201, json={"url": url, **wish})
    return made


def deliveries(here: World, webhook: dict[str, Any], **filters: Any) -> list[dict[str, Any]]:
    return list(ask(here, "GET", f"/webhooks/{webhook['id']}/deliveries", params=filters)["data"])


def submitted(here: World, **spec: Any) -> str:
    job: str = ask(here, "POST", "/jobs", 201, json={"model": MODEL, "data": here.lab.file, **spec})["id"]
    return job


def run(here: World, job_id: str, outcome: Outcome) -> None:
    """What a worker does with a job, through the functions it calls."""
    with here.database.write() as session:
        won = claim(session, "worker-x", "box", Slot(f"p-{job_id}", "prepare"), 600)
        assert won is not None and won.token.job_id == job_id
        finish(session, won.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
        won = claim(session, "worker-x", "box", Slot(f"c-{job_id}", "cpu"), 600)
        assert won is not None and won.token.job_id == job_id
        running(session, won.token)
        finish(session, won.token, "train", outcome, 0, RetryPolicy())


def document(got: Got) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(got.body)
    return body


# -- what is sent


@pytest.mark.both_databases
def test_a_job_tells_who_wants_to_know(
    here: World, there: Target, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: proxies are not for notices
    every = ["job.started", "job.paused", "job.succeeded", "job.failed", "job.cancelled"]
    mine = hook(here, there.url("/all"), name="ci", events=every)
    named = hook(here, there.url("/named"), events=["job.succeeded"], all_jobs=False)
    room = hook(here, there.url("/chat"), kind="chat")
    assert room["secret"] is None and mine["origin"] == f"http://127.0.0.1:{there.port}"

    good = submitted(here, name="voice intents", notify=[named["id"]])
    run(here, good, Succeeded({}))
    bad = submitted(here)
    run(here, bad, Failed("user", "bad_rows", "row 3 <@all> has\nno text"))
    gone = submitted(here)
    ask(here, "POST", f"/jobs/{gone}/pause")
    ask(here, "POST", f"/jobs/{gone}/cancel")
    until(lambda: len(there.got) == 9, step=sender.turn)

    told = {document(got)["data"]["id"] + " " + document(got)["type"]: got for got in there.at("/all")}
    assert set(told) == {
        f"{good} job.started", f"{good} job.succeeded", f"{bad} job.started", f"{bad} job.failed",
        f"{gone} job.paused", f"{gone} job.cancelled",
    }  # fmt: skip
    assert all(verifies(got, mine["secret"]) for got in told.values())
    assert not any(verifies(got, named["secret"]) for got in told.values())
    data = document(told[f"{bad} job.failed"])["data"]
    assert data["failure"] == {"class": "user", "code": "bad_rows"} and data["status"] == "failed"
    assert data["url"] == f"https://eft.lab/jobs/{bad}" and data["finished_at"].endswith("Z")
    assert [document(got)["data"]["id"] for got in there.at("/named")] == [good]
    lines = sorted(document(got)["text"] for got in there.at("/chat"))
    assert [f"{good}) succeeded" in line or f"{bad} failed" in line for line in lines] == [True, True]
    failed = next(line for line in lines if bad in line)
    assert "&lt;@\u200ball&gt; has no text" in failed and failed.endswith(f" https://eft.lab/jobs/{bad}")
    assert all("webhook-signature" not in got.headers for got in there.at("/chat"))

    until(lambda: all(row["state"] == "delivered" for row in deliveries(here, mine)))
    shown = json.dumps([ask(here, "GET", "/webhooks"), deliveries(here, mine), ask(here, "GET", "/audit")])
    assert mine["secret"] not in shown and "/all" not in shown


@pytest.mark.both_databases
def test_a_change_that_is_taken_back_tells_nobody(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/x"), events=["job.cancelled"])
    job_id = submitted(here)

    def cancelled() -> None:
        with here.database.write() as session:
            job = session.get_one(Job, job_id)
            assert move(session, job, Status.CANCELLED, reason="x")
            assert session.execute(select(Delivery).where(Delivery.job_id == job_id)).all()
            raise KeyError

    with pytest.raises(KeyError):
        cancelled()
    assert deliveries(here, made) == []
    ask(here, "POST", f"/jobs/{job_id}/cancel")
    assert [row["type"] for row in deliveries(here, made)] == ["job.cancelled"]


@pytest.mark.both_databases
def test_a_webhook_may_be_deleted_while_a_job_changes(here: World, there: Target, sender: Sender) -> None:
    """Whichever is first: the job's change goes through, and nothing is left for a webhook that is gone."""
    for delete_first in (False, True):
        made = hook(here, there.url("/x"), events=["job.cancelled"])
        job_id = submitted(here)
        principal = Principal(**dict.fromkeys(Principal.__dataclass_fields__) | vars_of(here))

        def cancel_it(job_id: str = job_id) -> None:
            with here.database.write() as session:
                assert move(session, session.get_one(Job, job_id), Status.CANCELLED, reason="x")
                time.sleep(0.1)

        def delete_it(principal: Principal = principal, number: str = made["id"]) -> None:
            with here.database.write() as session:
                service.remove(session, principal, number)
                time.sleep(0.1)

        both = [delete_it, cancel_it] if delete_first else [cancel_it, delete_it]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(both[0])
            time.sleep(0.03)
            second = pool.submit(both[1])
            first.result(90), second.result(90)
        assert ask(here, "GET", f"/jobs/{job_id}")["status"] == "cancelled"
        with here.database.read() as session:
            assert not session.execute(select(Delivery).where(Delivery.webhook_id == made["id"])).all()


def vars_of(here: World) -> dict[str, Any]:
    return {"user_id": here.lab.owner.user_id, "project_id": here.lab.id}


def test_previews_are_no_news(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/x"), events=["job.started", "job.succeeded"])
    with here.database.write() as session:
        done = set()
        while (won := claim(session, "worker-x", "box", Slot(f"preview-{len(done)}", "preview"), 600)) is not None:
            running(session, won.token)
            finish(session, won.token, won.kind, Succeeded({"path": "m"}), 0, RetryPolicy())
            done.add(won.token.job_id)
    assert here.lab.preview in done and deliveries(here, made) == []


def test_a_job_cannot_name_somebody_elses_webhook(here: World, sender: Sender) -> None:
    theirs, _ = here.webhook(here.rivals)
    for number in (theirs, "hook-" + "0" * 26):
        spec = {"model": MODEL, "data": here.lab.file, "notify": [number]}
        faults = ask(here, "POST", "/jobs", 422, json=spec)["error"]["faults"]
        assert [fault["code"] for fault in faults] == ["webhook_not_found"]


# -- tried again, given up


@pytest.mark.both_databases
def test_failures_are_tried_again_with_the_same_id_and_body(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/flaky"))
    there.plan["/flaky"].extend([500, "drip"])
    told = ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made)[0]["state"] == "delivered", step=sender.turn)
    (row,) = deliveries(here, made)
    assert (row["id"], row["attempts"], row["last_status"], row["last_error"]) == (told["id"], 3, 200, None)
    assert {got.headers["webhook-id"] for got in there.got} == {told["id"]}
    assert len({got.body for got in there.got}) == 1 and len(there.got) == 3
    assert all(verifies(got, made["secret"]) for got in there.got)
    assert not verifies(Got("/", there.got[0].headers, there.got[0].body + b" "), made["secret"])


def test_a_target_may_ask_for_more_time(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/busy"))
    there.plan["/busy"].append(429)
    there.headers["retry-after"] = "3600"
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made)[0]["attempts"], step=sender.turn)
    (row,) = deliveries(here, made)
    waits = datetime.fromisoformat(row["next_at"]) - datetime.fromisoformat(row["last_at"])
    assert row["state"] == "pending" and 3599 < waits.total_seconds() < 3605


@pytest.mark.both_databases
def test_dead_letters_are_seen_and_sent_again(here: World, sender: Sender) -> None:
    with held_port() as port:
        made = hook(here, f"http://127.0.0.1:{port}/later")
        told = ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
        until(lambda: deliveries(here, made, state="dead"), step=sender.turn)
        (row,) = deliveries(here, made, state="dead")
        assert row["attempts"] == 3 and "refused" in row["last_error"] and row["next_at"] is None
        assert ask(here, "GET", f"/webhooks/{made['id']}")["failing_since"] is not None
        with target(port=port) as there:
            ask(here, "POST", f"/webhooks/{made['id']}/deliveries/{told['id']}/resend")
            until(lambda: deliveries(here, made, state="delivered"), step=sender.turn)
            assert [got.headers["webhook-id"] for got in there.got] == [told["id"]]
    assert ask(here, "GET", f"/webhooks/{made['id']}")["failing_since"] is None


def test_redirects_are_not_followed(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/moved"))
    there.plan["/moved"].extend([302, 307, 308])
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made, state="dead"), step=sender.turn)
    assert {got.path for got in there.got} == {"/moved"}
    assert "redirects are not followed" in deliveries(here, made)[0]["last_error"]


def test_gone_disables_at_once(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/gone"))
    there.plan["/gone"].append(410)
    first, second = (ask(here, "POST", f"/webhooks/{made['id']}/test", 201) for _ in range(2))
    until(lambda: ask(here, "GET", f"/webhooks/{made['id']}")["disabled_at"], step=sender.turn)
    assert "410" in ask(here, "GET", f"/webhooks/{made['id']}")["disabled_reason"]
    assert {row["id"] for row in deliveries(here, made, state="dead")} == {first["id"], second["id"]}
    error = ask(here, "POST", f"/webhooks/{made['id']}/test", 409)["error"]
    assert error["code"] == "webhook_disabled"
    run(here, submitted(here), Succeeded({}))
    assert len(deliveries(here, made)) == 2
    ask(here, "POST", f"/webhooks/{made['id']}/enable")
    ask(here, "POST", f"/webhooks/{made['id']}/deliveries/{second['id']}/resend")
    until(lambda: deliveries(here, made, state="delivered"), step=sender.turn)


def test_days_of_failure_disable(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/down"))
    there.plan["/down"].extend([503, 200, 503, 503])
    for _ in range(2):
        ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: len(there.got) >= 3, step=sender.turn)  # a success came between: counted anew
    assert ask(here, "GET", f"/webhooks/{made['id']}")["disabled_at"] is None
    with here.database.write() as session:
        session.execute(update(Webhook).where(Webhook.id == made["id"]).values(failing_since=time.time() - 5.1 * 86400))
    there.plan["/down"].extend([503] * 5)
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: ask(here, "GET", f"/webhooks/{made['id']}")["disabled_at"], step=sender.turn)
    reason = ask(here, "GET", f"/webhooks/{made['id']}")["disabled_reason"]
    assert "only failed for 5.1 days" in reason
    (entry,) = ask(here, "GET", f"/audit?action=webhook.disable&target={made['id']}")["data"]
    assert entry["actor"] is None and entry["data"]["reason"] == reason


def test_a_slow_target_holds_up_nobody(here: World, there: Target, sender: Sender) -> None:
    slow, quick = hook(here, there.url("/slow")), hook(here, there.url("/quick"))
    there.plan["/slow"].extend(["hang"] * 3)
    for _ in range(3):
        ask(here, "POST", f"/webhooks/{slow['id']}/test", 201)
    patient = Sender(here.database, here.settings.model_copy(update={"webhook_timeout_seconds": 250.0}))
    until(lambda: there.at("/slow"), step=patient.turn)
    for _ in range(3):
        ask(here, "POST", f"/webhooks/{quick['id']}/test", 201)
    until(lambda: len(deliveries(here, quick, state="delivered")) == 3, step=patient.turn)
    assert [row["attempts"] for row in deliveries(here, slow)] == [0, 0, 0], "the slow one's answer is still awaited"
    assert len(there.at("/slow")) == 1, "one at a time"
    there.over.set()  # it hangs up
    patient.close()


def test_a_target_that_does_not_answer_is_not_waited_for(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/slow"))
    there.plan["/slow"].extend(["hang"] * 3)  # a second attempt that ends well would leave no error
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made)[0]["attempts"], step=sender.turn)
    assert "no answer within 3 s" in deliveries(here, made)[0]["last_error"]


@pytest.mark.both_databases
def test_of_several_processes_one_sends(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/once"))
    other = Sender(here.database, here.settings)
    for _ in range(5):
        ask(here, "POST", f"/webhooks/{made['id']}/test", 201)

    def both() -> None:
        sender.turn()
        other.turn()

    until(lambda: len(deliveries(here, made, state="delivered")) == 5, step=both)
    assert len(there.got) == 5
    sender.close()
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: len(there.got) == 6, step=other.turn)
    other.close()


# -- secrets


def test_both_secrets_sign_while_one_succeeds_the_other(here: World, there: Target, sender: Sender) -> None:
    made = hook(here, there.url("/r"))
    new = ask(here, "POST", f"/webhooks/{made['id']}/rotate", 201, params={"overlap_hours": 1})["secret"]

    def told() -> Got:
        count = len(there.got)
        ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
        until(lambda: len(there.got) > count, step=sender.turn)
        return there.got[-1]

    got = told()
    assert verifies(got, made["secret"]) and verifies(got, new) and new != made["secret"]
    last = ask(here, "POST", f"/webhooks/{made['id']}/rotate", 201, params={"overlap_hours": 0})["secret"]
    got = told()
    assert verifies(got, last) and not verifies(got, new) and not verifies(got, made["secret"])
    room = hook(here, there.url("/c"), kind="chat")
    assert ask(here, "POST", f"/webhooks/{room['id']}/rotate", 409)["error"]["code"] == "no_secret"


# -- where nothing is sent

INSIDE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::",
    "2001:0:7f00:1::", "fec0::1", "::127.0.0.1", "2001:db8::1",
]  # fmt: skip
OUTSIDE = ["9.9.9.9", "93.184.216.34", "2620:fe::fe", "64:ff9b::909:909", "::ffff:9.9.9.9"]


@pytest.mark.parametrize(("addresses", "good"), [(INSIDE, False), (OUTSIDE, True)])
def test_what_is_public(addresses: list[str], good: bool) -> None:
    for address in addresses:
        assert permitted(ipaddress.ip_address(address)) is good, address
        url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
        if good:
            assert resolve(parse(url), ())
        else:
            with pytest.raises(NotAllowed, match="not a public address"):
                resolve(parse(url), ())
    assert permitted(ipaddress.ip_address("::ffff:10.1.2.3"), ("10.0.0.0/8",))
    assert not permitted(ipaddress.ip_address("192.168.1.1"), ("10.0.0.0/8", "some.host"))


@pytest.mark.parametrize(
    "url",
    ["ftp://9.9.9.9/", "http:///x", "http://a@9.9.9.9/", "http://9.9.9.9/#x", "http://9.9.9.9:99999/", "http://h\u00e9.fr/",
     "http://9.9.9.9/ x", "http://9.9.9.9/\r\nx: y", "http://[fe80::1%25eth0]/", "file:///etc/passwd", "9.9.9.9"],
)  # fmt: skip
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(NotAllowed):
        parse(url)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "2130706434", "0x7f.2", "127.2", "[::ffff:10.0.0.1]", "169.254.169.254", "127.0.0.2"]
)
def test_private_addresses_are_refused_when_a_webhook_is_made(here: World, host: str) -> None:
    """Also in the forms that a resolver understands."""
    error = ask(here, "POST", "/webhooks", 422, json={"url": f"http://{host}/"})["error"]
    assert error["code"] == "address_not_allowed" and "EFT_WEBHOOK_ALLOW" in error["message"]


def test_a_name_that_becomes_private_is_not_told(here: World, there: Target, sender: Sender) -> None:
    """It was public when the webhook was made; and the address that was checked is the one that is connected to."""
    answers: list[str] = []
    asked: list[str] = []

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        address = answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    made = hook(here, there.url("/rebound"))
    with here.database.write() as session:
        session.execute(
            update(Webhook).where(Webhook.id == made["id"]).values(url=there.url("/rebound", "hooks.example.org"))
        )
    sender.close()
    tricked = Sender(here.database, here.settings, lookup)
    # 127.0.0.1 is allowed here and stands for a public address; the next answer would lead elsewhere.
    answers += ["127.0.0.1", "127.0.0.2", "10.0.0.1", "169.254.169.254"]
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made)[0]["state"] == "delivered", step=tricked.turn)
    assert asked == ["hooks.example.org"] and len(there.got) == 1
    assert there.got[0].headers["host"] == f"hooks.example.org:{there.port}"
    ask(here, "POST", f"/webhooks/{made['id']}/test", 201)
    until(lambda: deliveries(here, made)[0]["state"] == "dead", step=tricked.turn)
    assert "not a public address" in deliveries(here, made)[0]["last_error"]
    assert len(there.got) == 1 and answers == []
    tricked.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate is made with openssl")
def test_certificates_are_checked_by_the_urls_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever address is connected to: SNI and the certificate are about the name."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=hooks.example.org", "-addext", "subjectAltName=DNS:hooks.example.org",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    asked: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    tls.sni_callback = lambda _, name, __: asked.append(name)  # type: ignore[assignment]

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    def send(host: str) -> HttpReply:
        url = f"https://{host}:{there.port}/tls"
        return post(url, {}, b"{}", allow=("127.0.0.1",), seconds=5, lookup=lookup)

    with target(tls=tls) as there:
        assert "certificate is not good" in str(send("hooks.example.org").error) and not there.got
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert send("hooks.example.org") == HttpReply(200)
        assert there.got[0].headers["host"] == f"hooks.example.org:{there.port}"
        assert "certificate is not good" in str(send("other.example.org").error)
    assert asked == ["hooks.example.org", "hooks.example.org", "other.example.org"] and len(there.got) == 1


def test_discord_takes_another_form() -> None:
    assert chat("https://discord.com/api/webhooks/1/x", "a <b>")["content"] == "a <b>"
    assert chat("https://discord.com/api/webhooks/1/x/slack", "a <b>") == {"text": "a &lt;b&gt;"}
    assert chat("https://mattermost.lab/hooks/x", "a") == {"text": "a"}


# -- nothing is lost


@pytest.mark.both_databases
def test_an_api_that_is_killed_sends_again_with_the_same_id(
    start_api: Callable[..., Any], tmp_path: Path, there: Target
) -> None:
    quick = {
        "public_url": "http://eft.lab",
        "webhook_retry_seconds": "0.05",
        "webhook_timeout_seconds": 3,
        "webhook_allow": "127.0.0.0/8",
    }
    with start_api(**quick) as api:
        made = api.http.post("/webhooks", json={"url": there.url("/killed"), "events": ["job.paused"]}).json()
        there.plan["/killed"].append("hang")
        job_id = api.submit()["id"]
        api.http.post(f"/jobs/{job_id}/pause")
        until(lambda: there.got)
        api.process.send_signal(signal.SIGKILL)
        api.process.wait()
        assert len(there.got) == 1
        with api.database.read() as session:
            assert session.execute(select(Delivery.state, Delivery.attempts)).one() == ("pending", 0)
            actor_row = session.get_one(Job, job_id)
    with start_api(migrate=False, **quick) as again:
        until(lambda: len(there.got) == 2)
        by_the_command(again.url, api.key, there)
    first, second = there.at("/killed")
    assert first.headers["webhook-id"] == second.headers["webhook-id"] and first.body == second.body
    assert verifies(second, made["secret"])
    assert document(second)["data"]["id"] == actor_row.id == job_id


def by_the_command(url: str, key: str, there: Target) -> None:
    def eft(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["webhooks", *arguments], env={"EFT_URL": url, "EFT_API_KEY": key})
        assert done.exit_code == 0, done.output
        return done.stdout

    made = json.loads(eft("create", there.url("/cli"), "--name", "from here", "--event", "job.failed", "--json"))
    number = made["id"]
    secret = eft("rotate", number, "--overlap-hours", "1").strip()
    assert secret.startswith("whsec_") and secret != made["secret"]
    assert number in eft("list") and "from here" in eft("list")
    told = eft("test", number).strip()
    until(lambda: "delivered" in eft("deliveries", number))
    assert verifies(there.at("/cli")[0], secret) and verifies(there.at("/cli")[0], made["secret"])
    assert told in eft("deliveries", number) and told not in eft("deliveries", number, "--state", "dead")
    eft("resend", number, told)
    until(lambda: len(there.at("/cli")) == 2)
    assert "enabled" in eft("enable", number)
    assert "deleted" in eft("delete", number) and number not in eft("list")
