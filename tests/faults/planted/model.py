"""Mistakes in attention, rotation, experts, layers, sampling and the reading of checkpoints."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

SAMPLING = tuple(f"tests/unit/test_sampling.py::{kind}" for kind in ("TestTokens", "TestKeptSet"))
ROTARY = ("tests/unit/test_rotary.py",)
LOADING = ("tests/unit/test_loading.py",)
OVERRIDES = ("tests/unit/test_overrides.py",)
EXPERT_LAYERS = tuple(
    f"tests/unit/test_expert_layers.py::{name}"
    for name in (
        "test_one_sum_is_what_the_paper_does_in_three_steps",
        "test_shared_experts_are_among_the_routed_where_all_ranks_hold_these",
    )
)
ROW = "tests/kernels/test_suite.py::test_row"
KV_APPEND = tuple(
    f"{ROW}[kv_append-4-2-64-16-N=6-{name}]" for name in ("dtype=float32-kernel", "dtype=float32-reference")
)
ROUTE = ("tests/kernels/test_router.py",)
LSE_COMBINE = tuple(
    f"{ROW}[lse_combine-{name}]"
    for name in ("nothing-kernel", "3-5-3-80-empty=0.6-kernel", "3-5-3-80-empty=0.6-reference")
)
DECODE = tuple(
    f"{ROW}[flash_decode-{name}-kernel]" for name in ("plain", "group-16-verify-3", "mha-verify-8", "window-verify")
)
SCORED = tuple(
    f"{ROW}[key_scores-{name}-sms=3-rows={rows}-kernel]"
    for name in ("plain", "group-7", "first-queries-without-keys", "first-tile-without-keys")
    for rows in ("ends", "any")
)
HOPB = ("tests/dist/test_hopb.py::test_chunked_steps_are_those_of_one_exchange",)
PARITY = "tests/e2e/test_parity.py::"
ROW = PARITY + "test_tokens_and_logits[{}-threads]"
TURNS = ROW.format("halves")
DEALT = tuple(map(ROW.format, ("dealt over a token each", "dealt over five ranks")))

FAULTS = [
    # ---- the last layer
    Fault(
        "the last layer goes on with a token too early", "helix/worker/step.py",
        "(self.cu_q[1:].long() - 1).clamp(min=0)", "(self.cu_q[1:].long() - 2).clamp(min=0)",
        (PARITY + "test_prefill_has_its_own_path",),
    ),
    Fault(
        "all last tokens are sought in the first half", "helix/models/halves.py",
        "torch.where((rows < middle)", "torch.where((rows >= 0)", (TURNS,),
    ),
    # ---- attention
    Fault(
        "LSE in base 2", "kernels/attention/split_kv.py",
        "tl.store(lse, log2 * 0.6931471805599453, mask=live)", "tl.store(lse, log2, mask=live)", DECODE,
    ),
    Fault(
        "sum without its rescale", "kernels/attention/paged_tiles.py",
        "total = total * rescale + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)", DECODE,
    ),
    Fault(
        "output without its rescale", "kernels/attention/paged_tiles.py",
        "tl.dot(weights.to(q.dtype), v, acc * rescale[:, None]", "tl.dot(weights.to(q.dtype), v, acc", DECODE,
    ),
    Fault(
        "a key of the future", "kernels/attention/paged_tiles.py",
        "(key[None, :] < row_hi[:, None])", "(key[None, :] <= row_hi[:, None])", DECODE,
    ),
    Fault(
        "window one key too narrow", "kernels/attention/paged_tiles.py",
        "(key[None, :] >= row_lo[:, None])", "(key[None, :] > row_lo[:, None])",
        (f"{ROW}[flash_decode-window-kernel]",),
    ),
    Fault(
        "a tile of which no row counts", "kernels/attention/paged_tiles.py", "if SEVERAL:", "if False:",
        SCORED,
    ),
    Fault(
        "an edge without its mask", "kernels/attention/paged_tiles.py",
        "(tile >= full_stop)", "(tile > full_stop)", DECODE,
    ),
    Fault(
        "a query without keys finds some", "kernels/attention/flash_decode.py",
        "tl.where(reads[:, None], acc, 0.0)", "acc", SCORED,
    ),
    Fault(
        "sink in base 2", "kernels/attention/paged_tiles.py",
        "sink = sink.to(tl.float32) * 1.4426950408889634", "sink = sink.to(tl.float32)",
        (f"{ROW}[flash_decode-sinks-kernel]",),
    ),
    Fault(
        "a sink in every split", "kernels/attention/flash_prefill.py",
        "if split == 0:  # a sink", "if split >= 0:  # a sink",
        (f"{ROW}[flash_prefill-sinks-split-kernel]",),
    ),
    Fault(
        "splits that overlap", "kernels/attention/split_prefill.py",
        "tl.minimum(begin + run, last)", "tl.minimum(begin + run + 1, last)",
        (f"{ROW}[flash_prefill-late-chunks-split-kernel]",),
    ),
    Fault(
        "every rank projects the first tokens of a half", "helix/layers/attention.py",
        "begin = self.comm.kvp_rank * each", "begin = 0", (TURNS,),
    ),
    Fault(
        "the second half has the segments of the whole", "helix/worker/step.py",
        "self.cu_q.clamp(begin, end) - begin", "self.cu_q.clamp(0, end - begin)", (TURNS,),
    ),
    Fault(
        "an empty shard is NaN", "kernels/attention/split_kv.py",
        "acc /= tl.where(empty, 1.0, total)[:, None]", "acc /= total[:, None]",
        (f"{ROW}[flash_decode-empty-shards-kernel]",),
    ),
    Fault(
        "nothing anywhere is NaN", "kernels/attention/lse_combine.py",
        '    peak = tl.where(peak == float("-inf"), 0.0, peak)\n', "", LSE_COMBINE,
    ),
    Fault(
        "what an empty source left counts", "kernels/attention/lse_combine.py",
        'width = tl.where(source_lse == float("-inf"), 0, D)', "width = tl.where(source_lse == 0, D, D)", LSE_COMBINE,
    ),
    Fault(
        "combined in base 2", "kernels/attention/reference.py",
        "weights = (lse - peak).exp()", "weights = (lse - peak).exp2()", LSE_COMBINE,
    ),
    Fault(
        "sinks on every rank", "helix/layers/attention.py",
        "if layout.kvp_rank(comm.rank) == 0:", "if spec.sinks:",
        (ROW.format("experts over six ranks"),),
    ),
    Fault(
        "a chunk with its neighbour's bounds", "helix/attention/base.py",
        "tuple(of_tokens[rows] for", "tuple(of_tokens[: len(of_tokens[rows])] for", HOPB,
    ),
    Fault(
        "chunks of tokens instead of sequences", "helix/layers/attention.py",
        "slice(cuts[chunk].start * each, cuts[chunk].stop * each)", "slice(cuts[chunk].start, cuts[chunk].stop)",
        ("tests/dist/test_hopb.py::test_sequences_stay_whole_with_their_drafts",),
    ),
    Fault(
        "short steps are cut like long ones", "helix/worker/model_runner.py",
        "return chunks if row_tokens >= least else 1", "return chunks",
        ("tests/dist/test_hopb.py::test_auto_cuts_no_steps_that_are_too_short",),
    ),
    Fault(
        "hopb=on takes one exchange", "helix/worker/warm_up.py",
        'return [1, *fitting] if runner.hopb == "auto" else fitting', "return [1, *fitting]",
        ("tests/dist/test_hopb.py::test_chunks_are_chosen_by_their_times",),
    ),
    Fault(
        "attention that takes the place of an exchange", "comm/hopb.py", "if leads:", "if not leads:",
        ("tests/dist/test_hopb.py::test_an_exchange_of_whole_multiprocessors_is_launched_before_the_attention_beside_it",),
    ),
    Fault(
        "chunks in the other order", "helix/layers/attention.py", "packed(sent, self.shares, result[of(chunk)]",
        "packed(sent, self.shares, result[of(chunks - 1 - chunk)]", HOPB,
    ),
    Fault(
        "halves of a key turned the wrong way", "kernels/attention/kv_append.py",
        "other = second * c + first * s", "other = second * c - first * s", KV_APPEND,
    ),
    Fault(
        "interleaved rotation", "kernels/dense/reference.py",
        "a, b = x.float().chunk(2, dim=-1)", "a, b = x.float()[..., 0::2], x.float()[..., 1::2]", KV_APPEND,
    ),
    # ---- RoPE
    Fault(
        "YaRN's ramp turned round", "helix/layers/rotary.py",
        'plain / s["factor"] * ramp + plain * (1 - ramp)', 'plain / s["factor"] * (1 - ramp) + plain * ramp', ROTARY,
    ),
    Fault(
        "YaRN's temperature in base 2", "helix/layers/specs.py",
        "0.1 * weight * math.log(stretch) + 1.0", "0.1 * weight * math.log2(stretch) + 1.0", ROTARY,
    ),
    Fault("Llama 3's band without ends", "helix/layers/rotary.py", "keep = keep.clamp(0, 1)", "keep = keep", ROTARY),
    Fault(
        "linear scaling left out", "helix/layers/rotary.py",
        'return plain / s["factor"], 1.0', "return plain, 1.0", ROTARY,
    ),
    Fault(
        "lanes of a destination without heads are another's", "kernels/attention/merge_messages.py",
        "live = head < tl.load(starts + k + 1)", "live = head < tl.load(starts + tl.num_programs(1))",
        ("tests/kernels/test_merge_messages.py::test_partials_that_are_merged_are_copied",),
    ),
    # ---- experts
    Fault(
        "pairs lie behind those of their expert", "kernels/moe/pair_order.py",
        "tl.gather(end - count, expert, 0)", "tl.gather(end, expert, 0)",
        ("tests/kernels/test_pair_order.py::test_pairs_lie_by_expert",),
    ),
    Fault("weights not normalised", "kernels/moe/reference.py", "if normalise:", "if False:", ROUTE),
    Fault(
        "routed scale left out", "kernels/moe/router.py", "weight * scale, 1.0)", "weight, 1.0)", ROUTE,
    ),
    Fault(
        "a group is as good as its best expert", "kernels/moe/reference.py",
        "grouped.topk(group_score).values.sum(-1)", "grouped.max(-1).values", ROUTE,
    ),
    Fault(
        "the choice's bias weighs", "kernels/moe/reference.py",
        "weights = scores.gather(1, ids)", "weights = choice.gather(1, ids)", ROUTE,
    ),
    Fault(
        "shared experts counted twice", "helix/layers/ffn.py",
        "if spec.shared_width and not self.shared_count:", "if spec.shared_width:", EXPERT_LAYERS,
    ),
    Fault(
        "experts' bias on every rank", "helix/layers/ffn.py",
        "if columns.start == 0:", "if columns.start >= 0:", EXPERT_LAYERS,
    ),
    Fault(
        "gate and up exchanged", "helix/layers/ffn.py", "for odd in (0, 1))", "for odd in (1, 0))", EXPERT_LAYERS,
    ),
    Fault(
        "gpt-oss's gate without its one", "kernels/dense/reference.py", "* (up + 1))", "* up)",
        (f"{ROW}[experts-4-2-3-33-24-few-clamped-addend-reference]",),
    ),
    # ---- layers
    Fault(
        "output bias on every rank", "helix/layers/linear.py", "if bias and shard.comm.rank == 0 else", "if bias else",
        (ROW.format("experts over six ranks"),),
    ),
    Fault(
        "a tied head is read", "helix/models/decoder.py",
        'None if spec.tied else "lm_head"', '"lm_head" if spec.tied else None',
        (ROW.format("KV heads over four of eight ranks"),),
    ),
    Fault(
        "DeepSeek's temperature once", "helix/models/deepseek.py",
        "scale *= rotary.mscale(temperature) ** 2", "scale *= rotary.mscale(temperature)",
        (ROW.format("latents of gathered queries"),),
    ),
    Fault(
        "latent rotation not interleaved", "helix/layers/mla.py",
        "[range(begin, end, 2), range(begin + 1, end, 2)] if spec.interleaved", "[range(begin, end)] if True",
        (ROW.format("latents of gathered queries"),),
    ),
    Fault(
        "index keys rotated as latents are", "helix/layers/specs.py",
        "if self.interleaved else [range(begin, end)]", "if True else [range(begin, end)]",
        (ROW.format("chosen tokens of deepseek-v32"),),
    ),
    Fault(
        "equal scores to the later token", "kernels/indexer/keys.py",
        "(code << BITS) + ((1 << BITS) - 1 - at.to(tl.int64))", "(code << BITS) + at.to(tl.int64)",
        ("tests/kernels/test_choose_tokens.py::test_the_best_of_all_ranks[tied-8-16-16-33-few]",),
    ),
    Fault(
        "the token behind a row's last is listed", "kernels/indexer/choose_many_rows.py",
        "(code << 31) + 2147483648 - length", "(code << 31) + 2147483647 - length",
        ("tests/kernels/test_choose_tokens.py::test_many_rows[equal-2-16-16-12]",),
    ),
    Fault(
        "what lies behind a row's last token is a score", "kernels/indexer/choose_many_rows.py",
        "x = tl.where(j < length, x, -float(\"inf\"))", "x = tl.where(j >= 0, x, -float(\"inf\"))",
        ("tests/kernels/test_choose_tokens.py::test_a_list_is_short_and_has_the_best[40003]",),
    ),
    Fault(
        "a list ends before the last that may be chosen", "kernels/indexer/choose_many_rows.py",
        "tl.where(some >= topk, middle, low)\n        high = tl.where(some >= topk, high, middle)\n    return _all_of",
        "tl.where(some > 0, middle, low)\n        high = tl.where(some > 0, high, middle)\n    return _all_of",
        ("tests/kernels/test_choose_tokens.py::test_a_list_is_short_and_has_the_best[40003]",),
    ),
    Fault(
        "the best of a few groups make a list that is too long", "kernels/indexer/choose_many_rows.py",
        "while number > cap:\n        number = 0", "if number > cap:\n        number = 0",
        ("tests/kernels/test_choose_tokens.py::test_many_rows[one-group-2-16-16-12]",),
    ),
    Fault(
        "each rank its own best tokens", "helix/layers/indexer.py",
        "if placement.layout.kvp > 1:", "if placement.layout.kvp > 99:",
        (ROW.format("chosen tokens over three ranks"),),
    ),
    Fault(
        "a chunk's own tokens are not in what is gathered", "helix/worker/dealt.py",
        "nowhere, step.live, table, owners)", "nowhere, step.live & False, table, owners)", DEALT,
    ),
    Fault(
        "every gathered sequence begins on rank 0", "helix/worker/dealt.py",
        "layout.token_owner(begins, block, starts)", "layout.token_owner(begins, block, 0 * starts)", DEALT,
    ),
    # ---- sampling
    Fault(
        "noise of every position alike", "kernels/tokens/reference.py",
        "gumbel(seed[:, None, None], positions[..., None], ", "gumbel(seed[:, None, None], positions[..., None] * 0, ",
        SAMPLING,
    ),
    Fault(
        "all rows with the first one's seed", "kernels/tokens/reference.py",
        "gumbel(seed[:, None, None], positions", "gumbel(seed[:1, None, None], positions", SAMPLING,
    ),
    Fault(
        "noise by local columns", "kernels/tokens/reference.py",
        "torch.arange(first, first + p.logits.shape[2], ", "torch.arange(0, p.logits.shape[2], ",
        SAMPLING,
    ),
    Fault(
        "top-p of what top-k has dropped too", "helix/worker/sampling.py",
        "(state.top_p.double() * left.double()).ceil().long().clamp(min=1)",
        "(state.top_p.double() * mass.sum(-1).double()).ceil().long().clamp(min=1)",
        SAMPLING,
    ),
    Fault(
        "top-k of one more", "helix/worker/sampling.py",
        "(sums[0] < (need - before[0])[:, None])", "(sums[0] <= (need - before[0])[:, None])", SAMPLING,
    ),
    Fault(
        "min-p drops the best", "kernels/tokens/reference.py",
        "keep = scaled >= self.min_p", "keep = scaled > self.min_p", SAMPLING,
    ),
    Fault(
        "a single column is known to the compiler", "kernels/tokens/accept.py",
        '@triton.jit(do_not_specialize=["V", "first"])\ndef _kept', "@triton.jit\ndef _kept",
        ("tests/kernels/test_compile.py::test_sm_90",),
    ),
    Fault(
        "drafts kept whatever drew them", "kernels/tokens/accept.py", "        bound *= q\n", "        bound *= 1.0\n",
        ("tests/kernels/test_accept.py::test_kernels_do_what_the_reference_does",),
    ),
    # ---- checkpoints
    Fault(
        "nibbles in the other order", "helix/models/loading.py",
        "torch.stack((blocks & 15, blocks >> 4), -1)", "torch.stack((blocks >> 4, blocks & 15), -1)", LOADING,
    ),
    Fault(
        "columns from the beginning of their block", "helix/models/loading.py",
        "begin = columns.start - covering.start * MXFP4_BLOCK", "begin = 0", LOADING,
    ),
    Fault(
        "fp8 blocks from the beginning of the slice", "helix/models/loading.py",
        "torch.arange(rows.start, rows.stop, rows.step, device=grid.device) // block[0] - covering[0].start",
        "torch.arange(0, rows.stop - rows.start, rows.step, device=grid.device) // block[0]", LOADING,
    ),
    Fault(
        "fp8 without its last, ragged blocks", "helix/models/checkpoint.py",
        "tuple(-(-n // b) for n, b", "tuple(n // b for n, b", LOADING,
    ),
    Fault(
        "the last shard with a tensor wins", "helix/models/checkpoint.py",
        "if listed is not None and listed.get(within, name) != name:", "if False:", LOADING,
    ),
    Fault(
        "overrides replace nested objects", "helix/models/overrides.py",
        "result[key] = _merged(result.get(key), value)\n", "result[key] = value\n", OVERRIDES,
    ),
    Fault(
        "an override in the other spelling of RoPE drops the rest", "helix/models/overrides.py",
        "        _put(rope, key, own[key], layers, LAYERS[:1])", "        pass", OVERRIDES,
    ),
]  # fmt: skip
