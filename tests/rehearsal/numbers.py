"""The numbers of the rehearsal: what the kernels would have computed, computed by the CPU's.

A dispatch mode sees every ATen operation below autograd and autocast. An operation on CUDA tensors runs as it is, so
that torch's allocator, streams and checks do their work, and its kernels, which do not run, are replaced: the CPU's
kernel computes the same operation on the same bytes of device memory. On a stream that is behind (runtime/stream.c)
that computation is queued with the copies, and runs when they do.

Random numbers come from the state of the CUDA generator, which torch advances as on a GPU: what is drawn depends on its
seed and its offset, and on nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten: Any = torch.ops.aten
WORK = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def _runtime() -> Any:
    runtime = ctypes.CDLL("libcudart.so.13")  # the one that torch has loaded
    runtime.rehearsal_alias.restype = ctypes.c_void_p
    runtime.rehearsal_alias.argtypes = [ctypes.c_void_p]
    for name in ("rehearsal_prompt", "rehearsal_finish"):
        getattr(runtime, name).argtypes = [ctypes.c_void_p]
    runtime.rehearsal_enqueue.argtypes = [ctypes.c_void_p, WORK, ctypes.c_int64]
    for name in ("rehearsal_deferred", "rehearsal_launches", "rehearsal_used"):
        getattr(runtime, name).restype = ctypes.c_int64
    return runtime


RUNTIME = _runtime() if os.environ.get("EFT_REHEARSAL") == "yes" else None
"""None where these tests are read to be skipped (conftest.py)."""

COMPUTES_NOTHING = {
    aten.detach.default, aten.record_stream.default, aten.is_pinned.default, aten._pin_memory.default,
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.empty_like.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Storage, aten.resize_.default,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
SOLVERS = {aten._linalg_eigh.default}
"""Operations of cuSOLVER, whose calls end the process here: computed by the CPU's, and then copied."""

_ORDERS = ("late", "early", "prompt")

_queued: dict[int, Callable[[], None]] = {}
_numbers = count(1)
_faults: list[BaseException] = []
"""Of computations that ran while another thread waited: raised by the next operation."""


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same bytes of device memory."""
    if not tensor.is_cuda:
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError("conjugate views")
    span = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    at = RUNTIME.rehearsal_alias(tensor.data_ptr())
    raw = (ctypes.c_char * (span * tensor.element_size())).from_address(at)
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride())


@WORK
def _run(number: int) -> None:
    collects = gc.isenabled()
    gc.disable()  # what it frees may need locks that the thread waiting for this one holds
    try:
        _queued.pop(number)()
    except BaseException as error:
        traceback.print_exc()
        _faults.append(error)
    finally:
        if collects:
            gc.enable()


def submit(compute: Callable[[], None]) -> None:
    """Run it in its turn on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    if RUNTIME.rehearsal_prompt(stream):
        compute()
        return
    number = next(_numbers)
    _queued[number] = compute
    RUNTIME.rehearsal_enqueue(stream, _run, number)


def finish() -> None:
    """Run all that is queued on the current stream."""
    RUNTIME.rehearsal_finish(torch.cuda.current_stream().cuda_stream)


@contextmanager
def order(streams: str) -> Iterator[None]:
    """Which streams are behind within it: `late`, as elsewhere, `early` or `prompt` (runtime/stream.c)."""
    RUNTIME.rehearsal_order(_ORDERS.index(streams))
    try:
        yield
    finally:
        RUNTIME.rehearsal_order(_ORDERS.index("late"))


def tensors(of: Any) -> list[Tensor]:
    """In their order. Arguments and results of operations are nested in no more than tuples, lists and dicts, for which
    pytree takes five times as long."""
    match of:
        case Tensor():
            return [of]
        case tuple() | list():
            return [found for each in of for found in tensors(each)]
        case dict():
            return [found for each in of.values() for found in tensors(each)]
    return []


class Numbers(TorchDispatchMode):
    """See the module. One per thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if any(type(each) not in (Tensor, torch.nn.Parameter) for each in given):
            return func(*args, **kwargs)
        if not any(each.is_cuda for each in given):
            out = func(*args, **kwargs)
            if not any(type(each) is Tensor and each.is_cuda for each in tensors(out)):
                return out
            made = tensors(out)
        else:
            if func in (aten.equal.default, aten.is_nonzero.default):  # they answer the host
                finish()
                return func(*tree_map(_on_cpu, args), **kwargs)
            if func in INDEXED and any(each is not None and each.dtype == torch.bool for each in args[1]):
                finish()  # how many places a mask has is a question of the host
                args = (args[0], [part for each in args[1] for part in _places(each)], *args[2:])
            elif func in SOLVERS or (torch.Tag.dynamic_output_shape in func.tags and func not in INDEXED):
                finish()
                found = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
                return tree_map(lambda each: each.to(given[0].device) if isinstance(each, Tensor) else each, found)
            if func.namespace not in ("aten", "prims"):  # an operator of ours or another's: made of these
                return self._inside(func, args, kwargs)
            drawn = _drawn(func)
            out = func(*args, **kwargs)
            made = tensors(out)
            if drawn is not None:
                self._replace(func, args, kwargs, out, made, drawn)
                return out
        if _faults:
            raise _faults.pop(0)
        if func in COMPUTES_NOTHING or func.is_view or func is aten._local_scalar_dense.default:
            return out
        self._replace(func, args, kwargs, out, made, _drawn(func) if not given else None)
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator outside of ATen is made of, operation by operation. Those of c10d copy by themselves."""
        if func.namespace.startswith(("c10d", "_c10d", "profiler")):
            return func(*args, **kwargs)
        with self:
            return _backend(func)(*args, **kwargs)

    def _replace(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor], seed: int | None) -> None:
        copies = func in COPIES
        if copies:
            source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], made[0])
            if not source.is_cuda or not target.is_cuda:
                if source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous():
                    return  # the runtime copied
                if target.is_cuda:
                    source = source.clone()  # converted on the host, before the call returns
                blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                into, of = alias(target), alias(source)
                submit(lambda: _copy(into, of))
                if blocking or (not target.is_cuda and not target.is_pinned()):
                    finish()
                return
        on_host = tree_map(_on_cpu, (args, kwargs))
        results = [alias(each) for each in made]
        submit(lambda: _compute(func, *on_host, results, seed))
        if any(not each.is_cuda for each in made):
            finish()


def _places(index: Tensor | None) -> list[Tensor | None]:
    """A mask as numbers of its places in each dimension; other indices as they are."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [each.to(index.device) for each in _on_cpu(index).nonzero().unbind(1)]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return alias(value) if value.is_cuda else value.clone() if value.dim() == 0 else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _drawn(func: Any) -> int | None:
    """The seed of what an operation draws: the state of the CUDA generator before it; None where it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func.namespace != "aten":
        return None
    state = torch.cuda.get_rng_state().numpy().tobytes()
    return int.from_bytes(sha256(state).digest()[:7])


@torch.no_grad()
def _compute(func: Any, args: Any, kwargs: Any, results: list[Tensor], seed: int | None) -> None:
    if func is aten.log_sigmoid_backward.default:  # the GPU's kernel hands it nothing from the forward
        args = (*args[:2], aten.log_sigmoid_forward(args[1])[1])
    found = _attention(func, args, kwargs)
    if found is None and seed is None:
        found = func(*args, **kwargs)
    elif found is None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            found = func(*args, **kwargs)
    for result, value in zip(results, tensors(found), strict=False):  # attention's also have a state of its generator
        if value.numel() and result.numel() and result.data_ptr() != value.data_ptr():
            if result.shape != value.shape:
                result = result[tuple(slice(0, size) for size in value.shape)]  # log-sum-exps are padded on a GPU
            result.copy_(value)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's flash attention in the place of a GPU's kernels."""
    name, scale = func.name().partition("::")[2], kwargs.get("scale")
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    match name:
        case "_scaled_dot_product_flash_attention":
            query, key, value = args[:3]
            causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
            return forward(query, key, value, 0.0, causal, scale=scale)
        case "_scaled_dot_product_flash_attention_backward":
            grad, query, key, value, out, logsumexp = args[:6]
            return backward(grad, query, key, value, out, logsumexp, 0.0, args[11], scale=scale)
        case "_scaled_dot_product_efficient_attention":
            query, key, value, bias = args[:4]
            causal = args[6] if len(args) > 6 else kwargs.get("is_causal", False)
            return forward(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        case "_scaled_dot_product_efficient_attention_backward":
            grad, query, key, value, bias, out, logsumexp = args[:7]
            causal = args[12] if len(args) > 12 else kwargs.get("is_causal", False)
            kept = logsumexp[..., : query.shape[2]]
            return backward(grad, query, key, value, out, kept, 0.0, causal, attn_mask=bias, scale=scale)
        case "_flash_attention_forward":
            query, key, value, begins = args[:4]
            _check_causal(args[8], kwargs)
            parts = [
                forward(*_row(at, query, key, value), 0.0, True, scale=kwargs.get("scale")) for at in _rows(begins)
            ]
            return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
        case "_flash_attention_backward":
            grad, query, key, value, out, lse, begins = args[:7]
            _check_causal(args[11], kwargs)
            rows = [
                backward(
                    *_row(at, grad, query, key, value, out), lse[None, :, at], 0.0, True, scale=kwargs.get("scale")
                )
                for at in _rows(begins)
            ]
            return tuple(torch.cat([each[0].transpose(0, 1) for each in part]) for part in zip(*rows, strict=True))
        case _:
            return None


def _check_causal(causal: bool, kwargs: Any) -> None:
    window = kwargs.get("window_size_left", -1), kwargs.get("window_size_right", -1)
    if not causal and window != (-1, 0):
        raise NotImplementedError(f"attention in a window of {window}")


def _rows(begins: Tensor) -> list[slice]:
    numbers = begins.tolist()
    return [slice(*pair) for pair in pairwise(numbers)]


def _row(at: slice, *packed: Tensor) -> list[Tensor]:
    """[tokens, heads, width] of one row as [1, heads, tokens, width]."""
    return [each[at].transpose(0, 1)[None].contiguous() for each in packed]


def _backend(func: Any) -> Callable[..., Any]:
    """The Python function behind an operator that torch.library.custom_op made."""
    made = OPDEFS.get(func._schema.name)
    if made is None:
        raise NotImplementedError(f"{func} has no Python function")
    return made._backend_fns.get("cuda", made._init_fn)


def enter() -> None:
    """Compute in this thread and in all that are started from now on (torch calls this at the end of its import).

    REHEARSAL_HIP is the version of HIP that torch says it was built for.
    """
    if version := os.environ.get("REHEARSAL_HIP"):
        torch.version.hip, torch.version.cuda = version, None
    if os.environ.get("REHEARSAL_NUMBERS") == "0":
        return
    begin = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Numbers():
            begin(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    Numbers().__enter__()
