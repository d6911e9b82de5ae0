"""`export: gguf`: merge, convert by llama.cpp's converter, read with llama.cpp's engine, compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core.spec.axes.export import GGUF, K_QUANTS, MergeOnto, required_retention
from core.train.export.formats.subject import Subject, Withheld, check_memory
from core.train.export.gguf.importance import write_importance
from core.train.export.gguf.proof import prove, saved_for_converter
from core.train.export.gguf.tokenizer_names import model_name_of, pre_tokenizer_of
from core.train.export.retention import measure
from core.train.tools.install import ToolFailed, find

PROGRAMS = Path(__file__).parent.parent / "gguf"


def conversion(subject: Subject, onto: MergeOnto, target: Path) -> dict[str, Any]:
    """What convert_program.py is asked for `subject`."""
    whole = subject.whole(onto)
    about = {"folder": str(whole), "file": str(target), "name": model_name_of(whole, subject.name)}
    return about | {"pre_tokenizer": pre_tokenizer_of(whole)}


def write_gguf(item: GGUF, subject: Subject, folder: Path) -> dict[str, Any]:
    """Write the file into `folder`; what is known of it. Withheld where llama.cpp's engine does not read from it what
    was trained."""
    tools, quants = find("gguf", subject.cache_dir), find("quants", subject.cache_dir)
    if tools is None or (quants is None and item.quantization in K_QUANTS):
        raise Withheld(
            "the libraries that write GGUF files are not on this machine, although the model was prepared; submit the "
            "job again"
        )
    if quants is not None:
        tools = replace(tools, beside=(quants.folder,))
    check_memory(subject.model, torch.float32)
    tuned, base = subject.logits(item.merge_onto)
    whole = subject.whole(item.merge_onto)

    def convert(target: Path) -> None:
        asked = [conversion(subject, item.merge_onto, target)]
        with saved_for_converter(subject.tokenizer, whole):
            tools.run(PROGRAMS / "convert_program.py", json.dumps(asked), between=subject.between)

    def measure_inputs(target: Path) -> None:
        write_importance(whole, converted, subject.calibration, target, subject.between)

    folder.mkdir(parents=True)
    file = folder / f"model-{item.quantization}.gguf"
    try:
        converted = subject.once(f"converted-{item.merge_onto}", convert)
        arguments = [str(converted), str(file), item.quantization]
        if item.quantization in K_QUANTS:
            arguments.append(str(subject.once(f"importance-{item.merge_onto}.npz", measure_inputs)))
        tools.run(PROGRAMS / "quantise_program.py", *arguments, between=subject.between)
        proof = prove(file, whole, subject, tools)
    except ToolFailed as error:
        raise Withheld(f"llama.cpp does not take it: {error}") from error
    if proof.faults:
        raise Withheld("; ".join(proof.faults))
    found = measure(
        tuned,
        base,
        proof.logits,
        rows=len(subject.rows),
        rows_of=subject.rows_of,
        required=required_retention(item),
        reader=proof.reader,
    )
    if fault := found.fault():
        broken = found.kl_exported is None
        way = "its weights are beyond float16's range" if broken else "take a format with more bits per weight"
        way += "" if broken else ", or set `min_retention`"
        raise Withheld(f"in {item.quantization} {fault}; {way}", retention=found, kept_apart=not broken)
    return {"file": file.name, "retention": found.as_dict(), "proof": proof.about}
