"""Every code that an error, a fault of a data file, a failed attempt or a notice may carry, explained.

docs/troubleshooting.md is made of it, and a test reads the code of core, api, worker and box and holds both to one
another: a code that is written anywhere stands here, and nothing else does.
"""

from __future__ import annotations

import re

Code = tuple[str, str]
"""What it means; what to do."""

REQUESTS: dict[str, Code] = {
    "invalid_request": ("The request cannot be read as HTTP or JSON.", "The message says where; send JSON or YAML."),
    "unsupported_media_type": (
        "The body's Content-Type is none that this route reads.",
        "Name the type in the message.",
    ),
    "unknown_parameter": (
        "A query parameter that this route does not have.",
        "Leave it out; the message has near names.",
    ),
    "unknown_cursor": (
        "The cursor of a list belongs to nothing that is there.",
        "Begin the list anew, without `after`.",
    ),
    "range_not_satisfiable": ("The part asked for lies behind the file's end.", "Ask for its size first (HEAD)."),
    "idempotency_key_reused": (
        "The same Idempotency-Key came with another body.",
        "Take a new key for a new job; the first job is untouched.",
    ),
    "shown_to_another_key": (
        "An Idempotency-Key came again with another API key, and the answer holds a secret.",
        "Revoke what was made, or take a new Idempotency-Key.",
    ),
    "rate_limited": ("This key asks more often than its rate.", "Wait the seconds of `Retry-After`."),
    "too_large": ("A file or body is larger than its bound.", "The message names the bound and its setting."),
    "timeout": (
        "The other side took too long with its body.",
        "Send it again; submits are safe with an Idempotency-Key.",
    ),
    "unavailable": (
        "Database, broker or data root do not answer.",
        "`GET /readyz` and `eft doctor` say which; clients try again by themselves.",
    ),
    "not_found": (
        "There is none, or it is another project's: the answer is the same.",
        "Check the id and the project of your key (`eft whoami`).",
    ),
    "conflict": ("The object is not in a state that allows this.", "The message names the state and what is possible."),
    "gone": ("It was here and was deleted by rule or by somebody.", "`eft audit` (admins) says when and by whom."),
    "internal": ("A defect of eft.", "Report the request id, or the job's log, with what you did."),
    "error": ("None of the others.", "The message says what to do."),
}

RIGHTS: dict[str, Code] = {
    "missing_api_key": ("No key came with the request.", "`eft login`, or set `EFT_API_KEY` for the client."),
    "invalid_api_key": ("No key that was ever valid.", "`eft keys list` shows yours; `eft keys create` makes one."),
    "expired_api_key": (
        "The key is past its end.",
        "An admin of the project makes a new one; so does another key of yours (`eft keys create`).",
    ),
    "reused_api_key": (
        "A key that has a successor was used after its end: somebody may have stolen it.",
        "All keys of its family have been revoked. Make a new one, and look at `eft audit --action key.`.",
    ),
    "user_disabled": ("The key's owner was disabled.", "An admin enables them again."),
    "forbidden": ("Known, but not allowed to.", "The message names what is missing and who can give it."),
    "missing_scope": ("The key was made for less.", "Make one with the scope that the message names."),
    "missing_right": (
        "The key was made without this right.",
        "Make one with the right that the message names (`eft keys create --right`).",
    ),
    "missing_role": ("Your role in the project does not allow it.", "An admin of the project can raise it."),
    "not_a_member": ("You are no member of that project.", "One of its admins can add you."),
    "box_admin_only": ("Only who runs the box may do this.", "Ask them, or use the key that `eft up` showed."),
    "last_admin": ("Nobody would be left to administrate.", "Make another admin first."),
    "name_taken": ("A user or project is called so.", "Take another name."),
    "already_rotated": ("The key has a successor.", "Use that one; revoke what is no longer needed."),
    "too_many_keys": (
        "A user has at most EFT_KEYS_PER_MEMBER working keys in a project.",
        "Revoke those that nobody uses: `eft keys list` shows the last use of each.",
    ),
    "key_is_over": ("The key was revoked or has expired.", "Create a new one."),
}

JOBS: dict[str, Code] = {
    "fits_nowhere": (
        "By the plan of its memory the job fits none of the slots here, even at its smallest.",
        "The message names what would fit; `eft plan FILE` shows the bytes.",
    ),
    "unsettled": (
        "`method: auto` reached a trainer that was started by hand.",
        "Name the method; the service settles it when it starts a job.",
    ),
    "invalid_spec": ("The job cannot run as it is written.", "Each fault names its field; docs/spec.md has them all."),
    "invalid_yaml": ("The job file is no YAML.", "The message has line and column."),
    "unknown_field": ("No such field.", "The message has the nearest name."),
    "missing_field": ("A field that must be given is missing.", "The message names it; docs/spec.md, docs/data.md."),
    "invalid_value": ("A value of the wrong kind, or out of its bounds.", "The message has what is allowed."),
    "unknown_value": ("None of the values that there are.", "The message lists them."),
    "file_not_found": ("The project has no such file.", "`eft files ls`; `eft files upload`."),
    "webhook_not_found": ("The project has no such webhook.", "`eft webhooks list`."),
    "path_not_allowed": ("The path lies outside the folders that are open to jobs.", "EFT_DATA_ROOTS of the box."),
    "path_not_found": (
        "There is no such file on the server.",
        "Check the path; relative ones lie beside the job file.",
    ),
    "format_mismatch": (
        "The file is of another format than `format` says.",
        "Leave `format` at `auto`, or name it right.",
    ),
    "same_rows": ("Training and held-out rows are the same.", "Give another file, or `data.split`."),
    "priority_too_high": ("Higher than the project may ask for.", "An admin raises the limit: `eft quota set`."),
    "already_final": ("The job has ended.", "`eft retry` makes it run again."),
    "not_ended": ("Only an ended job is tried again or deleted.", "Wait, or cancel it first."),
    "job_in_use": (
        "A retry of the job may go on from its checkpoints.",
        "Delete that retry first, or leave both; the message names it.",
    ),
    "queue_full": (
        "As many jobs or previews of the project wait as may wait.",
        "Submit again when some have started; the message names the setting or the quota.",
    ),
    "specs_full": (
        "The specs of the project's jobs take as much of the database as they may take.",
        "`eft delete` jobs that are no longer needed; EFT_MAX_SPEC_BYTES of the box.",
    ),
    "not_pausable": ("It neither waits nor runs.", "`eft show JOB` says what it does."),
    "not_paused": ("Only a paused job is resumed.", "`eft show JOB` says what it does."),
    "still_pausing": ("It is writing its checkpoint.", "Try again in a moment."),
    "file_in_use": ("A job that has not ended needs the file.", "Wait for it or cancel it."),
    "stale_spec": ("The job was written by another version of eft that this one cannot read.", "Submit it again."),
    "max_runtime": (
        "The job's own time limit is over; its last checkpoint is kept.",
        "`eft retry` goes on from its last checkpoint, with as many seconds again.",
    ),
}

DATA: dict[str, Code] = {
    "invalid_data": ("The file has faults.", "Each names its line and what was expected: `eft data check FILE`."),
    "empty_file": ("No rows.", "A file has at least one."),
    "empty": ("A text that must say something is empty.", "Fill it, or leave the row out."),
    "unknown_format": ("The columns are those of no format.", "docs/data.md; map them with `columns`."),
    "mixed_formats": ("Rows of several formats in one file.", "One format a file; mix files with `sources`."),
    "ambiguous_row": ("The row could be two things.", "Say `format`, or drop the fields of one."),
    "invalid_row": ("A row is no object.", "Every row is an object with named fields."),
    "invalid_json": ("Not JSON at that place.", "The message has line and column."),
    "invalid_csv": ("Not CSV at that place.", "Quote fields that hold commas, quotes or line ends."),
    "invalid_parquet": ("The Parquet file contradicts itself.", "Write it anew."),
    "unreadable_file": (
        "Broken, encrypted, or compressed by what is not read here.",
        "Write it anew, as the message says.",
    ),
    "invalid_utf8": ("Not UTF-8.", "Save the file as UTF-8."),
    "invalid_unicode": ("Half a surrogate pair: no text.", "Write the character itself."),
    "nul_character": ("A NUL character.", "Remove it."),
    "invalid_type": ("Not the kind of value that belongs there.", "The message says which does."),
    "not_in_template": (
        "The chat template has no place for a field of the row (tool calls, reasoning, a name …), which would be lost.",
        "The message names the field, and families as `data.rendering` that have a place for it; docs/rendering.md.",
    ),
    "unsupported_field": ("A field that training cannot use as it is.", "The message says what to do with it."),
    "unknown_role": ("No role of a chat.", "system, user, assistant or tool."),
    "role_order": ("Turns out of order.", "The message says which turn cannot follow which."),
    "unknown_call": ("A tool's answer to a call that nobody made.", "Check `tool_call_id`."),
    "no_answer": ("No turn of the assistant to learn from.", "End the chat with one, or leave the row out."),
    "no_question": ("The assistant speaks first.", "Put the user's turn before it."),
    "nothing_to_learn": ("Every turn has weight 0.", "Give one weight 1, or leave the row out."),
    "too_long": ("A row of more than 16 MiB.", "Split it; none of that size fits a context."),
    "formula": ("Text that a spreadsheet would execute. It is taken as it stands.", "Mind it when you open the file."),
}

MODELS: dict[str, Code] = {
    "model_unavailable": ("The model cannot be used.", "The message says why."),
    "model_not_found": ("No such model on the hub or in the folder.", "Check the name; private ones need HF_TOKEN."),
    "model_revision_not_found": (
        "The model has no such revision.",
        "Leave `revision` out, or take one that is listed.",
    ),
    "model_gated": ("The hub wants your consent first.", "Accept its terms there and give the box an HF_TOKEN."),
    "model_not_cached": ("Offline, and it was never fetched.", "Let the box go online once, or give a local folder."),
    "model_path_not_allowed": ("The folder is not open to jobs.", "EFT_MODEL_ROOTS of the box."),
    "model_pickle": ("Weights in a pickle: loading them would run code.", "Take a safetensors version of it."),
    "model_needs_code": (
        "It wants its own Python code executed.",
        "Not supported; take a model that transformers has.",
    ),
    "model_quantized": (
        "Packed by a method that cannot be trained on.",
        "Take the original, with `quantization: nf4`.",
    ),
    "model_unreadable": ("Its files are broken or incomplete.", "Fetch them again; the message names the file."),
    "model_unsupported": ("An architecture that cannot be trained here.", "The message names what is known."),
    "model_unmeasured": (
        "What it takes is not known from its config.json alone.",
        "Prepare it (any job does), or name a local folder; then its files say it.",
    ),
    "model_gone": ("Its files left the data root while the job waited.", "`eft retry` prepares them again."),
    "hub_unreachable": (
        "The hub does not answer.",
        "It is tried again. Without a network: a mirror (HF_ENDPOINT), the cache (EFT_OFFLINE), or EFT_MODEL_ROOTS.",
    ),
    "dataset_not_found": ("No such data set, or no such part of it.", "The message lists what there is."),
    "dataset_ambiguous": ("It has several parts.", "Name one, as the message says."),
    "dataset_not_cached": ("Offline, and it was never fetched.", "Let the box go online once."),
}

FAILURES: dict[str, Code] = {
    "out_of_memory": (
        "The card (or the box) has not enough memory. Half the micro-batch was tried where that helps.",
        "Lower the batch or `training.max_length`, `method: qlora`, `memory.gradient_checkpointing`, docs/memory.md.",
    ),
    "host_out_of_memory": (
        "The kernel ended it because the box ran out of memory.",
        "Fewer jobs at once on that box, or more memory; smaller batches do not help.",
    ),
    "memory_limit": (
        "A process wanted more memory than it was given.",
        "The message names the setting (EFT_PREPARE_BYTES, EFT_CPU_SLOT_BYTES); or take a smaller model.",
    ),
    "diverged": ("The loss is no number any more.", "A lower learning rate, warm-up, or bf16 instead of fp16."),
    "no_space": (
        "A disk is full.",
        "`eft delete` jobs, `eft files rm`; `eft doctor` says what is free. Jobs go on by themselves.",
    ),
    "hung": (
        "Nothing was heard of it for long; its stacks are in the log.",
        "It is tried again; report it if it returns.",
    ),
    "device_error": ("The GPU or its driver raised an error.", "`eft doctor`; the card may be in quarantine."),
    "device_missing": ("The GPU that it was given is not there.", "`eft doctor` on that box."),
    "device_refused": ("The card computes wrongly by its self-test.", "`eft doctor` shows the part; docs/hardware.md."),
    "gpus_unavailable": ("A GPU was named that this box does not have.", "The message lists those that there are."),
    "killed": ("Somebody or something killed it (SIGKILL).", "It is tried again from its checkpoint."),
    "terminated": ("Somebody ended it (SIGTERM) before it could listen.", "It is tried again."),
    "segfault": ("It crashed in native code.", "It is tried again; if it returns, report the log."),
    "bus_error": (
        "A mapped file was cut off, or /dev/shm or a disk is full.",
        "Room there; `shm_size` of a container.",
    ),
    "aborted": ("A library gave up, as GPU drivers do after a fault.", "`eft doctor`; the log has its last words."),
    "illegal_instruction": ("A library is built for another processor.", "Install its build for this one."),
    "arithmetic": ("It crashed in native arithmetic.", "It is tried again; if it returns, report the log."),
    "crashed": ("It ended with a status that nobody knows.", "The log has its last words."),
    "spawn_failed": ("The trainer could not be started.", "`eft doctor` on that box; memory and process limits."),
    "worker_lost": ("Its worker was not heard of any more.", "It goes on elsewhere, or there when it is back."),
    "worker_error": ("The worker failed around it.", "Report the worker's log."),
    "bad_order": (
        "The trainer cannot read what the worker wrote.",
        "Worker and trainer are of two versions: install anew.",
    ),
    "bad_events": (
        "The worker cannot read what the trainer wrote.",
        "Worker and trainer are of two versions: install anew.",
    ),
    "no_result": ("It ended well and left no result.", "Report the log."),
    "checkpoint_mismatch": ("The checkpoint is of another job, data or model.", "Submit the job anew."),
    "rank_died": ("One of the ranks ended without a word; the others were ended with it.", "The log has all of them."),
    "rank_lost": ("The ranks lost each other.", "It is tried again; the log says who went first."),
    "artifacts_differ": (
        "The weights that were written, read again, are not those that were trained.",
        "It is tried again from the last checkpoint; check the disk, and report it if it comes back.",
    ),
    "ranks_drifted": (
        "The ranks no longer hold the same weights.",
        "A defect or a faulty card: `eft doctor`; report it.",
    ),
    "data_root_lost": (
        "The folder of its run is gone with the data root that held it.",
        "Mount it again; it is tried again by itself.",
    ),
    "blocks_not_found": (
        "The model has no list of frozen blocks that could be streamed.",
        "Leave `memory.stream` out: docs/memory.md.",
    ),
    "blocks_shared": (
        "Blocks of the model are one module, share weights, or write to what others read.",
        "Leave `memory.stream` out: docs/memory.md.",
    ),
    "blocks_do_not_fit": (
        "The host's memory does not hold the streamed blocks.",
        "Set `memory.stream` to `disk`.",
    ),
    "more_slots_than_blocks": (
        "More slots than the model has blocks.",
        "Lower `memory.stream.slots`, or leave `memory.stream` out.",
    ),
    "slots_do_not_fit": (
        "The slots of layer streaming do not fit the card.",
        "Lower `memory.stream.slots`: docs/memory.md.",
    ),
    "pinned_memory_refused": ("The system gives no pinned memory.", "Raise RLIMIT_MEMLOCK, or set `pinned: false`."),
    "offload_does_not_fit": (
        "Host memory has no room for what `memory.offload_optimizer` moves there.",
        "Leave it out, train adapters, or give the job's slot more memory: docs/memory.md.",
    ),
    "blocks_lost": (
        "A file of streamed weights is not readable any more.",
        "Is the data root there? It is tried again.",
    ),
}

NOTICES: dict[str, Code] = {
    "columns_ignored": (
        "The file has columns that its format does not read.",
        "Nothing, if that was meant; else map them (`columns`, `--column`).",
    ),
    "template_fields": (
        "The rows have fields that not every chat template has a place for.",
        "`eft files preview` with the model says whether its template has; docs/rendering.md.",
    ),
    "label_ignored": (
        "A file of raw text has a column that looks like the answer to the text, and it is not learned.",
        "Map both: `columns: {prompt: text, completion: label}`, or `--column prompt=text --column completion=label`.",
    ),
    "bad_checkpoint": ("A checkpoint was damaged; it is put aside and the one before was taken.", "Check the disk."),
    "drift": (
        "It goes on under other versions, devices or threads: no longer to the bit.",
        "Nothing, if that was meant.",
    ),
    "precision_fallback": ("The card has no such precision.", "The run record says which was taken and why."),
    "beyond_context": ("Longer rows than the model was made for.", "Lower `training.max_length`."),
    "block_skipped": (
        "No row of a block of streamed rows had anything to learn within `max_length`.",
        "Raise `training.max_length`, or leave out rows whose prompts fill it.",
    ),
    "rows_truncated": ("Rows were longer than `max_length`.", "`training.truncation` says what becomes of them."),
    "rows_over_budget": ("Rows longer than the batch's budget have a batch of their own.", "Raise `tokens_per_batch`."),
    "pairs": (
        "Rows of prompt and completion: what training makes of them, and how to ask the tuned model.",
        "Nothing, or choose another way with `data.rendering.pairs` (docs/rendering.md).",
    ),
    "few_steps": (
        "The run has fewer than 20 optimizer steps, too few to learn much.",
        "Smaller batches or more epochs; the message names the field.",
    ),
    "long_warmup": (
        "More than half of the run's optimizer steps are warm-up.",
        "Lower `schedule.warmup_ratio`, or give the run more steps.",
    ),
    "learning_rate_of_another_method": (
        "`method: auto` comes to a method that the job's learning rate is far from.",
        "Leave `optimizer.learning_rate` out, or name the method.",
    ),
    "loss_rose": (
        "The held-out loss at the end is more than twice the one at the start.",
        "Lower `optimizer.learning_rate`.",
    ),
    "prompt_boundary": (
        "Prompt and answer share a token.",
        "Begin no answer with white space; leave `data.rendering.pairs` out.",
    ),
    "products_in_parts": (
        "Products that this card's libraries compute wrongly when they are large are made in parts.",
        "Nothing; smaller micro-batches, or bf16 where float32 is the trouble, need no parts.",
    ),
    "whole_logits": (
        "The output head has no form that the chunked loss knows: training and evaluation make the logits of a whole "
        "batch, and take more memory for it.",
        "Leave the head out of `method.target_modules`, where it has an adapter; else smaller micro-batches.",
    ),
    "activation_offloading": (
        "The job trains on a CPU, whose memory is the host's: inputs are copied for nothing.",
        "Leave `memory.activation_offloading` out there.",
    ),
    "step_skipped": ("A step in fp16 was not finite; the loss scale was lowered.", "Normal at the start; else bf16."),
    "early_stopping": ("The held-out loss no longer fell.", "What you asked for; the best weights are handed back."),
    "best_restored": ("The best step's weights are handed back.", "Nothing."),
    "best_missing": ("The best step's checkpoint is gone; the last weights are handed back.", "Raise `keep_last`."),
    "already_quantized": ("The model was packed by somebody else already.", "Nothing: it is trained on as it is."),
    "quantization_cache": ("Packed weights could not be kept or read; they are made anew.", "Check the disk."),
    "token_cache": ("Tokens could not be kept or read; they are made anew.", "Check the disk."),
    "method": ("What `method: auto` came to, and why nothing before it.", "Nothing: docs/plans.md."),
    "stream": ("How the weights come to the card, and why.", "Nothing: docs/memory.md."),
    "offload": ("On a CPU, host memory is what the job computes in: offloading saves nothing.", "Leave it out."),
}

BOX: dict[str, Code] = {
    "newer_schema": ("The database was migrated by a newer eft that this one cannot work with.", "Upgrade this box."),
    "data_root_away": ("The data root does not answer.", "Mount it, or check the bucket; jobs wait meanwhile."),
    "other_data_root": (
        "The folder or bucket belongs to another installation.",
        "EFT_DATA; `eft adopt` if it was moved.",
    ),
    "open_data_root": (
        "Other users of the box may look into the data root, and the service's user cannot change that.",
        "`chmod 700` it as its owner, or give a folder below it (EFT_DATA).",
    ),
    "half_restored": ("A restore was begun and not finished.", "Run `eft restore` again: it goes on."),
    "backup": ("The backup cannot be made or read.", "The message names the file."),
    "already_held": ("Somebody holds the GPU.", "`eft gpu list` shows who and until when."),
    "held_by_another": ("It is another person's hold.", "They or an admin release it."),
    "not_held": ("Nobody holds it.", "`eft gpu list`."),
    "ambiguous_gpu": ("Several boxes have a GPU of that number.", "Say NODE/GPU."),
    "too_many_holds": (
        "You hold as many GPUs as you may.",
        "Release one; an admin of the box may hold more (EFT_HOLD_SLOTS).",
    ),
    "bad_time": ("No time, or one in the past.", "`18:00`, `2h`, or a date with its zone."),
    "address_not_allowed": ("The webhook's address is private or loopback.", "EFT_WEBHOOK_ALLOW of the box."),
    "webhook_disabled": ("It failed for days and was switched off.", "Mend the receiver, then `eft webhooks enable`."),
    "no_secret": ("A chat line is not signed: there is no secret.", "Nothing to rotate."),
    "too_many": ("The project has as many as it may have.", "Delete one."),
}

WAITING: dict[str, Code] = {
    "turn": ("Others are before it.", "`eft queue` has the line, and an estimate."),
    "model": ("Its model is being fetched or packed.", "Nothing; `eft logs JOB` shows how far."),
    "requirements": ("No box that serves now has what it asks for.", "Ask for less, or see `eft nodes`."),
    "closed": ("GPUs that fit are held, drained, or used by others.", "`eft gpu list` says by whom and until when."),
    "quota": ("A quota of the project or of its owner is used up.", "`eft quota list`; it goes on by itself."),
    "maintenance": ("It would not end before a maintenance window.", "A shorter `resources.max_runtime_seconds`."),
    "disk": (
        "The disk, or a budget of it, is full.",
        "`eft delete` and `eft files rm` what is not needed; `eft gc` frees what the rules of retention allow.",
    ),
    "later": ("It failed a moment ago and is tried again soon.", "Nothing."),
    "no_worker": ("No worker serves.", "`eft worker list`; start one."),
}

PARTS: dict[str, tuple[str, dict[str, Code]]] = {
    "Why a job waits": ("In `queue.code` of a job; `queue.reason` has it in words.", WAITING),
    "Requests": ("Of any route of the API.", REQUESTS),
    "Keys and rights": ("Whom you are, and what you may: [security](security.md).", RIGHTS),
    "Jobs": ("Of a submit, or of what is done to a job.", JOBS),
    "Data": ("Faults of a file, with line and field: [data](data.md).", DATA),
    "Models and data sets": ("Where they come from.", MODELS),
    "Failed attempts": (
        "In a job's `failure`, with its class: `user` (change the job), `memory` (smaller), `machine` (tried again by "
        "itself), `internal` (report it).",
        FAILURES,
    ),
    "Notices": ("Events of a run that goes on: nothing failed.", NOTICES),
    "The box": ("Of its GPUs, its data root, its database, its webhooks.", BOX),
}


def page() -> str:
    """docs/troubleshooting.md."""
    lines = [
        "# Troubleshooting by error code",
        "",
        "Generated from `core/error_codes.py` by `make docs`. An error of the API is",
        '`{"error": {"code", "message", "field", "faults", "request_id"}}`; a failed job has',
        "`failure: {class, code, message, field}`; `eft` prints the same words. The message is made for the case",
        "at hand and says more than this page.",
        "",
        "First of all: `eft show JOB` (why it waits, why it failed), `eft logs JOB`, and on the box `eft doctor`.",
    ]
    for title, (words, codes) in PARTS.items():
        lines += ["", f"## {title}", "", words, "", "| code | what it means | what helps |", "|---|---|---|"]
        lines += [f"| `{code}` | {_cell(means)} | {_cell(helps)} |" for code, (means, helps) in codes.items()]
    return "\n".join(lines) + "\n"


def _cell(words: str) -> str:
    """Pages beside this one are links."""
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](\1.md)", words)
