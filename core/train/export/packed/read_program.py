"""A program over the `compressed` or the `torchao` tools: logits of a folder with quantised weights, as that library
and transformers read it.

    read_program.py FOLDER ROWS LOGITS [FOLDER ROWS LOGITS …]

ROWS is a JSON file of lists of ids, LOGITS a NumPy file of the logits of all rows, one row below the other. Weights are
dequantised by the library, inputs of layers rounded where the folder says so; what flows between the layers is float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from core.base import quick_imports
from core.base.collector import importing

quick_imports.install(unused=("bitsandbytes", "boto3"))  # not torchao, which reads
with importing():
    import numpy as np
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM


def main() -> None:
    paths = [Path(word) for word in sys.argv[1:]]
    for folder, asked, logits in zip(paths[::3], paths[1::3], paths[2::3], strict=True):
        _read(folder, asked, logits)


def _read(folder: Path, asked: Path, logits: Path) -> None:
    rows: list[list[int]] = json.loads(asked.read_text(encoding="utf-8"))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    model.eval()
    with torch.no_grad():
        model(
            input_ids=torch.tensor([rows[0][:1]]), use_cache=False
        )  # compressed-tensors dequantises at the first call
        nn.Module.float(model)  # transformers refuses to do so for quantised models
        for layer in (one for one in model.modules() if isinstance(one, nn.Linear)):
            if layer.weight.dtype != torch.float32:  # torchao's tensors say what their layers compute in
                layer.weight = nn.Parameter(layer.weight.to(torch.float32), requires_grad=False)
        found = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]
    np.save(logits, torch.cat(found).numpy())


if __name__ == "__main__":
    main()
