"""The method of a job that continues an adapter: what the adapter has, it keeps."""

from __future__ import annotations

import pytest

from core.errors import SpecError
from core.jobs.admission.parents import _continued
from core.spec.axes.method import OFT, LoRA


def test_a_rotation_keeps_its_blocks() -> None:
    parent = OFT(oft_block_size=16, target_modules="attention")
    assert _continued(OFT(), parent) == parent
    with pytest.raises(SpecError) as refused:
        _continued(OFT(oft_block_size=8), parent)
    assert refused.value.field == "method.oft_block_size"


def test_a_rotation_is_not_continued_as_lora() -> None:
    for method, parent in ((LoRA(), OFT()), (OFT(), LoRA())):
        with pytest.raises(SpecError, match="merge") as refused:
            _continued(method, parent)
        assert refused.value.field == "method"


def test_rates_are_the_new_jobs_own() -> None:
    found = _continued(LoRA(loraplus_lr_ratio=4.0), LoRA(r=8))
    assert isinstance(found, LoRA) and (found.r, found.loraplus_lr_ratio) == (8, 4.0)
