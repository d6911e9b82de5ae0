"""The curvature that Sophia-G scales its steps by: the squared gradient of the loss of labels that the model itself
draws (Gauss-Newton-Bartlett; Liu et al. 2023, arXiv:2305.14342, algorithm 2).

It takes one more pass over the first batch of every `update_period`-th step. The draws are a function of the step
alone, so a run that is stopped at any place and resumed draws the same.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from core.train.batch import Batch
from core.train.engine import Engine
from core.train.linalg.norm import total_norm
from core.train.logits import label_logits
from core.train.optim.momentum import SophiaOptimizer


def estimate_curvature(engine: Engine, batch: Batch) -> None:
    """Renew the estimate of Sophia-G if it is due before this batch. Any other optimizer has none."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, SophiaOptimizer) or engine.micro_steps or engine.steps % optimizer.update_period:
        return
    here = batch.to(engine.device)
    generator = torch.Generator(engine.device).manual_seed(engine.steps)
    scale = 1.0 if engine.scaler is None else engine.scaler.scale
    with engine.training_pass():
        logits = label_logits(engine.model, here)[0].float()
        drawn = torch.multinomial(torch.softmax(logits.detach(), dim=-1), 1, generator=generator).squeeze(-1)
        loss = functional.cross_entropy(logits, drawn)
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    engine.updates.synchronize()
    gradients = [p.grad for p in engine.trained_parameters.values() if p.grad is not None]
    if math.isfinite(float(total_norm(gradients))):  # fp16 may overflow: the next one counts
        optimizer.estimate(drawn.numel() / scale**2)
    engine.zero_grad()
