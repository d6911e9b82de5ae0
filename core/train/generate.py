"""`python -m core.train.generate MODEL_DIR [--adapter DIR] --prompt "…"`: what does the model answer?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from core.train.__main__ import importing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m core.train.generate", description=__doc__)
    parser.add_argument("model_dir", type=Path, help="folder in Hugging Face format")
    parser.add_argument("--adapter", type=Path, help="folder of a PEFT adapter for that model")
    parser.add_argument("--prompt", required=True, help="the user's message")
    parser.add_argument("--system", help="a system message before it")
    parser.add_argument("--plain", action="store_true", help="send the prompt as it stands, without a chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="answer with text and token counts as JSON")
    args = parser.parse_args()
    for folder in (args.model_dir, args.adapter):
        if folder is not None and not folder.is_dir():
            print(f"error: {folder} is not a folder", file=sys.stderr)
            return 1
    if (task := _judges(args.adapter or args.model_dir)) is not None:
        print(f"error: this is a reward model ({task}), which writes no text", file=sys.stderr)
        return 1
    with importing():
        from core.train.entry.ask import ask
        from core.train.model.load import quiet

    quiet()
    answer = ask(
        args.model_dir,
        args.prompt,
        adapter=args.adapter,
        system=args.system,
        plain=args.plain,
        max_new_tokens=args.max_new_tokens,
    )
    print(json.dumps(answer.as_dict(), ensure_ascii=False) if args.json else answer.text)
    return 0


def _judges(folder: Path) -> str | None:
    """Task or class that the files of a reward model name; None for a model that writes text."""
    adapter, config = folder / "adapter_config.json", folder / "config.json"
    if adapter.is_file():
        task = str(json.loads(adapter.read_bytes()).get("task_type"))
        return task if task in ("SEQ_CLS", "TOKEN_CLS") else None
    names = json.loads(config.read_bytes()).get("architectures") or [] if config.is_file() else []
    return next((str(name) for name in names if str(name).endswith("Classification")), None)


if __name__ == "__main__":
    sys.exit(main())
