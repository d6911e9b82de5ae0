"""What a training step saves of a model's blocks between forward and backward, as `memory.gradient_checkpointing` and
`memory.activation_offloading` say it: everything, their inputs, or their inputs and the results that are expensive to
recompute (selective.py); and where the inputs are meanwhile (core/train/memory/offload/activations.py).

Blocks that stay on the device are checkpointed by torch (without reentrant backward, which stops as soon as it has what
is missing), those that are streamed by checkpointed_block.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from core.errors import ModelError
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.selective import contexts

FIELD = "memory.gradient_checkpointing"


def checkpoint_blocks(model: nn.Module, policy: CheckpointPolicy) -> None:
    """Let the blocks of a resident model keep so much. ModelError when transformers knows no blocks of this model."""
    about: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if policy.selective else {})
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=about)  # type: ignore[operator]
    except ValueError as error:
        raise ModelError(
            f"the blocks of this model cannot be checkpointed ({error}); leave `{FIELD}` out", field=FIELD
        ) from error
    if policy.inputs is None:
        return
    for module in model.modules():
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = policy.inputs.around(module._gradient_checkpointing_func)  # type: ignore[assignment, arg-type]
