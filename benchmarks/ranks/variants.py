"""Settings of decode steps that a benchmark times in turn over the same cache (`bench.variants`)."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks import schema
from benchmarks.schema import LabConfig
from helix.checks import check
from helix.schema import build

# They do not change what the cache holds.
KEYS = ("attention.policy", "attention.num_blocks", "bench.repeat", "kv.offload_prefetch")


def variants(config: LabConfig) -> dict[str, LabConfig]:
    """Returns the config of each variant by its text; without variants, the config itself under an empty one.

    Raises:
        ValueError: a variant sets another key, a value out of range, or more blocks than the cache is made for.
    """
    found = {}
    for label in config.bench.variants or [""]:
        if unknown := [part for part in label.split() if part.partition("=")[0] not in KEYS]:
            raise ValueError(
                f"bench.variants has {unknown[0]!r}: a variant is KEY=VALUE ..., with keys {', '.join(KEYS)}"
            )
        try:
            content = asdict(config)
            for group, key, value in (part.replace("=", ".", 1).split(".", 2) for part in label.split()):
                content[group][key] = value
            found[label] = build(LabConfig, content)
            check(found[label])
            schema.check(found[label])
        except ValueError as error:
            raise ValueError(f"bench.variants has {label!r}: {str(error).splitlines()[0]}") from error
        if found[label].attention.num_blocks > config.attention.num_blocks:
            raise ValueError(
                f"bench.variants has {label!r}, but the cache is made for "
                f"attention.num_blocks={config.attention.num_blocks}: set attention.num_blocks to the largest of all "
                "variants"
            )
    if found and config.attention.policy == "dense" and config.bench.variants:
        raise ValueError("bench.variants need block-sparse steps: set attention=block_sparse, or leave them out")
    return found
