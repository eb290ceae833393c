"""Published config.json files: each is read, or refused with the family or the format that is missing.

The files are those that NVIDIA's AIConfigurator 0.12 collects (https://github.com/ai-dynamo/aiconfigurator, of the
models' own repositories), without the keys that no reader of a text model has, and with lists of modules cut short.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helix.models import spec_from_config
from helix.models.checkpoint import read_config

PUBLISHED = [
    json.loads(line) for line in Path(__file__).with_name("published_configs.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["name"] for row in PUBLISHED])
def test_a_published_config_is_read_or_refused_by_what_is_missing(row: dict[str, Any], tmp_path: Path) -> None:
    for name in ("config", "hf_quant_config"):
        if name in row:
            (tmp_path / f"{name}.json").write_text(json.dumps(row[name]))
    if row["says"] == "read":
        text = row["config"].get("text_config", row["config"])
        assert len(spec_from_config(read_config(tmp_path)).layers) == text["num_hidden_layers"]
        return
    with pytest.raises(ValueError, match=r"is quantized|which is not supported") as refused:
        spec_from_config(read_config(tmp_path))
    assert row["says"] in str(refused.value) and "\n" not in str(refused.value)


def test_how_many_are_read() -> None:
    assert (len(PUBLISHED), sum(row["says"] == "read" for row in PUBLISHED)) == (89, 64)
