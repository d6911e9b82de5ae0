"""`method: auto`: which methods a job could come to, and to which it comes on slots of different sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from core.errors import SpecError
from core.jobs.admission import auto_method, fit
from core.jobs.base.slots import Key, Needs, PlanNeeds, Slot
from core.jobs.scheduling.cluster import SlotState
from core.plan.candidates import candidates
from core.plan.compatibility import check
from core.plan.device import CONTEXT_BYTES
from core.plan.memory.plan import plan
from core.plan.models.shape import Shape
from core.plan.stream import MARGIN
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import LEARNING_RATES, resolve
from core.spec.settled import method_of

LLAMA_8B = Shape.of_config(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
)  # fmt: skip
CASCADE = ["full", "lora", "lora over int8", "qlora", "streamed"]
LENGTH = 512


def job(**axes: Any) -> JobSpec:
    document = {"model": "a/b", "data": "file-" + "0" * 26, "method": "auto", "training": {"max_length": LENGTH}}
    return resolve(parse_job(document | axes))


def gpu(gigabytes: float, host: float = 512) -> Slot:
    return Slot("GPU-1", "gpu", "amd", "gfx942", round(gigabytes * 1e9), host_bytes=round(host * 1e9))


def seat(slot: Slot, label: str = "box-1/0") -> SlotState:
    return SlotState("box-1", slot, label, {}, None, None, None, "free", [], {}, None, None, None)


def taken(spec: JobSpec) -> list[tuple[str, str, str]]:
    """Method, packing and streaming of every rung that the job can have."""
    found = [rung.spec for rung in candidates(spec) if rung.spec is not None]
    return [(one.method.type, str(one.quantization and one.quantization.type), one.memory.stream.type) for one in found]


@pytest.mark.parametrize(
    ("axes", "last", "refused"),
    [
        ({}, ("qlora", "nf4", "auto"), {}),
        ({"quantization": "nf4"}, ("qlora", "nf4", "auto"), {"full": "nf4", "lora": "nf4", "lora over int8": "nf4"}),
        ({"quantization": "int8"}, ("qlora", "int8", "auto"), {"full": "int8", "lora": "int8", "qlora": "int8"}),
        ({"quantization": "none"}, ("lora", "none", "auto"), {"lora over int8": "none", "qlora": "none"}),
        ({"training": {"precision": "fp8"}}, ("lora", "none", "auto"), {"lora over int8": "fp8", "qlora": "fp8"}),
        ({"export": "merged"}, ("qlora", "nf4", "auto"), {"full": "no adapter to merge"}),
        ({"resources": {"gpus": 2}}, ("qlora", "nf4", "none"), {"streamed": "each rank would stream"}),
        ({"memory": {"stream": "host"}}, ("qlora", "nf4", "host"), {"full": "trains all weights", "streamed": "host"}),
    ],
    ids=["free", "nf4", "int8", "dense", "fp8", "merged", "ranks", "streamed"],
)
def test_what_is_asked_for_leaves_out_rungs(axes: Any, last: tuple[str, str, str], refused: dict[str, str]) -> None:
    spec = job(**axes)
    assert taken(spec)[-1] == last
    reasons = {rung.name: rung.reason for rung in candidates(spec) if rung.spec is None}
    assert reasons.keys() == refused.keys()
    assert all(words in reasons[name] for name, words in refused.items())
    for rung in candidates(spec):
        if rung.spec is not None:  # everything that depends on the method is written out
            assert rung.spec == resolve(rung.spec) and rung.spec.method.type == method_of(rung.spec).type
            assert rung.spec.optimizer.learning_rate == (2e-5 if rung.name.startswith("full") else 2e-4)


def test_every_job_that_is_accepted_has_a_rung() -> None:
    """Over the axes that rules connect with the method; a rule that leaves none would be one for `auto`, too."""
    cells = product(
        (None, "none", "nf4", "int8"), ("auto", "fp16", "fp8"), ("none", "host", "auto"), (1, 2), ([], ["merged"])
    )
    for packing, precision, stream, gpus, export in cells:
        spec = job(
            quantization=packing,
            training={"precision": precision},
            memory={"stream": stream},
            resources={"gpus": gpus},
            export=export,
        )
        if not check(spec):
            assert taken(spec), spec


def test_a_job_that_names_its_method_is_its_only_rung() -> None:
    spec = job(method="lora")
    assert [(rung.name, rung.spec) for rung in candidates(spec)] == [("lora", spec)]


def test_no_run_has_an_open_method() -> None:
    with pytest.raises(SpecError) as refused:
        method_of(job())
    assert (refused.value.code, refused.value.field) == ("unsettled", "method")


def test_each_rung_is_taken_on_the_card_that_just_holds_it() -> None:
    """And on one that is a little smaller, the next: cards from large to small go down the cascade once."""
    spec, seen = job(), []
    for rung in candidates(spec):
        assert rung.spec is not None
        peak = plan(rung.spec, LLAMA_8B, longest=LENGTH, device=fit.device_of(gpu(1000))).peak
        if rung.name == "streamed":
            break
        slot = gpu((peak / MARGIN + CONTEXT_BYTES) / 1e9 + 0.001)
        found = auto_method.settle(spec, LLAMA_8B, LENGTH, slot)
        assert found.fits and not found.adjusted and found.plan is not None
        earlier = [one.name for one in candidates(spec)].index(found.rung.name)
        assert earlier <= [one.name for one in candidates(spec)].index(rung.name), "the first that fits"
        assert [name for name, _ in found.rejected] == [one.name for one in candidates(spec)][:earlier]
        assert all("more than" in why for _, why in found.rejected)
        seen.append(found.rung.name)
    assert {name.partition(" with ")[0] for name in seen} == set(CASCADE[:-1])
    small = auto_method.settle(spec, LLAMA_8B, LENGTH, gpu(8))
    assert small.rung.name == "streamed" and small.spec.memory.stream.type == "auto" and small.fits
    assert len(small.rejected) == 8


def test_few_rows_are_not_learned_with_all_weights() -> None:
    for rows, name in ((100, "lora"), (999, "lora"), (1000, "full"), (None, "full")):
        found = auto_method.settle(job(), LLAMA_8B, LENGTH, gpu(1000), rows)
        assert found.rung.name == name and found.fits, rows
    few = auto_method.settle(job(), LLAMA_8B, LENGTH, gpu(1000), 100)
    assert few.rejected[0] == ("full", "100 training rows are few for all weights of a model (fewer than 1,000)")
    assert auto_method.settle(job(method="full"), LLAMA_8B, LENGTH, gpu(1000), 100).rung.name == "full", "as asked"


@pytest.mark.parametrize(
    ("stage", "optimizer", "rate", "refused"),
    [
        ("sft", "adamw", 2e-4, True),
        ("sft", "adamw", 2e-5, False),
        ("dpo", "adamw", 1e-5, True),
        ("dpo", "adamw", 1e-6, False),
        ("sft", "lion", 2e-5, True),
        ("sft", "sgd", 1e-2, False),
        ("orpo", "adamw", 8e-5, False),
    ],
)
def test_no_learning_rate_of_adapters_for_all_weights(stage: str, optimizer: str, rate: float, refused: bool) -> None:
    found = candidates(job(stage=stage, optimizer={"type": optimizer, "learning_rate": rate}))
    assert (found[0].name, found[0].spec is None) == ("full", refused)
    if refused:
        assert f"{rate:g}` is one of adapters" in found[0].reason
    assert any(one.name == "lora" and one.spec is not None for one in found)


@pytest.mark.parametrize("stage", ["cpt", "dpo", "simpo", "orpo", "kto", "reward", "process_reward"])
def test_every_stage_has_an_answer_that_fits(stage: str) -> None:
    """On cards from large to small: the method, whose plan fits there, and the learning rate of stage and method."""
    spec, seen = job(stage=stage), []
    for gigabytes in (280, 80, 48, 24, 16, 12):
        slot = gpu(gigabytes)
        found = auto_method.settle(spec, LLAMA_8B, LENGTH, slot)
        assert found.fits and found.plan is not None, (gigabytes, found.rejected)
        again = plan(found.spec, LLAMA_8B, longest=LENGTH, device=fit.device_of(slot))
        assert again.peak == found.plan.peak <= MARGIN * (slot.memory_bytes or 0)
        assert found.spec.stage == spec.stage and not check(found.spec)
        adapters, full = LEARNING_RATES.get(stage, (2e-4, 2e-5))
        assert found.spec.optimizer.learning_rate == (full if found.spec.method.type == "full" else adapters)
        assert ("reference" in again.moments) == (stage in ("dpo", "kto"))
        seen.append(found.rung.name.partition(" with ")[0])
    assert seen == sorted(seen, key=CASCADE.index) and seen[0] == "full" and "qlora" in seen, seen


def test_smaller_batches_come_before_giving_up() -> None:
    spec = job(training={"max_length": 2048, "per_device_train_batch_size": 16})
    found = auto_method.settle(spec, LLAMA_8B, 2048, gpu(8.5))
    assert found.rung.name == "streamed" and found.fits
    rows, accumulation = (
        found.adjusted[f"training.{name}"] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    assert rows * accumulation == 16 and rows < 16
    assert found.spec.training.per_device_train_batch_size == rows


def test_nothing_fits_and_the_least_is_taken() -> None:
    found = auto_method.settle(job(), LLAMA_8B, LENGTH, gpu(2))
    assert not found.fits and found.rung.name == "streamed" and "nothing fits" in found.reason


def test_where_nothing_fits_it_begins_with_the_smallest_batch() -> None:
    """One row at a time, rather than to be out of memory three times before."""
    found = auto_method.settle(job(training={"per_device_train_batch_size": 8}), LLAMA_8B, LENGTH, gpu(4))
    assert not found.fits and found.adjusted["training.per_device_train_batch_size"] == 1
    assert found.plan is not None and found.plan.rows == 1


def test_held_out_rows_decide_nothing() -> None:
    """Passes of an evaluation are no larger than those of training, however many rows are asked for."""
    held_out = {"train": "file-" + "0" * 26, "eval": "file-" + "1" * 26}
    evaluation = {"type": "held_out", "per_device_eval_batch_size": 64}
    for memory in (8, 12, 24, 80):
        without = auto_method.settle(job(), LLAMA_8B, LENGTH, gpu(memory))
        found = auto_method.settle(job(data=held_out, evaluation=evaluation), LLAMA_8B, LENGTH, gpu(memory))
        assert (found.rung.name, found.adjusted, found.fits) == (without.rung.name, without.adjusted, without.fits)


@pytest.mark.parametrize(("shape", "slot"), [(None, gpu(80)), (LLAMA_8B, Slot("cpu", "cpu"))], ids=["shape", "memory"])
def test_where_nothing_is_known_it_is_lora(shape: Any, slot: Slot) -> None:
    found = auto_method.settle(job(), shape, LENGTH, slot)
    assert (found.rung.name, found.plan) == ("lora", None)
    assert "known" in found.reason or "knows" in found.reason
    dense = auto_method.settle(job(quantization="nf4"), shape, LENGTH, slot)
    assert dense.spec.method.type == "qlora"


def test_what_was_settled_is_put_into_the_job() -> None:
    spec = job()
    settled = auto_method.settle(spec, LLAMA_8B, LENGTH, gpu(16)).as_dict()
    document = spec.model_dump(mode="json")
    assert auto_method.is_open(document, None) and not auto_method.is_open(document, settled)
    runs = auto_method.effective(document, settled, {"training.per_device_train_batch_size": 2})
    assert method_of(runs).type == settled["spec"]["method"]["type"] != "full"
    assert runs.training.per_device_train_batch_size == 2 and runs.optimizer.learning_rate == 2e-4
    words = auto_method.words(settled)
    assert settled["rung"] in words and all(one["reason"] in words for one in settled["rejected"])


def test_a_packed_model_has_fewer_rungs() -> None:
    packed = Shape.from_dict(LLAMA_8B.as_dict() | {"packed": True})
    found = auto_method.settle(job(), packed, LENGTH, gpu(1000))
    assert found.rejected[0][0] == "full" and "packed" in found.rejected[0][1]
    assert found.rung.name == "lora"


# --- the least that a job takes, and refusals


def test_the_least_of_auto_is_the_least_of_all() -> None:
    by_method = {name: fit.needs(job(method=name), LLAMA_8B, LENGTH, []) for name in ("full", "lora", "qlora", "auto")}
    gpus = [need.gpu for need in by_method.values() if need is not None]
    assert gpus == sorted(gpus, reverse=True) and len(set(gpus)) == 4
    large = fit.needs(job(method="lora", training={"per_device_train_batch_size": 64}), LLAMA_8B, LENGTH, [])
    small = fit.needs(job(method="lora", training={"per_device_train_batch_size": 1}), LLAMA_8B, LENGTH, [])
    assert large is not None and small is not None
    assert large.gpu - small.gpu < 500, "a batch is cut by itself, and refuses nothing; gradients accumulate then"


def test_what_an_estimate_may_be_wrong_by_refuses_nothing() -> None:
    """A card that is a little too small by the plan is tried where there is no larger one, and stands back else."""
    spec = job(method="lora")
    takes = fit.needs(spec, LLAMA_8B, LENGTH, [])
    assert takes is not None
    close, far, large = gpu(takes.gpu * 0.93 / 1000), gpu(takes.gpu * 0.85 / 1000), gpu(80)
    assert fit.refusal(spec, LLAMA_8B, LENGTH, [seat(close)]) is None
    assert fit.refusal(spec, LLAMA_8B, LENGTH, [seat(far)]) is not None
    line = Key(Needs.of(spec.resources), "p", "o", 0)
    alone = fit.planned(line, spec, LLAMA_8B, LENGTH, [far, close]).needs
    assert alone.missing(close) == [] and alone.missing(far) != [], "what is not refused can be claimed"
    both = fit.planned(line, spec, LLAMA_8B, LENGTH, [close, large]).needs
    assert both.missing(close) != [] and both.missing(large) == []


def test_a_card_that_was_refused_the_kernels_of_a_block_is_planned_without_them() -> None:
    about = {"id": "GPU-1", "kind": "gpu", "gpu": {"vendor": "amd", "arch": "gfx942", "memory_bytes": 192 << 30}}
    found = [{"attention": "flash", "block": "triton"}, {"block": "portable"}, {"attention": "flash"}]
    slots = [Slot.described(about, ()), *(Slot.described(about | {"backends": one}, ()) for one in found)]
    assert [slot.parts for slot in slots] == [None, True, False, False]
    cpu = {"id": "cpu", "kind": "cpu", "backends": {"block": "native"}}
    assert Slot.described(cpu, ()).parts is None
    shape, lora = replace(LLAMA_8B, rms_norms=True, silu=True), job(method="lora")
    unknown, fused, *apart = [plan(lora, shape, longest=LENGTH, device=fit.device_of(slot)).peak for slot in slots]
    assert unknown == fused < apart[0] == apart[1]


def test_needs_are_part_of_the_line() -> None:
    needs = Needs("any", plan=PlanNeeds(18_200, 21_000, 300))
    assert Needs.parse(needs.key) == needs and Key.parse(f"{needs.key}|p|o|100").needs == needs
    assert needs.missing(gpu(18.2)) == [] and needs.missing(gpu(18.1)) == ["18.2 GB at its smallest batch"]
    assert needs.missing(gpu(80, host=0.2)) == ["0.3 GB of host memory at its smallest batch"]
    unknown = Slot("GPU-2", "gpu", "amd", "gfx942"), Slot("cpu", "cpu"), Slot("prepare-0", "prepare")
    assert [needs.missing(slot) for slot in unknown] == [[], [], []]
    assert needs.missing(Slot("cpu", "cpu", share_bytes=20_000_000_000)) == ["21 GB at its smallest batch"]
    assert needs.words() == "1 slot", "memory is told only where a job waits for it"
    assert needs.words("18.2 GB") == "1 slot with 18.2 GB"
    assert needs.plan is not None
    cpu, card = Slot("cpu", "cpu"), gpu(1)
    assert needs.plan.words(card, 24_000_000_000) == "24 GB (18.2 GB at its smallest batch)"
    assert needs.plan.words(cpu, 24_000_000_000) == "24 GB (21 GB at its smallest batch)"
    assert needs.plan.words(card, 18_500_000_000) == "18.5 GB", "one figure where there is one"
    assert needs.plan.words(card) == "18.2 GB at its smallest batch"


def test_jobs_that_take_nearly_the_same_stand_in_one_line() -> None:
    """A look at the queue costs as much as it has lines: a sweep of 50 lengths is no 50 lines."""
    needs = [fit.needs(job(training={"max_length": length}), LLAMA_8B, length, []) for length in range(512, 1112, 12)]
    assert len({need.word for need in needs if need is not None}) < 20
    exact = plan(fit.lightest(job(method="lora")), LLAMA_8B, longest=LENGTH, device=fit.device_of(gpu(80)))
    told = fit.needs(job(method="lora"), LLAMA_8B, LENGTH, [])
    assert told is not None and 0.93 * exact.peak < told.gpu * 1e6 <= exact.peak + CONTEXT_BYTES


@pytest.mark.parametrize(
    ("axes", "gigabytes", "ways"),
    [
        ({"method": "full"}, 80, ["method: lora", "method: qlora"]),
        ({"method": "lora"}, 12, ["method: qlora"]),
        ({"method": "lora"}, 7, ["memory.stream: auto"]),
        ({"method": "qlora", "training": {"max_length": 32768}}, 12, ["training.max_length"]),
        ({"training": {"max_length": 65536}}, 10, ["training.max_length"]),
    ],
    ids=["full", "lora", "stream", "long", "auto"],
)
def test_a_refusal_says_what_would_fit(axes: Any, gigabytes: float, ways: list[str]) -> None:
    spec = job(**axes)
    longest = spec.training.max_length
    refused = fit.refusal(spec, LLAMA_8B, longest, [seat(gpu(gigabytes))])
    assert refused is not None and refused.code == "fits_nowhere" and refused.status == 422
    assert all(way in refused.message for way in ways), refused.message
    assert "box-1/0" in refused.message and "a slot with" in refused.message
    assert refused.field == ("method" if spec.method.type in ("full", "lora") else "memory")


def test_what_may_fit_somewhere_is_not_refused() -> None:
    full = job(method="full")
    assert fit.refusal(full, LLAMA_8B, LENGTH, []) is None, "no node, no refusal"
    assert fit.refusal(full, LLAMA_8B, LENGTH, [seat(gpu(8)), seat(gpu(192))]) is None
    assert fit.refusal(full, LLAMA_8B, LENGTH, [seat(gpu(8)), seat(Slot("cpu", "cpu"))]) is None, "nobody knows"
    asks = job(method="full", resources={"requirements": {"arch": ["gfx950"]}})
    assert fit.refusal(asks, LLAMA_8B, LENGTH, [seat(gpu(8))]) is None, "it waits for a card that may come"


@pytest.mark.parametrize(
    ("stream", "shape", "gigabytes", "code", "field"),
    [
        ({"type": "host", "slots": 33}, LLAMA_8B, 80, "more_slots_than_blocks", "memory.stream.slots"),
        ("disk", replace(LLAMA_8B, order=()), 80, "blocks_not_found", "memory.stream"),
        ({"type": "host", "slots": 32}, LLAMA_8B, 6, "slots_do_not_fit", "memory.stream.slots"),
        ({"type": "host", "slots": 1}, LLAMA_8B, 2, "fits_nowhere", "memory"),
    ],
    ids=["slots", "blocks", "room", "card"],
)
def test_streams_that_cannot_be_are_refused(stream: Any, shape: Shape, gigabytes: float, code: str, field: str) -> None:
    spec = job(method="qlora", memory={"stream": stream})
    refused = fit.refusal(spec, shape, LENGTH, [seat(gpu(gigabytes))])
    assert refused is not None
    assert (refused.code, refused.field) == (code, field), refused.message


def test_a_box_without_memory_for_the_blocks_is_told_of_disks() -> None:
    spec = job(method="lora", memory={"stream": "host"})
    refused = fit.refusal(spec, LLAMA_8B, LENGTH, [seat(gpu(24, host=4))])
    assert refused is not None and "host memory" in refused.message and "`memory.stream: disk`" in refused.message


def test_modules_that_the_model_does_not_have_are_refused() -> None:
    spec = job(method={"type": "lora", "target_modules": ["q_prj"]})
    with pytest.raises(SpecError) as refused:
        fit.refusal(spec, LLAMA_8B, LENGTH, [seat(gpu(80))])
    assert refused.value.field == "method.target_modules" and "q_proj" in refused.value.message


def test_a_continued_adapter_leaves_full_fine_tuning_out_and_a_stream_has_no_reference_of_it() -> None:
    parent = {"type": "job", "id": "job-01kar3v8x5m2h6n9qst4wyz0bc", "adapter": "continue"}
    job = {"model": parent, "data": "file-" + "0" * 26}
    found = candidates(JobSpec.model_validate({**job, "method": "auto"}))
    assert [one.name for one in found if one.spec is None] == ["full"]
    assert "trains no adapter" in found[0].reason
    streamed = {**job, "data": {"train": "file-" + "0" * 26, "streaming": True}, "training": {"max_steps": 2}}
    dpo = JobSpec.model_validate({**streamed, "stage": "dpo"})
    assert [fault.code for fault in check(dpo)] == ["reference_is_trained"]
    merged = JobSpec.model_validate({**streamed, "stage": "dpo", "model": {**parent, "adapter": "merge"}})
    assert not check(merged)
