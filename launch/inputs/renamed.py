"""Keys that were renamed in the last release: the old one is refused with its new name."""

from __future__ import annotations

from collections.abc import Sequence

# By command, the old key and what stands for it now, where {} is the old value.
RENAMED = {
    "helix plan": {
        "weights": "model.weights={}",
        "kv": "kv.dtype={}",
        "drafter": "speculation={}",
        "gamma": "speculation.gamma={}",
        "sparsity": "speculation.sparsity={}",
        "path": "speculation.path={}",
        "sparse": "attention=block_sparse attention.topk={}",
        "tier": "kv.tier={}",
        "host_bytes": "kv.host_bytes={}",
        "gpu_bytes": "kv.gpu_bytes={}",
        "ahead": "kv.ahead=true guessed={}",
        "backend": "comm.backend={}",
        "json": "--json {}",
    },
    "helix simulate": {
        "mode": "layout.mode={}",
        "dp": "layout.dp={}",
        "kvp": "layout.kvp={}",
        "tpa": "layout.tpa={}",
        "tpf": "layout.tpf={}",
        "ep": "layout.ep={}",
    },
}


def refuse_renamed(command: str, overrides: Sequence[str]) -> None:
    """Raises ValueError, with the new names, if there are old ones among overrides."""
    split = [(text, *text.partition("=")[::2]) for text in overrides]
    new = {text: RENAMED[command][key].format(value) for text, key, value in split if key in RENAMED[command]}
    if new:
        raise ValueError("; ".join(f"{text} is now {name}" for text, name in new.items()))
