"""What a plan needs of a model: its weights by name, in which block, and which of them are linear layers. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from core.errors import SpecError
from core.plan.models.config import HEADS, HIDDEN, VOCABULARY, check_files, check_numbers, number, text_part
from core.plan.models.families import FAMILIES, unmeasured, weights_of
from core.plan.models.headers import (
    BUFFERS,
    INDEX_FILE,
    NF4_STATE,
    OUTPUT_HEAD,
    Tensor,
    open_regular,
    read_json,
    read_places,
    sizes,
    ties_head,
    unpacked,
    unreadable,
    weight_files,
)
from core.spec.axes.method import Adapter
from core.spec.job import JobSpec

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "out_proj", "dense"]
"""Names of attention projections over the model families; those that a model has are taken."""
MAX_STATE_BYTES = 1 << 16
"""Largest size of the description beside a packed weight, bytes; real ones have some hundred."""
FILE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
OF_BLOCK = re.compile(r"^(?P<list>.*?)\.(?P<number>\d{1,9})\.")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_ROUTER = re.compile(r"\.(gate|router)\.(weight|linear\.weight)$")
EMBEDDING = re.compile(r"(embed|\bwte\b|\bwpe\b)")
HEAD = re.compile(r"^(.*\.)?(lm_head|embed_out|output)\.weight$")
_CONV1D = frozenset({"gpt2", "imagegpt", "openai-gpt"})
"""Families whose linear layers are transposed (transformers' Conv1D)."""

Kind = Literal["linear", "embedding", "head", "experts", "other"]
LINEAR: tuple[Kind, ...] = ("linear",)
ADAPTABLE: tuple[Kind, ...] = ("linear", "embedding", "head")
"""Kinds of weights that may have an adapter when they are named."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter."""

    name: str
    """Name within the block, e.g. `mlp.up_proj.weight`; outside of blocks within the model."""
    dtype: str
    """Dtype in the files, as safetensors names it; `NF4` if it is packed there."""
    shape: tuple[int, ...]
    """Shape of the weight, unpacked for NF4. Experts that are separate in the files are one weight [experts, each], as
    transformers fuses them."""
    kind: Kind
    transposed: bool = False
    """[in, out] in place of [out, in]."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def inputs(self) -> int:
        """Input features of a linear layer."""
        return self.shape[0 if self.transposed else 1]

    @property
    def outputs(self) -> int:
        return self.shape[1 if self.transposed else 0]


Selected = tuple[frozenset[str], tuple[frozenset[str], ...]]
"""Modules by name: those outside of the blocks, and of each block, in its own names."""


@dataclass(frozen=True)
class Shape:
    """A causal language model as its files, or its config.json alone, describe it."""

    model_type: str
    hidden: int
    inner: int
    """Width between the two products of a feed-forward layer (of one expert, in a mixture)."""
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    """0: no mixture of experts."""
    experts_per_token: int
    tied: bool
    """Output head and input embedding are one matrix."""
    packed: bool
    """The files' linear layers are NF4 already."""
    packed_double: bool
    """The scales of the NF4 layers are quantised too."""
    list_name: str
    """Path of the blocks, e.g. `model.layers`; empty when there are none."""
    outside: tuple[Weight, ...]
    """Embeddings, final norm, head (of a tied one only the embedding)."""
    patterns: tuple[tuple[Weight, ...], ...]
    """Blocks that differ, each by its parameters."""
    order: tuple[int, ...]
    """Index into `patterns` for each block."""
    scores_capped: bool = False
    """Attention's scores go through a tanh (Gemma 2), which transformers computes in plain operations."""
    logits_capped: bool = False
    """The logits go through a tanh."""
    own_dropout: bool = False
    """The model drops out by itself while it trains (GPT-2): attention's scores, and what each block adds."""
    plain_gelu: bool = False
    """GELU of single operations, each of which keeps something."""
    rms_norms: bool = False
    """Norms are RMS norms."""
    silu: bool = False
    """The feed-forward layer's activation is SiLU."""
    scorers: tuple[ScorerShape, ...] = field(default=(), compare=False)
    """Reward models that are on the device beside the model in a job that is planned."""

    # --- where from ----------------------------------------------------------------------------------

    @classmethod
    def of_folder(cls, folder: Path, *, field: str = "model") -> Shape:
        """The shape of a local model in Hugging Face format. ModelError, naming `field`, when it cannot be read."""
        config = read_json(folder / "config.json", field=field)
        check_numbers(config, field=field)
        names = [path.name for path in folder.iterdir()]
        index = read_json(folder / INDEX_FILE, field=field) if INDEX_FILE in names else None
        tensors: dict[str, Tensor] = {}
        packed: dict[str, tuple[int, ...]] = {}
        for shard in weight_files(names, index, field=field):
            places = read_places(folder / shard, field=field)
            tensors |= {name: tensor for name, (tensor, _) in places.items()}
            packed |= _packed_shapes(folder / shard, places, field)
        hold_against_files(config, tensors, field=field)
        double = any(name.endswith(".nested_absmax") for name in tensors)
        found = unpacked(tensors)
        found |= {name: Tensor("NF4", shape) for name, shape in packed.items()}
        return cls._of(config, found, packed=bool(packed), double=double)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Shape:
        """The shape from a config.json, before any weights are here. ModelError (`model_unmeasured`) for a family whose
        config does not tell, and for a model whose files are packed."""
        check_numbers(config, field="model")
        whole = dict(config)
        if isinstance(whole.get("text_config"), dict):
            raise unmeasured("it has more parts than the one for text")
        if whole.get("quantization_config") is not None:
            raise unmeasured("its files are packed")
        dtype = FILE_DTYPES.get(str(whole.get("dtype") or whole.get("torch_dtype") or "float32"), "F32")
        return cls._of(whole, weights_of(whole, dtype), packed=False, double=False)

    @classmethod
    def _of(cls, config: dict[str, Any], tensors: dict[str, Tensor], *, packed: bool, double: bool) -> Shape:
        text = text_part(config)
        tied = ties_head(config)
        counted = {name: tensor for name, tensor in tensors.items() if not BUFFERS.search(name)}
        if tied and len(counted) > 1:
            counted.pop(OUTPUT_HEAD, None)
        main = _main_list(counted)
        outside, blocks = _blocks(counted, main, config.get("model_type") in _CONV1D)
        patterns = tuple(dict.fromkeys(blocks))
        hidden = number(text, *HIDDEN)
        heads = number(text, *HEADS) or 1
        experts = number(text, "num_local_experts", "num_experts", "n_routed_experts")
        inner = number(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
        return cls(
            model_type=str(config.get("model_type")),
            hidden=hidden,
            inner=number(text, "moe_intermediate_size") or inner if experts else inner,
            vocab=number(text, *VOCABULARY) or _rows(outside),
            heads=heads,
            kv_heads=number(text, "num_key_value_heads") or heads,
            head_dim=number(text, "head_dim") or hidden // heads,
            experts=experts,
            experts_per_token=number(text, "num_experts_per_tok", "num_experts_per_token") if experts else 0,
            tied=tied or not any(weight.kind == "head" for weight in outside),
            packed=packed,
            packed_double=double,
            list_name=main or "",
            outside=outside,
            patterns=patterns,
            order=tuple(patterns.index(block) for block in blocks),
            scores_capped=text.get("attn_logit_softcapping") is not None,
            logits_capped=text.get("final_logit_softcapping") is not None,
            own_dropout=any(_above_zero(text.get(name)) for name in ("attention_dropout", "attn_pdrop")),
            plain_gelu=text.get("activation_function") == "gelu_new" or text.get("hidden_act") == "gelu_new",
            rms_norms="rms_norm_eps" in text,
            silu=text.get("hidden_act") in ("silu", "swish"),
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON, without `scorers`: a few kilobytes, whatever the number of blocks."""
        about = asdict(replace(self, scorers=()))
        del about["scorers"]
        return about

    @classmethod
    def from_dict(cls, about: Mapping[str, Any]) -> Shape:
        """What `as_dict` answered, JSON's lists in place of tuples. TypeError, KeyError for anything else."""

        def weights(entries: Iterable[Mapping[str, Any]]) -> tuple[Weight, ...]:
            return tuple(Weight(**(dict(entry) | {"shape": tuple(entry["shape"])})) for entry in entries)

        more = {
            "outside": weights(about["outside"]),
            "patterns": tuple(weights(pattern) for pattern in about["patterns"]),
            "order": tuple(about["order"]),
        }
        return cls(**(dict(about) | more))

    # --- asked ---------------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        return len(self.order)

    @property
    def blocks(self) -> tuple[tuple[Weight, ...], ...]:
        """The weights of each block."""
        return tuple(self.patterns[number] for number in self.order)

    @cached_property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(weight.numel for part in (self.outside, *self.blocks) for weight in part)

    @property
    def gated(self) -> bool:
        """The feed-forward layer multiplies two products: three matrices in place of two."""
        return any("gate" in weight.name or weight.name.startswith("mlp.w3") for weight in self.patterns[0])

    @property
    def file_bits(self) -> int:
        """Bits of an element of a dense weight in the files: 16 or 32."""
        bits = {16: 0, 32: 0}
        for part in (self.outside, *self.blocks):
            for weight in part:
                if weight.dtype != "NF4":
                    bits[32 if weight.dtype in ("F32", "F64") else 16] += weight.numel
        return max(bits, key=lambda size: bits[size])

    def targets(self, method: Adapter) -> Selected:
        """The linear layers that get an adapter. SpecError when there are none."""
        match method.target_modules:
            case "all-linear":
                return self._select(lambda full: True)
            case "attention":
                found = self._select(lambda full: any(is_named(full, name) for name in ATTENTION))
            case names:
                found = self._select(lambda full: any(is_named(full, name) for name in names), ADAPTABLE)
        if not any((found[0], *found[1])):
            known = sorted({weight.module.rpartition(".")[2] for part in self.patterns for weight in _linear(part)})
            raise SpecError(
                f"the model has none of the modules that are to be adapted; its linear layers are {', '.join(known)}",
                field="method.target_modules",
            )
        return found

    def packable(self, skip: Iterable[str]) -> Selected:
        """The linear layers that quantisation packs: all but those named, in full or by their last part."""
        names = list(skip)
        return self._select(lambda full: not any(is_named(full, name) for name in names))

    def _select(self, wanted: Callable[[str], bool], kinds: Collection[Kind] = LINEAR) -> Selected:
        """Modules of these kinds; the output head is no linear layer."""
        blocks = tuple(
            frozenset(
                weight.module
                for weight in block
                if weight.kind in kinds and wanted(f"{self.list_name}.{number}.{weight.module}")
            )
            for number, block in enumerate(self.blocks)
        )
        outside = (weight.module for weight in self.outside if weight.kind in kinds)
        return frozenset(module for module in outside if wanted(module)), blocks


@dataclass(frozen=True, slots=True)
class ScorerShape:
    """A reward model."""

    reward: str
    """Name of the reward."""
    shape: Shape
    """Shape of the model, or of the base of its adapter."""
    spec: JobSpec | None
    """The job that trained it; None: no job of eft did, and the model is whole."""


def _linear(part: Iterable[Weight]) -> Iterator[Weight]:
    return (weight for weight in part if weight.kind == "linear")


def is_named(name: str, asked: str) -> bool:
    """Whether a module's full name is the name asked for, or ends in it."""
    return name == asked or name.endswith("." + asked)


def _blocks(
    tensors: Mapping[str, Tensor], main: str | None, transposed: bool
) -> tuple[tuple[Weight, ...], list[tuple[Weight, ...]]]:
    """(what is outside of the blocks, the blocks)."""
    outside: list[Weight] = []
    blocks: dict[int, list[Weight]] = {}
    experts: dict[int, list[Tensor]] = {}
    for name, tensor in tensors.items():
        found = OF_BLOCK.match(name)
        if found is None or found["list"] != main:
            outside.append(_weight(name, tensor, transposed, outside=True))
            continue
        number, local = int(found["number"]), name[found.end() :]
        block = blocks.setdefault(number, [])
        if _EXPERTS.search(local) and len(tensor.shape) < 3:
            experts.setdefault(number, []).append(tensor)
        else:
            block.append(_weight(local, tensor, transposed, outside=False))
    for number, apart in experts.items():
        numel, dtype = sum(tensor.numel for tensor in apart), apart[0].dtype
        blocks[number].append(Weight("mlp.experts", dtype, (len(apart), numel // len(apart)), "experts"))
    by_name = [tuple(sorted(blocks[number], key=lambda weight: weight.name)) for number in sorted(blocks)]
    return tuple(sorted(outside, key=lambda weight: weight.name)), by_name


def _weight(name: str, tensor: Tensor, transposed: bool, *, outside: bool) -> Weight:
    kind = _kind(name, tensor, outside)
    return Weight(name, tensor.dtype, tensor.shape, kind, transposed and kind == "linear")


def _kind(name: str, tensor: Tensor, outside: bool) -> Kind:
    if _EXPERTS.search(name):
        return "experts"
    if len(tensor.shape) != 2 or not name.endswith(".weight") or _ROUTER.search(name):
        return "other"
    if outside and HEAD.match(name):
        return "head"
    return "embedding" if outside and EMBEDDING.search(name) else "linear"


def hold_against_files(config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, field: str) -> None:
    """ModelError where config.json describes another model than these, the tensors of its files."""
    lists: dict[str, set[int]] = {}
    for name in tensors:
        if (found := OF_BLOCK.match(name)) is not None:
            lists.setdefault(found["list"], set()).add(int(found["number"]))
    blocks = {name: len(numbers) for name, numbers in lists.items()}
    check_files(config, tensors, blocks, same=config.get("model_type") in FAMILIES, field=field)


def _main_list(tensors: Mapping[str, Tensor]) -> str | None:
    """The list of numbered modules with most parameters: the model's blocks."""
    lists: dict[str, int] = {}
    for name, tensor in tensors.items():
        if (found := OF_BLOCK.match(name)) is not None:
            lists[found["list"]] = lists.get(found["list"], 0) + tensor.numel
    return max(lists, key=lambda name: lists[name], default=None)


def _packed_shapes(path: Path, places: Mapping[str, tuple[Tensor, int]], field: str) -> dict[str, tuple[int, ...]]:
    """What NF4 weights stand for: bitsandbytes writes it as JSON into a tensor of bytes beside each."""
    found: dict[str, tuple[int, ...]] = {}
    notes = {name: place for name, place in places.items() if name.endswith(NF4_STATE)}
    if not notes:
        return found
    with open_regular(path, field=field) as file:
        for name, (tensor, begin) in notes.items():
            weight = name.removesuffix(NF4_STATE)
            file.seek(begin)
            try:
                about = json.loads(file.read(min(tensor.numel, MAX_STATE_BYTES)))
                shape = sizes(about["shape"])
                if -(-math.prod(shape) // 2) != places[weight][0].numel:
                    raise ValueError(f"{shape} is not its shape")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise unreadable(f"{path.name} does not say what {weight} stands for ({error})", field) from error
            found[weight] = shape
    return found


def _rows(outside: Iterable[Weight]) -> int:
    """Size of the vocabulary by the embedding or the output head, where the configuration does not give it."""
    return max((weight.shape[0] for weight in outside if weight.kind in ("embedding", "head")), default=1)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
