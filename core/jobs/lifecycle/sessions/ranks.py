"""Sessions over several ranks: whether a node here has slots for all of them."""

from __future__ import annotations

from collections import Counter

from sqlalchemy.orm import Session

from core.jobs.admission import ready
from core.jobs.admission.fit import FitsNowhere
from core.jobs.base.slots import Needs
from core.jobs.kinds import Kind
from core.spec.job import JobSpec


def check_slots(session: Session, spec: JobSpec) -> None:
    """Raises FitsNowhere where no node has as many slots of one kind as the session takes: its program would wait for a
    node that nobody has promised. As long as no node has registered, nothing is known."""
    asks = Needs.of(spec.resources)
    there = [seat for seat in ready.seats(session) if seat.slot.phase == Kind.TRAIN]
    if asks.gpus == 1 or not there:
        return
    lacks = [asks.missing(seat.slot) for seat in there]
    able = [seat for seat, missing in zip(there, lacks, strict=True) if not missing]
    counts = Counter((seat.node, seat.slot.kind, seat.slot.vendor, seat.slot.arch) for seat in able)
    (node, *_), most = max(counts.items(), key=lambda item: item[1], default=(("",), 0))
    if most >= asks.gpus:
        return
    has = f"the most that a node has are {most} ({node})" if most else f"no slot here has {' and '.join(min(lacks))}"
    way = f"set `resources.gpus` to {most}" if most else "change `resources`"
    words = f"a session over several ranks needs {asks.words()} of one node, alike, and {has}: {way}"
    raise FitsNowhere(words, field="resources.gpus")
