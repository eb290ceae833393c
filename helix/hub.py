"""Finds checkpoints of the Hugging Face Hub in its cache, or downloads them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from helix.config import Config

ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")  # ORG/NAME[@REVISION]
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]  # weights in other formats can contain code
DUPLICATE_WEIGHTS = ["consolidated*", "original/*"]  # the same weights in the authors' format
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# They decide how text is tokenized and where answers end; a repository may lack some of them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def is_hub_id(name: str) -> bool:
    """Returns whether a name is a Hub id, ORG/NAME[@REVISION], and not a local directory."""
    return ID.fullmatch(name) is not None and not Path(name).exists()


def local_directory(name: str, weights: bool = True) -> Path:
    """Returns a model's directory, and downloads the files that the Hub cache lacks.

    Respects `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT`
    (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables). Several processes may call
    this at the same time: the first downloads a file, the others wait for it.

    Args:
        name: a directory, returned as it is, or ORG/NAME[@REVISION].
        weights: False: only the config and the tokenizer.

    Raises:
        ValueError: files are missing and cannot be downloaded; the message names them.
    """
    if not is_hub_id(name):
        return Path(name)
    from huggingface_hub import constants, hf_hub_download, snapshot_download  # takes 1 s, so only for Hub ids
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    parts = ID.fullmatch(name)
    assert parts is not None, "is_hub_id looked"
    repository, revision = parts.groups()
    wanted: dict[str, Any] = {"revision": revision, "ignore_patterns": DUPLICATE_WEIGHTS}
    wanted["allow_patterns"] = FILES if weights else FILES[1:]
    missing, instead = ["config.json"], "set model.path=DIR"
    try:
        path = Path(snapshot_download(repository, **wanted, local_files_only=True))
        if not (missing := missing_files(path, weights)):
            instead = f"set model.path={path} to run it without"
            if not weights or not (missing := unknown_files(repository, path)):
                return path
    except (OSError, ValueError) as error:  # the cache has no file, or lacks some that it lists
        if (found := getattr(error, "snapshot_path", None)) is not None:
            path = Path(found)
            listed = json.loads((path.parents[1] / "trees" / f"{path.name}.json").read_text(encoding="utf-8"))["files"]
            names = [n for n in listed if "/" not in n and any(map(partial(fnmatchcase, n), FILES[1:]))]
            missing = missing_files(path, weights) or [n for n in names if not (path / n).exists()]
    where = f"{constants.HF_HUB_CACHE} lacks {_summarize(missing)} of {name}"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{where}, and HF_HUB_OFFLINE=1 forbids downloads: unset it, or {instead}")
    try:
        path = Path(snapshot_download(repository, **wanted))
        for file in unknown_files(repository, path) if weights else ():  # older clients do not list the repository
            with suppress(RemoteEntryNotFoundError):  # the client caches that the file does not exist
                hf_hub_download(repository, file, revision=revision)
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{repository}, and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{name}: {repository} has no revision {revision} at {constants.ENDPOINT}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{name} is neither a local directory nor a model at {constants.ENDPOINT} that HF_TOKEN gives access to"
        ) from error
    except (OSError, HfHubHTTPError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{where}, and {constants.ENDPOINT} cannot be reached ({why}): download it on a host with network access, "
            f"or {instead}"
        ) from error
    if missing := missing_files(path, weights):
        raise ValueError(f"{name} at {constants.ENDPOINT} has no {_summarize(missing)}: only safetensors are supported")
    return path


def resolve_hub_models(config: Config) -> None:
    """Replaces Hub ids in the config by local directories, and downloads what the cache lacks.

    Raises:
        ValueError: a model cannot be downloaded.
    """
    for model in (config.model, config.speculation.model):
        if model.path is not None:
            model.path = str(local_directory(model.path, weights=model.load == "checkpoint"))


def missing_files(path: Path, weights: bool = True) -> list[str]:
    """Lists the files that a directory lacks to be a checkpoint."""
    wanted = ["config.json"]
    if weights and (path / INDEX).exists():
        listed = {*json.loads((path / INDEX).read_text(encoding="utf-8")).get("weight_map", {}).values()}
        wanted += [SINGLE] if (path / SINGLE).exists() and SINGLE not in listed else sorted(listed)
    elif weights:
        wanted.append(SINGLE)
    return [name for name in wanted if not (path / name).exists()]


def unknown_files(repository: str, path: Path) -> list[str]:
    """Lists the tokenizer files that a snapshot lacks although its repository may have them.

    If only single files were downloaded, the cache does not say whether the repository has others.
    """
    from huggingface_hub import try_to_load_from_cache

    if (path.parents[1] / "trees" / f"{path.name}.json").exists() or (path / ".gitattributes").exists():
        return []  # the whole repository was listed, or downloaded
    missing = [n for n in TOKENIZER_FILES if try_to_load_from_cache(repository, n, revision=path.name) is None]
    if "tokenizer_config.json" not in missing and TOKENIZER_FILES[3] in missing:
        found = path / "tokenizer_config.json"
        if found.exists() and "chat_template" in json.loads(found.read_text(encoding="utf-8")):
            missing.remove(TOKENIZER_FILES[3])
    return missing


def _summarize(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more files" if more > 0 else "")
