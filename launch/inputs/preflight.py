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
from helix.models import DecoderSpec
from helix.models.loading import Checkpoint
from helix.place import Place, choose_backend
from helix.placement import Stripes
from helix.speculation import check_draft
from helix.tokenizer import check_tokenizer_files, has_tokenizer
from launch.inputs.auto_layout import choose, ranks
from launch.inputs.files import check_record, check_writable
from launch.inputs.parts import check_weights, make_checkpoint, make_draft_layout, make_layout, make_spec
from launch.inputs.prompts import Prompt, check_defaults, kept_results, read_prompts
from launch.inputs.work import DECODE, Work, work_of

TIMED = "python -m benchmarks.entry bench=decode"  # a benchmark's command, which says only what takes how long


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
    layout.check_heads(spec.attention.q_heads, spec.attention.kv_heads)
    experts = None if spec.experts is None else spec.experts.experts
    if layout.ep > 1 and experts is None:
        raise ValueError(f"layout.ep={layout.ep} but the model has no experts: set layout.ep=1")
    if experts is not None and layout.ep > experts:
        raise ValueError(
            f"layout.ep={layout.ep} but the model has {experts} experts, so that some ranks would hold none: "
            f"set layout.ep to {experts} or less, and the rest splits each expert (layout.tpf)"
        )


def check_attention(config: Config, layout: HelixLayout, spec: DecoderSpec, timed: bool = False) -> None:
    """Raises ValueError where queries cannot choose the blocks that they read; `timed`: as of `Work`."""
    attention = config.attention
    if attention.policy == "dense":
        return
    what = f"attention.policy={attention.policy}"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses by the keys of heads, and the model has latents (MLA): set attention=dense")
    if not spec.full:
        raise ValueError(f"{what}: every layer of the model has a sliding window already: set attention=dense")
    drafts = 0 if config.speculation.drafter == "none" else config.speculation.gamma
    least = 1 + -(-drafts // attention.block)
    if attention.local_blocks < least:
        raise ValueError(
            f"attention.local_blocks={attention.local_blocks} blocks of attention.block={attention.block} tokens do "
            f"not hold an unfinished block and speculation.gamma={drafts} drafts: set at least {least}"
        )
    if attention.score == "replay" and not timed and config.model.load != "random":
        raise ValueError(
            f"attention.score=replay keeps attention.repeat={attention.repeat} of the blocks whatever the model says, "
            f"so that its output is not the model's: time it with `{TIMED}` or model.load=random, or set "
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
    if layout.tpa > spec.attention.kv_heads:
        raise ValueError(
            f"attention.choice=global needs all query heads of a KV head on one rank; layout.tpa={layout.tpa} splits "
            f"those of the model's {spec.attention.kv_heads} KV heads: set a tpa of at most {spec.attention.kv_heads}"
        )


def check_self_drafts(config: Config, spec: DecoderSpec, timed: bool = False) -> None:
    """Raises ValueError where a model cannot draft for itself over few of its keys; `timed`: as of `Work`."""
    speculation = config.speculation
    if speculation.forced is not None and not timed and config.model.load != "random":
        raise ValueError(
            f"speculation.forced={speculation.forced} keeps drafts whatever the model says, so that its output is not "
            f"the model's: time it with `{TIMED}` or model.load=random, or leave it unset"
        )
    if speculation.drafter != "sparse":
        return
    what = "speculation.drafter=sparse"
    if spec.attention.latent is not None:
        raise ValueError(f"{what} chooses keys of heads, and the model has latents (MLA): set speculation=ngram")
    if not spec.full:
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


def preflight(
    config: Config, rank: int, world_size: int, device: str | None = None, work: Work | None = None
) -> CheckedRun:
    """What one rank is to run; the same on every rank but for what only that rank's slices can show.

    Args:
        device: name of this rank's GPU, for layout=auto; None on a CPU.
        work: what it does; None: what a run does.

    Raises:
        ValueError: naming the key, its value and what to do.
    """
    check(config)
    check_defaults(config.decode)
    work = work_of(config) if work is None else work
    auto = config.layout.mode == "auto"
    layout = HelixLayout.create(kvp=world_size) if auto else make_layout(config.layout)
    if config.comm.backend == "emulated":
        _check_emulated(config, work, layout, world_size)
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
    prompts = _prompts(config, work)
    reason = None
    if auto:
        layout, reason = choose(config, spec, prompts, world_size, device, work.load)
    check_layout(layout, spec)
    check_attention(config, layout, spec, work.timed)
    check_self_drafts(config, spec, work.timed)
    if config.speculation.drafter == "synthetic" and not work.timed and config.model.load != "random":
        raise ValueError(
            "speculation.drafter=synthetic keeps drafts whatever the model says, so that its output is not the "
            f"model's: time it with `{TIMED}` or model.load=random, or use speculation.drafter=ngram"
        )
    work.check(prompts)
    checkpoint, spec = make_checkpoint(config.model, spec, layout, rank)
    draft = make_draft(config, layout, spec, rank) if config.speculation.drafter == "model" else None
    files = {"decode.prompts": config.decode.prompts, "decode.output": config.decode.output, "record": config.record}
    files |= work.files
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


def prepared(config: Config, work: Work | None = None) -> int:
    """How many ranks a run on this host starts, once all that can be checked without them is.

    Raises:
        ValueError: as `preflight`; or there are not as many GPUs as comm.backend needs.
    """
    check(config)
    world_size = ranks(config)
    preflight(config, 0, world_size, work=work)
    check_tokenizer_files(config.model.path)
    # Whether GPUs reach each other they say themselves.
    here = {"gpus": torch.cuda.device_count(), "peers": True}
    choose_backend(config.comm.backend, Place(0, world_size, 0, world_size), [here])
    return world_size


def _check_emulated(config: Config, work: Work, layout: HelixLayout, processes: int) -> None:
    """Raises ValueError where two processes cannot emulate ranks of the layout."""
    what = "comm.backend=emulated: one or two GPUs emulate ranks of a larger layout"
    if not work.timed:
        raise ValueError(f"{what}, and tokens mean nothing: use `{TIMED}`, or bench=comm, hopb or prefill there")
    if config.layout.mode == "auto" or not 1 <= processes <= min(emulated.PROCESSES, layout.world_size - 1):
        raise ValueError(
            f"{what}: {processes} processes were started for {layout}; start {emulated.PROCESSES} at most, and set "
            "layout.kvp and layout.tpa to more"
        )


def _prompts(config: Config, work: Work) -> list[Prompt]:
    """What is to be decoded."""
    if work.prompts == "none" or (work.prompts == "taken" and config.decode.prompts is None):
        return []
    if config.decode.prompts is None:
        raise ValueError(f"nothing to do: set decode.prompts=FILE.jsonl, or time decode steps with `{TIMED}`")
    prompts = read_prompts(Path(config.decode.prompts))
    if work is not DECODE and any(p.body is not None for p in prompts):
        raise ValueError(f'{config.decode.prompts} holds messages, forms or a batch: measure "prompt" or "prompt_ids"')
    if any(p.ids is None for p in prompts) and not has_tokenizer(config.model.path):
        why = "a shape without model.path has no tokenizer"
        if config.model.path is not None:
            why = f"model.path={config.model.path} has no tokenizer.json"
        raise ValueError(f'{config.decode.prompts} holds text, but {why}: use "prompt_ids"')
    return prompts
