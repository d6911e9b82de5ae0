"""`python -m core.train.entry.standby`: a trainer that has imported everything and waits for its run
(core/spec/run/standby.py). With the number of a socket it stays, and forks a child for each order that comes there.

Importing torch, transformers and peft is nearly all of a cold start. A child that computes on a GPU is a process of its
own, since a driver does not survive a fork. A child that computes on the CPU is a fork of a process that has imported
and done nothing else: no parallel region of OpenMP has run in it, which would leave its children hanging in a futex.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from core.base.forks import fork_orphan, rename, run_module
from core.hardware import device_mask
from core.spec.run.exit_codes import EXIT_FENCED
from core.spec.run.folder import LOG_FILE
from core.spec.run.standby import FORK_VARIABLES, STANDBY_READY, ForkOrder, StandbyOrder
from core.train import __main__ as trainer
from core.train.entry.fencing import STDIN, await_order, leave

STDOUT, STDERR = 1, 2
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch asks NVML how many GPUs there are. Otherwise it asks the runtime, which then reads once and for all
which GPUs this process sees (docs.pytorch.org/docs/stable/notes/cuda.html, "Environment variables")."""


def main() -> int:
    words = "Import what a trainer needs, and wait for an order on stdin (core/spec/run/standby.py)."
    parser = argparse.ArgumentParser(prog="python -m core.train.entry.standby", description=words)
    parser.add_argument("padding", nargs="?", help="makes room in the command line for the run's folder")
    parser.add_argument("fd", nargs="?", type=int, help="number of an inherited socket: fork a child for each order")
    orders = parser.parse_args().fd
    await_order()
    with trainer.importing():
        imports()
        gc.collect()  # it has the time
    os.write(STDOUT, STANDBY_READY)
    if orders is not None:
        serve_forks(socket.socket(fileno=orders))
    line = _read_line()
    if line is None:  # the worker is gone; there is nothing to tidy up, and torch's own goodbye takes a while
        os._exit(EXIT_FENCED)
    order = StandbyOrder.model_validate_json(line)
    _write_to_log(Path(order.run_dir))
    arguments = [sys.executable, "-m", "core.train", order.run_dir]
    rename(arguments)
    if not _change_environment(order.environment):
        print("a library had read the GPU's number before it was set: starting cold", file=sys.stderr, flush=True)
        os.execv(sys.executable, arguments)  # noqa: S606 -- the same process goes on, with the same stdin
    sys.argv = [trainer.__file__, order.run_dir]
    return trainer.main()


def serve_forks(orders: socket.socket) -> NoReturn:
    """Fork a child for each order until the worker is gone."""
    while True:
        message, given, _, _ = socket.recv_fds(orders, 65536, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(EXIT_FENCED)
        order = ForkOrder.model_validate_json(message)

        def child(order: ForkOrder = order, given: list[int] = given) -> NoReturn:
            orders.close()
            _run_child(order, given)

        pid = fork_orphan(child)
        for descriptor in given:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _run_child(order: ForkOrder, given: list[int]) -> NoReturn:
    """`python -m MODULE RUN_DIR [DESCRIPTOR]`. Does not return."""
    stdin, log, *stream = given
    for descriptor, number in ((stdin, STDIN), (log, STDOUT), (log, STDERR)):
        os.dup2(descriptor, number)
    os.close(stdin)
    os.close(log)
    if order.environment:
        _use_network(order.environment)
    leave(run_module(order.module, [order.run_dir, *map(str, stream)]))


def _use_network(changes: dict[str, str | None]) -> None:
    """Have these variables, as if they had been there from the start."""
    if not FORK_VARIABLES.issuperset(changes):
        raise ValueError(f"a fork cannot take changes of {sorted(set(changes) - FORK_VARIABLES)}")
    from huggingface_hub import constants

    from core.train.hub.download import is_offline

    _set(changes)
    constants.HF_HUB_OFFLINE = is_offline(False)


def _set(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@functools.cache
def imports() -> None:
    """Import what a run needs on the way to its first step and what draws its curve at the end, and draw one (half a
    second); make what each run makes alike. Libraries such as torchao ask torch for GPUs meanwhile."""
    os.environ[ASK_NVML] = "1"
    import peft
    import torch.profiler
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.llama import modeling_llama

    import core.train.export.artifacts
    import core.train.methods.full
    import core.train.methods.lora
    import core.train.methods.qat
    import core.train.methods.start
    import core.train.quant.adapters
    import core.train.quant.model
    import core.train.recipe
    import core.train.stages.sft
    from core.train.base.code import code_sha256
    from core.train.export.plot import plot_loss
    from core.train.model.record import versions

    # The first call makes the table of all models: 900 patterns, compiled.
    get_checkpoint_conversion_mapping("llama")  # type: ignore[no-untyped-call]
    code_sha256()
    versions()
    plot_loss([{"step": 1, "loss": 1.0}], [], io.BytesIO(), unit="tokens")
    # transformers' names are lazy: taking them is what imports them.
    assert all((peft.LoraModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast))
    assert all((modeling_llama, torch.profiler, core.train.methods, core.train.quant, core.train.stages))
    assert all((core.train.recipe, core.train.export.artifacts))


def _read_line() -> bytes | None:
    """The order; None at end of file. What came behind it are heartbeats; the order says as well when the lease was
    held, and the next one comes."""
    line = b""
    while b"\n" not in line:
        if not (part := os.read(STDIN, 65536)):
            return None
        line += part
    return line.partition(b"\n")[0]


def _write_to_log(folder: Path) -> None:
    log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for stream in (STDOUT, STDERR):
        os.dup2(log, stream)
    os.close(log)


def _change_environment(changes: dict[str, str | None]) -> bool:
    """False when a driver library did not heed the change, because it had read the old value already.

    The spare of a box with several GPUs starts with all of them hidden; which one it may see comes with the order. It
    is heeded when torch sees one now.
    """
    if not set(changes) <= set(device_mask.ALL):
        raise ValueError(f"a spare cannot take changes of {sorted(set(changes) - set(device_mask.ALL))}")
    _set(changes)
    if all(value is None or value == device_mask.NO_GPU for value in changes.values()):
        return True
    import torch

    os.environ.pop(ASK_NVML, None)
    return torch.cuda.is_available()


if __name__ == "__main__":
    leave(main())
