"""`eft serve --print`: the lines for each program and each form in which a model is there."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from eft.commands.models.serve import ServingProgram, serving_lines
from eft.errors import UsageFault

MODEL, NAME = "model-01kar3v8x5m2h6n9qst4wyz0bc", "voice intents"
HUB = {"type": "hub", "id": "org/base", "revision": "main", "commit": "12fd25f"}


def model(*folders: str, base: dict[str, Any] = HUB, withheld: str = "") -> dict[str, Any]:
    formats = [{"folder": one, "released": one != withheld} for one in folders]
    return {"id": MODEL, "name": NAME, "base": base, "formats": formats}


def lines(program: str, *folders: str, rank: int | None = 12, **more: Any) -> list[str]:
    files = [f"{one}/{'weights.gguf' if one.startswith('gguf') else 'model.safetensors'}" for one in folders]
    return serving_lines(model(*folders, **more), files, rank, ServingProgram(program))


def test_an_adapter_is_served_over_its_base_at_the_commit_that_it_was_trained_on() -> None:
    fetch, start = lines("vllm", "adapter", "vllm")
    assert fetch == f"eft models download {MODEL} vllm -o {MODEL}"
    assert shlex.split(start) == [
        "vllm", "serve", "org/base", "--revision", "12fd25f", "--enable-lora", "--max-lora-rank", "16",
        "--lora-modules", f"voice-intents={MODEL}/vllm",
    ]  # fmt: skip
    _, start = lines("sglang", "adapter", "vllm")
    assert "--max-lora-rank 12 --lora-paths" in start and start.startswith(
        "python -m sglang.launch_server --model-path"
    )


@pytest.mark.parametrize(
    ("program", "begin"), [("vllm", "vllm serve"), ("sglang", "python -m sglang.launch_server --model-path")]
)
def test_merged_weights_go_before_adapters(program: str, begin: str) -> None:
    fetch, start = lines(program, "adapter", "merged", "vllm")
    assert start == f"{begin} {MODEL}/merged --served-model-name 'voice intents'" and " merged " in fetch
    assert f"{MODEL}/model" in lines(program, "model", rank=None)[1]


def test_llama_server_gets_the_file() -> None:
    assert lines("llamacpp", "adapter", "gguf-Q8_0")[1] == (
        f"llama-server -m {MODEL}/gguf-Q8_0/weights.gguf --alias 'voice intents' --jinja"
    )


@pytest.mark.parametrize(
    ("program", "folders", "more", "export"),
    [
        ("vllm", ["adapter"], {}, "merged"),
        ("sglang", ["adapter", "vllm"], {"base": {"type": "local", "path": "/m"}}, "merged"),
        ("vllm", ["adapter", "merged"], {"withheld": "merged"}, "merged"),
        ("llamacpp", ["adapter", "merged"], {}, "gguf-Q8_0"),
    ],
)
def test_a_model_without_a_fitting_format_names_the_export(
    program: str, folders: list[str], more: dict[str, Any], export: str
) -> None:
    with pytest.raises(UsageFault, match=f"eft models export {MODEL} {export} --wait"):
        lines(program, *folders, **more)
