"""What is told of the boxes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from api.view import iso, view_of
from core.base.attribute_docs import AttributeDocsModel
from core.jobs.policies.nodes import NodeStatus

_NODE: dict[str, Any] = {
    "name": "box-1",
    "state": "draining",
    "version": "0.1.0",
    "slots": [
        {"id": "GPU-5b8f1c", "kind": "gpu", "busy": True, "job": "job-01kar3v8x5m2h6n9qst4wyz0bc", "quarantined": None},
        {"id": "prepare-0", "kind": "prepare", "busy": False, "job": None, "quarantined": None},
    ],
    "notes": [],
    "labels": ["fast"],
    "heartbeat_seconds": 3.2,
    "started_at": "2026-11-21T09:20:57.120000Z",
    "drained": {"since": "2026-11-21T10:02:11.500000Z", "by": "ada", "reason": "a new power supply"},
}


class SlotView(AttributeDocsModel):
    """A place for one job."""

    id: str
    """UUID of a GPU, `cpu`, `prepare-0` …"""
    kind: str
    busy: bool
    job: str | None
    """The job that holds it, if it is of this project."""
    quarantined: str | None
    """Why it is not used now."""


class Drained(BaseModel):
    since: str
    by: str | None
    reason: str


class NodeView(AttributeDocsModel):
    """A box and the worker that serves it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_NODE]})
    name: str
    state: Literal["serving", "draining", "drained", "silent"]
    """draining: nothing new is claimed, and jobs are still leaving; silent: its worker was not heard of for a lease."""
    version: str
    slots: list[SlotView]
    notes: list[str]
    """What its worker found noteworthy about the box."""
    labels: list[str]
    """That jobs may ask for (EFT_NODE_LABELS)."""
    heartbeat_seconds: float
    """Age of the last sign of life."""
    started_at: str
    drained: Drained | None


class NodeList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_NODE]}]})
    data: list[NodeView]


def node_view(box: NodeStatus, project_id: str, lease_seconds: float) -> dict[str, Any]:
    """A drained node stays that when its worker has gone: it was told to."""
    node, held = box.node, dict(box.holds)
    described = [(str(slot["id"]), str(slot["kind"]), slot.get("quarantined")) for slot in node.slots]
    described += [(slot, "gone", None) for slot in sorted(held.keys() - {slot for slot, _, _ in described})]
    slots = []
    for slot, kind, quarantined in described:
        job, project = held.get(slot, (None, None))
        mine = job if project == project_id else None
        slots.append({"id": slot, "kind": kind, "busy": job is not None, "job": mine, "quarantined": quarantined})
    if node.drained_at is not None:
        state = "draining" if held else "drained"
    else:
        state = "silent" if box.heartbeat_age > lease_seconds else "serving"
    drained = None
    if node.drained_at is not None:
        drained = {"since": iso(node.drained_at), "by": box.drained_by, "reason": node.drain_reason or ""}
    age = round(box.heartbeat_age, 1)
    return view_of(NodeView, node, state=state, slots=slots, heartbeat_seconds=age, drained=drained)
