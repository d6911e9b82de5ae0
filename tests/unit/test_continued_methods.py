"""The method of a job that continues an adapter: what the adapter has, it keeps."""

from __future__ import annotations

import math

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


def test_an_adapter_from_the_bases_weights_is_continued_at_twice_its_rank() -> None:
    parent = LoRA(r=8, lora_alpha=16, init_lora_weights="pissa").handed_back()
    assert (parent.r, parent.lora_alpha, parent.init_lora_weights) == (16, 32, "default")
    assert _continued(LoRA(), parent) == parent
    with pytest.raises(SpecError) as refused:
        _continued(LoRA(r=8), parent)
    assert refused.value.field == "method.r"
    rooted = LoRA(r=8, lora_alpha=16, use_rslora=True, init_lora_weights="olora").handed_back()
    assert rooted.lora_alpha is not None
    assert math.isclose(rooted.lora_alpha / math.sqrt(16), 16 / math.sqrt(8), rel_tol=1e-12)


def test_modules_that_are_trained_whole_stay_so() -> None:
    parent = LoRA(r=8, modules_to_save=["norm"])
    assert _continued(LoRA(), parent) == parent
    with pytest.raises(SpecError) as refused:
        _continued(LoRA(modules_to_save=["lm_head"]), parent)
    assert refused.value.field == "method.modules_to_save"


def test_rates_are_the_new_jobs_own() -> None:
    found = _continued(LoRA(loraplus_lr_ratio=4.0), LoRA(r=8))
    assert isinstance(found, LoRA) and (found.r, found.loraplus_lr_ratio) == (8, 4.0)


def test_new_tokens_stay_those_of_the_adapter() -> None:
    parent = LoRA(r=8, new_tokens=["<look>"])
    assert _continued(LoRA(), parent) == parent
    with pytest.raises(SpecError) as refused:
        _continued(LoRA(new_tokens=["<hear>"]), parent)
    assert refused.value.field == "method.new_tokens"
