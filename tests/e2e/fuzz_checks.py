"""Checks a fuzz case against transformers: tokens, their logits, and refusals.

Dense attention, and sparse attention that selects every key, is compared with transformers' fp64 logits for our
sequence: whatever drafts, offload, prefix hits and preemptions did, each of our logits must follow from the tokens
before it. Lossy attention is compared with our own engine, without anything else, forced to the same tokens.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helix.layers.specs import AttentionSpec
from helix.models import SHARED_KEYS, DecoderSpec, spec_from_config
from helix.models.checkpoint import HEAD, TOWERS, read_config
from helix.models.spec import NextTokenNames
from tests.e2e import eagle3
from tests.e2e.checkpoints import PACKINGS, class_named, earliest_topk, pack, to_mxfp4, write_fp8, write_packed
from tests.e2e.fuzz_cases import MXFP4, ONE_RANK, STORED, Case, CaseRequest
from tests.e2e.fuzz_configs import ARCHITECTURES, OUTER
from tests.e2e.fuzz_runs import RankResult, RunOnRanks, ServeResult, SettingsRefused, forced, on_loopback, run
from tests.unit.test_sampling import oracle as drawn_from
from tests.unit.test_sampling import oracle_kept

# For logits of size 1 to 20. In fp32, different orders of summation (tests/e2e/parity.py); in bf16, the last rounding
# of one logit, 2^-9 of its size, which may differ between runs.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
# Multiples of the error of transformers' own run in that dtype, if larger. In fp32 its one run stands for all orders of
# summation. In bf16 each step of a layer rounds once, in theirs (about ten times a layer) as in ours; ours also rounds
# the partial outputs and the partial sums of up to four ranks, at most as often again. Errors add up like a random
# walk, to sqrt(2) of theirs. (The largest over all rows was 0.5 to 1.4 of theirs in 60 cases without experts.)
SLACK = {"float32": 8.0, "bfloat16": 2.5}
# For FP8 over several ranks, against one rank: another order of summation, 1e-6 of a value, rounds one of 1e5 values to
# its neighbor in e4m3, 6% away; a key or value contributes less than 1e-2 to logits of size 1 to 20.
ROUNDED = 5e-2
STATES = 4  # times the tolerance: transformers computes states in fp32, so its fp64 run has errors, too
TRIES = 6  # perturbed models that show whether a selection of blocks or experts is a near-tie
NUDGE = {"float32": 1e-6, "bfloat16": 2**-8}  # relative to the weights: about the effect of another order of summation
DRAFT_NOISE = 0.1  # relative to the weights: a draft model that is accepted sometimes

Rows = dict[tuple[str, int], Tensor]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: equal, refused (by name), refused by both, undecided (a near-tie in block selection or FP8 rounding;
            in bf16, also of experts or logits) or otherwise.
        seen: counts of events.
    """

    kind: str
    reason: str = ""
    seen: dict[str, int] = field(default_factory=dict)


def outcome(case: Case, ranks: RunOnRanks, device: torch.device) -> Outcome:
    """Runs a case and compares.

    Args:
        device: where transformers runs.
    """
    with tempfile.TemporaryDirectory(prefix="helix-fuzz-") as name:
        directory = Path(name)
        try:
            save(case, directory)
        except Exception as error:
            impossible: Exception | None = error
            (directory / "config.json").write_text(json.dumps(case.content))
        else:
            impossible = None
        try:
            spec = spec_from_config(read_config(directory))
        except ValueError as refusal:
            return Outcome("refused by both", str(refusal).split(":")[0]) if impossible else _refused(str(refusal))
        if impossible is not None:
            return Outcome("otherwise", f"transformers refuses it: {impossible!r:.200}")
        try:
            found = ranks(run, case, directory)
        except SettingsRefused as refused:
            missing = [word for word in (case.invalid or "").split() if word not in str(refused)]
            if case.invalid is None:
                return Outcome("otherwise", f"legal settings are refused: {refused}")
            return Outcome("otherwise", f"{missing} not named: {refused}") if missing else _refused(str(refused))
        if case.invalid is not None:
            return Outcome("otherwise", f"illegal settings run: {case.invalid}", dict(+found[0].served.seen))
        kind, problem = differences(case, directory, spec, found, ranks, device)
        return Outcome(kind, problem, dict(+found[0].served.seen))


def _refused(message: str) -> Outcome:
    return Outcome("refused", re.sub(r"\d+", "N", message.split(";")[0].split(":")[0])[:100])


def save(case: Case, directory: Path) -> None:
    """Writes the checkpoint, with random weights in transformers' shapes, and that of a draft model.

    Raises:
        Exception: transformers rejects the config.
    """
    cls = class_named(ARCHITECTURES[case.family])
    config = CONFIG_MAPPING[case.family](**json.loads(json.dumps(case.content)))
    torch.manual_seed(case.seed)
    model = cls(config).float() if case.trained is None else cls.from_pretrained(case.trained, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.state_dict().items() if case.trained is None else ():
            if name.endswith(("bias", "norm.weight", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if case.stored == MXFP4 and name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(convert_moe_packed_tensors(*to_mxfp4(parameter.mT), dtype=torch.float32))
    model.save_pretrained(directory)
    if case.own_head:
        whole = load_file(directory / "model.safetensors")
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    if case.settings["speculation.drafter"] == "mtp":
        tensors = load_file(directory / "model.safetensors")
        save_file(
            tensors | layer_ahead(tensors, spec_from_config(case.content)),
            directory / "model.safetensors",
            {"format": "pt"},
        )
    (directory / "config.json").write_text(json.dumps(case.content))
    if case.stored is not None:  # transformers gets the stored values, unpacked
        whole = directory / "whole"
        whole.mkdir()
        for name in ("config.json", "model.safetensors"):
            (directory / name).rename(whole / name)
        if case.stored == MXFP4:
            pack(whole, directory)
        elif case.stored in PACKINGS:
            plain = load_file(whole / "model.safetensors")
            tensors = {n: t for n, t in write_packed(whole, directory, case.stored).items() if n in plain}
            save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
        else:
            section, block = STORED[case.stored]
            tensors = write_fp8(whole, directory, section, block)
            save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").unlink(missing_ok=True)
    if case.generation is not None:
        for of in (directory, _whole_weights(directory)):
            (of / "generation_config.json").write_text(json.dumps(case.generation))
    if case.nested:
        nest(directory, case)
    if case.settings["speculation.drafter"] == "model":
        nudged(directory, directory / "draft", DRAFT_NOISE, case.seed)
    if case.settings["speculation.drafter"] == "eagle3":
        _write_eagle3(spec_from_config(case.content), directory / "draft", case.seed)


def nest(directory: Path, case: Case) -> None:
    """Rewrites a checkpoint as the text part of a multimodal one, with a tower; transformers gets the plain one."""
    whole, rng = directory / "whole", random.Random(case.seed)
    if not whole.exists():
        whole.mkdir()
        for file in directory.glob("*.*"):
            shutil.copy(file, whole)
    text = json.loads((directory / "config.json").read_text()) | {"model_type": case.family}
    text.pop("architectures", None)
    if case.family == "deepseek_v3":
        text["model_type"] = rng.choice(("deepseek_v3", "kimi_k2"))
    moved = [key for key in SHARED_KEYS if text.get(key) is not None and rng.random() < 0.5]
    outer = {"architectures": [OUTER[case.family]], "model_type": "outer", "text_config": text}
    (directory / "config.json").write_text(json.dumps(outer | {key: text.pop(key) for key in moved}))
    prefix, head = rng.choice((("model.language_model.", ""), ("language_model.model.", "language_model.")))

    def renamed(name: str) -> str:
        for plain, nested in (("model.", prefix), (HEAD, f"{head}{HEAD}")):
            if name.startswith(plain):
                return nested + name.removeprefix(plain)
        return name

    tensors = {renamed(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    tensors[f"{rng.choice(TOWERS)}weight"] = torch.ones(3)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_eagle3(spec: DecoderSpec, to: Path, seed: int) -> None:
    """Writes a random layer with the model's head layout, whose drafts are accepted where tokens repeat."""
    to.mkdir()
    rng, of = random.Random(seed), spec.attention
    aux_layers = [rng.randrange(len(spec.layers)) for _ in range(2)] + [len(spec.layers) - 1]
    heads = of.q_heads, of.kv_heads, of.head_dim if isinstance(of, AttentionSpec) else 16
    options = {"d2t": rng.random() < 0.5, "ids": aux_layers, "residual": rng.random() < 0.5}
    eagle3.save(to, options, spec.hidden, spec.vocab, 64, heads, seed)
    tensors = load_file(to / "model.safetensors")
    tensors["fc.weight"][:, 2 * spec.hidden :] += torch.eye(spec.hidden)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})


def layer_ahead(tensors: dict[str, torch.Tensor], spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Returns an MTP layer that is a copy of one of the model's layers."""
    assert spec.nextn is not None
    last = f"model.layers.{len(spec.layers) - 1 - spec.layers[::-1].index(spec.nextn)}."
    names = NextTokenNames(*(name.format(len(spec.layers)) for name in spec.nextn_names))
    like = {f"{names.layer}.{n.removeprefix(last)}": t.clone() for n, t in tensors.items() if n.startswith(last)}
    norms = {f"{n}.weight": torch.ones(spec.hidden) for n in (names.token_norm, names.state_norm, names.norm)}
    norms = {name: weight - spec.weight_offset for name, weight in norms.items()}
    both = torch.eye(spec.hidden).repeat(1, 2) + 0.1 * torch.randn(spec.hidden, 2 * spec.hidden)
    return like | norms | {f"{names.join}.weight": both}


def nudged(directory: Path, to: Path, share: float, seed: int) -> None:
    """Writes the same model, unpacked, with noise on all weights relative to each tensor's size."""
    to.mkdir()
    directory = _whole_weights(directory)
    whole, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, tensor in whole.items():
        noise = torch.randn(tensor.shape, generator=generator)
        whole[name] = tensor + share * tensor.square().mean().sqrt() * noise
    save_file(whole, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((directory / "config.json").read_text())


def theirs(case: Case, directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads the directory with transformers."""
    directory = _whole_weights(directory)
    cls = class_named(ARCHITECTURES[case.family])
    return (
        cls.from_pretrained(directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
        .to(device)
        .eval()
    )


def _whole_weights(directory: Path) -> Path:
    whole = directory / "whole"
    return whole if whole.exists() else directory


@torch.no_grad()
def their_logits(model: Any, served: ServeResult, device: torch.device) -> dict[str, Tensor]:
    """Returns the logits [n, V] fp64 of each output token by request, from one right-padded batch."""
    texts = {name: served.prompts[name] + tokens[:-1] for name, tokens in served.tokens.items() if tokens}
    if not texts:
        return {}
    width = max(map(len, texts.values()))
    batch = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts.values()], device=device)
    with patch.object(Tensor, "topk", earliest_topk):
        logits = model(batch, use_cache=False).logits.double().cpu()
    return {
        name: row[len(served.prompts[name]) - 1 : len(text)]
        for (name, text), row in zip(texts.items(), logits, strict=True)
    }


def differences(
    case: Case, directory: Path, spec: DecoderSpec, found: list[RankResult], ranks: RunOnRanks, device: torch.device
) -> tuple[str, str]:
    """Returns the kind of outcome, and how our decoding differs from what is expected."""
    dtype = case.settings["model.dtype"]
    exact = theirs(case, directory, torch.float64, device)
    rough = theirs(case, directory, getattr(torch, dtype), device)
    if problem := misread(exact, spec):
        return "otherwise", problem
    served, rows = found[0].served, _whole(found)
    if problem := disorder(case, served):
        return "otherwise", problem
    wanted, rounded = (their_logits(model, served, device) for model in (exact, rough))
    off = {name: (wanted[name] - rounded[name]).abs().amax(1) for name in wanted}  # [n] of each request
    min_difference = TOLERANCE[dtype] * (STATES if spec.has_states else 1)
    allowed = max([min_difference, *(SLACK[dtype] * distance.max().item() for distance in off.values())])
    ours = {name: torch.stack([rows[name, at] for at in _places(served, name)]).double() for name in wanted}
    for request in (request for requests in case.rounds for request in requests if request.name in ours):
        if problem := misdrawn(case, request, served, ours[request.name].float()):
            return "otherwise", problem
    if case.pinned and (again := found[0].captured) is not None and (problem := _redrawn(case, served, again)):
        return "otherwise", problem
    if case.lossy:
        unlike = max((logits - wanted[name]).abs().max().item() for name, logits in ours.items())
        found[0].served.seen["unlike dense"] += unlike > 10 * allowed
        if not case.alone:
            return _lossy(case, directory, served, ours, allowed, ranks)
        one = replace(case, settings=case.settings | ONE_RANK | {"speculation.drafter": "none"})
        allowed = allowed if case.settings["kv.dtype"] == "auto" else max(allowed, ROUNDED)
        return _lossy(one, directory, served, ours, allowed, on_loopback(1, str(device), 240.0))
    problem, worst = "", 0.0
    for name, logits in ours.items():
        distances = (logits - wanted[name]).abs().amax(1)
        # A request of few rows may be lucky in transformers' one run: allow at least half of the case's worst, and in
        # bf16 all of it. (Two of 24,000 cases in fp32 were off by 9.0 and 9.2 times theirs.)
        own = SLACK[dtype] * off[name].max().item()
        max_difference = max(min_difference, own, allowed / 2) if dtype == "float32" else allowed
        if not distances.max() <= max_difference:
            position, worst = len(served.prompts[name]) + int(distances.argmax()), max(worst, distances.max().item())
            problem = (
                f"{name}: logits off by {distances.max():.2e} after {position} tokens ({max_difference:.1e} allowed)"
            )
    if problem:
        tries = 0 if dtype == "float32" else TRIES if spec.experts is None else 2 * TRIES
        hair = _hangs_by_a_hair(case, directory, served, wanted, worst, tries, device)
        return "undecided" if hair else "otherwise", problem
    if (again := found[0].captured) is not None:
        return _captured(case, served, again, exact, allowed, device)
    return "equal", ""


def _hangs_by_a_hair(
    case: Case,
    directory: Path,
    served: ServeResult,
    wanted: dict[str, Tensor],
    worst: float,
    tries: int,
    device: torch.device,
) -> bool:
    """Whether transformers' bf16 run is as far off for one of `tries` perturbed models.

    With two experts nearly tied, rounding decides, and everything after depends on it. Larger perturbations flip
    several ties at once.
    """
    for i in range(tries):
        nudged(directory, where := directory / f"nudged-{i}", NUDGE["bfloat16"] * (1 + i // TRIES * 2), i)
        rounded = their_logits(theirs(case, where, torch.bfloat16, device), served, device)
        if worst <= SLACK["bfloat16"] * max((rounded[name] - wanted[name]).abs().max().item() for name in wanted):
            return True
    return False


def misread(exact: Any, spec: DecoderSpec) -> str:
    """Returns what we read differently from transformers, or ""."""
    eos = exact.generation_config.eos_token_id
    if eos is None:  # generation_config.json lacks it: the config's counts
        eos = exact.config.eos_token_id
    wanted = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if spec.eos != wanted:
        return f"eos {spec.eos}, not {wanted}"
    context, rope = exact.config.max_position_embeddings, spec.rope.scaling
    if spec.rope.kind == "yarn":  # as model cards mean it
        context = max(context, int(rope["factor"] * rope["original_max_position_embeddings"]))
    if spec.max_positions != context:
        return f"context {spec.max_positions}, not {context}"
    return ""


def disorder(case: Case, served: ServeResult) -> str:
    """Returns what is wrong with how requests ended, or ""."""
    if served.leaked != (0, 0, 0):
        return f"leaked pages, slots and sequences: {served.leaked}"
    for request in (request for requests in case.rounds for request in requests):
        tokens, end = served.tokens.get(request.name, ()), served.ends.get(request.name)
        ends = request.sampling.ends(case.eos)
        first = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        whole = {"stop": first == len(tokens), "length": len(tokens) == request.new and first is None}
        whole |= {"abort": first is None and len(tokens) <= request.new and request.abort is not None}
        if end is None or not whole.get(end, False):
            return (
                f"{request.name} ended by {end} after {len(tokens)} of {request.new} tokens; the first is token {first}"
            )
    return ""


def drafts_decide(case: Case, request: CaseRequest) -> bool:
    """Whether drafts, sampled with their own noise and verified by rejection, affect a request's tokens."""
    drafter, noise = case.settings["speculation.drafter"], case.settings.get("speculation.noise")
    rejection = drafter == "model" or (drafter in ("sparse", "mtp", "eagle3") and noise == "own")
    return rejection and not request.sampling.is_greedy


def misdrawn(case: Case, request: CaseRequest, served: ServeResult, logits: Tensor) -> str:
    """Returns a token that the sampler would not take from our own logits [n, V] fp32, or ""."""
    for token, at, row in zip(served.tokens[request.name], _places(served, request.name), logits, strict=True):
        if drafts_decide(case, request):
            right = bool(oracle_kept(row, request.sampling)[token])
        else:
            right = drawn_from(row, request.sampling, at) == token
        if not right:
            return f"{request.name}: token {token} at {at} is not what {request.sampling} draws from its logits"
    return ""


def _captured(
    case: Case, served: ServeResult, again: ServeResult, exact: Any, allowed: float, device: torch.device
) -> tuple[str, str]:
    """Checks that captured steps, whose logits are not visible, sample the same greedy tokens up to near-ties."""
    if problem := disorder(case, again):
        return "otherwise", f"captured: {problem}"
    wanted = their_logits(exact, again, device)
    for request in (request for requests in case.rounds for request in requests if request.name in wanted):
        same = again.prompts[request.name] == served.prompts[request.name]
        n = min(len(served.tokens[request.name]), len(again.tokens[request.name]))
        if (
            same and again.tokens[request.name][:n] == served.tokens[request.name][:n]
        ) or not request.sampling.is_greedy:
            continue
        logits, tokens = wanted[request.name], torch.tensor(again.tokens[request.name])
        short = logits.max(1).values - logits.gather(1, tokens[:, None])[:, 0]
        if short.max() > 2 * allowed:
            return "otherwise", f"captured: {request.name}: token {int(short.argmax())} is short by {short.max():.2e}"
    return "equal", ""


def _redrawn(case: Case, served: ServeResult, again: ServeResult) -> str:
    """Returns a request for which captured steps sample different tokens from the same inputs, or ""."""
    if problem := disorder(case, again):
        return f"captured: {problem}"
    for request in (
        request
        for requests in case.rounds
        for request in requests
        if request.abort is None and not drafts_decide(case, request)
    ):
        same = again.prompts[request.name] == served.prompts[request.name]
        if same and again.tokens[request.name] != served.tokens[request.name]:
            return f"captured: {request.name} draws other tokens"
    return ""


def _lossy(
    case: Case, directory: Path, served: ServeResult, ours: dict[str, Tensor], allowed: float, ranks: RunOnRanks
) -> tuple[str, str]:
    """Compares with an engine that has nothing but its attention.

    A near-tie between two blocks, or between two FP8 values of a key, may be rounded differently.
    Then small perturbations of the weights have the same effect, and the case is undecided.
    """

    def random_weights(where: Path) -> dict[str, Tensor]:
        rows = _whole(ranks(forced, case, where, served))
        return {name: torch.stack([rows[name, at] for at in _places(served, name)]).double() for name in ours}

    def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        distances = [(one[name] - other[name]).abs().max().item() for name in one]
        return max(distances, default=0.0) if all(d == d for d in distances) else float("inf")

    wanted = random_weights(directory)
    if (worst := apart(ours, wanted)) <= allowed:
        return "equal", ""
    for i in range(TRIES):
        nudged(directory, where := directory / f"nudged-{i}", NUDGE["float32"], i)
        if (draft := directory / "draft").exists():
            (where / "draft").symlink_to(draft)
        if apart(random_weights(where), wanted) > worst / SLACK["float32"]:
            return "undecided", f"lossy logits off by {worst:.2e}"
    return "otherwise", f"lossy logits off by {worst:.2e} ({allowed:.1e}) from those without anything around attention"


def _places(served: ServeResult, name: str) -> range:
    begin = len(served.prompts[name])
    return range(begin, begin + len(served.tokens[name]))


def _whole(found: list[RankResult]) -> Rows:
    positions = {at for rank in found for at in rank.logits}
    return {at: torch.cat([rank.logits[at] for rank in found if at in rank.logits]) for at in positions}
