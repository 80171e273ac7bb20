"""Models on the Hugging Face hub (extra `hub`): download by name, upload with a card."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opencon.errors import MissingExtraError, RunError

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name; neither begins with a dot, as ./photos and ../photos do
FILES = ["*.json", "*.safetensors", "README.md"]  # all that a model is made of; nothing else is fetched


def download(source: str | Path, settings: str) -> Path:
    """The folder of a model: `source` itself; or, where there is no such folder, a download from the hub.

    Args:
        source: a folder, or "owner/name".
        settings: name of the file that every model has.
    """
    folder = Path(source).expanduser()
    if folder.exists() or isinstance(source, Path) or not NAME.fullmatch(source):
        return folder
    hub = _hub(f"there is no folder {source!r}, and fetching a model of that name from the hub")
    try:
        fetched = Path(hub.snapshot_download(source, allow_patterns=FILES))
    except Exception as err:  # no network, no such name, no permission: each has an error of its own
        raise RunError(f"{source!r} is no folder here, and the hub does not have it either ({_reason(err)}).") from err
    if not (fetched / settings).is_file():
        raise RunError(f"{source!r} on the hub holds no model of opencon (no {settings}).")
    return fetched


def upload(repo: str, save: Callable[[Path], None], *, private: bool) -> str:
    """Upload what `save` writes into a folder. Returns the address."""
    if not NAME.fullmatch(repo):
        raise RunError(f"{repo!r} is no name on the hub. Give one of the form owner/name.")
    hub = _hub("uploading to the hub")
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        try:
            hub.create_repo(repo, private=private, exist_ok=True)
            return str(hub.upload_folder(repo_id=repo, folder_path=folder))
        except Exception as err:
            why = _reason(err)
            raise RunError(
                f"{repo!r} cannot be uploaded to the hub ({why}). Look at the network, and log in with `hf auth login`."
            ) from err


def _reason(err: Exception) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return next(iter(str(err).splitlines()), type(err).__name__)


def _hub(why: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as err:
        raise MissingExtraError("huggingface_hub", "hub", why, err) from err
    return huggingface_hub
