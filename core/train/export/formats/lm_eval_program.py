"""A program over the `lm_eval` tools: one task of lm-evaluation-harness, looked up or scored.

    lm_eval_program.py check TASK FOLDER online|offline
    lm_eval_program.py score ORDER RESULT

`check` loads the task with its data, which it downloads if it is `online`. FOLDER has tasks beside those of the
package; `-`: there is none. `score` reads ORDER, a JSON object, and writes RESULT, another, with the harness's own
reader of the model (transformers and PEFT). Both end with a sentence for the user on standard error if they fail.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

CLOSE = 3
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def manager(name: str, folder: str | None) -> Any:
    """An index of tasks by name: of the folder, where the task is there, else of the package too, whose thousands of
    files take a while to read."""
    from lm_eval.tasks import TaskManager

    if folder is not None and name in (own := TaskManager(include_path=folder, include_defaults=False)).all_tasks:
        return own
    return TaskManager(include_path=folder, include_defaults=True)


def check(tasks: Any, name: str) -> None:
    """Load the task with its data. SystemExit with what is the matter."""
    if name not in tasks.all_subtasks:
        if name in tasks.all_groups or name in tasks.all_tags:
            sys.exit(f"`{name}` is a group of tasks of lm-eval; name one of its tasks")
        close = difflib.get_close_matches(name, tasks.all_subtasks, CLOSE)
        meant = f"; did you mean {' or '.join(f'`{one}`' for one in close)}?" if close else ""
        sys.exit(f"lm-eval has no task `{name}` on this machine{meant}")
    try:
        tasks.load([name])
    except Exception as error:  # whatever its loader meets: the hub, a file, a line of YAML
        said = " ".join(str(error).split())[:300]
        sys.exit(f"the data of `{name}` could not be loaded ({type(error).__name__}: {said})")


def score(order: dict[str, Any]) -> dict[str, Any]:
    """Scores of the task by metric, the number of rows, and what each row was answered."""
    import lm_eval
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    evaluator.add_env_info = lambda storage: None  # it runs `pip list` and more, for a report that nobody has here
    name = order["task"]
    model = HFLM(
        order["model"],
        peft=order["adapter"],
        tokenizer=order["tokenizer"],
        dtype=order["dtype"],
        device=order["device"],
        batch_size=order["batch_size"],
    )
    found = lm_eval.simple_evaluate(
        model,
        tasks=[name],
        num_fewshot=order["num_fewshot"],
        limit=order["limit"],
        apply_chat_template=order["apply_chat_template"],
        task_manager=manager(name, order["folder"]),
    )
    if found is None:
        sys.exit("lm-eval has scored nothing")  # a rank that is not the first
    rows = found["samples"][name]
    return {
        "scores": {key: value for key, value in found["results"][name].items() if isinstance(value, int | float)},
        "higher_is_better": found["higher_is_better"].get(name, {}),
        "rows": len({one["doc_id"] for one in rows}),
        "num_fewshot": found["n-shot"].get(name),
        "version": found["versions"].get(name),
        "samples": rows,
    }


def main() -> None:
    match sys.argv[1:]:
        case ["check", name, folder, network]:
            if network == "offline":
                os.environ.update(OFFLINE)
            check(manager(name, None if folder == "-" else folder), name)
        case ["score", order, result]:
            os.environ.update(OFFLINE)
            found = score(json.loads(Path(order).read_text(encoding="utf-8")))
            Path(result).write_text(json.dumps(found, default=str, ensure_ascii=False), encoding="utf-8")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
