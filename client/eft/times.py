"""Points in time as people type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from eft.errors import UsageFault

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def point(text: str, now: datetime | None = None, *, option: str = "") -> str:
    """`18:00` (the next one, by this machine's clock), `2h`, `3d`, `2026-11-22 08:00` or ISO 8601; as ISO 8601 with its
    offset. Raises UsageFault, which names the `option` that it was given to."""
    moment = (now or datetime.now(UTC)).astimezone()
    try:
        if span := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd])", text.strip(), re.ASCII):
            return (moment + timedelta(**{_UNITS[span[2]]: float(span[1])})).isoformat(timespec="seconds")
        if clock := re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip()):
            then = moment.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
            return (then if then > moment else then + timedelta(days=1)).isoformat(timespec="seconds")
        then = datetime.fromisoformat(text.strip())
        return (then if then.tzinfo else then.astimezone()).isoformat(timespec="seconds")
    except (ValueError, OverflowError):  # also of a day that no calendar has
        where = f"{option}: " if option else ""
        raise UsageFault(f"{where}{text!r} is not a time; write 18:00, 2h, 3d or 2026-11-22T08:00") from None


def seconds(text: str, *, option: str) -> float:
    """`90`, `90s`, `30m`, `2h` or `1d` in seconds. Raises UsageFault, which names the `option` that it was given to."""
    span = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", text.strip(), re.ASCII)
    if span is None:
        raise UsageFault(f"{option}: {text!r} is not a length of time; write 90s, 30m or 2h")
    return float(span[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[span[2]]


def shown(time: str | None) -> str:
    """A time of the server for people: UTC, to the second; "" for None."""
    if not time:
        return ""
    return datetime.fromisoformat(time).astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def zone() -> str:
    """Name of the zone in which `clock` tells."""
    return datetime.now().astimezone().strftime("%Z")


def clock(time: str | None) -> str:
    """Local time to the minute, with its day where that is not today; "" for None."""
    if time is None:
        return ""
    then = datetime.fromisoformat(time).astimezone()
    return f"{then:%H:%M}" if then.date() == datetime.now().astimezone().date() else f"{then:%a %d %b %H:%M}"
