"""How many of the papers' items are as described there, from `count.yaml`: `helix papers --count`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.records.columns import page

DATA = Path(__file__).with_suffix(".yaml")
VERDICTS = "described", "partly", "not"  # best first


class Counted(NamedTuple):
    """An item that was not as described at the first count.

    Attributes:
        was, now: of VERDICTS, then and today.
        by: the command that shows a better verdict; empty if it is the same.
        why: what is missing.
    """

    paper: str
    name: str
    item: str
    was: str
    now: str
    by: str
    why: str


def counted() -> tuple[int, list[Counted]]:
    """Returns the number of all items, and those that were not as described."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    total = data.pop("total")
    return total, [
        Counted(paper, name, of["item"], of["was"], of.get("now", of["was"]), of.get("by", ""), of.get("why", "-"))
        for paper, items in data.items()
        for name, of in items.items()
    ]


def totals() -> dict[str, dict[str, int]]:
    """Returns how many items have each verdict, `was` and `now`; those not listed are as described."""
    total, items = counted()
    found = {}
    for when in ("was", "now"):
        numbers = {verdict: sum(getattr(item, when) == verdict for item in items) for verdict in VERDICTS}
        found[when] = numbers | {"described": numbers["described"] + total - len(items)}
    return found


def lines() -> list[str]:
    """Formats the counts, then the items that are or were not as described."""
    numbers = totals()
    head = page(
        [
            ("", *VERDICTS),
            *((when, *map(str, numbers[key].values())) for when, key in (("first count", "was"), ("today", "now"))),
        ]
    )
    rows = [(i.name, i.item, i.was, i.now + (f": `{i.by}`" if i.by else ""), i.why) for i in counted()[1]]
    return [*head, "", *page([("", "item", "first count", "today", "what is missing"), *rows])]
