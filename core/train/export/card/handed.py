"""What the weights of a card are: how they came about, and how they are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

from core.spec.axes.method import OFT, Full, LoRA, QLoRA, TrainedPart
from core.spec.axes.quantization import QAT
from core.spec.axes.stage import Head
from core.spec.job import JobSpec
from core.spec.settled import method_of
from core.train.model.heads import CLASSES, LABELS


@dataclass(slots=True)
class Handed:
    """What a card is for: the adapter, the model, or a format of it."""

    how: str
    """How the weights were trained, and what was made of them."""
    kind: str
    """`adapter` or `model`."""
    library: str
    """Name of the library that loads it, as the hub knows it."""
    relation: str
    """To the base model, by the hub's metadata: `adapter`, `finetune` or `quantized`."""
    load: str
    """Markdown: code that loads it."""


def handed(spec: JobSpec, record: dict[str, Any], *, head: Head, base: str, exported: dict[str, Any] | None) -> Handed:
    """What lies beside the card: what was trained or, if given, what `exported` (an entry of the result's `export`)
    says was made of it."""
    method = method_of(spec)
    match method:
        case LoRA() | QLoRA() | OFT():
            packed = None if isinstance(spec.quantization, QAT) else record["quantization"]
            over = f" over {packed['format']} weights" if packed else ""
            load = _load_adapter(head).format(base=base)
            found = Handed(f"{_adapter_words(method)}{over}", "adapter", "peft", "adapter", load)
        case Full(train=part):
            how = "full fine-tuning" if part is None else f"fine-tuning of {_part(part)}"
            found = Handed(how, "model", "transformers", "finetune", _load_model(head))
        case _ as never:
            assert_never(never)
    if exported is not None and found.kind == "adapter":
        if "merge_onto" in exported:
            original = exported["merge_onto"] == "original"
            found.how += f"; merged onto {'its original weights' if original else 'the weights it was trained over'}"
        found.how += f", in {exported['dtype']}" if "dtype" in exported else ""
        found.kind, found.library, found.relation, found.load = "model", "transformers", "finetune", _load_model(head)
    if isinstance(spec.quantization, QAT):
        found.how += f", rounded to {_rounding(spec.quantization)} in training"
        if exported is None:
            found.load += f"\n\n{_UNROUNDED.format(weights=spec.quantization.weights, kind=found.kind)}"
    if exported is not None:
        _as_format(found, exported, base)
    return found


def _as_format(found: Handed, exported: dict[str, Any], base: str) -> None:
    """Change what differs by the format."""
    if exported["type"] == "gguf":
        found.how += f"; GGUF, {exported['quantization']}"
        found.library, found.relation = "llama.cpp", "quantized"
        found.load = _LOAD_GGUF.format(file=f"model-{exported['quantization']}.gguf")
    elif exported["type"] in _PACKED:
        words, found.library, found.load = _PACKED[exported["type"]]
        if exported.get("as_trained"):
            words = f"{exported['bits']}-bit integers, their inputs in 8 bits, as they were trained"
        found.how, found.relation = f"{found.how}; linear layers in {words}", "quantized"
    elif exported["type"] == "vllm":
        found.kind, found.library, found.relation = "adapter", "peft", "adapter"
        found.load = _LOAD_VLLM.format(base=base, rank=exported.get("max_lora_rank", "RANK"))


def _adapter_words(method: LoRA | QLoRA | OFT) -> str:
    match method:
        case OFT(r=None):
            return f"OFT, blocks of {method.oft_block_size or 32}"
        case OFT(r=r):
            return f"OFT, {r} blocks"
        case LoRA(r=r, lora_alpha=alpha) | QLoRA(r=r, lora_alpha=alpha):
            began = f", initialised by `{method.init_lora_weights}` and exported with rank {2 * r}"
            words = f"{'DoRA' if method.use_dora else 'LoRA'}, rank {r}, alpha {alpha:g}"
            return words + (began if method.started else "")
        case _ as never:
            assert_never(never)


def _rounding(spec: QAT) -> str:
    """The numbers of `quantization: qat`, in words."""
    share = f" in groups of {spec.group_size}" if spec.weights == "int4" else ""
    return f"{spec.weights} weights{share} and 8-bit inputs"


def _part(part: TrainedPart) -> str:
    chosen = {"embeddings": part.embeddings, "the output head": part.head, "norms": part.norms}
    layers = [] if part.layers == "none" else [f"layers: {part.layers}"]
    return ", ".join([*layers, *(name for name, on in chosen.items() if on)])


def _load_adapter(head: Head) -> str:
    if head == "tokens":
        return _LOAD_ADAPTER
    return _LOAD_SCORING.replace("NUMBER", str(len(LABELS[head]))).replace("AutoModel", CLASSES[head].__name__)


def _load_model(head: Head) -> str:
    return _LOAD_MODEL.replace("AutoModelForCausalLM", CLASSES[head].__name__)


_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""

_LOAD_GGUF = """```sh
llama-server -m {file}
```

Ollama takes it as well: `FROM ./{file}` in a Modelfile. The file has the tokenizer and the chat template."""

_LOAD_VLLM = """```sh
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned=THIS_FOLDER
```

Requests name the model `tuned`."""

_LOAD_PACKED = """```sh
vllm serve THIS_FOLDER
```

SGLang takes it as well, and transformers with the package `compressed-tensors`."""

_LOAD_SCORING = """```python
from peft import PeftModel
from transformers import AutoModel, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModel.from_pretrained("{base}", num_labels=NUMBER, pad_token_id=tokenizer.pad_token_id)
model = PeftModel.from_pretrained(base, folder)
```"""

_LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""

_UNROUNDED = (
    "It was trained to be quantised: `torchao_{weights}` is the model that was trained, and this {kind} computes "
    "without the rounding."
)
_LOAD_TORCHAO = f"With the package `torchao`:\n\n{_LOAD_MODEL}"
_PACKED = {
    "fp8": ("8-bit floats", "vllm", _LOAD_PACKED),
    "gptq": ("4 bits, by GPTQ", "vllm", _LOAD_PACKED),
    "awq": ("4 bits, by AWQ", "vllm", _LOAD_PACKED),
    "mxfp4": ("4-bit floats by GPTQ", "vllm", _LOAD_PACKED),
    "torchao_int8": ("8-bit integers", "transformers", _LOAD_TORCHAO),
    "torchao_int4": ("4-bit integers by GPTQ, their inputs in 8 bits", "transformers", _LOAD_TORCHAO),
}
"""What holds the linear layers of a quantised folder, the library of its card, and how it is loaded."""
