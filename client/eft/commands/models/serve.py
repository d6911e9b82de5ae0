"""`eft serve`: the command that serves a model of the registry under load, with another program."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any

import typer

from eft.errors import UsageFault
from eft.manual.source import manual
from eft.session import HANDLE, JsonOption, UrlOption, session

EXAMPLE = "voice-intents"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""


class ServingProgram(StrEnum):
    """A program that serves models."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"


@manual(
    examples=[
        (f"eft serve {EXAMPLE} --print vllm", "Print the lines that download it and start vLLM."),
        (f"eft serve {EXAMPLE} --print llamacpp", "The same for llama-server, with its GGUF file."),
    ]
)
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"A model: {HANDLE}.")],
    program: Annotated[ServingProgram, typer.Option("--print", help="Program that is to serve it.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the lines that download a model and serve it with vLLM, SGLang or llama.cpp. Nothing is started."""
    with session(as_json, url) as (client, output):
        found = client.models.get(model)
        files = [one.path for one in client.models.files(found["id"])]
        method = client.get(found["job"]).spec["method"]
        lines = serving_lines(found, files, method.get("r"), program)
        output.json({"lines": lines}) if as_json else output.text("".join(f"{line}\n" for line in lines))


def serving_lines(
    model: Mapping[str, Any], files: Sequence[str], rank: int | None, program: ServingProgram
) -> list[str]:
    """Shell lines for a model as `GET /models/{id}` shows it. `rank`: of its adapter. UsageFault where the program can
    load none of its formats; the message names the export that it can."""
    released = [one["folder"] for one in model["formats"] if one["released"]]
    name = model["name"] or model["id"]
    if program is ServingProgram.LLAMACPP:
        folder = next((one for one in sorted(released) if one.startswith("gguf-")), None)
        file = next((path for path in files if folder and path.startswith(f"{folder}/") and path.endswith(".gguf")), "")
        if folder is None or not file:
            raise _missing(model, "llama.cpp reads GGUF files", "gguf-Q8_0")
        start = ["llama-server", "-m", _at(model, file), "--alias", name, "--jinja"]
        return [_fetch(model, folder), shlex.join(start)]
    whole = next((one for one in ("model", "merged", "fp8", "gptq", "awq", "mxfp4") if one in released), None)
    if whole is not None:
        start = [*_server(program, _at(model, whole)), "--served-model-name", name]
        return [_fetch(model, whole), shlex.join(start)]
    base = model["base"]
    if "vllm" not in released or rank is None or base["type"] != "hub":
        words = "it loads whole models, or an adapter that was exported as `vllm` over a model of the hub"
        raise _missing(model, words, "merged")
    start = [*_server(program, base["id"]), *(["--revision", base["commit"]] if "commit" in base else [])]
    adapter = f"{name.replace(' ', '-')}={_at(model, 'vllm')}"
    if program is ServingProgram.VLLM:
        most = next(one for one in VLLM_RANKS if one >= rank)
        start += ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", adapter]
    else:
        start += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-paths", adapter]
    return [_fetch(model, "vllm"), shlex.join(start)]


def _server(program: ServingProgram, model: str) -> list[str]:
    if program is ServingProgram.VLLM:
        return ["vllm", "serve", model]
    return ["python", "-m", "sglang.launch_server", "--model-path", model]


def _at(model: Mapping[str, Any], path: str) -> str:
    """The place of a downloaded file or folder."""
    return str(PurePosixPath(model["id"]) / path)


def _fetch(model: Mapping[str, Any], folder: str) -> str:
    return shlex.join(["eft", "models", "download", model["id"], folder, "-o", model["id"]])


def _missing(model: Mapping[str, Any], words: str, export: str) -> UsageFault:
    return UsageFault(
        f"{words}, and `{model['id']}` has no such format: `eft models export {model['id']} {export} --wait` makes one"
    )
