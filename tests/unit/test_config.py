"""conf/ and the schema agree, and values out of range are named."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from helix.config import BenchConfig, Config, bench_points, check
from launch.run import ROOT, as_config, check_overrides

CONF = Path(ROOT) / "conf"
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name != "hardware")  # the simulator reads those


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return as_config(compose("config", list(overrides)))


def test_defaults_are_a_valid_config_of_the_demo_model() -> None:
    config = composed()
    check(config)
    assert config.model.path == str(ROOT / "assets" / "demo-model")
    assert (config.layout.kvp, config.layout.tpa, config.layout.tpf, config.layout.ep) == (1, 1, None, 1)
    assert config.kv.append_block == 16 and config.decode.temperature == 0


@pytest.mark.parametrize("group, option", [(g, f.stem) for g in GROUPS for f in sorted((CONF / g).glob("*.yaml"))])
def test_every_option_composes_into_the_schema(group: str, option: str) -> None:
    config = composed(f"{group}={option}")
    check(config)
    assert isinstance(config, Config)


def test_the_command_line_of_the_documentation() -> None:
    line = (
        "model.path=DIR model.dtype=float32 model.load=checkpoint layout.kvp=2 layout.tpa=2 layout.tpf=4 layout.ep=1 "
        "kv.append_block=16 kv.page_size=64 decode.prompts=FILE.jsonl decode.output=OUT.jsonl "
        "decode.max_new_tokens=32 decode.temperature=0 comm.backend=auto record=RECORD.json"
    )
    config = composed(*line.split())
    assert config.layout.tpf == 4 and config.record == "RECORD.json" and config.decode.max_new_tokens == 32


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(Exception, match="kvpp"):
        composed("layout.kvpp=2")
    for override in ("+layout.kvpp=2", "+speculation.model.gama=9", "+kvp=2"):
        key = override[1:].split("=")[0]
        with pytest.raises(ValueError, match=f"{key} is unknown; known: "):
            composed(override)
    assert composed("+model.config.num_hidden_layers=3").model.config == {"num_hidden_layers": 3}


def test_help_names_every_group() -> None:
    help_text = OmegaConf.load(CONF / "config.yaml").hydra.help.template
    for group in [*GROUPS, "record", "seed"]:
        assert f"\n  {group} " in help_text or group == "experiment", group


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.dtype=int8", ["model.dtype", "int8", "bfloat16"]),
        ("model.load=magic", ["model.load", "magic", "checkpoint"]),
        ("attention.policy=sparse", ["attention.policy", "sparse", "dense"]),
        ("comm.backend=mpi", ["comm.backend", "mpi", "gloo"]),
        ("hopb.chunks=3", ["hopb.chunks", "'3'", "none, auto, 2, 4, 8"]),
        ("bench.kind=all", ["bench.kind", "all", "decode"]),
        ("speculation.drafter=oracle", ["speculation.drafter", "oracle", "none, ngram, model, replay"]),
        ("speculation.acceptance=1.5", ["speculation.acceptance", "1.5", "from 0 to 1"]),
        ("speculation.gamma=32", ["speculation.gamma", "32", "from 1 to 31"]),
        ("speculation.longest=0", ["speculation.longest", "0", "from 1 to 8"]),
        ("bench.gammas=[0,1]", ["bench.gammas", "1", "speculation.drafter=none"]),
        ("kv.append_block=0", ["kv.append_block", "0", "positive"]),
        ("kv.page_size=-1", ["kv.page_size", "-1"]),
        ("kv.tokens=0", ["kv.tokens", "0"]),
        ("kv.memory_fraction=1.5", ["kv.memory_fraction", "1.5", "at most 1"]),
        ("decode.max_batch=0", ["decode.max_batch", "0"]),
        ("decode.prefill_chunk=0", ["decode.prefill_chunk"]),
        ("decode.run_steps=0", ["decode.run_steps"]),
        ("kv.page_size=16385", ["kv.page_size", "16385", "from 1 to 16384"]),
        ("comm.timeout_s=0", ["comm.timeout_s"]),
        ("comm.timeout_s=inf", ["comm.timeout_s", "inf", "from 0.1 to 600"]),
        ("decode.resume=true", ["decode.resume", "decode.output"]),
        ("layout.mode=foo", ["layout.mode", "foo", "helix, tp, medha, auto"]),
    ],
)
def test_values_out_of_range_are_named(override: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        check(composed(override))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "text, words",
    [
        ("layout.kpv=2", "layout.kpv is unknown; known: layout.mode, layout.kvp, "),
        ("kvp=2", "kvp is unknown; known: model, layout, "),
        ("speculation.model.pth=x", "known: speculation.model.path, "),
        ("layout.kvp=1,2", "python -m launch.sweep -m"),
        ("layout=auto", ""),
        ("model.config.num_hidden_layers=4", ""),
        ("+model.config.rope_theta=1e6", ""),
        ("bench.points=[1x2,3x4]", ""),
        ("hydra.sweep.dir=x", ""),
        ("experiment=demo", ""),
        ("--cfg", ""),
    ],
)
def test_mistakes_of_a_command_line_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) if words else nullcontext():
        check_overrides([text], sweeps=False)
    if ",2" in text:
        check_overrides([text], sweeps=True)


def test_points_are_read_before_anything_is_loaded() -> None:
    assert bench_points(BenchConfig("decode", ["2x3", "1x64K", "8x1M"])) == [(2, 3), (1, 65536), (8, 1 << 20)]
    with pytest.raises(ValueError, match=r"bench\.points has '1x2G'"):
        check(composed("bench=decode", "bench.points=[1x2G]"))
    with pytest.raises(ValueError, match=r"bench\.points is empty"):
        check(composed("bench=prefill", "bench.points=[]"))


def test_drafts_to_time_are_those_that_are_proposed() -> None:
    check(composed("speculation=ngram", "speculation.gamma=7", "bench.gammas=[0,1,7]"))
    with pytest.raises(ValueError, match=r"bench\.gammas has 8, but speculation.drafter=ngram .* proposes 7 at most"):
        check(composed("speculation=ngram", "speculation.gamma=7", "bench.gammas=[0,8]"))


def test_the_schema_has_these_groups() -> None:
    assert set(Config.__dataclass_fields__) == {
        "model", "layout", "kv", "attention", "comm", "hopb", "speculation", "decode", "bench", "record", "seed",
    }  # fmt: skip
