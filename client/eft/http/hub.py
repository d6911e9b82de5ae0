"""A local folder as a model repository of the Hugging Face hub, by huggingface_hub and the user's own token."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from eft.errors import ApiError, ConfigError, LocalError, Unreachable, UsageFault

REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where the files are now."""

    repo: str
    url: str
    """Address of the commit."""
    commit: str


class HubRepository:
    """A model repository to push to. The token comes from `HF_TOKEN` or `hf auth login`; it goes to the hub alone and
    is stored nowhere."""

    def __init__(self, repo: str) -> None:
        """Raises UsageFault for a bad id, or without huggingface_hub; ConfigError without a token or offline."""
        try:
            from huggingface_hub import HfApi, constants, get_token
        except ImportError as error:
            words = f"a push needs huggingface_hub ({error}): pip install huggingface_hub, where eft is installed"
            raise UsageFault(f"{words} (by pipx: pipx inject eft huggingface_hub)") from error
        if constants.HF_HUB_OFFLINE:
            raise ConfigError("HF_HUB_OFFLINE is set: unset it to push")
        if REPOSITORY.fullmatch(repo) is None:
            raise UsageFault(f"{repo!r} is not an id of a repository: OWNER/NAME", field="OWNER/NAME")
        token = get_token()
        if token is None:
            raise ConfigError("no token of the hub: set HF_TOKEN, or run `hf auth login`; it needs the right to write")
        self.repo, self._api = repo, HfApi(token=token)

    def create(self, *, public: bool) -> None:
        """Create the repository unless it is there; one that is there keeps its visibility."""
        with self._told():
            self._api.create_repo(self.repo, private=not public, exist_ok=True)

    def push(self, folder: Path, *, revision: str | None, message: str, progress: bool) -> Pushed:
        """Upload the files of `folder` as one commit: all of them are there, or none. Files that the hub has are not
        sent again. `revision`: a branch, created if it is missing; default: main."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not progress:
            disable_progress_bars()
        with self._told():
            if revision is not None:
                self._api.create_branch(self.repo, branch=revision, exist_ok=True)
            commit = self._api.upload_folder(
                repo_id=self.repo, folder_path=folder, revision=revision, commit_message=message
            )
        return Pushed(self.repo, str(commit.commit_url), str(commit.oid))

    @contextmanager
    def _told(self) -> Generator[None, None, None]:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except HfHubHTTPError as error:
            status = error.response.status_code
            words = error.server_message or f"HTTP {status}"
            if status in (401, 403):
                words += f"; the token must have the right to write to {self.repo}"
            raise ApiError(f"the hub refused {self.repo}: {words}", status=status, code="hub") from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: a transfer of a file that broke off
            raise Unreachable(f"the hub ({self._api.endpoint}) did not take it: {error}; push again") from error
        except OSError as error:
            if error.filename is not None:  # a file of this machine
                raise
            # What hf_xet says of its transfers. A mirror may know only Git LFS.
            words = f"the hub ({self._api.endpoint}) did not take it: {error}; push again, with HF_HUB_DISABLE_XET=1"
            raise Unreachable(f"{words} if it is a mirror without Xet") from error
        except ValueError as error:  # the id of the repository, or metadata of the model card
            raise LocalError(f"{self.repo} cannot be pushed: {error}") from error
