"""What a config asks for, checked before anything is started: everything that can be wrong with it is said here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from comm import emulated
from helix.config import Config, check
from helix.files import read_json, read_text
from helix.layout import HelixLayout
from helix.loading import Checkpoint
from helix.models import DecoderSpec
from helix.pages import Stripes
from helix.place import Place, choose_backend
from helix.speculation import check_draft
from helix.tokenizer import check_tokenizer_files, has_tokenizer
from launch.inputs.auto_layout import choose, ranks
from launch.inputs.files import check_record, check_writable
from launch.inputs.parts import check_weights, make_checkpoint, make_draft_layout, make_layout, make_spec
from launch.inputs.prompts import Prompt, check_defaults, kept_results, read_prompts
from launch.inputs.tuning import check_tuning
from launch.inputs.variants import variants


@dataclass(frozen=True)
class CheckedDraft:
    """The draft model of a plan; attributes as there."""

    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class CheckedRun:
    """A config whose parts fit each other, the machine aside.

    Attributes:
        checkpoint: the weights to load, None for random ones.
        draft: the model of speculation.drafter=model.
        prompts: of decode.prompts; empty in a benchmark.
        finished: decode.output holds results of all of them, as rank 0 found it; False on other ranks.
        reason: why layout=auto took this layout; None: it was given.
    """

    config: Config
    layout: HelixLayout
    spec: DecoderSpec
    checkpoint: Checkpoint | None
    draft: CheckedDraft | None
    prompts: list[Prompt]
    finished: bool
    reason: str | None


def check_layout(layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError where the model cannot be spread over the layout."""
    layout.check_heads(spec.q_heads, spec.kv_heads)
    if layout.ep > 1 and spec.moe is None:
        raise ValueError(f"layout.ep={layout.ep} but the model has no experts: set layout.ep=1")
    if spec.moe is not None and layout.ep > spec.moe.experts:
        raise ValueError(
            f"layout.ep={layout.ep} but the model has {spec.moe.experts} experts, so that some ranks would hold none: "
            f"set layout.ep to {spec.moe.experts} or less, and the rest splits each expert (layout.tpf)"
        )


def check_attention(config: Config, layout: HelixLayout, spec: DecoderSpec) -> None:
    """Raises ValueError where queries cannot choose the blocks that they read."""
    attention = config.attention
    if attention.policy == "dense":
        return
    what = f"attention.policy={attention.policy}"
    if spec.mla is not None:
        raise ValueError(f"{what} chooses by the keys of heads, and the model has latents (MLA): set attention=dense")
    if None not in spec.windows:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set attention=dense")
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    least = 1 + -(-drafts // attention.block)
    if attention.local_blocks < least:
        raise ValueError(
            f"attention.local_blocks={attention.local_blocks} blocks of attention.block={attention.block} tokens do "
            f"not hold an unfinished block and speculation.gamma={drafts} drafts: set at least {least}"
        )
    if attention.score == "replay" and config.bench.kind == "none" and config.model.load != "random":
        raise ValueError(
            f"attention.score=replay keeps attention.repeat={attention.repeat} of the blocks whatever the model says, "
            "so that its output is not the model's: time it with bench=decode or model.load=random, or set "
            "attention.score=bounds"
        )
    if attention.choice == "local":
        return
    if attention.score == "replay":
        raise ValueError("attention.score=replay takes each rank's share of topk: set attention.choice=local")
    if attention.block != config.blocks.append:
        raise ValueError(
            f"attention.choice=global compares blocks of all ranks: attention.block={attention.block} must be "
            f"kv.append_block={config.blocks.append} (or set attention.choice=local)"
        )
    if config.hopb.chunks not in ("none", "auto"):
        raise ValueError(
            f"attention.choice=global exchanges in the middle of attention, which hopb.chunks={config.hopb.chunks} "
            "would cut: set hopb=none or attention.choice=local"
        )
    if layout.tpa > spec.kv_heads:
        raise ValueError(
            f"attention.choice=global needs all query heads of a KV head on one rank; layout.tpa={layout.tpa} splits "
            f"those of the model's {spec.kv_heads} KV heads: set a tpa of at most {spec.kv_heads}"
        )


def check_self_drafts(config: Config, spec: DecoderSpec) -> None:
    """Raises ValueError where a model cannot draft for itself over few of its keys."""
    speculation = config.speculation
    if speculation.forced is not None and config.bench.kind == "none" and config.model.load != "random":
        raise ValueError(
            f"speculation.forced={speculation.forced} keeps drafts whatever the model says, so that its output is not "
            "the model's: time it with bench=decode or model.load=random, or leave it unset"
        )
    if speculation.drafter != "sparse":
        return
    what = "speculation.drafter=sparse"
    if spec.mla is not None:
        raise ValueError(f"{what} chooses keys of heads, and the model has latents (MLA): set speculation=ngram")
    if None not in spec.windows:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set speculation=ngram")
    if config.attention.policy != "dense":
        raise ValueError(
            f"{what} is verified over all keys, and attention.policy={config.attention.policy} reads a part of them: "
            "set attention=dense, or speculation=ngram"
        )
    page = config.blocks.page
    if page & (page - 1) or 1 < page < 16:
        raise ValueError(f"{what} takes pages of 1 token or of a power of two from 16 on, not kv.page_size={page}")


def make_draft(config: Config, of_target: HelixLayout, target: DecoderSpec, rank: int) -> CheckedDraft:
    """Raises ValueError unless the draft model can propose to the target."""
    speculation = config.speculation
    try:
        if speculation.model.path is None and not speculation.model.config:
            raise ValueError("speculation=model needs speculation.model.path=DIR")
        spec = make_spec(replace(config, model=speculation.model))
        check_weights(speculation.model, "speculation.model")
        layout = make_draft_layout(speculation.layout, spec, of_target.world_size)
        stripes = Stripes(of_target, *config.blocks)
        check_draft(target.vocab, spec.vocab, layout, stripes)
        check_layout(layout, spec)
        if has_tokenizer(config.model.path) and has_tokenizer(speculation.model.path):
            check_tokenizers(Path(str(config.model.path)), Path(str(speculation.model.path)))
        checkpoint, spec = make_checkpoint(speculation.model, spec, layout, rank)
        return CheckedDraft(layout, spec, checkpoint)
    except ValueError as error:
        raise ValueError(f"the draft model (speculation.model and speculation.layout): {error}") from error


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raises ValueError where a token id is one text to the target and another to the draft model."""
    files = [path / "tokenizer.json" for path in (target, draft)]
    if read_text(files[0]) == read_text(files[1]):
        return
    ours, theirs = (_token_ids(file) for file in files)
    differing = sorted(text for text in {*ours, *theirs} if ours.get(text) != theirs.get(text))
    if differing:
        text = differing[0]
        raise ValueError(
            f"the tokenizers in {target} and {draft} differ in {len(differing)} tokens, such as {text!r}: id "
            f"{ours.get(text, 'none')} and {theirs.get(text, 'none')}; a draft model has to share the target's tokens"
        )


def _token_ids(file: Path) -> dict[str, int]:
    content = read_json(file)
    try:
        vocab = content["model"]["vocab"]
        ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        return ids | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} has no vocabulary of the tokenizers library") from error


def preflight(config: Config, rank: int, world_size: int, device: str | None = None) -> CheckedRun:
    """What one rank is to run; the same on every rank but for what only that rank's slices can show.

    Args:
        device: name of this rank's GPU, for layout=auto; None on a CPU.

    Raises:
        ValueError: naming the key, its value and what to do.
    """
    check(config)
    check_defaults(config.decode)
    auto = config.layout.mode == "auto"
    layout = HelixLayout.create(kvp=world_size) if auto else make_layout(config.layout)
    if config.comm.backend == "emulated":
        _check_emulated(config, layout, world_size)
        rank, world_size = emulated.rank_of(rank, world_size, layout.world_size), layout.world_size
    if layout.world_size != world_size:
        raise ValueError(
            f"layout.kvp*tpa = {layout.kvp}*{layout.tpa} = {layout.world_size} ranks, but {world_size} were started: "
            f"use torchrun --nproc-per-node={layout.world_size} or change layout.kvp or layout.tpa"
        )
    if config.model.path is not None and "architectures" in config.model.config:
        raise ValueError(
            f"model=NAME is a shape of its own, and model.path={config.model.path} a checkpoint of another: leave out "
            "model=NAME"
        )
    spec = make_spec(config)
    check_weights(config.model, "model")
    prompts = _prompts(config)
    reason = None
    if auto:
        layout, reason = choose(config, spec, prompts, world_size, device)
    check_layout(layout, spec)
    check_attention(config, layout, spec)
    check_self_drafts(config, spec)
    if config.speculation.drafter == "synthetic" and config.bench.kind == "none" and config.model.load != "random":
        raise ValueError(
            "speculation.drafter=synthetic keeps drafts whatever the model says, so that "
            "its output is not the model's: "
            "time it with bench=decode or model.load=random, or use speculation.drafter=ngram"
        )
    if config.bench.kind == "tune":
        check_tuning(config, prompts)
    variants(config)
    checkpoint, spec = make_checkpoint(config.model, spec, layout, rank)
    draft = make_draft(config, layout, spec, rank) if config.speculation.drafter == "model" else None
    files = {"decode.prompts": config.decode.prompts, "decode.output": config.decode.output, "record": config.record}
    files |= {"bench.output": config.bench.output} if config.bench.output is not None else {}
    named = [os.path.realpath(path) for path in files.values() if path is not None]
    if len(set(named)) < len(named):
        *all_but_last, last = (f"{key}={path}" for key, path in files.items())
        raise ValueError(f"{', '.join(all_but_last)} and {last} must be different files")
    finished = False
    if rank == 0:
        for key, value in files.items():
            if value is not None and key != "decode.prompts":
                check_writable(key, Path(value))
        if config.record is not None:
            check_record(Path(config.record))
        finished = 0 < len(prompts) == len(kept_results(config, prompts))
    return CheckedRun(config, layout, spec, checkpoint, draft, prompts, finished, reason)


def prepared(config: Config) -> int:
    """How many ranks a run on this host starts, once all that can be checked without them is.

    Raises:
        ValueError: as `preflight`; or there are not as many GPUs as comm.backend needs.
    """
    check(config)
    world_size = ranks(config)
    preflight(config, 0, world_size)
    check_tokenizer_files(config.model.path)
    # Whether GPUs reach each other they say themselves.
    here = {"gpus": torch.cuda.device_count(), "peers": True}
    choose_backend(config.comm.backend, Place(0, world_size, 0, world_size), [here])
    return world_size


def _check_emulated(config: Config, layout: HelixLayout, processes: int) -> None:
    """Raises ValueError where two processes cannot emulate ranks of the layout."""
    what = "comm.backend=emulated: one or two GPUs emulate ranks of a larger layout"
    if config.bench.kind == "none":
        raise ValueError(f"{what}, and tokens mean nothing: set bench=decode, comm, hopb or prefill")
    if config.layout.mode == "auto" or not 1 <= processes <= min(emulated.PROCESSES, layout.world_size - 1):
        raise ValueError(
            f"{what}: {processes} processes were started for {layout}; start {emulated.PROCESSES} at most, and set "
            "layout.kvp and layout.tpa to more"
        )


def _prompts(config: Config) -> list[Prompt]:
    """What is to be decoded; nothing in a server, nor in a benchmark, unless it tunes on prompts."""
    if config.serve.socket is not None:
        return []
    if config.bench.kind != "none" and (config.bench.kind != "tune" or config.decode.prompts is None):
        return []
    if config.decode.prompts is None:
        raise ValueError("nothing to do: set decode.prompts=FILE.jsonl, or bench=decode to time decode steps")
    prompts = read_prompts(Path(config.decode.prompts))
    if any(p.text is not None for p in prompts) and not has_tokenizer(config.model.path):
        why = "a shape without model.path has no tokenizer"
        if config.model.path is not None:
            why = f"model.path={config.model.path} has no tokenizer.json"
        raise ValueError(f'{config.decode.prompts} holds text, but {why}: use "prompt_ids"')
    return prompts
