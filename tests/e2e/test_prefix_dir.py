"""Prefixes on disk outlive the ranks, and whatever happens to the files, tokens stay the same."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import cache
from launch.llm import LLM
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.e2e.command_line import as_copies
from tests.e2e.test_llm import ranks

SLOW = pytest.mark.slow
PROMPT = [(7 * i + i // 90) % 250 + 1 for i in range(2200)]


@pytest.fixture(scope="module", autouse=True)
def copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        as_copies(patch)
        yield


def started(folder: Path, *more: str, model: Path = DEMO) -> LLM:
    settings = "kv.tokens=8192", "kv.prefix_host_bytes=3e7", f"kv.prefix_dir={folder}", "kv.prefix_disk_bytes=6e7"
    return LLM(model, kvp=2, overrides=[*settings, *more])


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[tuple[int, ...], int]:
    """Returns tokens, and how many of the prompt's were cached."""
    (found,) = llm.generate([tuple(prompt)], max_tokens=8)
    return found.token_ids, found.cached_tokens


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A directory with the prefix of PROMPT, and the tokens that follow."""
    folder = tmp_path_factory.mktemp("written") / "prefixes"
    with started(folder) as llm:
        tokens, cached = answer(llm)
    assert cached == 0
    return folder, tokens


def rank_dirs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*-r*"))


def flip_payloads(folder: Path) -> None:
    """Flips a bit in each MiB of one rank's files, but not in headers that a scan reads."""
    for file in rank_dirs(folder)[1].glob("*.seg"):
        with file.open("r+b") as stream:
            for at in range(4096 * 3 + 5, file.stat().st_size, 4096 * 3):
                stream.seek(at)
                byte = stream.read(1)
                stream.seek(at)
                stream.write(bytes([byte[0] ^ 16]))


def lose_a_rank(folder: Path) -> None:
    shutil.rmtree(rank_dirs(folder)[1])


def swap_ranks(folder: Path) -> None:
    first, second = rank_dirs(folder)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def test_a_restarted_job_finds_them(
    written: tuple[Path, tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "prefixes"
    shutil.copytree(written[0], folder)
    with started(folder) as llm:
        cache.main(["clear", str(folder)])
        assert capsys.readouterr().out.endswith("GB, in use\n")
        with pytest.raises(RuntimeError, match=r"rank 0 cannot use kv.prefix_dir=.*another process uses it"):
            started(folder)
        tokens, cached = answer(llm)
        assert tokens == written[1] and cached >= len(PROMPT) - 64 * 2
        cached = answer(llm, [250, *PROMPT[1:]])[1]
        assert cached == 0, "another first token"
    assert oct(folder.stat().st_mode)[-3:] == "700"
    cache.main(["list", str(folder)])
    assert re.fullmatch(
        rf"[0-9a-f]{{16}}  {DEMO}, helix 2x1, kv.dtype=auto, kv.append_block=16, kv.page_size=64: \d.\d\d GB\n",
        capsys.readouterr().out,
    )
    cache.main(["clear", str(folder)])
    assert capsys.readouterr().out.endswith("GB, deleted\n") and not [*folder.iterdir()]


@pytest.mark.parametrize("content", ["{}", '{"kv": [1], "layout": {}, "path": null}'])
def test_directories_of_others_are_left_alone(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rank := tmp_path / "theirs" / "0").mkdir(parents=True)
    (rank / "lock").touch()
    (tmp_path / "theirs" / cache.DESCRIPTION).write_text(content)
    for what in ("list", "clear"):
        with pytest.raises(SystemExit, match=r"error: .*theirs/identity\.json does not describe prefixes: move "):
            cache.main([what, str(tmp_path)])
    assert (rank / "lock").exists()


@pytest.mark.parametrize("family", ["qwen3-next", pytest.param("gpt-oss", marks=SLOW)])
def test_states_and_windows_outlive_a_restart(family: str, tmp_path: Path) -> None:
    """Their snapshots are found with the prefix; without them all of it is computed again."""
    prompt, found = [token % 90 + 1 for token in PROMPT[:400]], []
    for _ in range(2):
        with started(tmp_path / "prefixes", model=checkpoint(family)) as llm:
            found.append(answer(llm, prompt))
    (tokens, cached), (again, later) = found
    assert len(tokens) == 8 and tokens == again and (cached, later) == (0, 3 * 128)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 150 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_is_a_miss(small_disk: Path, written: tuple[Path, tuple[int, ...]]) -> None:
    folder, other = small_disk / "prefixes", small_disk / "other"
    with started(folder) as llm:
        other.write_bytes(bytes(shutil.disk_usage(small_disk).free - (3 << 20)))
        assert answer(llm)[0] == written[1] == answer(llm)[0]
    with pytest.raises(ValueError, match=r"this host, which has 0.0 GB: set at most"):
        started(folder)
    other.unlink()
    with started(folder) as llm:
        assert answer(llm) == (written[1], 0)


@pytest.mark.parametrize("damage", [flip_payloads, *(pytest.param(f, marks=SLOW) for f in (lose_a_rank, swap_ranks))])
def test_damage_is_a_miss(
    written: tuple[Path, tuple[int, ...]], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "prefixes"
    shutil.copytree(written[0], folder)
    damage(folder)
    with started(folder) as llm:
        tokens, cached = answer(llm)
        assert tokens == written[1] and cached < len(PROMPT) // 2


def nudged(to: Path) -> Path:
    """Another checkpoint of equal shapes."""
    shutil.copytree(DEMO, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: (tensor * torch.tensor(1.01)).to(tensor.dtype) for name, tensor in tensors.items()}, file)
    return to


@pytest.mark.parametrize(
    "change",
    [
        "model.config.rope_theta=20000",
        *(pytest.param(c, marks=SLOW) for c in ("kv.dtype=fp8", "kv.page_size=32", "layout.tpa=2", "weights")),
    ],
)
def test_other_settings_find_none(written: tuple[Path, tuple[int, ...]], tmp_path: Path, change: str) -> None:
    model = nudged(tmp_path / "model") if change == "weights" else DEMO
    with started(written[0], *([] if change == "weights" else [change]), model=model) as llm:
        assert answer(llm)[1] == 0


@pytest.mark.slow
def test_a_job_that_is_killed_while_it_writes(tmp_path: Path, written: tuple[Path, tuple[int, ...]]) -> None:
    folder = tmp_path / "prefixes"
    for victim in (0, 1):
        llm = started(folder)
        try:
            stream = llm.stream(tuple(PROMPT), max_tokens=200)
            next(iter(stream))  # the prompt has been read, and is being written
            os.kill(ranks()[victim], signal.SIGKILL)
        finally:
            llm.close()
        with started(folder) as llm:
            assert answer(llm)[0] == written[1]
