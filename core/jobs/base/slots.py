"""A place to run one child, and whether it has what a job needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from core.hardware.tables.arch import lookup
from core.jobs.kinds import SLOTS, Kind, SlotKind
from core.spec.axes.runtime import Resources

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Slot:
    """A place to run one child: a GPU, the CPU of a box without one, or the place for tasks that need neither."""

    id: str
    """UUID of the GPU; `cpu`, or `cpu-0` and so on where a box has several; `prepare-0`; `preview-0`."""
    kind: SlotKind
    vendor: str = ""
    arch: str = ""
    memory_bytes: int = 0
    """Total memory of the GPU, bytes."""
    labels: frozenset[str] = frozenset()
    """Labels of its node."""
    share_bytes: int = 0
    """Memory that a job on a CPU slot may count on, bytes; 0: unknown."""
    host_bytes: int = 0
    """Host memory of the node, bytes; 0: unknown."""
    parts: bool | None = None
    """Whether its GPU computes norms and gated activations in one operator each, by its self-test; None: unknown."""

    @property
    def phase(self) -> Kind:
        """What a waiting job waits for it to do."""
        return SLOTS[self.kind].serves

    @property
    def family(self) -> tuple[str, str, str]:
        """What the slots of one job have in common: the same build of PyTorch, the same kernels."""
        return self.kind, self.vendor, self.arch

    @property
    def billing(self) -> float:
        """What one second on it counts in fair share."""
        return SLOTS[self.kind].billing

    @property
    def bf16(self) -> bool:
        row = lookup("cpu" if self.kind == "cpu" else self.arch)
        return row is not None and row.bf16

    @classmethod
    def described(cls, entry: Mapping[str, Any], labels: Collection[Any]) -> Slot:
        """From a node's row (worker/agent/agent.py writes it)."""
        gpu, backends = entry.get("gpu") or {}, entry.get("backends")
        return cls(
            str(entry["id"]),
            entry["kind"],
            gpu.get("vendor", ""),
            gpu.get("arch", ""),
            int(gpu.get("memory_bytes") or 0),
            frozenset(map(str, labels)),
            int(entry.get("share_bytes") or 0),
            int(entry.get("host_bytes") or 0),
            backends.get("block") == "triton" if gpu and backends else None,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes that a job may use on its device; 0: unknown."""
        return self.memory_bytes if self.kind == "gpu" else self.share_bytes


LEAST = "at its smallest batch"
"""Behind the figure of PlanNeeds, which is another one than that of the plan of the job as it stands."""
NEARLY = 1.1
"""A plan within this factor of the smallest one is not shown beside it."""


@dataclass(frozen=True, slots=True)
class PlanNeeds:
    """Memory in MB (10^6 bytes, rounded up) of the least that a job can come to, by its plan
    (core/jobs/admission/fit.py)."""

    gpu: int
    """Memory of the GPU, MB."""
    cpu: int
    """Memory where device and host share one, MB."""
    host: int
    """Host memory beside a GPU, MB."""

    @property
    def certain(self) -> PlanNeeds:
        """The certain part, since a plan is an estimate (bench/plan.py: within 10 % on a GPU, 20 % on a CPU)."""
        return PlanNeeds(self.gpu * 9 // 10, self.cpu * 8 // 10, self.host * 9 // 10)

    @property
    def word(self) -> str:
        return f"plan={self.gpu},{self.cpu},{self.host}"

    @classmethod
    def parse(cls, word: str) -> PlanNeeds:
        gpu, cpu, host = map(int, word.split(","))
        return cls(gpu, cpu, host)

    def missing(self, slot: Slot) -> list[str]:
        """Requirements that a slot does not meet; empty if the slot's hardware is unknown."""
        device = self.gpu if slot.kind == "gpu" else self.cpu
        lacks = [f"{_gb(device)} {LEAST}"] if 0 < slot.device_bytes < device * MB else []
        if slot.kind == "gpu" and 0 < slot.host_bytes < self.host * MB:
            lacks.append(f"{_gb(self.host)} of host memory {LEAST}")
        return lacks

    def words(self, slot: Slot, whole: int | None = None) -> str:
        """On such a slot, e.g. `24 GB (18.2 GB at its smallest batch)`. `whole`: bytes by the plan of the job as it
        stands; None: unknown."""
        least = self.gpu if slot.kind == "gpu" else self.cpu
        if whole is None:
            return f"{_gb(least)} {LEAST}"
        return _gb(whole / MB) if whole <= NEARLY * least * MB else f"{_gb(whole / MB)} ({_gb(least)} {LEAST})"


def _gb(megabytes: float) -> str:
    return f"{megabytes / 1000:.3g} GB"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a job asks of each of its slots, and how many it needs. Its `key` is the first part of `jobs.queue_key`."""

    accelerator: str
    memory_mb: int = 0
    bf16: bool = False
    vendor: str = ""
    arch: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    gpus: int = 1
    """Slots of one node and one family (Slot.family) that it trains on at once."""
    plan: PlanNeeds | None = None
    """Memory by its plan (core/jobs/admission/fit.py); None: not planned."""

    @classmethod
    def of(cls, resources: Resources) -> Needs:
        asks = resources.requirements
        return cls(
            resources.accelerator,
            0 if asks.min_memory_gb is None else round(asks.min_memory_gb * 1000),
            asks.bf16,
            "" if asks.vendor == "any" else asks.vendor,
            tuple(sorted(set(asks.arch))),
            tuple(sorted(set(asks.labels))),
            resources.gpus,
        )

    @property
    def key(self) -> str:
        """One spelling for one meaning; `parse` reads it back."""
        # A version that knows no jobs of several GPUs reads `4*gpu` as a kind of slot that it does not have.
        words = [f"{self.gpus}*{self.accelerator}" if self.gpus > 1 else self.accelerator]
        if self.memory_mb:
            words.append(f"mb={self.memory_mb}")
        if self.bf16:
            words.append("bf16")
        if self.vendor:
            words.append(f"vendor={self.vendor}")
        words += [f"arch={arch}" for arch in self.arch]
        words += [f"label={label}" for label in self.labels]
        if self.plan is not None:
            words.append(self.plan.word)
        return " ".join(words)

    @classmethod
    def parse(cls, key: str) -> Needs:
        first, *words = key.split(" ")
        gpus, _, accelerator = first.rpartition("*")
        pairs = [word.partition("=")[::2] for word in words]

        def named(name: str) -> tuple[str, ...]:
            return tuple(value for key, value in pairs if key == name)

        (memory,) = named("mb") or ("0",)
        (vendor,) = named("vendor") or ("",)
        arches, labels = named("arch"), named("label")
        plan = next((PlanNeeds.parse(word) for word in named("plan")), None)
        return cls(accelerator, int(memory), ("bf16", "") in pairs, vendor, arches, labels, int(gpus or 1), plan)

    def width(self, phase: Kind) -> int:
        """Slots that it takes for this: a model is prepared on one, however many train."""
        return self.gpus if phase == Kind.TRAIN else 1

    def missing(self, slot: Slot) -> list[str]:
        """What `slot` does not have of it, in words; empty where it fits."""
        if slot.kind not in ("gpu", "cpu"):
            return []  # work without a GPU needs nothing of its slot
        if self.accelerator not in ("any", slot.kind):
            return ["a GPU" if self.accelerator == "gpu" else "a CPU slot"]
        missing = ["a GPU that is not a MIG slice"] if self.gpus > 1 and slot.id.startswith("MIG-") else []
        if self.memory_mb * 1_000_000 > slot.memory_bytes:
            missing.append(f"{self.memory_mb / 1000:g} GB")
        if self.bf16 and not slot.bf16:
            missing.append("bf16")
        if self.vendor and self.vendor != slot.vendor:
            missing.append(_VENDORS.get(self.vendor, self.vendor))
        if self.arch and slot.arch not in self.arch:
            missing.append(" or ".join(self.arch))
        missing += [f"label {label}" for label in self.labels if label not in slot.labels]
        return missing + ([] if self.plan is None else self.plan.missing(slot))

    def words(self, memory: str = "") -> str:
        """E.g. `1 GPU with bf16 and 40 GB`, `4 AMD GPUs`. `memory`: what the job takes, where it waits for that."""
        kind = {"gpu": "GPU", "cpu": "CPU slot"}.get(self.accelerator, "slot")
        if self.vendor:
            kind = f"{_VENDORS.get(self.vendor, self.vendor)} GPU"
        place = f"{self.gpus} {kind}{'s' if self.gpus > 1 else ''}"
        asks = ["bf16"] if self.bf16 else []
        asks += [f"{self.memory_mb / 1000:g} GB"] if self.memory_mb else []
        asks += [" or ".join(self.arch)] if self.arch else []
        asks += [f"label {label}" for label in self.labels]
        asks += [memory] if memory else []
        if not asks:
            return place
        return f"{place} with {' and '.join([', '.join(asks[:-1]), asks[-1]] if len(asks) > 1 else asks)}"


_VENDORS = {"amd": "AMD", "nvidia": "NVIDIA"}


@dataclass(frozen=True, slots=True)
class Key:
    """`jobs.queue_key`, taken apart."""

    needs: Needs
    project_id: str
    owner_id: str
    priority: int

    def __str__(self) -> str:
        # Two digits and a third: 000 is priority 100, 200 is -100, so that a higher one is listed first.
        return f"{self.needs.key}|{self.project_id}|{self.owner_id}|{100 - self.priority:03d}"

    @classmethod
    def parse(cls, text: str) -> Key:
        needs, project_id, owner_id, level = text.split("|")
        return cls(Needs.parse(needs), project_id, owner_id, 100 - int(level))
