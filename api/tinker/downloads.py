"""Files of saved weights that leave the box: as a tar, or one by one, encrypted where the caller asked for it.

A link carries its own permission, since clients fetch it without a key: what it is of and until when it holds, signed
with a secret of the data root.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import tarfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from api.tinker import door
from api.tinker.door import Door
from core.base.files import write_private
from core.db.tables import SessionSave
from core.errors import NotFound, SpecError
from core.jobs.lifecycle.sessions.records import FoundSession
from core.storage.layout import Layout

LINK_SECONDS = 3600.0
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What is given away: the adapter as PEFT writes it, without the state of its optimizer."""
ARCHIVE = "archive.tar"
ENCRYPTED = ".age"
GIVEN = "given"
"""Folder within that of saved weights: what is made of them for those who fetch it. It goes with them."""
_SECRET = "links.secret"  # noqa: S105 -- the name of its file


def recipients(texts: Sequence[str]) -> list[Any]:
    """Keys of age: `age1…` or `ssh-…`. Raises SpecError."""
    if not texts:
        return []
    import pyrage  # a library of its own, for those who ask for encryption

    found = []
    for at, text in enumerate(texts):
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            found.append(kind.Recipient.from_str(text.strip()))
        except pyrage.RecipientError as error:
            words = f"`{text[:80]}` is not a public key of age (`age1…` or `ssh-…`): {error}"
            raise SpecError(words, field=f"age_encryption_recipients.{at}", code="invalid_value") from error
    return found


def size(of: Door, row: SessionSave) -> int:
    """Bytes of the files that are given away, before encryption."""
    folder = of.folder(row.session_id, row.folder)
    return sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS))


def files(of: Door, found: FoundSession, row: SessionSave) -> list[str]:
    """Names of the files of saved weights, made ready to be fetched."""
    folder = of.folder(row.session_id, row.folder)
    keys, config = recipients(row.recipients or []), _config(found, folder)
    if not keys:
        _made(folder, CONFIG, lambda path: path.write_bytes(config))
        return [CONFIG, WEIGHTS]
    import pyrage

    _made(folder, CONFIG + ENCRYPTED, lambda path: path.write_bytes(pyrage.encrypt(config, keys)))
    _made(folder, WEIGHTS + ENCRYPTED, lambda path: pyrage.encrypt_file(str(folder / WEIGHTS), str(path), keys))
    return [CONFIG + ENCRYPTED, WEIGHTS + ENCRYPTED]


def archive(of: Door, found: FoundSession, row: SessionSave) -> str:
    """The name of one file that has all of them. SpecError for weights that are only given away encrypted."""
    if row.recipients:
        words = "these weights are given away encrypted, file by file: ask for `external_weights_urls`"
        raise SpecError(words, field="path", code="invalid_value")
    folder = of.folder(row.session_id, row.folder)
    config = _config(found, folder)

    def write(path: Path) -> None:
        with tarfile.open(path, "w") as tar:
            about = tarfile.TarInfo(CONFIG)
            about.size, about.mode = len(config), 0o600
            tar.addfile(about, BytesIO(config))
            tar.add(folder / WEIGHTS, WEIGHTS, filter=_nobodys)

    _made(folder, ARCHIVE, write)
    return ARCHIVE


def link(of: Door, base: str, row: SessionSave, name: str) -> tuple[str, float]:
    """An address from which a file can be fetched without a key, and the time at which it ends."""
    until = time.time() + LINK_SECONDS
    told = json.dumps([row.session_id, row.folder, name, int(until)]).encode()
    token = base64.urlsafe_b64encode(told + _signed(of.app.layout, told)).decode().rstrip("=")
    return f"{base.rstrip('/')}/downloads/{token}/{name}", until


def fetched(layout: Layout, token: str, name: str) -> Path:
    """The file of a link. Raises NotFound for one that was not given, has ended, or whose file has gone."""
    gone = NotFound("this link is not valid, or has ended: ask for a new one", field="token")
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        raise gone from None
    told, signature = raw[:-32], raw[-32:]
    if not hmac.compare_digest(signature, _signed(layout, told)):
        raise gone
    session_id, folder, file, until = json.loads(told)
    saved = layout.saved(session_id, folder)
    path: Path = saved / file if file == WEIGHTS else saved / GIVEN / file
    if file != name or until < time.time() or not path.is_file():
        raise gone
    return path


def _config(found: FoundSession, folder: Path) -> bytes:
    """PEFT's description of the adapter, with the name of its base in the place of a folder of this box."""
    told = json.loads((folder / CONFIG).read_bytes())
    return json.dumps(told | {"base_model_name_or_path": door.base_model(found)}, indent=1).encode()


def _made(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Let a file be there, whole."""
    target = folder / GIVEN / name
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f"new-{secrets.token_hex(8)}")
    try:
        write(aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _nobodys(about: tarfile.TarInfo) -> tarfile.TarInfo:
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    about.mode = 0o600
    return about


def _signed(layout: Layout, told: bytes) -> bytes:
    return hmac.digest(_secret(layout), b"eft link" + told, hashlib.sha256)


def _secret(layout: Layout) -> bytes:
    """The secret of this data root, made once: all processes of the API have the same."""
    path = layout.root / _SECRET
    if not path.exists():
        aside = path.with_name(f"{_SECRET}-{secrets.token_hex(8)}")
        write_private(aside, secrets.token_bytes(32))
        try:
            os.link(aside, path)  # the first one stays
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return path.read_bytes()
