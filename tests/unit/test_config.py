"""conf/ and the schema agree, and values out of range are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helix.config import Config, check
from launch.inputs import compose
from launch.inputs.compose import ROOT, RUN, sweep_points, told

CONF = Path(ROOT) / "conf"


def composed(*overrides: str) -> Config:
    return compose.composed(overrides)


def test_defaults_are_a_valid_config_of_the_demo_model() -> None:
    config = composed()
    check(config)
    assert config.model.path == str(ROOT / "assets" / "demo-model")
    assert (config.layout.kvp, config.layout.tpa, config.layout.tpf, config.layout.ep) == (1, 1, None, 1)
    assert config.blocks == (16, 64) and config.decode.temperature == 0


@pytest.mark.parametrize("group, option", [(g, option) for g in RUN.groups for option in RUN.groups[g]])
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
    with pytest.raises(ValueError, match="kvpp"):
        composed("layout.kvpp=2")
    for override in ("+layout.kvpp=2", "+speculation.model.gama=9", "+kvp=2"):
        key = override[1:].split("=")[0]
        with pytest.raises(ValueError, match=f"{key} is unknown; known: "):
            composed(override)
    assert composed("+model.config.num_hidden_layers=3").model.config == {"num_hidden_layers": 3}


def test_help_names_every_group() -> None:
    text = told(["--help", "layout=tp"])
    assert text is not None and "  layout: auto, helix, medha, tp\n" in text and "mode: tp\n" in text
    for group in [*RUN.groups, "record", "seed"]:
        assert f"\n  {group} " in text or group == "experiment", group
    assert "hardware" not in text, "the simulator's alone"


def test_the_composed_config_is_shown() -> None:
    text = told(["--cfg", "job", "layout.kvp=3"])
    assert text is not None and "  kvp: 3\n" in text and "hydra" not in text
    assert told(["layout.kvp=3"]) is None


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.dtype=int8", ["model.dtype", "int8", "bfloat16"]),
        ("model.load=magic", ["model.load", "magic", "checkpoint"]),
        ("attention.policy=sparse", ["attention.policy", "sparse", "dense"]),
        ("comm.backend=mpi", ["comm.backend", "mpi", "gloo"]),
        ("hopb.chunks=3", ["hopb.chunks", "'3'", "none, auto, 2, 4, 8"]),
        ("speculation.drafter=oracle", ["speculation.drafter", "oracle", "none, ngram, model, sparse, synthetic"]),
        (
            "speculation.policy=best",
            ["speculation.policy", "best", "any, c2q, window, quest, full"],
        ),
        ("speculation.sparsity=0", ["speculation.sparsity", "above 0"]),
        ("speculation.sparsity=1.5", ["speculation.sparsity", "1.5", "at most 1"]),
        ("speculation.forced=2", ["speculation.forced", "2", "from 0 to 1"]),
        ("attention.repeat=-0.1", ["attention.repeat", "-0.1", "from 0 to 1"]),
        ("speculation.acceptance=1.5", ["speculation.acceptance", "1.5", "from 0 to 1"]),
        ("speculation.gamma=32", ["speculation.gamma", "32", "from 1 to 31"]),
        ("speculation.longest=0", ["speculation.longest", "0", "from 1 to 8"]),
        ("kv.append_block=0", ["kv.append_block", "0", "from 1"]),
        ("kv.page_size=-1", ["kv.page_size", "-1"]),
        ("kv.tokens=0", ["kv.tokens", "0"]),
        ("kv.memory_fraction=1.5", ["kv.memory_fraction", "1.5", "at most 1"]),
        ("decode.max_batch=0", ["decode.max_batch", "0"]),
        ("decode.prefill_chunk=0", ["decode.prefill_chunk"]),
        ("kv.page_size=16385", ["kv.page_size", "16385", "from 1 to 16384"]),
        ("comm.timeout_s=0", ["comm.timeout_s"]),
        ("schedule.stall_ms=0", ["schedule.stall_ms=0.0", "from 1 to 60000"]),
        ("schedule.decode_share=1", ["schedule.decode_share=1.0", "from 0.0 to 0.99"]),
        ("schedule.run_ms=0", ["schedule.run_ms"]),
        ("schedule.patience_s=-1", ["schedule.patience_s"]),
        ("schedule.lease=0", ["schedule.lease=0", "from 1 to"]),
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
        ("layout.kvp.x=2", "layout.kvp.x is unknown: layout.kvp has no keys"),
        ("hardware=h100", "hardware is unknown; known: model, "),
        ("layout=nonsense", "layout has no option nonsense; known: auto, helix, medha, tp"),
        ("layout.kvp=1,2", "python -m launch.sweep -m"),
        ("layout=tp,helix", "python -m launch.sweep -m"),
        ("layout.kvp=abc", "layout.kvp=abc must be an integer of at most 64 bits"),
        ("layout.kvp=null", "layout.kvp=null must be an integer of at most 64 bits"),
        ("kv.tokens=1.5", "kv.tokens=1.5 must be an integer of at most 64 bits, or null"),
        ("kv.tokens=9223372036854775808", "must be an integer of at most 64 bits"),
        ("decode.temperature=hot", "decode.temperature=hot must be a number"),
        ("decode.resume=maybe", "decode.resume=maybe must be true or false"),
        ("decode.stop=3", "decode.stop=3 must be a list of texts, such as [a,b]"),
        ("decode.stop=[[1]]", "decode.stop=[[1]] must be a list of texts"),
        ("record=", "record= must be a path, or null"),
        ("decode.stop=['a", "the value cannot be read; put it in quotes"),
        ("speculation.model=x", "speculation.model is set by its keys: speculation.model.path, "),
        ("record=${nothing}", "Interpolation key 'nothing' not found"),
        ("record=${", "record=${ must be a path, or null"),
        ("", "'': a setting is KEY=VALUE"),
        ("=3", "'=3': a setting is KEY=VALUE"),
        ("+layout.kvp=2", "layout.kvp is there already: leave out the +"),
        ("~layout.kvp", "only keys of model.config can be taken out"),
        ("layout.kvp", "'layout.kvp': a setting is KEY=VALUE"),
        ("--foo", "--foo is not an option: use --help, --cfg job"),
        ("-m", "one run has one config"),
        ("hydra.run.dir=x", "hydra is unknown"),
    ],
)
def test_mistakes_of_a_command_line_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        composed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["layout", "model.config.num_hidden_layers", "+model.config.rope_theta"])
def test_options_and_keys_of_the_model_s_config_are_taken(key: str) -> None:
    config = composed("layout=auto" if key == "layout" else f"{key}=4")
    assert config.layout.mode == "auto" or list(config.model.config.values()) == [4]


@pytest.mark.parametrize(
    "path",
    ["/a b(1)=x{'.jsonl", "a,b", "it's", "[x]", "~/x", "a\\", "x=${root:}y", "'a b'", "\u00fc {", "null.x", "1", "a:b"],
)
def test_paths_are_taken_as_they_are(path: str) -> None:
    """Paths in quotes already, and interpolations, are Hydra's to read."""
    wanted = {"x=${root:}y": f"x={ROOT}y", "'a b'": "a b"}.get(path, path)
    assert composed(f"decode.prompts={path}").decode.prompts == wanted
    if "," not in path:
        assert sweep_points([f"decode.prompts={path}"])[0] in (
            [[f"decode.prompts={path}"]],
            [[f"decode.prompts={compose.QuotedString(path, compose.Quote.single).with_quotes()}"]],
        )


def test_a_sweep_is_the_product_of_its_values() -> None:
    arguments = ["layout.kvp=1,2", "layout=helix,tp", "decode.prompts=a b.jsonl,c=d.jsonl", "hydra.sweep.dir=x y"]
    points, directory = sweep_points(arguments)
    assert directory == Path("x y") and len(points) == 8
    found = [composed(*point) for point in points]
    assert {c.decode.prompts for c in found} == {"a b.jsonl", "c=d.jsonl"}
    assert [(c.layout.kvp, c.layout.mode) for c in found[::2]] == [(1, "helix"), (1, "tp"), (2, "helix"), (2, "tp")]
    assert len(sweep_points(["layout.kvp=range(1,4)", "decode.stop=[a,b]"])[0]) == 3
    for text, words in (
        ("layout=tp,no", "layout has no option no"),
        ("layout.kvp=1,x", "layout.kvp=x must be an integer"),
    ):
        with pytest.raises(ValueError, match=words):
            sweep_points([text])


def test_the_schema_has_these_groups() -> None:
    assert set(Config.__dataclass_fields__) == {
        "model", "layout", "kv", "attention", "comm", "hopb", "speculation", "decode", "schedule", "serve",
        "record", "seed",
    }  # fmt: skip
