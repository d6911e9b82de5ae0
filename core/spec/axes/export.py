"""The export axis: what a job hands back beside what it trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

from pydantic import AfterValidator, Field

from core.spec.base import SpecModel, by_type, short_form

MergeOnto = Literal["trained", "original"]
Retention = Annotated[float, Field(ge=0, le=1)]


class Merged(SpecModel):
    """The whole model with the adapter merged into its weights; loads without PEFT. Plain transformers loads the
    written model, and its logits are compared with those of base and adapter. A model that differs is not released, and
    the job says so."""

    type: Literal["merged"] = "merged"
    merge_onto: MergeOnto = "trained"
    """`trained`: the weights over which the adapter was trained (dequantised if packed), so that the merged model is
    the one that was evaluated. `original`: the weights of the model's files before packing."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the weights; `auto`: fp16 if the base model's files are fp16, otherwise bf16."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the model is released. Default: 0.999."""


GGUF_RETENTION = {"F16": 0.999, "Q8_0": 0.99, "Q6_K": 0.98, "Q5_K_M": 0.95, "Q4_K_M": 0.90}
"""Least retention of a GGUF file by its type."""


K_QUANTS = ("Q6_K", "Q5_K_M", "Q4_K_M")
"""Types of GGUF files that are made with an importance matrix."""


class GGUF(SpecModel):
    """A GGUF file for llama.cpp and the programs built on it (Ollama, LM Studio). An adapter is merged into the weights
    first. llama.cpp's engine reads the written file: tokens, chat template and logits are compared with those of the
    trained model."""

    type: Literal["gguf"] = "gguf"
    quantization: Literal["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"] = "Q8_0"
    """File type, by llama.cpp's names. K-quants (`Q6_K` and smaller) use an importance matrix over training rows."""
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the file is released. Default: 0.999 for F16, 0.99 for
    Q8_0, 0.98 for Q6_K, 0.95 for Q5_K_M, 0.90 for Q4_K_M."""


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""


class VLLMAdapter(SpecModel):
    """The adapter as vLLM serves it over the base model (`--lora-modules`). It is checked against vLLM's rules: LoRA of
    a rank that vLLM takes, without DoRA, `modules_to_save`, or adapters of embeddings and head. PEFT reads it over the
    base model's own files, and its logits are compared with those of the trained model."""

    type: Literal["vllm"] = "vllm"
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the adapter is released. Default: 0.90. Less than 1 is lost where it
    was trained over packed weights (`qlora`), since vLLM serves it over those of the files."""


class FP8(SpecModel):
    """The whole model with its linear layers in 8-bit floats (E4M3), one scale for each output, in the layout of
    compressed-tensors, which vLLM and SGLang serve. Inputs of these layers are rounded to 8 bits too while it runs. The
    output head stays in 16 bits. compressed-tensors reads the folder, and its logits are compared with those of the
    trained model."""

    type: Literal["fp8"] = "fp8"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.97."""


class GPTQ(SpecModel):
    """The whole model with its linear layers in 4 bits, chosen by GPTQ over training rows (arXiv:2210.17323), in the
    layout of compressed-tensors, which vLLM and SGLang serve. The output head stays in 16 bits. compressed-tensors
    reads the folder, and its logits are compared with those of the trained model."""

    type: Literal["gptq"] = "gptq"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.90."""


class AWQ(SpecModel):
    """The whole model with its linear layers in 4 bits, the weights of large inputs in finer steps, by AWQ over
    training rows (arXiv:2306.00978). The layout is that of `gptq`. It takes less time than GPTQ on large models, and
    keeps a little less. compressed-tensors reads the folder, and its logits are compared with those of the trained
    model."""

    type: Literal["awq"] = "awq"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.90."""


class MXFP4(SpecModel):
    """The whole model with its linear layers in 4-bit floats (E2M1) that share a power of two for 32 weights, chosen by
    GPTQ over training rows: the numbers of AMD's MI350 and NVIDIA's Blackwell (OCP Microscaling Formats 1.0), in the
    layout of compressed-tensors. Inputs of these layers and the output head stay in 16 bits. compressed-tensors reads
    the folder, and its logits are compared with those of the trained model."""

    type: Literal["mxfp4"] = "mxfp4"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.90."""


class TorchAOInt8(SpecModel):
    """The whole model with its linear layers in 8-bit integers, one scale for each output, in torchao's layout, which
    transformers loads on a CPU or a GPU. Inputs of these layers and the output head stay in 16 bits. torchao reads the
    folder, and its logits are compared with those of the trained model."""

    type: Literal["torchao_int8"] = "torchao_int8"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.97."""


class TorchAOInt4(SpecModel):
    """The whole model with its linear layers in 4-bit integers, chosen by GPTQ over training rows, in torchao's layout
    for CPUs, from which ExecuTorch makes programs for phones. Inputs of these layers are rounded to 8 bits while it
    runs. The folder has one weight a byte; an exported program has two. The output head stays in 16 bits. torchao reads
    the folder, and its logits are compared with those of the trained model."""

    type: Literal["torchao_int4"] = "torchao_int4"
    merge_onto: MergeOnto = "trained"
    """Weights that the adapter is merged into; see `merged`."""
    min_retention: Retention | None = None
    """Least retention (docs/exports.md) with which the folder is released. Default: 0.90."""


PackedExport = FP8 | GPTQ | AWQ | MXFP4 | TorchAOInt8 | TorchAOInt4
"""Folders of the whole model with quantised linear layers."""


class LMEval(SpecModel):
    """Scores of a task of EleutherAI's lm-evaluation-harness (lm-eval), and its answer to each row. The harness itself
    loads what was trained, by transformers and PEFT over the base model's own files: the score is the one that anybody
    measures with the folders that are handed back. On a CPU it computes in float32."""

    type: Literal["lm_eval"] = "lm_eval"
    task: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}$")]
    """Name of one task: of the package, or of the folder that the service names (`EFT_LM_EVAL_TASKS`)."""
    num_fewshot: Annotated[int, Field(ge=0, le=100)] | None = None
    """Solved examples before each question. Default: what the task says."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Rows of the task that are asked, the first ones. Default: all."""
    apply_chat_template: bool = False
    """Ask through the model's chat template."""


Export = Annotated[
    Merged | GGUF | VLLMAdapter | FP8 | GPTQ | AWQ | MXFP4 | TorchAOInt8 | TorchAOInt4 | LMEval,
    Field(discriminator="type"),
    short_form(by_type, otherwise="merged"),
]


@dataclass(frozen=True, slots=True)
class AboutFormat:
    """What the service says of one format of a type, beside the program that writes it."""

    folder: str
    """Folder below the artifacts; no two exports of a job share one."""
    title: str
    withheld: str
    """Code of the notice where it is not released."""
    retention: float | None
    """Least retention with which it is released by default; None: it is a score, and keeps nothing."""


def about(export: Export) -> AboutFormat:
    """The row of the export's type, for its values."""
    match export:
        case Merged():
            return AboutFormat("merged", "the merged model", "merged_withheld", 0.999)
        case GGUF(quantization=kind):
            return AboutFormat(f"gguf-{kind}", f"the GGUF file ({kind})", "gguf_withheld", GGUF_RETENTION[kind])
        case VLLMAdapter():
            return AboutFormat("vllm", "the adapter for vLLM", "vllm_withheld", 0.90)
        case FP8():
            return AboutFormat("fp8", "the fp8 model", "packed_withheld", 0.97)
        case GPTQ():
            return AboutFormat("gptq", "the GPTQ model", "packed_withheld", 0.90)
        case AWQ():
            return AboutFormat("awq", "the AWQ model", "packed_withheld", 0.90)
        case MXFP4():
            return AboutFormat("mxfp4", "the MXFP4 model", "packed_withheld", 0.90)
        case TorchAOInt8():
            return AboutFormat("torchao_int8", "the int8 model", "packed_withheld", 0.97)
        case TorchAOInt4():
            return AboutFormat("torchao_int4", "the int4 model", "packed_withheld", 0.90)
        case LMEval(task=task):
            return AboutFormat(f"lm-eval-{task}", f"the score of lm-eval's task `{task}`", "lm_eval_failed", None)
        case _ as never:
            assert_never(never)


def formats() -> list[tuple[str, dict[str, str]]]:
    """Each folder that an export can make without further choices, with what to ask for."""
    plain = (Merged(), VLLMAdapter(), FP8(), GPTQ(), AWQ(), MXFP4(), TorchAOInt8(), TorchAOInt4())
    wishes: list[tuple[Export, dict[str, str]]] = [(one, {"type": one.type}) for one in plain]
    for kind in GGUF_RETENTION:
        asked = {"type": "gguf", "quantization": kind}
        wishes.append((GGUF.model_validate(asked), asked))
    return [(about(one).folder, wish) for one, wish in wishes]


def required_retention(export: Merged | GGUF | VLLMAdapter | PackedExport) -> float:
    """Least retention with which the export is released."""
    if export.min_retention is not None:
        return export.min_retention
    by_default = about(export).retention
    assert by_default is not None
    return by_default


def _once(exports: list[Export]) -> list[Export]:
    if len({about(item).folder for item in exports}) < len(exports):
        raise ValueError("each format may occur only once")
    return exports


Exports = Annotated[list[Export], AfterValidator(_once), short_form(lambda value: [value], "merged")]
"""What a job hands back."""
