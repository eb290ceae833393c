"""Mistakes in the choice of blocks, and in a cache in host memory."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

FAULTS = [
    # ---- block-sparse decode
    Fault(
        "a tie too few", "kernels/sparse/select_blocks.py",
        "equal & (equals <= free)", "equal & (equals < free)",
        ("tests/kernels/test_select_blocks.py::test_of_equals_the_earlier",),
    ),
    Fault(
        "a score that is no number is the lowest", "kernels/sparse/select_blocks.py",
        "bits ^ ((bits >> 31) & 0x7FFFFFFF), _HIGHEST)", "bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)",
        ("tests/kernels/test_select_blocks.py::test_no_number_is_the_highest_score",),
    ),
    Fault(
        "a tile of candidates too few", "kernels/sparse/select_blocks.py",
        "_largest(keys, tiles, SEATS, low)", "_largest(keys, tiles, SEATS // 2, low)",
        ("tests/kernels/test_select_blocks.py::test_choices[many-tiles-kernel]",),
    ),
    Fault(
        "the search for the k-th largest ends a key early", "kernels/sparse/select_blocks.py",
        "(reached > k) & (mark < high)", "(reached > k + 1) & (mark < high)",
        ("tests/kernels/test_select_blocks.py::test_any_scores",),
    ),
    Fault(
        "parts of a page in another order", "kernels/sparse/select_blocks.py",
        "* PARTS + i % PARTS", "* PARTS + (i + 1) % PARTS",
        ("tests/kernels/test_select_blocks.py::test_parts",),
    ),
    Fault(
        "a stretch gives all that it has", "kernels/sparse/select_blocks.py",
        "(end - first) * k // pages - before", "tl.minimum(k, end - begin)",
        ("tests/kernels/test_select_blocks.py::test_stretches",),
    ),
    Fault(
        "a page's parts share bounds", "kernels/sparse/block_bounds.py",
        "begin // SLOTS * p_part", "0 * p_part",
        ("tests/kernels/test_block_bounds.py::test_pages_that_were_filled",),
    ),
    Fault(
        "dense a token too long", "kernels/sparse/block_ranges.py",
        "short = position + 1 < from_tokens", "short = position < from_tokens",
        ("tests/kernels/test_block_ranges.py",),
    ),
    Fault(
        "of equal blocks the later", "kernels/sparse/reference.py", "(1 << 31) - block", "(1 << 31) + block",
        ("tests/kernels/test_keep_best.py",),
    ),
    Fault(
        "bounds of no generated page", "helix/worker/model_runner.py",
        "state.span(rows, before, state.lengths[:rows]", "state.span(rows, state.lengths[:rows], state.lengths[:rows]",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[chosen blocks-threads]",),
    ),
    # ---- a cache in host memory
    Fault(
        "tier: a layer does not wait for its guess", "helix/attention/tiered.py",
        "            self._join(self._ahead[cache.lane])", "            pass",
        ("tests/e2e/test_tiered.py::test_a_guess_may_take_until_its_layer_waits_for_it",),
    ),
    Fault(
        "tier: a prompt does not wait for what is before it", "helix/attention/tiered.py",
        "            self._join(self._side)\n            if i + 1 <", "            if i + 1 <",
        ("tests/e2e/test_tiered.py::test_a_guess_may_take_until_its_layer_waits_for_it",),
    ),
    Fault(
        "tier: a guess takes places that are being read", "helix/attention/tiered.py",
        """            self._join(self._ahead[cache.lane])
        self._fetch(table, cache, step, self.budget, cache.misses)
""",
        """            pass
        self._fetch(table, cache, step, self.budget, cache.misses)
        self._join(self._ahead[cache.lane])
""",
        ("tests/e2e/test_tiered.py::test_a_guess_may_take_until_its_layer_waits_for_it",),
    ),
    Fault(
        "tier: parts of the batch share rings", "helix/attention/tiered.py",
        "step.max_q, step.first)", "step.max_q, 0)",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[chunks of a batch in host memory-threads]",),
    ),
    Fault(
        "tier: an unfinished page without its scales", "helix/worker/tiered_cache.py",
        "for kept in self.block.parts:", "for kept in self.block.parts[:2]:",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[few bits in host memory with drafts-threads]",),
    ),
    Fault(
        "tier: values as far apart as keys", "kernels/attention/paged_tiles.py", "if V_APART > 1:", "if V_APART > 9:",
        ("tests/kernels/test_suite.py::test_row[flash_decode-odd-kv=k16v8-layout=blocks-dtype=float16-kernel]",),
    ),
    Fault(
        "tier: parts of a block that overlap", "helix/worker/blocks.py",
        "            begin = end\n", "            begin = end - ALIGNED // WORD\n",
        ("tests/kernels/test_append.py::test_parts_lie_in_order",),
    ),
    Fault(
        "tier: a guess renews the order", "kernels/tier/resolve.py",
        "    if not GUESS:\n        tl.store(turns + head, 1 - turn)", "    tl.store(turns + head, 1 - turn)",
        ("tests/kernels/test_tier.py::test_kernel_and_reference_leave_the_same",),
    ),
    Fault(
        "tier: steps renew a block too few", "benchmarks/ranks/kept_kernels.py",
        "    renewed = round((1 - repeat) * topk * SHARES)", "    renewed = round((1 - repeat) * (topk - 1) * SHARES)",
        ("tests/kernels/test_repeat_blocks.py::test_the_share_is_kept",),
    ),
    Fault(
        "tier: hits come over the link", "helix/planner/layer.py",
        "tokens = share * (1 - tier.hits) * chosen", "tokens = share * chosen",
        ("tests/unit/test_simulate_cost.py::test_what_is_not_hot_comes_over_the_link",),
    ),
]  # fmt: skip
