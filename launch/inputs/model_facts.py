"""Facts about a model, from its config, the headers of its weights and its tokenizer. Free of torch."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from helix.hub import local_directory
from helix.layers.specs import FFNSpec, MixerSpec, MLASpec, MLPSpec, RopeSpec
from helix.models import DecoderSpec, family_of, multimodal_architecture
from helix.models.checkpoint import TEXT_PARTS, CheckpointFiles, WeightFormat, read_config
from helix.models.eagle3 import ARCHITECTURES as EAGLE3
from helix.planner.plan import NoLayoutFits, PlanQuery, longest_context, plan
from helix.planner.points import Points
from helix.planner.step import memory_of
from helix.setup.parts import resolved_config, stored_config
from helix.tokenizer import has_tokenizer, read_added_tokens, read_chat_template, without_tokenizer
from launch.client.chat_tokenizer import ChatTokenizer
from launch.client.format_detection import DetectedFormat, detect_chat_format
from launch.inputs.command_parser import model_override
from launch.inputs.hardware import device_here
from launch.inputs.planning import CheckedQuery, check_query, pick_hardware

GPUS = (1, 2, 4, 8)


def facts(model: str) -> dict[str, Any]:
    """Collects all facts that `helix info MODEL` shows; if Helix cannot run the model, why (`refused`) and a few facts.

    Args:
        model: a directory, ORG/NAME[@REVISION] on the Hub, or a shape of conf/model/.

    Raises:
        ValueError: there is no such model.
    """
    key, _, value = model_override(model).partition("=")
    path = local_directory(value, weights=False) if key == "model.path" else None
    found: dict[str, Any] = {"model": model, "path": None if path is None else str(path)}
    config = {} if path is None else read_config(path)
    names = config.get("architectures")
    found |= {"architecture": names[0] if isinstance(names, list) and names else None}
    found |= {"family": config.get("model_type")}
    try:
        return found | _facts(f"{key}={value if path is None else path}")
    except ValueError as error:
        why = str(error)
        if found["architecture"] in EAGLE3:
            why = (
                f"{path} is the EAGLE-3 draft layer of another model: run that model with speculation=eagle3 "
                f"speculation.path={path}"
            )
        return found | {"refused": why}


def _facts(override: str) -> dict[str, Any]:
    try:
        pick_hardware(None, "auto")
        chosen = []
    except ValueError:  # this machine's GPU has no description
        chosen = ["hardware=h200"]
    checked = check_query([override, "gpus=1", "context=1", *chosen])
    config = checked.config.model
    path = None if config.path is None else Path(config.path)
    resolved, spec = resolved_config(config), checked.query.spec
    stored = WeightFormat.from_config(resolved.get("quantization_config"))
    outer = multimodal_architecture(stored_config(config))
    files = None if path is None else _open(path, stored)
    spec = spec if files is None else files.as_stored(spec)
    attention = spec.attention
    return {
        "architecture": outer or ", ".join(resolved.get("architectures") or []),
        "family": family_of(resolved),
        "text_part_only": outer is not None,
        "layers": len(spec.layers),
        "mixers": Counter(_mixer_name(layer.mixer) for layer in spec.layers),
        "ffns": Counter(_ffn_name(layer.ffn) for layer in spec.layers),
        "hidden": spec.hidden,
        "vocabulary": spec.vocab,
        "query_heads": attention.q_heads,
        "kv_heads": None if isinstance(attention, MLASpec) else attention.kv_heads,
        "head_dim": attention.query if isinstance(attention, MLASpec) else attention.head_dim,
        "latent": [attention.latent, attention.rope] if isinstance(attention, MLASpec) else None,
        "dtype": spec.dtype,
        "tied": spec.tied,
        "quantization": None if stored is None else stored.method,
        "scale_blocks": [] if stored is None else [list(group.block) for group in stored.groups if group.block],
        "few_bits": [] if files is None else _few_bits(files),
        "weights": None if files is None else _weights(files, spec, outer is not None),
        "context": spec.max_positions,
        "context_key": spec.limited_by,
        "ropes": [_rope_name(rope) for rope in spec.ropes],
        "mtp": spec.nextn is not None,
        **_tokenizer(path, spec.eos),
        **_memory(checked, spec, here=device_here() is not None and not chosen),
    }


def _open(path: Path, stored: WeightFormat | None) -> CheckpointFiles | None:
    try:
        return CheckpointFiles(path, stored)
    except ValueError:
        if next(path.rglob("*.safetensors"), None) is None:
            return None
        raise


def _mixer_name(mixer: MixerSpec) -> str:
    if not mixer.is_attention:
        return "recurrent"
    if mixer.window is not None:
        return f"window {mixer.window:,}"
    if not isinstance(mixer, MLASpec):
        return "full"
    if mixer.topk is None:
        return "latent (MLA)"
    return f"latent (MLA), top {mixer.topk:,} " + ("as selected before" if mixer.indexer is None else "by its indexer")


def _ffn_name(ffn: FFNSpec) -> str:
    if isinstance(ffn, MLPSpec):
        return f"dense {ffn.width:,}"
    shared = f", shared {ffn.shared_width:,}" if ffn.shared_width else ""
    return f"top {ffn.top_k} of {ffn.experts} experts of {ffn.width:,}{shared}"


def _rope_name(rope: RopeSpec) -> str:
    factor, trained = (rope.scaling.get(key) for key in ("factor", "original_max_position_embeddings"))
    name = "plain" if rope.kind == "default" else rope.kind
    return name + (f" x {factor:g}" if factor else "") + (f" from {trained:,}" if trained else "")


def _weights(files: CheckpointFiles, spec: DecoderSpec, nested: bool) -> dict[str, Any]:
    # Bytes by type, and by what reads them.
    mtp = tuple(f"{name.format(len(spec.layers))}." for name in spec.nextn_names)
    text = (*TEXT_PARTS, "lm_head.")
    types: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    bits = {kind: int(re.sub(r"\D*(\d+).*", r"\1", kind)) for kind in {*files.dtypes.values()} - {"BOOL"}}
    for name, kind in files.dtypes.items():
        size = math.prod(files.shapes[name]) * bits.get(kind, 8) // 8
        types[kind] += size
        is_text = not nested or files.stored[name].startswith(text)
        parts["mtp" if name.startswith(mtp) else "text" if is_text else "skipped"] += size
    return {
        "files": len({*files.files.values()}),
        "bytes": sum(types.values()),
        "dtypes": dict(types.most_common()),
        "mtp_bytes": parts["mtp"],
        "skipped_bytes": parts["skipped"],
    }


def _few_bits(files: CheckpointFiles) -> list[dict[str, Any]]:
    # Matrices by kind and group, most elements first.
    found: dict[tuple[str, str, int], Counter[str]] = {}
    for matrix in files.quantized.values():
        planes = matrix.layout.numbers, matrix.layout.scales
        numbers, scales = (p.shape(files.shapes.get(matrix.base + p.suffix, ())) for p in planes)
        if numbers is not None and scales is not None:
            group = 0 if scales[-1] == 1 else matrix.group
            counts = found.setdefault((matrix.layout.title, matrix.layout.format.kind, group), Counter())
            counts += Counter(matrices=math.prod(numbers[:-2]), elements=math.prod(numbers))
    keys = "format", "kind", "group"
    rows = [dict(zip(keys, key, strict=True)) | counts for key, counts in found.items()]
    return sorted(rows, key=lambda row: -row["elements"])


def _tokenizer(path: Path | None, eos: tuple[int, ...]) -> dict[str, Any]:
    known = path if has_tokenizer(path) else None
    template, texts = ("", {}) if known is None else (read_chat_template(known), read_added_tokens(known))
    detected = DetectedFormat(None, "no chat template")
    if template:
        detected = detect_chat_format(ChatTokenizer(str(known)), str(known))
    return {
        "tokenizer": None if known is None else "tokenizer.json",
        "why_no_tokenizer": without_tokenizer(path) if known is None else None,
        "chat_template": bool(template),
        "chat_format": detected.name,
        "chat_format_reason": detected.reason,
        "tool_calls": detected.reads_calls,
        "end_tokens": [{"id": i, "text": texts.get(i)} for i in eos],
    }


def _memory(checked: CheckedQuery, spec: DecoderSpec, here: bool) -> dict[str, Any]:
    # `longest_context` of a plan then is what memory holds, also beyond the model's context.
    query = replace(checked.query, spec=replace(spec, draft=None, max_positions=sys.maxsize))
    hardware, dtype = query.hardware, checked.config.model.dtype
    token_bytes, sequence_bytes = _kv_bytes(query, Points.of("helix"))
    return {
        "kv_dtype": spec.dtype if dtype == "auto" else dtype,
        "kv_token_bytes": token_bytes,
        "kv_sequence_bytes": sequence_bytes,
        "kv_bytes": token_bytes * spec.max_positions + sequence_bytes,
        "hardware": hardware.name,
        "hardware_is_here": here,
        "gpu_bytes": hardware.memory_bytes.value,
        "layouts": [_layout(replace(query, gpus=n, context=spec.max_positions)) for n in GPUS if n <= hardware.gpus],
    }


def _kv_bytes(query: PlanQuery, layout: Points) -> tuple[int, int]:
    # Bytes on the fullest rank: of a token, and of a sequence whatever its length (windows and states).
    options = replace(query.options, snapshots=0)
    tokens = options.page_size * int(layout.kvp[0])  # a page on each rank; one token is the step's own
    first, second = (
        float(memory_of(query.spec, query.hardware, layout, n * tokens - 1, options).kv_bytes[0]) for n in (1, 2)
    )
    return round((second - first) / tokens), round(2 * first - second)


def _layout(query: PlanQuery) -> dict[str, Any]:
    # The planner's first layout for a sequence of the model's context, or of the longest that fits.
    try:
        try:
            choice, context = plan(query).choices[0], query.context
        except NoLayoutFits:
            if not (context := longest_context(query)):
                raise
            choice = plan(replace(query, context=context)).choices[0]
    except ValueError as error:
        return {"gpus": query.gpus, "layout": None, "why": getattr(error, "reason", str(error)).rpartition(": ")[2]}
    return {
        "gpus": query.gpus,
        "layout": choice.name,
        "weight_bytes": round(choice.weight_bytes),
        "kv_token_bytes": _kv_bytes(query, choice.points)[0],
        "sequences": choice.largest_batch if context == query.context else 0,
        "tokens": choice.longest_context,
    }


def show(found: Mapping[str, Any]) -> None:
    """Prints the facts as tables; of a refused model only what is known."""
    terminal = Console(highlight=False, markup=False, emoji=False)
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in _rows(found).items():
        table.add_row(name, text)
    terminal.print(table)
    if "refused" in found:
        return
    kind = "this machine's GPU" if found["hardware_is_here"] else "the default hardware"
    terminal.print(
        f"\nOn {found['hardware']} ({_gb(found['gpu_bytes'])}, {kind}), in the layouts that `helix plan` ranks first "
        f"for one sequence of {found['context']:,} tokens, or of the most that fit:"
    )
    table = Table("GPUs", "layout")
    for heading in ("weights\nper GPU", "KV a token\nper GPU", "sequences\nthat fit", "KV tokens\nthat fit"):
        table.add_column(heading, justify="right")
    for one in found["layouts"]:
        if one["layout"] is not None:
            numbers = f"{one['kv_token_bytes']:,} B", f"{one['sequences']:,}", f"{one['tokens']:,}"
            table.add_row(str(one["gpus"]), one["layout"], _gb(one["weight_bytes"]), *numbers)
    if table.row_count:
        terminal.print(table)
    for one in found["layouts"]:
        if one["layout"] is None:
            terminal.print(f"{one['gpus']} GPU{'s' * (one['gpus'] > 1)}: does not fit, {one['why']}")


def _rows(found: Mapping[str, Any]) -> dict[str, str]:
    name = " ".join(str(found[key]) for key in ("family", "architecture") if found[key] is not None) or "none named"
    if "refused" in found:
        return {"model": found["model"], "family": name}
    weights = found["weights"]
    heads = f"{found['kv_heads']} KV of {found['head_dim']}"
    if found["latent"] is not None:
        heads = "a latent of {} + {}".format(*found["latent"])
    stored = "no weights here: this is what config.json says"
    if weights is not None:
        types = ", ".join(f"{kind} {_gb(size)}" for kind, size in weights["dtypes"].items())
        stored = f"{_gb(weights['bytes'])} in {weights['files']} file{'s' * (weights['files'] > 1)}: {types}"
        stored += f"; {_gb(weights['skipped_bytes'])} skipped" if weights["skipped_bytes"] else ""
    quantization = "none"
    if found["quantization"] is not None:
        blocks = " or ".join(f"{rows} x {columns}" for rows, columns in found["scale_blocks"])
        quantization = f"{found['quantization']}{f', a scale for {blocks} values' if blocks else ''}"
        for of in found["few_bits"]:
            group = f"{of['group']} columns" if of["group"] else "a row"
            quantization += f"; {of['matrices']:,} matrices in {of['format']} ({of['kind']}, a scale for {group})"
    mtp = "no MTP layer in config.json"
    if found["mtp"]:
        mtp = "MTP layer: speculation=mtp"
        if weights is not None:
            mtp += f" ({_gb(weights['mtp_bytes'])})" if weights["mtp_bytes"] else ", but the weights lack it"
    fixed = f" and {_gb(found['kv_sequence_bytes'])} a sequence" if found["kv_sequence_bytes"] else ""
    tokenizer = found["tokenizer"] or f"{found['why_no_tokenizer']}: token ids work; text needs tokenizer.json"
    chat = "none: chats are refused, completions work"
    if found["chat_template"]:
        chat = "yes; format unknown: answers are not split into thoughts, calls and text"
    if found["chat_format"] is not None:
        chat = f"yes; format {found['chat_format']} ({found['chat_format_reason']})"
    ends = ", ".join(" ".join(str(x) for x in end.values() if x is not None) for end in found["end_tokens"])
    return {
        "model": found["model"],
        "family": name + ("; only the text part runs, the vision tower is skipped" * found["text_part_only"]),
        "layers": _counted(found["mixers"]),
        "FFN": _counted(found["ffns"]),
        "sizes": f"hidden {found['hidden']:,}, vocabulary {found['vocabulary']:,}, LM head "
        + ("tied to the embedding" if found["tied"] else "not tied"),
        "heads": f"{found['query_heads']} query, {heads}",
        "weights": stored,
        "quantization": f"{quantization} (dtype {found['dtype']})",
        "context": f"{found['context']:,} tokens ({found['context_key']}); RoPE " + ", ".join(found["ropes"]),
        "KV cache": f"{found['kv_token_bytes']:,} B a token{fixed} in {found['kv_dtype']}; {_gb(found['kv_bytes'])} "
        "for the whole context",
        "drafts": mtp,
        "tokenizer": tokenizer,
        "chat template": chat,
        "end tokens": ends or "none",
    }


def _counted(kinds: Mapping[str, int]) -> str:
    return "\n".join(f"{count} x {kind}" for kind, count in kinds.items())


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
