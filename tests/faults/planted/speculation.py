"""Mistakes in drafts: how many there are, and which keys they read."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

ADAPTIVE = ("tests/unit/test_adaptive.py",)
LIMITS = ("tests/e2e/test_speculation.py::test_limits_reach_every_rank_and_end_with_their_sequence",)

FAULTS = [
    # ---- drafts
    Fault(
        "a slot's next sequence inherits its limit", "helix/engine/core.py",
        "self._policy.forget(slot)", "pass", LIMITS,
    ),
    Fault(
        "limits of drafts are not set", "helix/worker/model_runner.py",
        "if decision.draft_limits:", "if False:", LIMITS,
    ),
    Fault(
        "limits of drafts are not sent", "helix/engine/draft_policy.py",
        "drafts == 0 or unlimited", "drafts >= 0 or unlimited", ADAPTIVE,
    ),
    Fault(
        "drafts of a sequence that takes none are verified", "helix/engine/draft_policy.py",
        "        if slot in self._without:\n            return 0\n", "", ADAPTIVE,
    ),
    Fault(
        "a sequence is never forgotten", "helix/engine/draft_policy.py",
        "self._rows_keep.pop(slot, None)", "pass", ADAPTIVE,
    ),
    Fault(
        "drafts behind a rejected one count as tried", "helix/engine/draft_policy.py",
        "range(min(outcome.kept + 1, outcome.tried))", "range(outcome.tried)", ADAPTIVE,
    ),
    Fault(
        "the draft model begins a token late", "helix/speculation/model.py",
        "before = (lengths - 1).clamp(min=0)", "before = lengths.clamp(min=0)",
        ("tests/e2e/test_draft_model.py::test_all_that_is_right_is_kept[qwen3-4-False]",),
    ),
    # ---- sparse drafting
    Fault(
        "an equal key too many", "kernels/sparse/select_tokens.py",
        "skipped = equals - left", "skipped = equals - left - 1",
        ("tests/kernels/test_select_tokens.py::test_of_equals_the_latest",),
    ),
    Fault(
        "counts of the call before", "kernels/sparse/select_tokens.py",
        "tl.store(row_counts + _LOW + v, v * 0)", "tl.store(row_counts + _SECOND + d, d * 0)",
        ("tests/kernels/test_select_tokens.py::test_a_call_leaves_nothing_to_the_next",),
    ),
    Fault(
        "a NaN that pushes out a sink", "kernels/sparse/reference.py",
        "NO_NUMBER = 0xFFFE", "NO_NUMBER = 0xFFFF",
        ("tests/kernels/test_select_tokens.py::test_no_number_is_the_highest_score_but_pushes_out_no_sink",),
    ),
    Fault(
        "a counter that overflows", "kernels/sparse/select_tokens.py", "MOST_TILES = 7", "MOST_TILES = 14",
        ("tests/kernels/test_select_tokens.py::test_one_counter_holds_all_keys",),
    ),
    Fault(
        "drafts may choose a key that was refused", "helix/speculation/sparse.py",
        "span.starts, span.before, step.live", "span.starts, span.before + 1, step.live",
        ("tests/e2e/test_sparse_drafts.py::test_tables[any]",),
    ),
    Fault(
        "a new sequence drafts with its predecessor's keys", "helix/speculation/sparse.py",
        "for i, prompt in enumerate(chunk.prompts):", "for i, prompt in enumerate(chunk.prompts[1:], 1):",
        ("tests/e2e/test_sparse_drafts.py::test_tables[any]",),
    ),
    Fault(
        "after steps without drafts, old keys", "helix/speculation/sparse.py",
        "self._choose(every, state.block_tables, state.starts, state.lengths - 1, state.active, 0)", "return",
        ("tests/e2e/test_sparse_drafts.py::test_tables[any]",),
    ),
    Fault(
        "the bonus row is the last of the tile", "kernels/attention/flash_decode.py",
        "tl.max(tl.where(los < his, query, -1), 0)", "T - 1",
        ("tests/kernels/test_suite.py::test_row[key_scores-plain-sms=3-rows=ends-kernel]",),
    ),
    Fault(
        "queries that read a key are taken for the first", "kernels/attention/flash_decode.py",
        "earliest = tl.min(tl.where(los < his, query, T), 0)", "earliest = 0",
        ("tests/kernels/test_attention.py::test_groups_that_straddle_append_blocks",),
    ),
    Fault(
        "a draft too many is read", "helix/attention/chosen.py",
        "behind = hi - self.known[rows] + self.counts[rows]", "behind = hi - self.known[rows] + self.counts[rows] + 1",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[every key is read by any-threads]",),
    ),
    Fault(
        "a guess that nobody looks at", "kernels/sparse/select_tokens.py",
        "if (above < k) & (k <=", "if (above >= 0) & (k <=",
        ("tests/kernels/test_select_tokens.py::test_what_the_call_before_found_is_a_guess",),
    ),
    Fault(
        "a right guess whose counts are lost", "kernels/sparse/select_tokens.py",
        "tl.load(row_counts + _GUESSED + v))", "v * 0)",
        ("tests/kernels/test_select_tokens.py::test_what_the_call_before_found_is_a_guess",),
    ),
    Fault(
        "keys of the parts before count twice", "kernels/sparse/select_tokens.py",
        "other=0) - beyond\n", "other=0)\n",
        ("tests/kernels/test_select_tokens.py::test_choices",),
    ),
    Fault(
        "every rank takes the keys that are equal", "kernels/sparse/select_tokens.py",
        "left - tl.load(equals_before + row * 256 + low)", "left",
        ("tests/kernels/test_select_tokens.py::test_ranks_choose_together",),
    ),
    Fault(
        "the next draft comes from the first verified row", "helix/speculation/layer.py",
        "step.span.before - 1).clamp(min=0)", "step.span.before - 1).clamp(max=0)",
        ("tests/e2e/test_layer_drafts.py::test_drafts_are_those_of_the_layer",),
    ),
    Fault(
        "the last row of a chunk is forgotten", "helix/speculation/layer.py",
        "self._ends[slots] = chunk.states[rows]", "self._ends[slots] = 0 * chunk.states[rows]",
        ("tests/e2e/test_layer_drafts.py::test_drafts_are_those_of_the_layer",),
    ),
    Fault(
        "acceptance may fall by two thirds", "launch/serving/acceptance.py",
        "share <= (1 - FALL) * before", "share <= FALL * before",
        ("tests/serving/test_metrics.py::test_a_fall_of_acceptance_is_told_once",),
    ),
]  # fmt: skip
