"""What bench/memory.py compares with: others who train LoRA while the frozen weights are in host memory.

    plain       PEFT over a bfloat16 base that is all on the device, torch's checkpoints: the loop of the two below
    accelerate  its cpu_offload, hooked into each frozen linear layer below the adapters. Over a whole model, as it is
                documented, it cannot train: PEFT makes the adapters where the weights are, on the meta device, and the
                backward refuses them. It copies when a layer is called, without pinned memory and with nothing ahead
    deepspeed   ZeRO stage 3 with offload_param (ZeRO-Infinity's) and offload_optimizer to the CPU, on one device, with
                as many live parameters as two blocks have. Its own copies are ahead of the computation

All: bfloat16 weights and adapters, no autocast, checkpoints block by block, the model's own loss, AdamW. NF4 is left
out: neither moves bitsandbytes' packed weights in training. Each peer runs in a process of its own (DeepSpeed replaces
functions of torch), takes its turn when it is told a batch's size and seed, and tells its seconds:

    python -m bench.memory_peers NAME FOLDER [--device cuda] [--threads N]

DeepSpeed is no dependency of eft. To have it beside: a virtual environment of its own with torch, transformers, peft,
accelerate and `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`, and its interpreter as `--peer-python`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.memory_ids import ids_of
from bench.qlora_models import vocabulary_of

NAMES = ("plain", "accelerate", "deepspeed")
RANK = 16
Step = Callable[[Tensor], Tensor]


class Missing(Exception):
    """A peer that cannot run here; the words say why."""


# --- the bench's side --------------------------------------------------------------------------------------


class Peer:
    """A peer in a process of its own. Missing when it does not start, or takes longer than `patience` for anything."""

    def __init__(self, name: str, folder: Path, device: str, *, python: str, threads: int, patience: float) -> None:
        command = [python, "-m", "bench.memory_peers", name, str(folder), "--device", device, "--threads", str(threads)]
        self._patience = patience
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.about = self._answer()
        if self.about["missing"]:
            self.close()
            raise Missing(self.about["missing"])

    def step(self, tokens: int, seed: int) -> dict[str, float]:
        """`seconds`, `loss`, and `over_load_bytes` of a GPU. Missing when it fails or does not answer in time."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{tokens} {seed}\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], self._patience)[0]:
            self.close()
            raise Missing(f"no answer in {self._patience:.0f} s")
        line = self._child.stdout.readline()
        if not line:
            raise Missing(f"its process ended with exit code {self._child.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise Missing(answer["error"])
        return answer


# --- the peer's side ---------------------------------------------------------------------------------------


def _serve(name: str, folder: Path, device: torch.device) -> None:
    """What libraries print goes to standard error."""
    answers = sys.stdout

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    on_gpu = device.type == "cuda"
    with redirect_stdout(sys.stderr):
        vocabulary = vocabulary_of(folder)
        try:
            step = _build(name, folder, device)
        except Missing as missing:
            answer(missing=str(missing))
            return
        answer(missing=None, version=None if name == "plain" else version(name))
        for line in sys.stdin:
            tokens, seed = map(int, line.split())
            ids = ids_of(tokens, vocabulary, seed).to(device)
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            try:
                loss = float(step(ids))
            except Exception as error:  # said to the bench, which goes on without this peer
                answer(error=f"{type(error).__name__}: {error}"[:300])
                return
            seconds = time.perf_counter() - began
            answer(seconds=seconds, loss=loss, peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None)


def _build(name: str, folder: Path, device: torch.device) -> Step:
    torch.manual_seed(0)
    match name:
        case "plain":
            return _bare(_adapted(_base(folder).to(device)))
        case "accelerate":
            return _bare(_hooked(_adapted(_base(folder)), device))
        case "deepspeed":
            return _zero3(_adapted(_base(folder)), device)
        case _:
            raise ValueError(name)


def _base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def _adapted(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    base.enable_input_require_grads()
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _bare(model: Any) -> Step:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _hooked(model: Any, device: torch.device) -> Any:
    from accelerate import cpu_offload  # type: ignore[import-untyped]

    frozen = [module for name, module in model.named_modules() if name.endswith(".base_layer")]
    for module in frozen:
        cpu_offload(module, execution_device=device)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:  # what is hooked is on the meta device now, and stays there
            tensor.data = tensor.data.to(device)
    return model


def _zero3(model: Any, device: torch.device) -> Step:
    try:
        version("deepspeed")
    except PackageNotFoundError:
        raise Missing("it is not installed (bench/memory_peers.py says how; then --peer-python)") from None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_gpu = device.type == "cuda"
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    block = max(sum(p.numel() for p in layer.parameters()) for layer in model.get_base_model().model.layers)
    offload = {"device": "cpu", "pin_memory": on_gpu}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3, "offload_param": offload, "offload_optimizer": offload, "overlap_comm": on_gpu,
            "stage3_max_live_parameters": 2 * block, "stage3_max_reuse_distance": 2 * block,
            "stage3_prefetch_bucket_size": block,
        },
        # Its CPU Adam is compiled on first use; what is trained is small, so torch's serves.
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _serve(args.name, args.folder, torch.device(args.device))


if __name__ == "__main__":
    main()
