"""Random models of every family, written in random ways, decoded by random layouts: against transformers.

    python -m tests.e2e.fuzz [family=NAME] [cases=500] [seed=0] [record=FILE]

A case is a legal config, its random weights, and a way to write the config down: keys left out where the family's
default says the same, old spellings, aliases, nulls, keys that nobody knows. transformers reads what was written, in
fp64 and fp32; so do we, on loopback ranks. Every token that we draw must be one of the best of the fp64 logits at its
place, and every logit equal to them, up to what transformers' own fp32 run differs by. What we refuse, we refuse with a
reason, which is counted.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from comm.loopback import LoopbackWorld, run_ranks
from helix.layout import HelixLayout
from helix.loading import read_config
from helix.models import DecoderSpec, spec_from_config
from helix.request import Request
from helix.speculation import Drafter, NgramDrafter
from launch.job.report import provenance
from tests.e2e.fuzz_configs import ARCHITECTURES, MAKERS, Json, config_of, rope_of, written
from tests.e2e.parity import ModelDrafts, build_engine

LENGTH = 160  # most tokens of a prompt: past gpt-oss's default window of 128
NEW_TOKENS = 5
TOLERANCE = 1e-4  # of logits of size 1 to 20, for sums in another order (tests/e2e/parity.py)
SLACK = 8  # times what transformers' own fp32 run is off, where that is more


@dataclass
class Case:
    """What is run, and how.

    Attributes:
        content: of config.json, as written.
        own_head: the checkpoint has a head that differs from the embedding, whatever the config says.
    """

    model_type: str
    seed: int
    content: Json
    generation: Json | None
    own_head: bool
    layout: HelixLayout
    append_block: int
    page_size: int
    prefill_chunk: int
    drafter: str
    lengths: tuple[int, ...]


@dataclass
class Tally:
    """Cases of a family by what became of them."""

    family: str
    cases: int = 0
    equal: int = 0
    otherwise: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    refused_by_both: Counter[str] = field(default_factory=Counter)


def case_of(model_type: str, seed: int) -> Case:
    """The case of a family and a seed; every other one is written plainly."""
    rng = random.Random(f"{model_type} {seed}")
    config = config_of(model_type, rng)
    if model_type.startswith("deepseek"):
        config |= {"head_dim": config["qk_rope_head_dim"]}
    rope = rope_of(model_type, rng, config["max_position_embeddings"])
    config["eos_token_id"] = rng.choice((None, 2, 3, [3, 5]))
    content = written(model_type, config, rope, seed % 2 == 0, rng)
    if seed % 2 and model_type == "gpt_oss" and rng.random() < 0.2:  # null means YaRN there
        content = {k: v for k, v in content.items() if not k.startswith(("rope", "original_max"))}
        content |= rng.choice(({}, {"rope_scaling": None}, {"rope_parameters": None}))
    generation = rng.choice((None, None, {"eos_token_id": 7}, {"eos_token_id": [7, 9], "temperature": 0.5}))
    kv_heads = 1 if model_type.startswith("deepseek") else config["num_key_value_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
    layout = layout_of(config["num_attention_heads"], kv_heads, experts, rng)
    return Case(
        model_type,
        seed,
        content,
        generation,
        config["tie_word_embeddings"] and rng.random() < 0.3,
        layout,
        rng.choice((1, 4, 16, 64)),
        rng.choice((1, 3, 16, 64)),
        rng.choice((7, 64, 256)),
        rng.choice(("none", "none", "ngram", "model")),
        tuple(rng.choice((1, rng.randint(2, 40), rng.randint(40, LENGTH))) for _ in range(rng.randint(1, 3))),
    )


def layout_of(q_heads: int, kv_heads: int, experts: int, rng: random.Random) -> HelixLayout:
    """Any over up to four ranks on which these heads and experts can be spread."""
    while True:
        world, mode = rng.choice((1, 2, 2, 3, 4)), rng.choice(("helix", "helix", "helix", "tp", "medha"))
        kvp = 1 if mode == "tp" else rng.choice([n for n in range(1, world + 1) if world % n == 0])
        ep = rng.choice([n for n in range(1, world + 1) if world % n == 0 and n <= experts])
        try:
            layout = HelixLayout.create(mode, kvp, world // kvp, ep=ep)
            layout.check_heads(q_heads, kv_heads)
        except ValueError:
            continue
        return layout


def save(case: Case, directory: Path) -> None:
    """The checkpoint, its weights of the shapes that transformers makes of the config.

    Raises:
        Exception: transformers takes the config for none.
    """
    cls = getattr(transformers, ARCHITECTURES[case.model_type])
    config = CONFIG_MAPPING[case.model_type](**json.loads(json.dumps(case.content)))
    torch.manual_seed(case.seed)
    model = cls(config).float()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith(("bias", "norm.weight", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    if case.own_head:
        whole = load_file(directory / "model.safetensors")
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(case.content))
    (directory / "generation_config.json").unlink(missing_ok=True)
    if case.generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(case.generation))


def theirs(case: Case, directory: Path, dtype: torch.dtype) -> Any:
    """What transformers makes of the directory."""
    cls = getattr(transformers, ARCHITECTURES[case.model_type])
    return cls.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def prompts_of(case: Case, vocab: int) -> list[tuple[int, ...]]:
    rng = random.Random(case.seed)
    return [tuple(rng.randrange(vocab) for _ in range(length)) for length in case.lengths]


def ours(
    case: Case, directory: Path, prompts: list[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    """Tokens of each prompt, and the logits [n, V] from which they were drawn."""
    longest = LENGTH + NEW_TOKENS + 8

    def body(world: LoopbackWorld, rank: int) -> tuple[dict[int, tuple[int, ...]], dict[tuple[int, int], torch.Tensor]]:
        def comm() -> Any:
            return world.communicator(rank, case.layout.kvp_group(rank))

        drafter: Drafter | ModelDrafts | None = None
        if case.drafter == "ngram":
            drafter = NgramDrafter(3, 2)
        elif case.drafter == "model":
            drafter = ModelDrafts(directory, case.layout, comm(), 2)
        engine = build_engine(
            directory, case.layout, comm(), case.append_block,
            page_size=case.page_size, max_batch=2, max_length=longest, prefill_chunk=case.prefill_chunk,
            drafter=drafter, adaptive=False,
        )  # fmt: skip
        logits: dict[tuple[int, int], torch.Tensor] = {}

        def observe(slots: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
            for slot, position, row in zip(slots.tolist(), positions.tolist(), rows, strict=True):
                admission = engine.runner.admitted[slot]
                logits[int(admission.id), position - admission.length] = row.clone()

        engine.runner.observer = observe
        requests = [Request(i, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
        tokens = {int(output.id): output.output_ids for output in engine.generate(requests)}
        return tokens, logits

    ranks = run_ranks(case.layout.world_size, body, timeout_s=120.0)
    tokens = [ranks[0][0][i] for i in range(len(prompts))]
    rows = [
        torch.stack([torch.cat([logits[i, n] for _, logits in ranks]) for n in range(NEW_TOKENS)])
        for i in range(len(prompts))
    ]
    return tokens, rows


def differences(case: Case, directory: Path, spec: DecoderSpec) -> str | None:
    """How our decoding differs from transformers' reading of a directory; None where it does not."""
    exact, single = (theirs(case, directory, dtype) for dtype in (torch.float64, torch.float32))
    eos = exact.generation_config.eos_token_id
    if eos is None:  # a generation_config.json without it: the config's counts
        eos = exact.config.eos_token_id
    wanted_eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if spec.eos != wanted_eos:
        return f"eos {spec.eos}, not {wanted_eos}"
    if spec.max_positions != exact.config.max_position_embeddings:
        return f"context {spec.max_positions}, not {exact.config.max_position_embeddings}"
    prompts = prompts_of(case, spec.vocab)
    tokens, rows = ours(case, directory, prompts)
    for prompt, drawn, logits in zip(prompts, tokens, rows, strict=True):
        sequence = torch.tensor([prompt + drawn[:-1]])
        with torch.no_grad():
            wanted, rounded = (m(sequence).logits[0, len(prompt) - 1 :].double() for m in (exact, single))
        allowed = max(TOLERANCE, SLACK * (wanted - rounded).abs().max().item())
        worst = (logits - wanted).abs().max().item()
        if not worst <= allowed:
            return f"logits off by {worst:.2e} behind {len(prompt)} tokens ({allowed:.1e} allowed)"
        best = wanted.max(1).values - wanted.gather(1, torch.tensor(drawn)[:, None])[:, 0]
        if best.max() > 2 * allowed:
            return f"token {int(best.argmax())} behind {len(prompt)} tokens is not the best"
    return None


def run_case(case: Case, tally: Tally) -> None:
    """Runs a case and notes what became of it."""
    tally.cases += 1
    with tempfile.TemporaryDirectory(prefix="helix-fuzz-") as name:
        directory = Path(name)
        try:
            save(case, directory)
        except Exception as error:
            impossible = error
        else:
            impossible = None
        if impossible is not None:
            (directory / "config.json").write_text(json.dumps(case.content))
        try:
            spec = spec_from_config(read_config(directory))
        except ValueError as refusal:
            reason = str(refusal).split(":")[0] if impossible else _reason(str(refusal))
            (tally.refused_by_both if impossible else tally.refused)[reason] += 1
            return
        if impossible is not None:
            tally.otherwise.append(f"seed {case.seed}: transformers refuses it: {impossible!r:.200}")
            return
        problem = differences(case, directory, spec)
    if problem is None:
        tally.equal += 1
    else:
        tally.otherwise.append(f"seed {case.seed}: {problem}; {case.layout}; {json.dumps(case.content)}")


def _reason(message: str) -> str:
    """A refusal without what differs from case to case."""
    return message.split(";")[0][:90]


def main(arguments: list[str]) -> int:
    """Runs cases of one family or of all; returns 1 where any was read otherwise."""
    given = dict(argument.split("=", 1) for argument in arguments)
    if unknown := set(given) - {"family", "cases", "seed", "record"}:
        sys.exit(f"error: {', '.join(sorted(unknown))} unknown; known: family, cases, seed, record")
    families = [given["family"]] if "family" in given else list(MAKERS)
    begin, cases = int(given.get("seed", 0)), int(given.get("cases", 500))
    quiet()
    console = Console(width=120)
    table = Table("family", "cases", "equal", "refused by name", "refused by both", "read otherwise", "s")
    tallies = []
    for family in families:
        tally, start = Tally(family), time.monotonic()
        for seed in track(range(begin, begin + cases), family, console=console, disable=not console.is_terminal):
            run_case(case_of(family, seed), tally)
        tallies.append(tally)
        counts = tally.equal, tally.refused.total(), tally.refused_by_both.total(), len(tally.otherwise)
        table.add_row(family, str(tally.cases), *map(str, counts), f"{time.monotonic() - start:.0f}")
        for line in tally.otherwise:
            console.print(f"[red]{family}[/] {line}", soft_wrap=True)
        if "record" in given:
            line = {**vars(tally), "first_seed": begin, **provenance(torch.device("cpu"))}
            with Path(given["record"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
    console.print(table)
    for tally in tallies:
        for reason, count in tally.refused.most_common():
            console.print(f"{tally.family}: {count} x {reason}", soft_wrap=True)
    return 1 if any(tally.otherwise for tally in tallies) else 0


def quiet() -> None:
    """Keeps transformers from remarks on each of a thousand models."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
