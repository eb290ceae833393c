"""Everything that can be wrong with a config is said before anything starts, alike on every rank."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from comm.loopback import LoopbackWorld
from helix.attention.policies import make_policy
from helix.config import AttentionConfig, Config, KVConfig
from helix.errors import ConfigError
from helix.layout import HelixLayout
from helix.placement import Placement
from helix.setup.drafts import check_tokenizers
from helix.tokenizer import load_tokenizer
from kernels.sparse.select_blocks import MOST_PAGES
from launch.inputs.compose import RUN
from launch.job import spawn
from launch.run import main
from tests.e2e import mtp
from tests.e2e.checkpoints import DEMO, checkpoint
from tests.laboratory import composed, preflight


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("qwen3"), tmp_path / "model")  # heads 12/6, no tokenizer


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_ids": [1, 2, 3]}\n')
    return path


def plan(model: Path, prompts: Path, *overrides: str, world: int = 2) -> Config:
    config = composed(f"model.path={model}", f"decode.prompts={prompts}", "layout.kvp=2", *overrides)
    preflight(config, world)
    return config


def problem(model: Path, prompts: Path, *overrides: str, world: int = 2) -> str:
    with pytest.raises(ValueError) as caught:
        preflight(composed(f"model.path={model}", f"decode.prompts={prompts}", "layout.kvp=2", *overrides), world)
    return str(caught.value)


DP = "layout.mode=dp", "layout.kvp=1", "layout.dp=2"
SHAPES = [name for name in RUN.groups["model"] if name != "demo"]


NO_WEIGHTS = r"set model\.path=DIR .* or model\.load=random for random weights"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_no_weights_until_somebody_says_which(name: str) -> None:
    with pytest.raises(ValueError, match=NO_WEIGHTS):
        preflight(composed(f"model={name}", "bench=decode"), 1)
    assert preflight(composed(f"model={name}", "model.load=random", "bench=decode"), 1).checkpoint is None


def test_a_shape_has_no_weights_before_its_prompts(tmp_path: Path) -> None:
    """Whose text it has no tokenizer for."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=NO_WEIGHTS):
        preflight(composed(f"model={SHAPES[0]}", f"decode.prompts={text}"), 1)


def test_a_good_plan(model: Path, prompts: Path) -> None:
    plan(model, prompts, "layout.tpa=3", world=6)
    plan(model, prompts, *DP)
    plan(model, prompts, "speculation=ngram", "bench.acceptance=0.8", "bench=decode")
    plan(model, prompts, "comm=emulated", "bench=decode", "layout.tpa=3")
    plan(model, prompts, "comm=emulated", "bench=decode", world=1)


@pytest.mark.parametrize(
    "overrides, world, words",
    [
        ((), 3, ["layout.kvp*tpa = 2*1 = 2 ranks", "3 were started", "--nproc-per-node=2"]),
        (("layout.tpa=4",), 8, ["layout.tpa=4", "12 query and 6 KV heads", "kvp=8 tpa=1", "kvp=4 tpa=2"]),
        (("layout.tpa=12",), 24, ["layout.tpa=12", "duplicate the cache", "kvp=4 tpa=6"]),
        (("layout.tpf=3",), 2, ["layout.tpf*ep = 3*1", "kvp*tpa = 2", "leave layout.tpf unset"]),
        (("layout.ep=2",), 2, ["layout.ep=2", "no experts"]),
        (("layout.ep=3",), 2, ["layout.ep=3", "2 ranks"]),
        (("layout.kvp=0",), 2, ["layout.kvp=0"]),
        (("layout.mode=ring",), 2, ["layout.mode=ring", "helix, tp, medha, dp"]),
        (("layout.mode=tp",), 2, ["layout.kvp=2", "mode=helix"]),
        (("layout.mode=dp",), 2, ["layout.kvp=2", "must be 1", "layout.dp"]),
        (("layout.dp=2",), 2, ["layout.dp=2", "mode=dp"]),
        ((*DP, "layout.dp=2"), 3, ["layout.dp = 2 ranks", "3 were started", "change layout.dp"]),
        ((*DP, "speculation=ngram"), 2, ["layout.mode=dp", "speculation.drafter=suffix", "speculation=none"]),
        ((*DP, "attention=quest"), 2, ["layout.mode=dp", "attention.policy=block_sparse", "attention=dense"]),
        ((*DP, "hopb=on"), 2, ["layout.mode=dp", "that hopb=on could overlap", "hopb=off"]),
        ((*DP, "speculation=suffix"), 2, ["layout.mode=dp", "speculation.drafter=suffix", "speculation=none"]),
        (("speculation=mtp",), 2, ["speculation.drafter=mtp", "num_nextn_predict_layers", "speculation=ngram"]),
        (("speculation=eagle3",), 2, ["speculation=eagle3", "speculation.path=DIR"]),
        (("speculation=eagle3", "speculation.path=/nowhere"), 2, ["speculation.path=/nowhere", "has no weights"]),
        (("comm.backend=mpi",), 2, ["comm.backend=mpi"]),
        (("comm=emulated", "layout.tpa=3"), 2, ["comm.backend=emulated", "tokens mean nothing", "bench=decode"]),
        (("comm=emulated", "bench=decode"), 2, ["comm.backend=emulated", "2 processes", "helix kvp=2 tpa=1"]),
        (("comm=emulated", "bench=decode", "layout.tpa=3"), 3, ["3 processes", "start 2 at most"]),
        (("speculation=ngram", "bench.acceptance=0.8"), 2, ["bench.acceptance=0.8", "not the model's", "bench=decode"]),
        (("decode.prompts=null",), 2, ["nothing to do", "decode.prompts", "bench=decode"]),
        (("model.path=null",), 2, ["no model", "model.path=DIR"]),
        (("decode.temperature=-1",), 2, ["decode: ", "temperature = -1", ">= 0"]),
        (("decode.top_p=nan",), 2, ["decode: ", "top_p = nan", "(0, 1]"]),
        (("decode.prompts=/nowhere.jsonl",), 2, ["decode.prompts=/nowhere.jsonl cannot be read: No such file"]),
        (("model.path=/nowhere",), 2, ["model.path=/nowhere is not a directory"]),
    ],
)
def test_what_the_command_line_can_get_wrong(
    model: Path, prompts: Path, overrides: tuple[str, ...], world: int, words: list[str]
) -> None:
    message = problem(model, prompts, *overrides, world=world)
    assert all(word in message for word in words), message


def test_more_expert_groups_than_experts(prompts: Path) -> None:
    mixtral = checkpoint("mixtral")  # 5 experts
    message = problem(mixtral, prompts, "layout.tpa=4", "layout.ep=8", world=8)
    assert all(word in message for word in ("layout.ep=8", "5 experts", "layout.tpf")), message
    plan(mixtral, prompts, "layout.tpa=4", "layout.ep=4", world=8)


def test_what_a_directory_can_lack(model: Path, prompts: Path, tmp_path: Path) -> None:
    assert "has no config.json" in problem(tmp_path, prompts)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    message = problem(model, prompts)
    assert "unknown architecture GPT2LMHeadModel" in message and "Qwen3ForCausalLM" in message
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    assert "misshaped" in problem(model, prompts) and "[257, 72], expected [258, 72]" in problem(model, prompts)
    (model / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp" not in k}, model / "model.safetensors")
    assert "3 missing: model.layers.1.mlp.down_proj.weight" in problem(model, prompts)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert "truncated" in problem(model, prompts)
    file.unlink()
    assert "has no weights" in problem(model, prompts)
    plan(model, prompts, "model.load=random")  # the config is enough


def test_a_shard_that_the_index_names_is_missing(prompts: Path, tmp_path: Path) -> None:
    demo = shutil.copytree(DEMO, tmp_path / "demo")
    (demo / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in problem(demo, prompts)


def test_prompts_are_read_before_anything_starts(model: Path, prompts: Path) -> None:
    prompts.write_text('{"prompt_ids": [1]}\n{"prompt_ids"\n')
    assert f"{prompts}, line 2: not JSON" in problem(model, prompts)
    prompts.write_text('{"prompt": "text"}\n')
    assert "no tokenizer.json" in problem(model, prompts) and "prompt_ids" in problem(model, prompts)


def test_outputs_are_rank_0s_to_check(model: Path, prompts: Path, tmp_path: Path) -> None:
    for key in ("decode.output", "record"):
        config = composed(
            f"model.path={model}", f"decode.prompts={prompts}", "layout.kvp=2", f"{key}={tmp_path}/no/file"
        )
        with pytest.raises(ValueError, match=f"{key}=.*cannot be written"):
            preflight(config, 2)
        preflight(config, 2, writes=False)


def test_results_never_replace_prompts(model: Path, prompts: Path) -> None:
    assert "must be different files" in problem(model, prompts, f"decode.output={prompts}")
    assert "must be different files" in problem(model, prompts, "decode.output=x.json", "record=./x.json")


def test_a_link_names_the_file_that_it_leads_to(model: Path, prompts: Path, tmp_path: Path) -> None:
    link, loop = tmp_path / "link", tmp_path / "loop"
    link.symlink_to(prompts)
    loop.symlink_to(loop)
    assert "must be different files" in problem(model, prompts, f"decode.output={link}")
    config = composed(f"model.path={model}", f"decode.prompts={prompts}", f"decode.output={loop}")
    with pytest.raises(ValueError, match=r"decode\.output=.*loop cannot be written: Too many levels of symbolic links"):
        preflight(config, 1)


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("tokenizer.json", "{}", "the tokenizer in .*demo cannot be read: "),
        ("tokenizer.json", "[]", "tokenizer.json holds a list"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json: nested too deep"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not UTF-8"),
        ("tokenizer.json", None, "tokenizer.json cannot be read: it is a FIFO"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": 5}',
            "the tokenizer in .*demo cannot be read: AttributeError: ",
        ),
        ("tokenizer_config.json", None, "tokenizer_config.json cannot be read: it is a FIFO"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, file: str, content: str | bytes | None, said: str) -> None:
    demo = shutil.copytree(DEMO, tmp_path / "demo")
    (demo / file).unlink()
    if content is None:
        os.mkfifo(demo / file)
    else:
        (demo / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(demo)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content", ['{"model": []}', '{"model": {"vocab": [3]}}', '{"model": {"vocab": {}}, "added_tokens": 5}']
)
def test_a_draft_s_tokenizer_of_another_shape_is_named(tmp_path: Path, content: str) -> None:
    draft = shutil.copytree(DEMO, tmp_path / "draft")
    (draft / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"draft/tokenizer\.json has no vocabulary"):
        check_tokenizers(DEMO, draft)


class Panic(BaseException):
    """What tokenizers raise of a file that they did not expect is none of Exception."""


@pytest.mark.parametrize("kind", [Exception, TypeError, AttributeError, Panic])
def test_whatever_a_tokenizer_file_raises_is_one_line(kind: type[BaseException], monkeypatch: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise kind("data did not match\nat line 1")

    monkeypatch.setattr("helix.tokenizer.Tokenizer", broken)
    with pytest.raises(ValueError, match=f"tokenizer in {DEMO} cannot be read: {kind.__name__}: data") as caught:
        load_tokenizer(DEMO)
    assert "\n" not in str(caught.value)


def test_nothing_is_started_for_a_wrong_run(model: Path, prompts: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(spawn, "launch", lambda *_: pytest.fail("ranks were started"))
    given = [f"model.path={model}", f"decode.prompts={prompts}"]
    for text, words in (
        ("layout.kvp=1000000000", "1000000000 ranks, and this host runs"),
        ("layout.tpa=4", "layout.tpa=4 does not fit a model"),
        ("layout.kvp=0", "layout.kvp=0 must be"),
        ("comm.backend=nccl", "needs a GPU for each rank"),
        ("model.path=/nowhere", "/nowhere is not a directory"),
        ("layout.ep=10000000000000000000000000", "an integer of at least 1"),
    ):
        assert main([*given, text]) == 1
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and words in said.err and said.err.count("\n") == 1 and not said.out
    started: list[int] = []
    monkeypatch.setattr(spawn, "launch", lambda count, *_: started.append(count) or 0)
    assert main([*given, "layout.kvp=2"]) == 0 and started == [2]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_is_sent_where_it_belongs(flag: str, monkeypatch: Any, capsys: Any) -> None:
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in (ranks | {"MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    assert main([flag, "layout.kvp=1,2"]) == 1
    said = capsys.readouterr().err
    assert "-m under torchrun would run the whole sweep on every rank: type `helix run layout.kvp=1,2 -m`" in said


def test_blocks_can_be_chosen(model: Path, prompts: Path) -> None:
    plan(model, prompts, "attention=block_sparse")
    plan(model, prompts, "attention=block_sparse", "speculation=ngram", "speculation.gamma=31")
    plan(model, prompts, "attention=quest", "attention.choice=global", "layout.tpa=3", world=6)
    for given, blocks in (
        ([], (16, 64)),
        (["attention=quest"], (16, 16)),
        (["attention=block_sparse", "attention.block=64", "kv.page_size=64"], (64, 64)),
        (["kv.append_block=32", "attention=block_sparse"], (32, 128)),
        (["speculation=sparse"], (64, 64)),
        (["speculation=sparse", "kv.append_block=32", "kv.page_size=16"], (32, 16)),
    ):
        assert plan(model, prompts, *given).blocks == blocks


@pytest.mark.parametrize(
    "family, overrides, words",
    [
        ("deepseek-v3-yarn", [], ["attention.policy=block_sparse", "latents (MLA)"]),
        ("glm-5", ["kv.tier=host", "kv.host_bytes=1e9"], ["latents (MLA)", "attention=dense"]),
        ("deepseek-v3-yarn", ["kv.tier=host", "kv.host_bytes=1e9"], ["latents (MLA)", "attention=dense"]),
        ("mistral-windowed", [], ["attention.policy=block_sparse", "every layer", "sliding window"]),
        (
            "qwen3",
            ["speculation=ngram", "speculation.gamma=17", "attention.block=16", "attention.local_blocks=2"],
            ["attention.local_blocks=2", "attention.block=16", "speculation.gamma=17", "at least 3"],
        ),
        (
            "qwen3",
            ["attention.choice=global", "kv.append_block=64"],
            ["attention.choice=global", "attention.block=128", "kv.append_block=64"],
        ),
        ("qwen3", ["kv.page_size=64"], ["kv.page_size=64", "attention.block=128", "leave out kv.page_size"]),
        ("qwen3", ["attention.choice=global", "hopb=on"], ["choice=global", "which hopb=on would cut", "hopb=off"]),
        ("qwen3", ["bench.repeat=0.8"], ["bench.repeat=0.8", "not the model's", "bench=decode"]),
        (
            "qwen3",
            ["bench.repeat=0.8", "attention.choice=global", "bench=decode"],
            ["bench.repeat=0.8", "choice=local"],
        ),
        ("qwen3", ['bench.variants=["attention.block=64"]'], ["bench.variants", "attention.block=64", "topk"]),
        ("qwen3", ['bench.variants=["attention.topk=many"]'], ["bench.variants", "attention.topk=many"]),
        ("qwen3", ['bench.variants=["bench.repeat=2"]'], ["bench.variants", "bench.repeat=2", "0 to 1"]),
        ("qwen3", ['bench.variants=["attention.topk=33"]'], ["bench.variants", "attention.topk=32", "the most"]),
        ("qwen3", ["attention=dense", 'bench.variants=[""]'], ["bench.variants", "attention=block_sparse"]),
        (
            "qwen3",
            ["attention.choice=global", "layout=tp", "layout.kvp=1", "layout.tpa=12"],
            ["attention.choice=global", "layout.tpa=12", "at most 6"],
        ),
    ],
)
def test_blocks_that_cannot_be_chosen(family: str, overrides: list[str], words: list[str], prompts: Path) -> None:
    world = 12 if "layout.tpa=12" in overrides else 2
    said = problem(checkpoint(family), prompts, "attention=block_sparse", *overrides, world=world)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("kv", ["fp8", "k16v8"])
def test_few_bits_in_host_memory(kv: str, prompts: Path) -> None:
    host = ["attention=block_sparse", "kv.tier=host", "kv.host_bytes=1e9", f"kv.dtype={kv}"]
    assert problem(checkpoint("deepseek-v3-yarn"), prompts, *host, world=2)
    assert plan(checkpoint("qwen3"), prompts, *host).kv.dtype == kv


def test_more_pages_than_a_rank_chooses_among() -> None:
    layout = HelixLayout.create("helix", 2)
    config = AttentionConfig(policy="block_sparse")
    comm = LoopbackWorld(2).communicator(0, layout.kvp_group(0))
    most = 2 * MOST_PAGES
    assert make_policy(config, Placement(layout, 0, 1, 1), most, comm, KVConfig()) is not None
    with pytest.raises(ConfigError, match=r"524288 pages of a rank.* 1048577 tokens .*set kv\.page_size=2 or more"):
        make_policy(config, Placement(layout, 0, 1, 1), most + 1, comm, KVConfig())


def test_a_model_can_draft_for_itself(model: Path, prompts: Path) -> None:
    assert plan(model, prompts, "speculation=sparse").speculation.policy == "any"
    plan(model, prompts, "speculation=sparse", "speculation.policy=c2q", "layout.mode=medha")


@pytest.mark.parametrize(
    "family, overrides, words",
    [
        ("deepseek-v3-yarn", [], ["speculation.drafter=sparse", "latents (MLA)"]),
        ("deepseek-v32", [], ["speculation.drafter=sparse", "latents (MLA)"]),
        ("mistral-windowed", [], ["speculation.drafter=sparse", "every layer", "sliding window"]),
        ("qwen3", ["attention=block_sparse"], ["speculation.drafter=sparse", "attention.policy=block_sparse"]),
        ("qwen3", ["kv.page_size=48"], ["speculation.drafter=sparse", "kv.page_size=48", "power of two"]),
        ("qwen3", ["bench.acceptance=0.9"], ["bench.acceptance=0.9", "not the model's"]),
    ],
)
def test_a_model_cannot_draft_for_itself(family: str, overrides: list[str], words: list[str], prompts: Path) -> None:
    said = problem(checkpoint(family), prompts, "speculation=sparse", *overrides)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    "overrides, words",
    [
        ([*DP], ["layout.mode=dp", "Gated DeltaNet"]),
        (["kv.host_snapshots=2", "kv.snapshots=0"], ["kv.host_snapshots=2", "kv.snapshots=0", "1 or more"]),
        (["kv.host_snapshots=2", "kv.prefix_cache=false"], ["kv.host_snapshots=2", "kv.prefix_cache=true"]),
        (["kv.host_snapshots=-1"], ["kv.host_snapshots=-1", "at least 0"]),
        (["speculation=sparse"], ["speculation.drafter=sparse", "Gated DeltaNet", "speculation=ngram"]),
    ],
)
def test_what_states_cannot_do_is_named(overrides: list[str], words: list[str], prompts: Path) -> None:
    said = problem(checkpoint("qwen3-next"), prompts, *overrides, world=2)
    assert all(word in said for word in words), said


def test_a_model_without_states_has_no_snapshots(model: Path, prompts: Path) -> None:
    said = problem(model, prompts, "kv.host_snapshots=2")
    assert "kv.host_snapshots=2" in said and "leave it out" in said


def test_snapshots_are_not_kept_for_layers_that_draft(prompts: Path) -> None:
    said = problem(mtp.with_layer("qwen3.5-tied"), prompts, "kv.host_snapshots=2", "speculation=mtp")
    assert "kv.host_snapshots=2" in said and "speculation.drafter=mtp" in said


def test_a_model_with_states_is_no_draft(model: Path, prompts: Path) -> None:
    said = problem(model, prompts, "speculation=model", f"speculation.model.path={checkpoint('qwen3-next')}", world=2)
    assert "layers keep states" in said


def test_latents_are_kept_in_fp8_or_as_they_are(prompts: Path) -> None:
    latents = checkpoint("deepseek-v3-yarn")
    assert plan(latents, prompts, "kv.dtype=fp8").kv.dtype == "fp8"
    said = problem(latents, prompts, "kv.dtype=k16v8")
    assert "kv.dtype=k16v8" in said and "latents (MLA)" in said and "set fp8 or auto" in said
    said = problem(latents, prompts, "kv.dtype=fp8_all")
    assert "kv.dtype=fp8_all" in said and "no index keys" in said and "set fp8 or auto" in said
    assert plan(checkpoint("glm-5"), prompts, "kv.dtype=fp8_all").kv.dtype == "fp8_all"
