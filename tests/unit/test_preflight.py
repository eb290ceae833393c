"""Everything that can be wrong with a config is said before anything starts, alike on every rank."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comm.loopback import LoopbackWorld
from helix.attention.policies import make_policy
from helix.config import AttentionConfig, Config, KVConfig
from helix.errors import ConfigError
from helix.kv_placement import KVPlacement
from helix.layout import HelixLayout
from helix.tokenizer import load_tokenizer
from kernels.sparse.select_blocks import MAX_PAGES
from launch.inputs import preflight as checked
from launch.inputs.compose import RUN
from launch.job import spawn
from launch.run import main
from tests.benchmark_config import compose_config, preflight
from tests.e2e import mtp
from tests.e2e.checkpoints import DEMO, checkpoint

DP = "layout.mode=dp layout.kvp=1 layout.dp=2"
HOST = "kv.offload=host kv.offload_host_bytes=1e9"
SPARSE = "attention=block_sparse"
SHAPES = [name for name in RUN.groups["model"] if name != "demo"]
NO_WEIGHTS = r"set model\.path=DIR .* or model\.load=random for random weights"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3]}\n')
    return path


def plan(prompts: Path, overrides: str = "", family: str = "qwen3", world: int = 2) -> Config:
    """The config of a run over two KV ranks that passes; `qwen3` has 12 query and 6 KV heads, and no tokenizer."""
    model = mtp.with_layer(family[4:]) if family.startswith("mtp ") else checkpoint(family)
    given = [f"model.path={model}", f"decode.prompts={prompts}", "layout.kvp=2", *overrides.split()]
    config = compose_config(*given)
    preflight(config, world)
    return config


@pytest.mark.parametrize("name", SHAPES[::12])
def test_a_shape_has_no_weights_until_somebody_says_which(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a"}\n')  # for which it has no tokenizer, either
    for wanted in ("bench=decode", f"decode.prompts={text}"):
        with pytest.raises(ValueError, match=NO_WEIGHTS):
            preflight(compose_config(f"model={name}", wanted), 1)
    assert preflight(compose_config(f"model={name}", "model.load=random", "bench=decode"), 1).checkpoint is None


@pytest.mark.parametrize(
    "family, overrides, world",
    [
        ("qwen3", "layout.tpa=3", 6),
        ("qwen3", DP, 2),
        ("qwen3", "speculation=ngram bench.acceptance=0.8 bench=decode", 2),
        ("qwen3", "comm=emulated bench=decode layout.tpa=3", 2),
        ("qwen3", "comm=emulated bench=decode", 1),
        ("mixtral", "layout.tpa=4 layout.ep=4", 8),
        ("qwen3", f"{SPARSE} speculation=ngram speculation.gamma=31", 2),
        ("qwen3", "attention=quest attention.choice=global layout.tpa=3", 6),
        ("qwen3", "speculation=sparse speculation.policy=c2q layout.mode=medha", 2),
        ("qwen3", f"{SPARSE} {HOST} kv.dtype=fp8", 2),
        ("qwen3", f"{SPARSE} {HOST} kv.dtype=k16v8", 2),
        ("deepseek-v3-yarn", "kv.dtype=fp8", 2),
        ("glm-5", "kv.dtype=fp8_all", 2),
    ],
)
def test_good_plans(family: str, overrides: str, world: int, prompts: Path) -> None:
    config = plan(prompts, overrides, family, world)
    assert f"kv.dtype={config.kv.dtype}" in overrides or config.kv.dtype == "auto"


def test_random_weights_need_the_config_alone(prompts: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    (model / "model.safetensors").unlink()
    given = f"model.path={model}", f"decode.prompts={prompts}"
    with pytest.raises(ValueError, match="has no weights"):
        preflight(compose_config(*given), 1)
    preflight(compose_config(*given, "model.load=random"), 1)


def test_other_tokenizers_are_named_and_token_ids_work(prompts: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    (model / "tiktoken.model").write_text("IQ== 0")
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r'no tokenizer\.json \(tiktoken\.model cannot be read\): use "prompt_ids"'):
        preflight(compose_config(f"model.path={model}", f"decode.prompts={text}"), 1)
    preflight(compose_config(f"model.path={model}", f"decode.prompts={prompts}"), 1)


@pytest.mark.parametrize("key", ["decode.output", "record"])
def test_outputs_are_rank_0s_to_check(key: str, prompts: Path, tmp_path: Path) -> None:
    config = compose_config(
        f"model.path={checkpoint('qwen3')}", f"decode.prompts={prompts}", f"{key}={tmp_path}/no/file"
    )
    with pytest.raises(ValueError, match=f"{key}=.*cannot be written"):
        preflight(config, 1)
    preflight(config, 1, writes=False)


@pytest.mark.parametrize(
    "file, content, error",
    [
        ("tokenizer.json", "{}", "the tokenizer in .*demo cannot be read: "),
        ("tokenizer_config.json", '{"added_tokens_decoder": 5}', "tokenizer in .* cannot be read: AttributeError: "),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, file: str, content: str, error: str) -> None:
    demo = shutil.copytree(DEMO, tmp_path / "demo")
    (demo / file).write_text(content)
    with pytest.raises(ValueError, match=error) as caught:
        load_tokenizer(demo)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


class Panic(BaseException):
    """What tokenizers raise of a file that they did not expect is none of Exception."""


@pytest.mark.parametrize("kind", [Exception, Panic])
def test_whatever_a_tokenizer_file_raises_is_one_line(kind: type[BaseException], monkeypatch: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise kind("data did not match\nat line 1")

    monkeypatch.setattr("helix.tokenizer.Tokenizer", broken)
    with pytest.raises(ValueError, match=f"tokenizer in {DEMO} cannot be read: {kind.__name__}: data") as caught:
        load_tokenizer(DEMO)
    assert "\n" not in str(caught.value)


def test_as_many_ranks_are_started_as_the_layout_has(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(spawn, "launch", lambda count, *_: started.append(count) or 0)
    assert main([f"model.path={checkpoint('qwen3')}", f"decode.prompts={prompts}", "layout.kvp=2"]) == 0
    assert started == [2]


@pytest.mark.parametrize(
    "more, error",
    [
        (
            "kv.prefix_host_bytes=6e9",
            r"kv.prefix_host_bytes=6e\+09 is per rank, 12.0 GB of memory .* 10.0 GB: .* 5e\+09",
        ),
        ("kv.prefix_host_bytes=4e9", None),
        (f"{HOST} kv.offload_host_bytes=7e9 {SPARSE}", r"kv.offload_host_bytes=7e\+09 .* 14.0 GB of memory for the 2"),
        ("kv.prefix_host_bytes=1e9 kv.prefix_disk_bytes=2e9", r"kv.prefix_disk_bytes=2e\+09 .* 4.0 GB of disk space"),
        ("kv.prefix_host_bytes=1e9 kv.prefix_disk_bytes=1.5e9", None),  # with what its files have already
    ],
)
def test_what_the_host_does_not_have(
    more: str, error: str | None, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "available_memory", lambda: 10_000_000_000)
    monkeypatch.setattr(checked.shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000_000 - 4096))
    (tmp_path / "model" / "rank").mkdir(parents=True)
    (tmp_path / "model" / "rank" / "0.seg").write_bytes(bytes(4096))
    config = plan(prompts, more + (f" kv.prefix_dir={tmp_path}" if "disk" in more else ""))
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        checked.check_host(config, 2)


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_is_sent_where_it_belongs(flag: str, monkeypatch: Any, capsys: Any) -> None:
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in (ranks | {"MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    assert main([flag, "layout.kvp=1,2"]) == 1
    error = capsys.readouterr().err
    assert "-m under torchrun would run the whole sweep on every rank; run `helix run layout.kvp=1,2 -m`" in error


@pytest.mark.parametrize(
    "overrides, blocks",
    [
        ("", (16, 64)),
        ("attention=quest", (16, 16)),
        (f"{SPARSE} attention.block=64 kv.page_size=64", (64, 64)),
        (f"kv.append_block=32 {SPARSE}", (32, 128)),
        ("speculation=sparse", (64, 64)),
        ("speculation=sparse kv.append_block=32 kv.page_size=16", (32, 16)),
    ],
)
def test_sizes_of_blocks_and_pages(overrides: str, blocks: tuple[int, int], prompts: Path) -> None:
    config = plan(prompts, overrides)
    assert config.blocks == blocks and config.speculation.policy == "any"


def test_more_pages_than_a_rank_chooses_among() -> None:
    layout = HelixLayout.create("helix", 2)
    config = AttentionConfig(policy="block_sparse")
    comm = LoopbackWorld(2).communicator(0, layout.kvp_group(0))
    max_length = 2 * MAX_PAGES
    assert make_policy(config, KVPlacement(layout, 0, 1, 1), max_length, comm, KVConfig()) is not None
    with pytest.raises(ConfigError, match=r"524288 pages per sequence.* 1048577 tokens .*set kv\.page_size=2 or more"):
        make_policy(config, KVPlacement(layout, 0, 1, 1), max_length + 1, comm, KVConfig())
