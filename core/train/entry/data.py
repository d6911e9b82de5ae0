"""`python -m core.train.entry.data check|preview FILE …`: look at data by hand, without a server. JSON on stdout, one
document a file; progress on stderr. `eft data` draws it.

`check` reads the file as an upload would. `preview` takes the options of a job (`--set training.max_length=512`,
`--spec job.yaml`) and brings of the model only the tokenizer. An error is a document too: {"error": {code, message,
field}}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from core.errors import DataError, EftError, SpecError, plainly
from core.spec.axes.data import FORMATS, Column, Format, Readable
from core.train.__main__ import importing


def main() -> int:
    args = _parser().parse_args()
    ok, failed = True, None
    try:
        for document in _checks(args) if args.verb == "check" else [_preview(args)]:
            if isinstance(document, EftError):
                failed = failed or document
            else:
                ok &= document["ok"]
                _print(document)
    except EftError as error:
        failed = error
    if failed is not None:
        _print({"error": failed.as_dict()})
    return 0 if ok and failed is None else 1


def _checks(args: argparse.Namespace) -> Iterator[dict[str, Any] | EftError]:
    """One file that cannot be read keeps nobody from hearing of the others."""
    columns = _columns(args.column)
    for path in args.files:
        try:
            yield _check(Path(path), args.format, columns)
        except DataError as error:
            yield error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eft data", description="Look at training data, without a server.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    check = verbs.add_parser("check", help="what a file is, how many rows it has, and every fault in it")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument("--format", choices=["auto", *FORMATS], default="auto", help="what every row shall be")
    check.add_argument("--column", action="append", default=[], metavar="OURS=THEIRS", help="e.g. prompt=question")
    preview = verbs.add_parser("preview", help="what training with a model would make of a file")
    preview.add_argument("data", metavar="FILE")
    preview.add_argument("--model", help="hub id, local folder or .gguf file")
    preview.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="an option as in a job")
    preview.add_argument("--spec", type=Path, help="a job file (YAML or JSON) to take options from")
    preview.add_argument("--offline", action="store_true", help="do not contact hubs")
    preview.add_argument(
        "--models-dir",
        type=Path,
        default=Path(os.environ.get("EFT_DATA", ".eft")) / "models",
        help="cache of prepared models (default: below $EFT_DATA)",
    )
    preview.set_defaults(method=None, eval=None)
    return parser


def _check(path: Path, format: Format, columns: dict[str, str]) -> dict[str, Any]:
    from core.data.check import check_file

    try:
        report = check_file(path, format=format, columns=columns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", field="file") from error
    return {"file": str(path), "ok": report.ok, "bytes": path.stat().st_size} | report.as_dict()


def _columns(given: list[str]) -> dict[str, str]:
    """OURS=THEIRS, held to what an upload and a job are held to."""
    columns: dict[str, str] = {}
    for pair in given:
        ours, equals, theirs = pair.partition("=")
        if not equals or not ours or not theirs:
            raise SpecError(f"--column takes OURS=THEIRS such as prompt=question, not `{pair}`", field="columns")
        if ours in columns:
            raise SpecError(f"--column gives `{ours}` twice", field="columns")
        columns[ours] = theirs
    try:
        Readable.model_validate({"columns": columns})
    except ValidationError as error:
        names = ", ".join(get_args(Column))
        words = plainly(error.errors(include_url=False)[0]["msg"])
        raise SpecError(f"--column takes our names ({names}): {words}", field="columns") from error
    return columns


def _preview(args: argparse.Namespace) -> dict[str, Any]:
    from core.plan import compatibility
    from core.spec.files import data_orders
    from core.spec.load import parse_job
    from core.spec.resolve import resolve
    from core.spec.run.orders import RunOrder
    from core.train.entry.jobfile import document, located
    from core.train.prepare.models import prepare_tokenizer

    spec = resolve(parse_job(document(args)))
    if refused := compatibility.check(spec, preview=True):
        raise SpecError(refused[0].message, field=refused[0].field, faults=refused, code=refused[0].code)
    train, held_out = data_orders(spec.data, located)
    prepared = prepare_tokenizer(spec.model, args.models_dir.absolute(), None, args.offline, _tell_bytes)
    order = RunOrder(
        job_id="preview",
        attempt=1,
        spec=spec,
        model_dir=str(prepared.model_dir),
        train=train,
        eval=held_out,
        cache_dir=str(args.models_dir.absolute().parent / "cache"),
    )
    with importing():
        from core.train.data.preview import preview  # slow: torch and transformers
        from core.train.model.load import quiet
        from core.train.vocabulary.tokenizer import load_tokenizer

    quiet()
    found = preview(order, load_tokenizer(prepared.model_dir), _tell_rows)
    _tell("")
    return {"file": args.data} | found


def _tell_bytes(phase: str, done: int, total: int | None) -> None:
    _tell(f"{phase} the tokenizer: {done / 1e6:.0f} MB")


def _tell_rows(done: int, total: int | None) -> None:
    _tell(f"{done} rows" + (f" of {total}" if total else ""))


def _tell(words: str) -> None:
    """One line that is written over, for people only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{words}")
        sys.stderr.flush()


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())
