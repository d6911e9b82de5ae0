"""Which modules of a model compute an RMS norm, a gated activation or rotary embedding, and their use of the fused
operators.

A class is not taken by its name alone: its own forward and the formula must agree on a few numbers. A module whose
class has another formula (a bias, a gate of another function, a norm over a part of the width) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.train.kernels.fused.operators import rms_norm, serves, silu_gate, turned
from core.train.kernels.interface import backend_for

Form = Literal["plain", "from_one"]
FORMS: tuple[Form, ...] = ("plain", "from_one")
ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function of a model's module that turns queries and keys."""
WIDTH = 24
"""Width of the numbers that a class is tried with."""
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class FusedParts:
    """How the parts of a model beside its products run: part of the run record."""

    backend: str
    norms: int = 0
    gates: int = 0
    adapters: int = 0
    """LoRA layers whose base and adapter are one operator (core/train/quant/adapters.py)."""
    rotations: int = 0
    """Layers of attention with rotary embedding."""


def fuse_parts(model: nn.Module, device: torch.device) -> FusedParts:
    """Let the model's RMS norms, gated activations and rotary embeddings run in one operator each, where the device has
    one. Names, parameters and what is saved stay as they are. Within torch.compile, for other dtypes and for a weight
    that is trained a module computes as before."""
    backend = backend_for(device, "block")
    if backend == "portable":
        return FusedParts(backend)
    norms = gates = rotations = 0
    module: Any
    for module in model.modules():
        kind: Any = type(module)
        if (eps := _epsilon(module)) is not None:
            if (form := _form(kind, eps)) is not None:
                module.__class__ = _norm_class(kind, form)
                norms += 1
        elif _is_gated(module) and _gates(kind, module.act_fn.__class__):
            module.__class__ = _gated_class(kind)
            gates += 1
        elif (turns := _turning(kind)) is not None:
            module.__class__ = turns
            rotations += 1
    return FusedParts(backend, norms, gates, rotations=rotations)


def _fits(*tensors: Tensor) -> bool:
    return not torch.compiler.is_compiling() and serves(*tensors)


# --- RMS norms -------------------------------------------------------------------------------------


def _epsilon(module: Any) -> float | None:
    """The constant below the root, of a module that looks like an RMS norm."""
    if "RMSNorm" not in type(module).__name__ or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(eps) if isinstance(eps, float) and module.weight.dim() == 1 else None


def _norm_of(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


@cache
def _form(kind: Any, eps: float) -> Form | None:
    """What a class computes; None: something else."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.variance_epsilon = module.eps = eps
    try:
        found = module(x)
    except (AttributeError, TypeError, RuntimeError, ValueError):  # it has more to it than a weight
        return None
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for form in FORMS:
        if torch.allclose(found, plain * (weight if form == "plain" else 1.0 + weight), rtol=TOLERANCE, atol=TOLERANCE):
            return form
    return None


@cache
def _norm_class(kind: Any, form: Form) -> type[nn.Module]:
    original: Callable[..., Tensor] = kind.forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if not _fits(hidden_states, weight) or weight.requires_grad:
            return original(self, hidden_states)
        return rms_norm(hidden_states, weight, _norm_of(self), from_one=form == "from_one")

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# --- gated activations -----------------------------------------------------------------------------


def _is_gated(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


@cache
def _gates(kind: Any, activation: Any) -> bool:
    """Whether a class computes down_proj(silu(gate_proj(x)) · up_proj(x)) and nothing else."""
    x = torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0)) * 3.0
    try:
        module: Any = SimpleNamespace(
            gate_proj=lambda of: of[..., :WIDTH] * 2.0,
            up_proj=lambda of: of[..., WIDTH:] + 1.0,
            down_proj=lambda of: of - 0.5,
            act_fn=activation(),
        )
        found: Any = kind.forward(module, x)
    except (AttributeError, TypeError, RuntimeError, ValueError):  # it has more to it than its projections
        return False
    wanted = functional.silu(x[..., :WIDTH] * 2.0) * (x[..., WIDTH:] + 1.0) - 0.5
    return isinstance(found, Tensor) and torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@cache
def _gated_class(kind: Any) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        fits = _fits(gate, up) and gate.shape == up.shape
        product = silu_gate(gate, up) if fits else self.act_fn(gate) * up
        result: Tensor = self.down_proj(product)
        return result

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


# --- rotary embedding ------------------------------------------------------------------------------


@cache
def _turning(kind: Any) -> type[nn.Module] | None:
    """A class of attention that turns queries and keys in one operator each; None: this one calls no such function, or
    one of another formula. The function is a global of the model's module, so the class gets a forward of its own."""
    forward = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    theirs = forward.__globals__.get(ROTARY)
    if theirs is None or not _turns(theirs):
        return None
    ours = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: _rotary(theirs)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": ours, "__module__": kind.__module__})


def _turns(function: Any) -> bool:
    draw = torch.Generator().manual_seed(0)
    x, angles = torch.randn(2, 3, 5, WIDTH, generator=draw), torch.randn(2, 2, 5, WIDTH, generator=draw)
    low, high = x.chunk(2, -1)
    try:
        found = function(x, x[:, :1], angles[0], angles[1])
    except (AttributeError, TypeError, RuntimeError, ValueError):  # it takes something else
        return False
    wanted = x * angles[0].unsqueeze(1) + torch.cat([-high, low], -1) * angles[1].unsqueeze(1)
    pairs = zip(found, (wanted, wanted[:, :1]), strict=True)
    return all(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE) for one, other in pairs)


def _rotary(theirs: Any) -> Callable[..., Any]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if more or named or not _fits(q, k, cos, sin) or not _fit_angles(q, k, cos, sin):
            return theirs(q, k, cos, sin, *more, **named)
        return turned(q, cos, sin), turned(k, cos, sin)

    return apply


def _fit_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.requires_grad:
        return False
    lines, tokens, width = cos.shape
    return all(lines in (1, x.shape[0]) and (tokens, width) == tuple(x.shape[2:]) and width % 2 == 0 for x in (q, k))
