"""Checkpoints of the Hugging Face Hub: from its cache, or downloaded into it."""

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
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]  # weights in other formats can hold programs
DUPLICATE_WEIGHTS = ["consolidated*", "original/*"]  # the same weights again, in a form of the authors' own
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Files that decide how texts are read and where answers end; a repository may lack some of them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def is_hub_id(name: str) -> bool:
    """Tells whether a name is an id of the Hub, ORG/NAME[@REVISION], and no directory here."""
    return ID.fullmatch(name) is not None and not Path(name).exists()


def local_directory(name: str, weights: bool = True) -> Path:
    """Returns the directory of a model, downloading what the cache of the Hub lacks of it.

    `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` count as everywhere
    (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables). Several processes may call
    this at the same time: the first downloads a file, the others wait for it.

    Args:
        name: a directory, which is returned as it is, or ORG/NAME[@REVISION].
        weights: False: without weights, for the shape and the tokenizer alone.

    Raises:
        ValueError: files are missing and cannot be downloaded; the message names them.
    """
    if not is_hub_id(name):
        return Path(name)
    from huggingface_hub import constants, hf_hub_download, snapshot_download  # a second, which directories do not pay
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
    except (OSError, ValueError) as error:  # not one file is in the cache, or some are missing of those listed there
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
        for file in unknown_files(repository, path) if weights else ():  # older clients keep no list of what there is
            with suppress(RemoteEntryNotFoundError):  # which they do keep
                hf_hub_download(repository, file, revision=revision)
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is for those who agreed to its terms: do so at {constants.ENDPOINT}/{repository}, and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{name}: {repository} has no revision {revision} at {constants.ENDPOINT}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{name} is not a directory here, nor a model at {constants.ENDPOINT} that this user may read (HF_TOKEN)"
        ) from error
    except (OSError, HfHubHTTPError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{where}, and {constants.ENDPOINT} cannot be reached ({why}): download it where there is a network, or "
            f"{instead}"
        ) from error
    if missing := missing_files(path, weights):
        raise ValueError(f"{name} at {constants.ENDPOINT} has no {_summarize(missing)}: safetensors alone are read")
    return path


def resolve_hub_models(config: Config) -> None:
    """Puts directories in place of models of the Hugging Face Hub, which are downloaded where the cache lacks them.

    Raises:
        ValueError: one cannot be had.
    """
    for model in (config.model, config.speculation.model):
        if model.path is not None:
            model.path = str(local_directory(model.path, weights=model.load == "checkpoint"))


def missing_files(path: Path, weights: bool = True) -> list[str]:
    """Lists the files that a directory lacks to be a checkpoint, weights among them where they are wanted."""
    wanted = ["config.json"]
    if weights and (path / INDEX).exists():
        listed = {*json.loads((path / INDEX).read_text(encoding="utf-8")).get("weight_map", {}).values()}
        wanted += [SINGLE] if (path / SINGLE).exists() and SINGLE not in listed else sorted(listed)
    elif weights:
        wanted.append(SINGLE)
    return [name for name in wanted if not (path / name).exists()]


def unknown_files(repository: str, path: Path) -> list[str]:
    """Lists the files of texts that a snapshot lacks while nothing says that its repository has none of them.

    A cache into which single files were downloaded looks like one of a repository that has no others.
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
