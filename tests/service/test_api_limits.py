"""Rate limits of a real API process: by key, and by address for those who have none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from api.errors import RateLimited
from api.http.body_limits import REMEMBERED, Buckets, RequestLimits
from core.settings import Settings
from tests.service.conftest import Api, StartApi, running_api

WRONG = "eft_00000000_" + "0" * 40


def refused(reply: httpx.Response) -> int:
    """Seconds to wait, of a reply in the one error shape."""
    assert reply.status_code == 429, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["field"]) == ("rate_limited", None)
    assert error["request_id"] == reply.headers["x-request-id"]
    seconds = int(reply.headers["retry-after"])
    assert seconds >= 1 and f"ask again in {seconds} s" in error["message"]
    return seconds


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """60 requests a minute and key, five at once; six a minute for strangers."""
    folder = tmp_path_factory.mktemp("limits")
    with running_api(folder, rate_per_minute=60, rate_burst=5, rate_strangers_per_minute=6) as api:
        yield api


def test_a_key_has_a_burst_and_then_its_rate(limited: Api) -> None:
    one, other = limited.client("lab", "eve"), limited.client("lab", "bob")
    replies = [one.get("/jobs")]
    while replies[-1].status_code == 200 and len(replies) < 300:  # as long as it takes faster than one a second
        replies.append(one.get("/jobs"))
    assert [reply.status_code for reply in replies[:5]] == [200] * 5
    wait = refused(replies[-1])
    assert other.get("/jobs").status_code == 200, "another key, even of the same project, has its own"
    assert limited.with_key(None).get("/healthz").status_code == 200, "probes need no key and have no limit"
    time.sleep(wait)
    assert one.get("/jobs").status_code == 200
    assert one.post("/jobs", json={}).status_code in (422, 429)


def test_a_stream_counts_once_however_long_it_is(start_api: StartApi) -> None:
    with start_api(rate_per_minute=0.01, rate_burst=4) as api:
        job_id = api.submit()["id"]  # two requests: the file, and the job
        with api.http.stream("GET", f"/jobs/{job_id}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "id: 1"
            job = api.http.get(f"/jobs/{job_id}")
            assert job.status_code == 200
            refused(api.http.get(f"/jobs/{job_id}"))
            assert next(lines).startswith("event:"), "the stream goes on"


def test_wrong_keys_are_slowed_down_by_address_and_a_good_one_is_not_locked_out(limited: Api) -> None:
    assert limited.http.get("/jobs").status_code == 200
    stranger, nobody = limited.with_key(WRONG), limited.with_key(None)
    replies = [client.get("/jobs") for client in (stranger, nobody) * 3]
    assert [reply.status_code for reply in replies] == [401] * 6
    assert refused(stranger.get("/jobs")) <= 10
    refused(nobody.get("/jobs"))
    assert limited.http.get("/jobs").status_code == 200, "this key worked from here before"
    late = limited.client("lab", "carol")
    refused(late.get("/jobs"))  # whether this one is right is not told now
    assert limited.with_key(None).get("/version").status_code == 200


def test_no_limit_where_none_is_set(api: Api) -> None:
    assert {api.http.get("/me").status_code for _ in range(250)} == {200}


def ticking() -> tuple[Callable[[], float], Callable[[float], None]]:
    now = [100.0]

    def tick(seconds: float) -> None:
        now[0] += seconds

    return lambda: now[0], tick


def test_buckets_fill_at_their_rate_up_to_the_burst() -> None:
    clock, tick = ticking()
    buckets = Buckets(30, 2, clock)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 2.0]
    tick(1.5)
    assert buckets.wait("a") == buckets.take("a") == 0.5
    tick(0.5)
    assert buckets.take("a") == 0
    tick(3600)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 2.0]


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    buckets = Buckets(1, 1)
    for number in range(REMEMBERED):
        buckets.take(str(number))
    assert buckets.take("0") > 0
    buckets.take("new")
    assert ("0" in buckets, "1" in buckets, "new" in buckets) == (False, True, True)
    assert len(buckets._full) == REMEMBERED


def test_addresses_of_one_ipv6_subscriber_count_as_one() -> None:
    limits = RequestLimits(Settings(rate_strangers_per_minute=1))
    limits.stranger(None, "2001:db8:1:2::1")
    for address, free in (("2001:db8:1:2:ffff::9", False), ("2001:db8:1:3::1", True), ("::ffff:10.0.0.1", True)):
        try:
            limits.before(WRONG, address)
        except Exception as error:
            assert not free and getattr(error, "status", 0) == 429
        else:
            assert free


def test_more_keys_of_a_user_gain_nothing() -> None:
    limits = RequestLimits(Settings(rate_per_minute=60, rate_burst=2))
    passed = 0
    for number in range(100):
        try:
            limits.known(f"key {number}", "ada")
            passed += 1
        except RateLimited as error:
            assert "all of your API keys" in str(error)
    assert passed == 6, "three keys' worth"
    limits.known("key of another", "grace")
