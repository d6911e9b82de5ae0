"""Effects of a device's self-test on a run: kernels that are ruled out, and notices."""

from __future__ import annotations

from typing import cast

from core.errors import SpecError
from core.hardware.selftest import Choice, Dtype
from core.spec.axes.quantization import packing_of
from core.spec.job import JobSpec
from core.train.kernels import interface


def apply_selftest(choice: Choice, spec: JobSpec, precision: Dtype) -> list[tuple[str, str]]:
    """Rule out what failed, for this process; notices as (code, words). SpecError when the job cannot do without it."""
    interface.unveto()
    packs = packing_of(spec.quantization) is not None
    if packs and precision not in choice.packed_weights:
        raise SpecError(
            f"a run over packed weights does not compute correctly in {precision} on this device, as its self-test "
            f"found ({'; '.join(choice.told)}); take `quantization: none` with `method: lora`",
            field="quantization",
        )
    for name, why in choice.veto.items():
        backend, _, part = name.partition(":")
        match backend:
            case "triton" | "native":
                interface.veto(backend, why, cast(interface.Part, part))
    told = [words for words in choice.told if not words.startswith("no run over packed") or packs]
    return [("selftest", "the self-test of this device: " + "; ".join(told))] if told else []
