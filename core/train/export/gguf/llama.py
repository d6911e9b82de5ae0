"""llama.cpp's C interface (llama.h) as the wheel xllamacpp carries it, as far as a reader needs it.

The structures are those of the build that core/tools/requirements-gguf.txt pins (b11549); another build may have
others. Imported by programs over the `gguf` tools alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
import xllamacpp


class ModelParams(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress_callback", "progress_callback_user_data")),
        ("kv_overrides", c_void_p),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc")),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
        *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *((name, c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c_int) for name in ("type_k", "type_v")),
        ("moe_cache_size", c_size_t),
        *((name, c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


WARNING, ERROR = 3, 4
"""Levels of ggml's log that are passed on."""


def _print(level: int, text: bytes, _: Any) -> None:
    if level in (WARNING, ERROR):
        print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)


_log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(_print)


def _library() -> Any:
    library: Any = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "model_default_params": (ModelParams, []),
        "context_default_params": (ContextParams, []),
        "model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
        "init_from_model": (c_void_p, [c_void_p, ContextParams]),
        "model_get_vocab": (c_void_p, [c_void_p]),
        "model_chat_template": (c_char_p, [c_void_p, c_char_p]),
        "batch_init": (LlamaBatch, [c_int32, c_int32, c_int32]),
        "batch_free": (None, [LlamaBatch]),
        "decode": (c_int32, [c_void_p, LlamaBatch]),
        "get_logits": (POINTER(c_float), [c_void_p]),
        "get_memory": (c_void_p, [c_void_p]),
        "memory_clear": (None, [c_void_p, c_bool]),
        "vocab_n_tokens": (c_int32, [c_void_p]),
        "vocab_bos": (c_int32, [c_void_p]),
        "vocab_eos": (c_int32, [c_void_p]),
        "vocab_pad": (c_int32, [c_void_p]),
        "vocab_get_add_bos": (c_bool, [c_void_p]),
        "vocab_is_eog": (c_bool, [c_void_p, c_int32]),
        "tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


class Llama:
    """A GGUF file as llama.cpp's engine has loaded it on the CPU."""

    def __init__(self, path: str, *, context: int, threads: int) -> None:
        """`context`: tokens of the longest row. ValueError when the engine refuses the file."""
        self._library = _library()
        params = self._library.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._library.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise ValueError("llama.cpp cannot load the file; its log says why")
        self.vocab = self._library.llama_model_get_vocab(self._model)
        self.tokens: int = self._library.llama_vocab_n_tokens(self.vocab)
        options = self._library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = options.n_outputs_max = max(context, 32)
        options.n_threads = options.n_threads_batch = threads
        self._context = self._library.llama_init_from_model(self._model, options)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context for the file; its log says why")

    def special(self) -> dict[str, Any]:
        """Ids of the special tokens, -1 where there is none, and whether BOS is added to a text."""
        names = ("bos", "eos", "pad")
        found = {name: getattr(self._library, f"llama_vocab_{name}")(self.vocab) for name in names}
        return found | {"add_bos": bool(self._library.llama_vocab_get_add_bos(self.vocab))}

    def ends(self, token: int) -> bool:
        """Whether an answer ends with this token."""
        return bool(self._library.llama_vocab_is_eog(self.vocab, token))

    def template(self) -> str | None:
        """The chat template of the file."""
        found = self._library.llama_model_chat_template(self._model, None)
        return None if found is None else found.decode()

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text; control tokens in it are read as such. `special`: with BOS and EOS as the file says."""
        raw = text.encode()
        room = len(raw) + 8
        found = (c_int32 * room)()
        count = self._library.llama_tokenize(self.vocab, raw, len(raw), found, room, special, True)
        if count < 0:
            raise ValueError(f"llama.cpp does not tokenise {text[:40]!r}")
        return list(found[:count])

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logits [tokens, vocabulary] of a row by itself."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._library.llama_batch_init(len(ids), 0, 1)
        try:
            for place, token in enumerate(ids):
                batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.n_tokens = len(ids)
            if status := self._library.llama_decode(self._context, batch):
                raise ValueError(f"llama.cpp does not compute a row of {len(ids)} tokens (status {status})")
            found = self._library.llama_get_logits(self._context)
            return np.ctypeslib.as_array(found, (len(ids), self.tokens)).copy()
        finally:
            self._library.llama_batch_free(batch)
