"""What the self-test of a device found (core/train/selftest), and what follows from it: data and pure functions.

A verdict has one entry a part: what was computed, how far from the CPU's exact result it came, what rounding may make,
and how it ended. A part that was `unavailable` is no fault: this build of torch has no such kernel. `choose` turns a
verdict into what a run on that device may use. Nothing is dropped in silence: every refusal has its words in `told`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.hardware.tables.faults import NO_LIMITS, Limits

Status = Literal["passed", "failed", "crashed", "hung", "unavailable"]
"""`failed`: an exception or a difference beyond the tolerance; `crashed`: the process died in it; `hung`: it was killed
when its time was over."""
Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
Attention = Literal["flash", "efficient", "math", "eager"]
ATTENTION: tuple[Attention, ...] = ("flash", "efficient", "math", "eager")
PORTABLE = "portable"
NARROW = ("lora.r8.", "lora.r16.")
WIDE_RANK = 64
"""What narrow operands are padded to where they fault (core/hardware/tables/faults.py: the tile that reads too far)."""
MANY_ROWS = 1 << 19
"""Rows up to which a float32 product is right where a larger one is not."""


class _Stored(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Part(_Stored):
    """One thing that was tried."""

    status: Status
    error: str | None = None
    difference: float | None = None
    """Worst of all tensors: largest error over the largest value of the exact result."""
    tolerance: float | None = None
    why: str | None = None
    """Where the tolerance comes from."""
    seconds: float = 0.0


class Verdict(_Stored):
    """All parts on one device, with what they were tried with."""

    key: str
    slot: str
    node: str
    device_name: str
    arch: str
    torch: str
    runtime: str
    """`rocm 7.2 (driver 6.14.5)`, `cuda 13.0 (driver 580.65)`, `cpu`."""
    checked_at: str
    seconds: float
    parts: dict[str, Part]
    environment: dict[str, str] = Field(default={})
    """Variables without which a part faulted and with which it passed: a trainer on this device gets them."""
    cured: dict[str, str] = Field(default={})
    """What those variables cured: part → how it had ended without them."""
    fault: str | None = None
    """Why nothing could be tried."""
    # Derived, for display:
    ok: bool = True
    """Every part passed or is unavailable."""
    refused: str | None = None
    told: list[str] = Field(default=[])
    backends: dict[str, str] = Field(default={})
    failures: list[dict[str, str]] = Field(default=[])


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run may use. The default: nothing is known, everything may be used."""

    precisions: tuple[str, ...] = DTYPES
    attention: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per precision the backends that passed; a precision that is missing: all."""
    veto: Mapping[str, str] = field(default_factory=dict)
    """What is not to be used, with the reason: kernel backends as `triton:dequantize` or `native:loss`; `varlen`, the
    attention kernel of that name; `chunked`, the loss that never makes whole logits."""
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per precision the attention libraries that passed, and `cudnn`: only these are used."""
    packed_weights: tuple[str, ...] = DTYPES
    """Precisions in which a run over packed weights may compute: without any backend but the portable one."""
    fp8: str | None = None
    """What speaks against products in 8-bit floats."""
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = NO_LIMITS
    """Limits on matrix products, beside those of the table of known faults."""
    refused: str | None = None
    """In words: why nothing may run on this device."""
    told: tuple[str, ...] = ()


def choose(verdict: Verdict | None) -> Choice:
    """See Choice. None: no self-test was made."""
    if verdict is None:
        return Choice()
    if verdict.fault is not None:
        return Choice(precisions=(), refused=verdict.fault, told=(verdict.fault,))
    bad = {name: part for name, part in verdict.parts.items() if _failed(part)}
    told = [
        f"{name} had {ended}, and passed with {_settings(verdict.environment)}" for name, ended in verdict.cured.items()
    ]
    told += [f"{name} {describe(part)}" for name, part in bad.items()]
    attention: dict[str, tuple[str, ...]] = {
        dtype: tuple(kind for kind in ATTENTION if _passed(verdict, f"attention.{kind}.{dtype}")) for dtype in DTYPES
    }
    precisions = tuple(dtype for dtype in DTYPES if _computes(verdict, dtype) and attention[dtype])
    veto = _vetoes(bad)
    packed_weights = tuple(dtype for dtype in precisions if _packs(bad, dtype))
    for precision in DTYPES:
        if precision not in precisions and any(name.endswith(f".{precision}") for name in bad):
            told.append(f"no run computes in {precision} here")
    told += [f"{backend} is not used ({reason})" for backend, reason in veto.items()]
    if len(packed_weights) < len(precisions):
        where = f" in {', '.join(p for p in precisions if p not in packed_weights)}" if packed_weights else ""
        told.append(f"no run over packed weights starts here{where}")
    refused = None
    if "optimizer.adamw" in bad:
        refused = f"the optimizer's step {describe(bad['optimizer.adamw'])}"
    elif not precisions:
        refused = "no precision computes correctly: " + "; ".join(
            f"{name} {describe(part)}" for name, part in bad.items()
        )
    limits = _limits(bad)
    if limits.rank_multiple > 1:
        told.append(f"LoRA's ranks are padded with zeros to multiples of {limits.rank_multiple}")
    if limits.fp32_rows is not None:
        told.append(f"float32 products of more than {limits.fp32_rows:,} rows are made in parts")
    return Choice(
        precisions=precisions,
        attention=attention,
        libraries=_libraries(verdict),
        veto=veto,
        packed_weights=packed_weights,
        fp8=_against_fp8(verdict),
        environment=dict(verdict.environment),
        limits=limits,
        refused=refused,
        told=tuple(dict.fromkeys(told)),
    )


def _libraries(verdict: Verdict) -> dict[str, tuple[str, ...]]:
    """See `Choice.libraries`; parts are named `library.NAME.DTYPE`."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in verdict.parts.items():
        what, *rest = name.split(".")
        if what == "library" and part.status == "passed":
            found[rest[1]] = (*found.get(rest[1], ()), rest[0])
    return found


def _computes(verdict: Verdict, dtype: Dtype) -> bool:
    """Products, those of a LoRA that is wide enough, and the loss over whole logits: torch's own arithmetic."""
    return all(_passed(verdict, f"{what}.{dtype}") for what in ("matmul", "lora.r64", "loss.logits"))


def _against_fp8(verdict: Verdict) -> str | None:
    part = verdict.parts.get("fp8.linear")
    if part is not None:
        return None if part.status == "passed" else f"fp8.linear {describe(part)}"
    return None if verdict.arch == "cpu" else "the self-test of this card has not tried fp8"


def _limits(bad: Mapping[str, Part]) -> Limits:
    """What products must keep to: of what failed a larger or a smaller form passed."""
    narrow = any(name.startswith(NARROW) for name in bad)
    return Limits(fp32_rows=MANY_ROWS if "rows.fp32" in bad else None, rank_multiple=WIDE_RANK if narrow else 1)


def _packs(bad: Mapping[str, Part], dtype: Dtype) -> bool:
    """The portable backend unpacks rightly, and so do products over what it unpacked."""
    return not any(name.startswith(f"dequantize.{PORTABLE}") for name in bad) and not any(
        name.startswith("qlora.") and name.endswith(dtype) for name in bad
    )


def _vetoes(bad: Mapping[str, Part]) -> dict[str, str]:
    veto: dict[str, str] = {}
    for name, part in bad.items():
        what, *rest = name.split(".")
        reason = f"{name} {describe(part)}"
        match what:
            case "dequantize" | "gemv" | "loss" | "block" if rest[0] not in ("logits", PORTABLE):
                veto.setdefault(f"{rest[0]}:{what}", reason)
            case "loss" if rest[0] == PORTABLE:
                veto.setdefault("chunked", reason)
            case "varlen":
                veto.setdefault("varlen", reason)
            case _:
                pass
    return veto


def _passed(verdict: Verdict, name: str) -> bool:
    part = verdict.parts.get(name)
    return part is not None and part.status == "passed"


def _failed(part: Part) -> bool:
    return part.status in ("failed", "crashed", "hung")


def describe(part: Part) -> str:
    """How it ended, in words that follow its name."""
    match part.status:
        case "passed":
            return "is right"
        case "unavailable":
            return f"is not to be had ({part.error})"
        case "crashed":
            return f"ended its process ({part.error})"
        case "hung":
            return f"did not end ({part.error})"
        case "failed" if part.difference is not None and part.tolerance is not None:
            return f"is off by {part.difference:.2g} of the largest value (rounding may make {part.tolerance:.2g})"
        case "failed":
            return f"failed ({part.error})"


def _settings(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def shared(verdicts: Sequence[Verdict]) -> Verdict | None:
    """What holds on every one of several devices of one kind: of each part the worst that was found, so that ranks
    which compute together take the same kernels. None without any."""
    if not verdicts:
        return None
    parts: dict[str, Part] = {}
    for verdict in verdicts:
        for name, part in verdict.parts.items():
            parts[name] = max(parts.get(name, part), part, key=lambda one: _SEVERITY[one.status])
    environment = {name: value for verdict in verdicts for name, value in verdict.environment.items()}
    fault = next((verdict.fault for verdict in verdicts if verdict.fault is not None), None)
    return verdicts[0].model_copy(update={"parts": parts, "environment": environment, "fault": fault})


_SEVERITY: dict[Status, int] = {"passed": 0, "unavailable": 1, "failed": 2, "hung": 3, "crashed": 4}


def finished(verdict: Verdict) -> Verdict:
    """With the derived fields, for readers of the file."""
    choice = choose(verdict)
    bad = {name: part for name, part in verdict.parts.items() if _failed(part)}
    best = choice.precisions[0] if choice.precisions else None
    backends = {"attention": (choice.attention.get(best or "") or ("none",))[0]}
    for what in ("dequantize", "gemv", "loss", "block"):
        here = [name.split(".")[1] for name, part in verdict.parts.items() if name.startswith(f"{what}.")]
        able = [
            backend for backend in dict.fromkeys(here) if backend != "logits" and not _vetoed(choice, what, backend)
        ]
        if able:
            backends[what] = able[0]
    return verdict.model_copy(
        update={
            "ok": verdict.fault is None and not bad,
            "refused": choice.refused,
            "told": list(choice.told),
            "backends": backends,
            "failures": [{"check": name, "detail": describe(part)} for name, part in bad.items()],
        }
    )


def _vetoed(choice: Choice, what: str, backend: str) -> bool:
    return f"{backend}:{what}" in choice.veto


# --- on disk ---------------------------------------------------------------------------------------------


def folder(cache: Path) -> Path:
    """Where verdicts lie below the data root's cache folder."""
    return cache / "selftest"


def read(path: Path) -> Verdict | None:
    """None when there is none, or it is of another form: it is made again then."""
    try:
        return Verdict.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def encoded(verdict: Verdict) -> bytes:
    """What `read` takes."""
    return json.dumps(verdict.model_dump(mode="json"), indent=1).encode()


def record(verdict: Verdict | None) -> dict[str, Any] | None:
    """What a run record says of it: all parts, without what only a person reads."""
    if verdict is None:
        return None
    about = verdict.model_dump(mode="json", exclude={"slot", "node", "backends", "failures"})
    about["parts"] = {
        name: {key: part[key] for key in ("status", "difference", "tolerance", "error") if part[key] is not None}
        for name, part in about["parts"].items()
    }
    return about
