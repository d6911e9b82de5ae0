"""Who runs in bench/qlora.py: one optimizer step each, on ids [rows, tokens] with every token labelled.

For all: rank 16 (alpha 32) on every linear layer of the decoder, no dropout, activation checkpointing (non-reentrant),
gradients clipped to a norm of 1, fused AdamW, products in bfloat16.

    ours         our engine: NF4 with double quantisation, float32 adapters under autocast, the chunked loss; on a CPU
                 norms and gated activations by the C kernels
    selective    the same with `gradient_checkpointing: selective`, which keeps what is dear to make again
    apart        the same with norms and gated activations as transformers computes them
    compiled     the same with `training.compile`: blocks compiled by torch, which is not part of a step
    trl          bitsandbytes + PEFT + TRL's SFTTrainer as users run it: its own loss (chunked, with entropy and token
                 accuracy), its default of bfloat16 adapters and bf16 autocast
    tuned        the same trainer well set: packing, nothing but bfloat16 (base, adapters and products, so no autocast
                 and none of its casts), no logging. The rows are full already: packing ("wrapped") leaves them as they
                 are and spares the attention mask, which best-fit packing would make where there is no FlashAttention
    bare         bitsandbytes + PEFT in bfloat16 throughout, in a bare loop without a trainer's bookkeeping, with the
                 model's own loss over whole logits: on a CPU faster than TRL's loss, and much larger
    bnb          bitsandbytes + PEFT in a bare loop as users write it: prepare_model_for_kbit_training, float32
                 adapters, autocast, the model's own loss
    lora         the loop of `bare` over a bfloat16 base: plain LoRA
    unsloth      Unsloth's FastLanguageModel in that loop, where it is installed (GPU only)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.qlora_models import tokenizer_for
from core.train.batch import IGNORE_INDEX, Batch

OURS = ("ours", "selective", "apart", "compiled")
NAMES = (*OURS, "trl", "tuned", "bare", "bnb", "lora", "unsloth")
CHECKPOINTING = {"use_reentrant": False}
Step = Callable[[Tensor], Tensor]
"""One optimizer step on ids [rows, tokens]; answers the loss before it."""


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    tokens: int
    r: int
    device: torch.device


def batches(shape: Shape, count: int, vocabulary: int) -> list[Tensor]:
    """The same for everybody who asks with the same shape."""
    generator = torch.Generator().manual_seed(7)
    low = min(100, vocabulary // 2)
    return [
        torch.randint(low, vocabulary, (shape.rows, shape.tokens), generator=generator).to(shape.device)
        for _ in range(count)
    ]


class Missing(Exception):
    """A peer that cannot run here; the words say why."""


def build(name: str, folder: Path, shape: Shape, batches: Sequence[Tensor]) -> Step:
    """`batches`: all that will be asked for, in order (a trainer wants its data set beforehand)."""
    torch.manual_seed(0)
    match name:
        case _ if name in OURS:
            return _ours(folder, shape, name)
        case "trl" | "tuned":
            return _Trl(folder, shape, batches, tuned=name == "tuned")
        case "bare" | "bnb" | "lora":
            return _loop(name, folder, shape)
        case "unsloth":
            return _unsloth(folder, shape)
        case _:
            raise ValueError(name)


# --- ours ------------------------------------------------------------------------------------------


def _ours(folder: Path, shape: Shape, name: str) -> Step:
    from core.spec.axes.optimizer import AdamW
    from core.train.engine import build_engine
    from core.train.kernels.float32 import Route, quickest, through_float32
    from core.train.kernels.fused.modules import fuse_parts
    from core.train.loss.head import OutputHead, head_of, hidden_states
    from core.train.loss.linear_cross_entropy import linear_cross_entropy
    from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
    from core.train.memory.checkpointing.policy import checkpoint_blocks
    from core.train.policy import PolicyModel
    from core.train.quant.adapters import fuse_adapters
    from core.train.quant.model import load_quantized
    from core.train.stage import Loss, Totals

    base: Any = load_quantized(folder, torch.bfloat16)[0]
    base.to(shape.device)
    base.enable_input_require_grads()
    model = _adapt(base, shape, full=True)
    if name in ("ours", "selective"):
        fuse_parts(model, shape.device)
    fuse_adapters(model)
    if name == "selective":
        checkpoint_blocks(model, CheckpointPolicy(selective=True))
    head = head_of(model)
    assert isinstance(head, OutputHead), head
    spec = AdamW(learning_rate=1e-4, weight_decay=0.0)
    engine = build_engine(model, spec, device=shape.device, autocast=torch.bfloat16)
    route = quickest() if shape.device.type == "cpu" else Route.NOTHING
    if name == "compiled":
        _compile(engine, several_rows=shape.rows > 1)

    def loss_of(_: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        hidden = hidden_states(head, batch.input_ids)[:, :-1].flatten(0, 1)
        labels = batch.labels[:, 1:].flatten()
        total = linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, options=head.options)
        return Loss(total / totals["label_tokens"], {})

    def step(ids: Tensor) -> Tensor:
        rows, tokens = ids.shape
        labels = ids.clone()
        labels[:, 0] = IGNORE_INDEX
        batch = Batch(ids, labels, (tokens,) * rows, rows * (tokens - 1))
        with through_float32(route):  # as a run does, and taken back for the peers of this process
            mean = engine.forward(batch, loss_of, {"label_tokens": batch.label_tokens}).total
            engine.backward(mean)
            engine.step()
        return mean.detach()

    return step


def _compile(engine: Any, *, several_rows: bool) -> None:
    """What `training.compile` does before the first step, for as long as this process lasts."""
    from core.train.compiling.prepare import try_blocks
    from core.train.compiling.regions import Compiler, Region
    from core.train.memory.streaming.blocks import find_blocks

    compiler = Compiler(several_rows=several_rows, sign_of_life=lambda: None)
    regions = [Region(name, block, compiler) for name, block in find_blocks(engine.model)]
    why = try_blocks(engine, compiler) or next((each.why_eager for each in regions if each.why_eager), None)
    if why is not None:
        raise Missing(f"the blocks are not compiled: {why}")

    def stop(block: str, reason: str) -> None:
        raise RuntimeError(f"{block} has no code: {reason}")

    compiler.close(stop)


# --- bitsandbytes, PEFT, TRL -----------------------------------------------------------------------


def _four_bits(folder: Path, shape: Shape) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    ask = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=ask, device_map={"": shape.device}
    )


def _lora_config(shape: Shape) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=shape.r, lora_alpha=2 * shape.r, target_modules="all-linear")


def _adapt(base: Any, shape: Shape, *, full: bool) -> Any:
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(base, _lora_config(shape), autocast_adapter_dtype=full)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return model.train()


def _loop(name: str, folder: Path, shape: Shape) -> Step:
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    if name == "lora":
        base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        base.to(shape.device)
    else:
        base = _four_bits(folder, shape)
    if name == "bnb":
        base = prepare_model_for_kbit_training(base, True, CHECKPOINTING)  # type: ignore[no-untyped-call]
    else:
        base.enable_input_require_grads()
    return _bare(_adapt(base, shape, full=name == "bnb"), shape, autocast=name == "bnb")


def _bare(model: Any, shape: Shape, *, autocast: bool) -> Step:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(shape.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class _Trl:
    """TRL's trainer in a thread of its own. It stands still before every optimizer step until it is asked for one, so
    that it can take its turn; what counts is from there to where it stands before the next one."""

    def __init__(self, folder: Path, shape: Shape, batches: Sequence[Tensor], *, tuned: bool) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._inputs: Tensor | None = None
        self._loss: Tensor | None = None
        self._failed: BaseException | None = None
        self._threads = torch.get_num_threads()
        self._trainer = self._make(folder, shape, batches, tuned)
        threading.Thread(target=self._run, daemon=True).start()
        self._wait()

    def __call__(self, ids: Tensor) -> Tensor:
        self._go.release()
        self._wait()
        assert self._inputs is not None and torch.equal(self._inputs.cpu(), ids.cpu())
        assert self._loss is not None
        return self._loss

    def _wait(self) -> None:
        self._done.acquire()
        if self._failed is not None:
            raise RuntimeError("TRL's trainer failed") from self._failed

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._trainer.train()
        except BaseException as error:
            self._failed = error
            self._done.release()

    def _make(self, folder: Path, shape: Shape, batches: Sequence[Tensor], tuned: bool) -> Any:
        from datasets import Dataset
        from torch.utils.data import SequentialSampler
        from transformers import TrainerCallback
        from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

        from core.train.verify.peer import quiet

        bench = self

        class InTurn(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                bench._done.release()
                bench._go.acquire()

        class Told(SFTTrainer):
            def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
                return SequentialSampler(self.train_dataset)

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                bench._inputs = inputs["input_ids"]
                result = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[no-untyped-call]
                bench._loss = (result[0] if isinstance(result, tuple) else result).detach()
                return result

        # One batch more than will be asked for: the trainer must not end, and tidy up, beside the others' steps.
        rows = [row.tolist() for ids in (*batches, batches[0]) for row in ids]
        arguments = quiet(folder / "trl", device=shape.device.type, precision="none" if tuned else "bf16")
        well_set = {"packing": True, "packing_strategy": "wrapped", "logging_strategy": "no"}
        arguments |= well_set if tuned else {"logging_strategy": "steps"}
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": CHECKPOINTING}
        return Told(
            model=_four_bits(folder, shape),
            args=SFTConfig(
                per_device_train_batch_size=shape.rows, max_steps=len(batches) + 1, max_length=shape.tokens,
                learning_rate=1e-4, lr_scheduler_type="constant", seed=1, **arguments,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]),
            processing_class=tokenizer_for(folder),
            peft_config=_lora_config(shape),
            callbacks=[InTurn()],
        )  # fmt: skip


# --- Unsloth ---------------------------------------------------------------------------------------


def _unsloth(folder: Path, shape: Shape) -> Step:
    if shape.device.type != "cuda":
        raise Missing("it runs on GPUs only")
    if find_spec("unsloth") is None:
        raise Missing("it is not installed (`pip install unsloth`)")
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=shape.tokens, dtype=torch.bfloat16, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model, r=shape.r, lora_alpha=2 * shape.r, lora_dropout=0, bias="none", random_state=1,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=True,
    )  # fmt: skip
    return _bare(model.train(), shape, autocast=True)
