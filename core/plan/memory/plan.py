"""The memory plan of a job: bytes by kind, on the device, on the host and on disk, before anything is loaded. No torch.

The peak of a run is at one of eight moments, and the plan is the largest of them: while the reference of a stage is
computed, in the loss, when the backward begins (everything is kept), when it ends (all gradients are there), in the
optimizer's step, while evaluating, while answers are sampled, and while reward models score them. Measuring held-out
rows never needs more than training, nor does the reference: their passes are no larger, and their logits are chunks,
too.
docs/plans.md has the formula in a table; `python -m bench.plan` holds it against what is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from core.plan.activations import Pass
from core.plan.device import Device
from core.plan.memory.elsewhere import disk_items, host_items
from core.plan.memory.held import held_throughout, scorer_weights
from core.plan.memory.kept import kept_of
from core.plan.memory.moments import moments
from core.plan.memory.passes import training_pass
from core.plan.memory.result import Plan
from core.plan.models.shape import Shape
from core.plan.models.weights import headed, weigh
from core.plan.stream import Decision, Free, Need, decide
from core.spec.axes.method import Full
from core.spec.axes.runtime import AutoStream, DiskStream, HostStream, NoStream
from core.spec.job import JobSpec
from core.spec.settled import method_of


def plan(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Plan:
    """What the job takes on this device. `longest`: tokens of its longest row (`training.max_length`, until the rows
    have been read). The spec's dependent defaults must be filled in (core/spec/resolve.py). `memory.stream: auto` is
    settled by what the device and its host have. SpecError where the spec names modules that the model does not have.
    """
    shape = headed(spec, shape)
    match spec.memory.stream:
        case AutoStream() as asked:
            resident = _plan(spec, shape, longest, device, Decision("none", 0, False, "all on the device"))
            decision = decide(
                asked,
                need(spec, shape, longest=longest, device=device),
                Free(device=device.usable, host=device.host, one_memory=device.one_memory),
            )
            if decision.where == "none":
                return replace(resident, stream=decision)
            return _plan(spec, shape, longest, device, decision)
        case NoStream() | HostStream() | DiskStream() as asked:
            decision = decide(asked, None, Free(None, None, device.one_memory))
            return _plan(spec, shape, longest, device, decision)
        case _ as never:
            assert_never(never)


def need(spec: JobSpec, shape: Shape, *, longest: int, device: Device) -> Need | None:
    """The figures that decide whether the blocks are streamed; None where none can be: all is trained, or there are no
    blocks."""
    if isinstance(method_of(spec), Full) or not shape.layers:
        return None
    shape = headed(spec, shape)
    held = weigh(spec, shape, device)
    resident = _plan(spec, shape, longest, device, Decision("none", 0, False, ""))
    streamed = _plan(spec, shape, longest, device, Decision("host", 1, True, ""))
    trained = held.adapter * 4
    beside = held.stays + trained + scorer_weights(spec, shape, device)
    return Need(
        blocks=sum(held.aligned),
        largest_block=held.largest,
        outside=held.stays + scorer_weights(spec, shape, device),
        trained=trained,
        working=sum(item.bytes for item in resident.device) - sum(held.aligned) - beside,
        working_streamed=sum(item.bytes for item in streamed.device) - held.largest - beside,
        of=shape.layers,
    )


def _plan(spec: JobSpec, shape: Shape, longest: int, device: Device, stream: Decision) -> Plan:
    held = weigh(spec, shape, device)
    tokens, field = training_pass(spec, longest)
    what = Pass(tokens, longest)
    kept = kept_of(spec, shape, held, device, what, streams=stream.where != "none")
    throughout = held_throughout(spec, shape, held, device, stream)
    before = [item for item in throughout if item.kind != "optimizer"]  # which has a state from the first step on
    held_at = {
        name: [*(before if name == "reference" else throughout), *items]
        for name, items in moments(spec, shape, held, device, what, kept).items()
    }
    totals = {name: sum(item.bytes for item in items) for name, items in held_at.items()}
    moment = max(totals, key=lambda name: totals[name])
    return Plan(
        device=tuple(item for item in held_at[moment] if item.bytes),
        moment=moment,
        moments=totals,
        host=tuple(item for item in (*host_items(spec, held, device, stream), *kept.host) if item.bytes),
        disk=tuple(item for item in disk_items(spec, shape, held, stream) if item.bytes),
        rows=max(1, tokens // longest),
        tokens=tokens,
        field=field,
        parameters=shape.parameters,
        trained=held.trained,
        precision=device.precision(spec.training),
        stream=stream,
        one_memory=device.one_memory,
    )
