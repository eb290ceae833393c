"""Mistakes such as people make, each with the tests that have to notice it: the quickest that there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Text of a file that is replaced by other text.

    Attributes:
        old: occurs once in the file.
        tests: pytest's names of tests, of which one fails with the fault, and none without.
        deadline_s: of a test that would hang; None for the usual one.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    deadline_s: float | None = None


LAYOUT = ("tests/unit/test_layout.py",)
KV_CACHE = ("tests/unit/test_kv_cache.py",)
SCHEDULER = ("tests/unit/test_scheduler.py",)
PAGES = ("tests/unit/test_pages.py",)
PREFIX = ("tests/unit/test_prefix.py",)
BLOCK_TABLES = ("tests/unit/test_block_tables.py",)
ADAPTIVE = ("tests/unit/test_adaptive.py",)
SAMPLING = tuple(f"tests/unit/test_sampling.py::{kind}" for kind in ("TestTokens", "TestKeptSet"))
ROTARY = ("tests/unit/test_rotary.py",)
LOADING = ("tests/unit/test_loading.py",)
TEXT = ("tests/unit/test_text.py",)
PROMPTS = ("tests/unit/test_prompts.py",)
COST = ("tests/unit/test_simulate_cost.py",)
BILL = ("tests/unit/test_sparse_bill.py",)
EXPERT_LAYERS = tuple(
    f"tests/unit/test_expert_layers.py::{name}"
    for name in (
        "test_one_sum_is_what_the_paper_does_in_three_steps",
        "test_shared_experts_are_among_the_routed_where_all_ranks_hold_these",
    )
)
PLACEMENT = ("tests/kernels/test_step_kernels.py",)
COMMIT = ("tests/kernels/test_commit.py",)
KV_APPEND = ("tests/kernels/test_kv_append.py",)
ROUTE = ("tests/kernels/test_router.py",)
LSE_COMBINE = ("tests/kernels/test_lse_combine.py",)
DECODE = ("tests/kernels/test_flash_decode.py::test_kernel",)
HOPB = ("tests/dist/test_hopb.py::test_chunked_steps_are_those_of_one_exchange",)
MESSAGES = ("tests/dist/test_exchange.py::test_messages_hold_each_share_then_padding",)
VAIN = ("tests/kernels/test_collectives.py::test_a_wait_in_vain_ends_and_the_next_is_short",)
LIMITS = ("tests/e2e/test_speculation.py::test_limits_reach_every_rank_and_end_with_their_sequence",)
ENGINE = "tests/e2e/test_engine.py::"
WISHES = "tests/e2e/test_wishes.py::"
CALLS = "tests/serving/test_calls.py::test_any_walk_is_calls_that_the_parser_reads"
FRONT = "tests/serving/test_front.py::"
MALFORMED = "tests/serving/test_malformed.py::"
SERVE = "tests/e2e/test_serve.py::"
TURNS = "tests/e2e/test_turns.py::test_halves_change_nothing[qwen2-helix kvp=2 tpa=1 -> tpf=2 ep=1]"
PARITY = "tests/e2e/test_parity.py::"
AHEAD = "tests/kernels/test_interleavings.py::"
COLLECTIVES = "tests/kernels/test_collectives.py::"

FAULTS = [
    # ---- who owns what
    Fault(
        "shares overlap", "helix/layout.py",
        "return range(begin, begin + size + (index < larger))",
        "return range(begin, begin + size + (index <= larger))", LAYOUT,
    ),
    Fault("ranks in the other order", "helix/layout.py", "return rank % self.kvp", "return rank // self.tpa", LAYOUT),
    Fault(
        "start rotation ignored", "helix/layout.py",
        "return (token // block + start) % self.kvp", "return token // block % self.kvp", LAYOUT,
    ),
    Fault(
        "blocks ignored in the local order", "helix/layout.py",
        "return token // (block * self.kvp) * block + token % block", "return token // self.kvp", LAYOUT,
    ),
    Fault(
        "start rotation the wrong way", "helix/layout.py",
        "first = (kvp_rank - start) % self.kvp * block", "first = (kvp_rank + start) % self.kvp * block", LAYOUT,
    ),
    Fault(
        "a query does not read its own key", "helix/layout.py",
        "hi = self.local_length(position + 1, ", "hi = self.local_length(position, ", LAYOUT,
    ),
    Fault(
        "window one key too wide", "helix/layout.py",
        "before = position + 1 - window", "before = position - window", LAYOUT,
    ),
    Fault(
        "uneven heads as if even", "helix/layout.py", "+ sum(shares[:k])", "+ k * shares[0]", LAYOUT,
    ),
    Fault(
        "expert columns by the wrong axis", "helix/layout.py",
        "share(width, self.tpf, index % self.tpf)", "share(width, self.tpf, index // self.ep)", LAYOUT,
    ),
    Fault(
        "experts by the wrong axis", "helix/layout.py",
        "share(experts, self.ep, index // self.tpf)", "share(experts, self.ep, index % self.ep)", LAYOUT,
    ),
    Fault(
        "window one key too wide in the kernel", "kernels/attention/placement.py",
        "tl.maximum(position + 1 - WINDOW, 0)", "tl.maximum(position - WINDOW, 0)", PLACEMENT,
    ),
    Fault(
        "start rotation ignored in the kernel", "kernels/attention/placement.py",
        "(position // BLOCK_TOKENS + start) % KVP == RANK", "position // BLOCK_TOKENS % KVP == RANK", PLACEMENT,
    ),
    # ---- pages, lengths, steps
    Fault(
        "append block taken for the page size", "helix/kv_cache.py",
        "page * self.page_size + slot % self.page_size, -1)", "page * self.page_size + slot % self.append_block, -1)",
        KV_CACHE,
    ),
    Fault(
        "a part of a page is none", "helix/pages.py",
        "return -(-self.layout.local_length(length, 0, self.append_block) // self.page_size)",
        "return self.layout.local_length(length, 0, self.append_block) // self.page_size", PAGES,
    ),
    Fault(
        "no page for rounding", "helix/pages.py",
        "(sequences - 1) * (-(-self.append_block // self.page_size) + 1)",
        "(sequences - 1) * (-(-self.append_block // self.page_size))", KV_CACHE,
    ),
    Fault(
        "a page is not given back", "helix/pages.py", "self._push(idle[~kept])", "self._push(idle[~kept][1:])", PAGES,
    ),
    Fault(
        "bounds of copied pages are lost", "helix/kv_cache.py",
        "[*self.tensors, *([] if self.bounds is None else [self.bounds])]", "self.tensors", KV_CACHE,
    ),
    Fault(
        "a page is freed while it is used", "helix/pages.py",
        "idle = pages[self._users[pages] == 0]", "idle = pages", PAGES,
    ),
    Fault(
        "a stripe shared across starts", "helix/block_tables.py",
        "self.tree.root(held.salt, held.start)", "self.tree.root(held.salt, 0)", PREFIX,
    ),
    Fault(
        "a reference to a shared page is lost", "helix/block_tables.py",
        "self.pool.share(shared)", "self.pool.share(shared[1:])", PREFIX,
    ),
    Fault(
        "a copied tail is one token too long", "helix/prefix.py",
        "return int(differ[0]) if len(differ)", "return int(differ[0]) + 1 if len(differ)", PREFIX,
    ),
    Fault(
        "the last token of a prompt is not computed", "helix/prefix.py",
        "best, prompt = Hit(), tokens[:-1]", "best, prompt = Hit(), tokens", BLOCK_TABLES,
    ),
    Fault(
        "a run grows under others that end in it", "helix/prefix.py",
        " and self.pool.users(parent.pages[-1]) == 1:", ":", BLOCK_TABLES,
    ),
    Fault(
        "the source of a copy is anybody's", "helix/block_tables.py",
        "        self.pool.share(source)\n        own = self._take(fresh)\n        self.pool.release(source)\n",
        "        own = self._take(fresh)\n", BLOCK_TABLES,
    ),
    Fault(
        "salts meet", "helix/prefix.py",
        "self._roots[parent.root] = parent", "self._roots[None, parent.root[1]] = parent", BLOCK_TABLES,
    ),
    Fault(
        "padding reads keys", "helix/kv_cache.py",
        "torch.where(live, hi, lo).int()", "hi.int()", KV_CACHE,
    ),
    Fault(
        "missing drafts are appended", "helix/step.py", "active[owner] & (tokens >= 0)", "active[owner]", KV_CACHE,
    ),
    Fault(
        "drafts past the end", "helix/step.py",
        "self.limits[:rows] - self.lengths[:rows] - 1)", "self.limits[:rows] - self.lengths[:rows])", KV_CACHE,
    ),
    Fault(
        "a verify group at one position", "helix/step.py",
        "positions = (lengths[:, None] + offsets).flatten()", "positions = (lengths[:, None] + 0 * offsets).flatten()",
        KV_CACHE,
    ),
    Fault(
        "prompt chunks begin at zero", "helix/step.py",
        "torch.arange(begin, begin + len(tokens))", "torch.arange(len(tokens))", KV_CACHE,
    ),
    Fault(
        "a draft behind a rejected one is kept", "kernels/reference/commit.py",
        ".long().cumprod(1).sum(1)", ".long().sum(1)", KV_CACHE,
    ),
    Fault(
        "a step takes more than the limit", "kernels/tokens/commit.py",
        "tl.minimum(held + 1, left)", "held + 1", COMMIT,
    ),
    Fault(
        "lengths of idle rows grow", "kernels/tokens/commit.py",
        "tl.store(lengths + b, length + count)", "tl.store(lengths + b, length + held + 1)", COMMIT,
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
        "output without its rescale", "kernels/attention/paged_tiles.py", "acc * rescale[:, None]", "acc", DECODE,
    ),
    Fault(
        "a key of the future", "kernels/attention/paged_tiles.py",
        "(key[None, :] < row_hi[:, None])", "(key[None, :] <= row_hi[:, None])", DECODE,
    ),
    Fault(
        "window one key too narrow", "kernels/attention/paged_tiles.py",
        "(key[None, :] >= row_lo[:, None])", "(key[None, :] > row_lo[:, None])",
        ("tests/kernels/test_flash_decode.py::test_kernel[window]",),
    ),
    Fault(
        "a tile of which no row counts", "kernels/attention/paged_tiles.py", "if SEVERAL:", "if False:",
        ("tests/kernels/test_key_scores.py::test_scores",),
    ),
    Fault(
        "an edge without its mask", "kernels/attention/paged_tiles.py",
        "(tile >= full_stop)", "(tile > full_stop)", DECODE,
    ),
    Fault(
        "a query without keys finds some", "kernels/attention/flash_decode.py",
        "tl.where(reads[:, None], acc, 0.0)", "acc", ("tests/kernels/test_key_scores.py::test_scores",),
    ),
    Fault(
        "sink in base 2", "kernels/attention/paged_tiles.py",
        "sink = sink.to(tl.float32) * 1.4426950408889634", "sink = sink.to(tl.float32)",
        ("tests/kernels/test_flash_decode.py::test_kernel[sinks]",),
    ),
    Fault(
        "a sink in every split", "kernels/attention/flash_prefill.py",
        "if split == 0:  # a sink", "if split >= 0:  # a sink",
        ("tests/kernels/test_flash_prefill.py::test_split_keys[sinks]",),
    ),
    Fault(
        "splits that overlap", "kernels/attention/split_prefill.py",
        "tl.minimum(begin + run, last)", "tl.minimum(begin + run + 1, last)",
        ("tests/kernels/test_flash_prefill.py::test_split_keys[late-chunks]",),
    ),
    Fault(
        "every rank projects the first tokens of a half", "helix/layers/attention.py",
        "begin = self.comm.kvp_rank * each", "begin = 0", (TURNS,),
    ),
    Fault(
        "the second half has the segments of the whole", "helix/step.py",
        "self.cu_q.clamp(begin, end) - begin", "self.cu_q.clamp(0, end - begin)", (TURNS,),
    ),
    Fault(
        "an empty shard is NaN", "kernels/attention/split_kv.py",
        "acc /= tl.where(empty, 1.0, total)[:, None]", "acc /= total[:, None]",
        ("tests/kernels/test_flash_decode.py::test_kernel[empty-shards]",),
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
        "combined in base 2", "kernels/reference/lse_combine.py",
        "weights = (lse - peak).exp()", "weights = (lse - peak).exp2()", LSE_COMBINE,
    ),
    Fault(
        "sinks on every rank", "helix/layers/attention.py",
        "if spec.sinks and layout.kvp_rank(comm.rank) == 0:", "if spec.sinks:",
        (PARITY + "test_experts_on_every_grid[gpt-oss-kvp2-tpa1-ep1-block64]",),
    ),
    Fault(
        "a chunk with its neighbour's bounds", "helix/attention/base.py",
        "tuple(of_tokens[rows] for", "tuple(of_tokens[: len(of_tokens[rows])] for", HOPB,
    ),
    Fault(
        "chunks of tokens instead of sequences", "helix/layers/attention.py",
        "[slice(c.start * each, c.stop * each) for c in cuts]", "[slice(c.start, c.stop) for c in cuts]",
        ("tests/dist/test_hopb.py::test_sequences_stay_whole_with_their_drafts",),
    ),
    Fault("chunks in the other order", "comm/hopb.py", "torch.cat(exchanged)", "torch.cat(exchanged[::-1])", HOPB),
    Fault(
        "halves of a key turned the wrong way", "kernels/attention/kv_append.py",
        "other = second * c + first * s", "other = second * c - first * s", KV_APPEND,
    ),
    Fault(
        "interleaved rotation", "kernels/reference/kv_append.py",
        "a, b = x.float().chunk(2, dim=-1)", "a, b = x.float()[..., 0::2], x.float()[..., 1::2]", KV_APPEND,
    ),
    # ---- RoPE
    Fault(
        "YaRN's ramp turned round", "helix/layers/rotary.py",
        'plain / s["factor"] * ramp + plain * (1 - ramp)', 'plain / s["factor"] * (1 - ramp) + plain * ramp', ROTARY,
    ),
    Fault(
        "YaRN's temperature in base 2", "helix/layers/rotary.py",
        "0.1 * weight * math.log(stretch) + 1.0", "0.1 * weight * math.log2(stretch) + 1.0", ROTARY,
    ),
    Fault("Llama 3's band without ends", "helix/layers/rotary.py", "keep = keep.clamp(0, 1)", "keep = keep", ROTARY),
    Fault(
        "linear scaling left out", "helix/layers/rotary.py",
        'return plain / s["factor"], 1.0', "return plain, 1.0", ROTARY,
    ),
    # ---- experts
    Fault("weights not normalised", "kernels/reference/router.py", "if normalise:", "if False:", ROUTE),
    Fault(
        "routed scale left out", "kernels/moe/router.py", "weight * scale, 1.0)", "weight, 1.0)", ROUTE,
    ),
    Fault(
        "a group is as good as its best expert", "kernels/reference/router.py",
        "grouped.topk(group_score).values.sum(-1)", "grouped.max(-1).values", ROUTE,
    ),
    Fault(
        "the choice's bias weighs", "kernels/reference/router.py",
        "weights = scores.gather(1, ids)", "weights = choice.gather(1, ids)", ROUTE,
    ),
    Fault(
        "shared experts counted twice", "helix/layers/moe.py",
        "if spec.shared_width and not self.shared_count:", "if spec.shared_width:", EXPERT_LAYERS,
    ),
    Fault(
        "experts' bias on every rank", "helix/layers/moe.py",
        "if columns.start == 0:", "if columns.start >= 0:", EXPERT_LAYERS,
    ),
    Fault(
        "gate and up exchanged", "helix/layers/moe.py", "for odd in (0, 1))", "for odd in (1, 0))", EXPERT_LAYERS,
    ),
    Fault(
        "gpt-oss's gate without its one", "kernels/reference/experts.py", "* (up + 1))", "* up)",
        ("tests/kernels/test_experts.py::test_moe_is_transformers",),
    ),
    # ---- layers
    Fault(
        "output bias on every rank", "helix/layers/linear.py", "if bias and comm.rank == 0:", "if bias:",
        (PARITY + "test_experts_on_every_grid[gpt-oss-kvp2-tpa1-ep1-block64]",),
    ),
    Fault(
        "a tied head is read", "helix/models/decoder.py",
        'None if spec.tied else "lm_head"', '"lm_head" if spec.tied else None',
        (PARITY + "test_every_layout_and_block[qwen2-kvp2-tpa1-block1]",),
    ),
    Fault(
        "DeepSeek's temperature once", "helix/models/deepseek.py",
        "scale *= spec.rope.mscale(temperature) ** 2", "scale *= spec.rope.mscale(temperature)",
        ("tests/e2e/test_mla.py::test_every_group_and_choice[deepseek-v3-yarn-kvp2-ep1-values-gathered]",),
    ),
    Fault(
        "latent rotation not interleaved", "helix/layers/mla.py",
        "[range(begin, end, 2), range(begin + 1, end, 2)] if spec.interleaved", "[range(begin, end)] if True",
        ("tests/e2e/test_mla.py::test_every_group_and_choice[deepseek-v3-yarn-kvp2-ep1-values-gathered]",),
    ),
    # ---- sampling
    Fault(
        "noise of every position alike", "helix/sampling.py",
        "gumbel(seed[:, None, None], positions[..., None], ", "gumbel(seed[:, None, None], positions[..., None] * 0, ",
        SAMPLING,
    ),
    Fault(
        "all rows with the first one's seed", "helix/sampling.py",
        "gumbel(seed[:, None, None], positions", "gumbel(seed[:1, None, None], positions", SAMPLING,
    ),
    Fault(
        "noise by local columns", "helix/sampling.py",
        "torch.arange(vocab_offset, vocab_offset + p.logits.shape[2], ", "torch.arange(0, p.logits.shape[2], ",
        SAMPLING,
    ),
    Fault(
        "top-p of what top-k has dropped too", "helix/sampling.py",
        "(state.top_p.double() * left.double()).ceil().long().clamp(min=1)",
        "(state.top_p.double() * mass.sum(-1).double()).ceil().long().clamp(min=1)",
        SAMPLING,
    ),
    Fault(
        "top-k of one more", "helix/sampling.py",
        "(sums[0] < (need - before[0])[:, None])", "(sums[0] <= (need - before[0])[:, None])", SAMPLING,
    ),
    Fault(
        "min-p drops the best", "kernels/reference/accept.py",
        "keep = scaled >= self.min_p", "keep = scaled > self.min_p", SAMPLING,
    ),
    Fault(
        "drafts kept whatever drew them", "kernels/tokens/accept.py", "        bound *= q\n", "        bound *= 1.0\n",
        ("tests/kernels/test_accept.py::test_kernels_do_what_the_reference_does",),
    ),
    # ---- messages and mailboxes
    Fault(
        "padding lanes count", "comm/base.py",
        "to_lse[k : k + n, :, h:] = -torch.inf", "to_lse[k : k + n, :, h:] = 0", MESSAGES,
    ),
    Fault("shares begin too early", "comm/base.py", "k, head = k + n, run.stop", "k, head = k + n, head + h", MESSAGES),
    Fault(
        "sums rounded after each rank", "comm/base.py",
        "total = parts[0].to(wide, copy=True)", "total = parts[0].clone()",
        ("tests/dist/test_communicator.py::test_rank_order_sum_rounds_once",),
    ),
    Fault(
        "one box for two launches", "kernels/peers/mailbox.py",
        "((tag & 1) * SOURCES + source)", "source",
        (AHEAD + "test_all_gather", AHEAD + "test_all_reduce_norm[one-shot-at-once]"),
    ),
    Fault(
        "the exchange has one box for two launches", "kernels/peers/mailbox.py",
        "((tag & 1) * SOURCES + source)", "source", (AHEAD + "test_exchange",),
    ),
    Fault(
        "words are taken without their tag", "kernels/peers/mailbox.py",
        "    looks = 0\n", "    missing = 0 * missing\n    looks = 0\n", (AHEAD + "test_all_gather",),
    ),
    Fault(
        "turns are counted from zero", "kernels/peers/mailbox.py",
        "(tl.load(counter) // TURN + 1)", "(tl.load(counter) // TURN)", (AHEAD + "test_all_gather",),
    ),
    Fault(
        "a program too few ends the turn", "kernels/peers/mailbox.py",
        "TURN - programs + 1, 1)", "TURN - programs, 1)", (AHEAD + "test_exchange",),
    ),
    Fault(
        "wait without patience", "kernels/peers/mailbox.py",
        "tl.where(tl.load(status) != 0, 0, spins)", "spins", VAIN,
    ),
    Fault(
        "wait without end", "kernels/peers/mailbox.py",
        "while (missing > 0) & (looks < spins):", "while missing > 0:", VAIN, 10.0,
    ),
    Fault(
        "nobody hears of a wait in vain", "kernels/peers/mailbox.py",
        "        tl.store(status, missing)\n", "        tl.store(status, 0 * missing)\n", VAIN,
    ),
    Fault(
        "what did not come passes for numbers", "kernels/peers/mailbox.py",
        "        got = tl.where(mask & ((got >> 32).to(tl.int32) != tag), -1, got)\n", "", VAIN,
    ),
    Fault(
        "a norm does not wait for its predecessor", "kernels/peers/all_reduce_norm.py",
        "    if not EARLY:\n        wait_for_predecessor(PDL)\n", "", (AHEAD + "test_all_reduce_norm",),
    ),
    Fault(
        "squares are added before they are there", "kernels/peers/all_reduce_norm.py",
        "bits = receive(mine + s, tag, s < SLICES, rank + 0 * s, status, looks)",
        "bits = tl.load(mine + s, mask=s < SLICES, other=0).to(tl.int32)", (AHEAD + "test_all_reduce_norm",),
    ),
    Fault(
        "an empty source's words count", "kernels/peers/exchange.py",
        'some = (logs != float("-inf"))[:, None]', "some = (logs == logs)[:, None]", (COLLECTIVES + "test_exchange",),
    ),
    Fault(
        "everybody gets this rank's heads", "kernels/peers/exchange.py",
        "head = tl.load(starts + to) + lane", "head = tl.load(starts + rank) + lane", (COLLECTIVES + "test_exchange",),
    ),
    Fault(
        "LSE sent in base 2", "kernels/peers/merge_exchange.py",
        "log = log2 * 0.6931471805599453", "log = log2",
        ("tests/kernels/test_merge_exchange.py::test_as_one_after_the_other[plain-40-torch.float32]",),
    ),
    # ---- the control plane
    Fault("a slot is lost", "helix/scheduler.py", "heapq.heappush(self._free_slots, s.slot)", "pass", SCHEDULER),
    Fault(
        "all sequences start on rank 0", "helix/scheduler.py",
        "start = crc32(s.tokens[: stripes.tokens].tobytes()) % stripes.layout.kvp", "start = 0", SCHEDULER,
    ),
    Fault(
        "tokens under way are not counted", "helix/scheduler.py",
        "min(s.known + s.most + more, ", "min(s.known + more, ", SCHEDULER,
    ),
    Fault(
        "ranks are not told what others have computed", "helix/scheduler.py",
        "writes, self._changed = self._changed, []", "writes, self._changed = list[_Change](), []", SCHEDULER,
    ),
    Fault(
        "it comes back before its last tokens are read", "helix/scheduler.py",
        "if s.most or (pool.room", "if (pool.room", SCHEDULER,
    ),
    Fault("no lease", "helix/scheduler.py", "if not o.leased and", "if", SCHEDULER),
    Fault(
        "the dearest is preempted", "helix/scheduler.py",
        "min([*others, s], key=loss)", "max([*others, s], key=loss)", SCHEDULER,
    ),
    Fault("no patience", "helix/scheduler.py", "if now - s.refused >= self._patience_s:", "if False:", SCHEDULER),
    Fault(
        "chunks as long as they may be", "helix/scheduler.py",
        "self._times.within(self._stall_s) if decoding else math.inf", "math.inf", SCHEDULER,
    ),
    Fault("chunk after chunk", "helix/scheduler.py", "if not prompts or self._owed > 0:", "if not prompts:", SCHEDULER),
    Fault(
        "the oldest prompt has what is left", "helix/scheduler.py",
        "half = max(self._cut(oldest, -(-tokens // 2), work / 2), least)", "half = 0", SCHEDULER,
    ),
    Fault(
        "all compute the same", "helix/scheduler.py",
        "if stripe is not None and stripe in computed:", "if False:", SCHEDULER,
    ),
    Fault(
        "a run goes on to the last end", "helix/scheduler.py",
        "self._steps(plan, min(left))", "self._steps(plan, max(left))",
        SCHEDULER,
    ),
    Fault(
        "no room for drafts", "helix/scheduler.py",
        "s.request.max_new_tokens) + self._drafts", "s.request.max_new_tokens)", SCHEDULER,
    ),
    Fault(
        "as many rows as sequences", "helix/scheduler.py",
        "min(1 << max(self.running).bit_length(), self._max_batch)", "min(len(self.running), self._max_batch)",
        SCHEDULER,
    ),
    Fault(
        "a slot's next sequence inherits its limit", "helix/serving.py", "self._policy.forget(slot)", "pass", LIMITS,
    ),
    Fault("limits of drafts are not set", "helix/model_runner.py", "if decision.draft_limits:", "if False:", LIMITS),
    Fault(
        "limits of drafts are not sent", "helix/speculation/adaptive.py",
        "drafts == 0 or unlimited", "drafts >= 0 or unlimited", ADAPTIVE,
    ),
    Fault(
        "drafts of a sequence that takes none are verified", "helix/speculation/adaptive.py",
        "        if slot in self._without:\n            return 0\n", "", ADAPTIVE,
    ),
    Fault(
        "a grammar is not waited for", "helix/scheduler.py", "s.request.grammar is not None and s.most", "False",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "behind a prompt with a grammar, steps follow", "helix/scheduler.py",
        "            steps = 0  # the first token is not known yet\n", "            pass\n",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "a sequence is never forgotten", "helix/speculation/adaptive.py",
        "self._rows_keep.pop(slot, None)", "pass", ADAPTIVE,
    ),
    Fault(
        "drafts behind a rejected one count as tried", "helix/speculation/adaptive.py",
        "range(min(outcome.kept + 1, outcome.tried))", "range(outcome.tried)", ADAPTIVE,
    ),
    Fault(
        "no look at the end of a run", "helix/engine.py",
        "                self.runner.check(wait=False)\n            self.runner.check()\n", "",
        (ENGINE + "test_a_rank_that_gave_up_in_the_last_step_says_so",),
    ),
    Fault(
        "tokens are taken without a look", "helix/model_runner.py", "        self._check(False)\n", "",
        (ENGINE + "test_no_token_comes_out_of_a_step_in_which_a_rank_gave_up",),
    ),
    Fault(
        "tokens behind the end", "helix/serving.py",
        "                    continue  # computed behind its end, thrown away\n",
        "                    pass\n", (ENGINE + "test_eos_ends_a_request_and_gives_its_slot_on",),
    ),
    Fault(
        "a chunk carries the tokens before its own", "helix/scheduler.py", "s.tokens[s.prefilled : end])",
        "s.tokens[: end - s.prefilled])", SCHEDULER,
    ),
    Fault(
        "who looks back sees no prompt", "helix/scheduler.py", "if self._drafts or request.sampling.changes_logits",
        "if request.sampling.changes_logits", SCHEDULER,
    ),
    Fault(
        "a rehearsal launches", "kernels/ahead.py", 'options | {"warmup": True}', "options",
        ("tests/kernels/test_compile.py::test_what_is_launched_ahead_is_compiled_at_the_end_and_writes_nothing",),
    ),
    Fault(
        "a heartbeat is left out", "helix/serving.py", "self._launch(Decision.nothing())", "pass",
        (SERVE + "test_an_idle_engine_lives_and_its_ranks_hear_from_it",),
    ),
    Fault(
        "what the draft model has not read is shared", "helix/scheduler.py",
        "s.text() if self._keep_drawn else s.tokens", "s.text()", SCHEDULER,
    ),
    Fault(
        "shared pages count once where each sequence has its own", "helix/block_tables.py",
        "        self._left -= count\n        node = ", "        self._left -= fresh\n        node = ", BLOCK_TABLES,
    ),
    Fault(
        "the next run waits for the one before", "helix/serving.py",
        "while len(self._runs) > 1 or self._is_early(inbox):", "while self._runs:",
        (SERVE + "test_the_next_run_is_launched_before_the_one_before_is_read",),
    ),
    Fault(
        "a copy is left out", "helix/model_runner.py", "if len(admission.copy_from):", "if False:",
        (SERVE + "test_an_output_says_how_far_a_prompt_is",),
    ),
    Fault(
        "a table does not grow", "helix/model_runner.py", "for table in decision.tables:", "for table in ():",
        (SERVE + "test_tokens_are_those_of_each_request_alone[qwen3-None]",),
    ),
    Fault(
        "EOS is a token like others", "helix/text.py",
        "if token in self._ends or stopped:", "if stopped:",
        (ENGINE + "test_eos_ends_a_request_and_gives_its_slot_on",),
    ),
    Fault(
        "the draft model begins a token late", "helix/speculation/model.py",
        "before = (lengths - 1).clamp(min=0)", "before = lengths.clamp(min=0)",
        ("tests/e2e/test_draft_model.py::test_all_that_is_right_is_kept[qwen3-4-False]",),
    ),
    # ---- checkpoints, prompts, results
    Fault(
        "nibbles in the other order", "helix/loading.py",
        "torch.stack((blocks & 15, blocks >> 4), -1)", "torch.stack((blocks >> 4, blocks & 15), -1)", LOADING,
    ),
    Fault(
        "columns from the beginning of their block", "helix/loading.py",
        "begin = columns.start - covering.start * MXFP4_BLOCK", "begin = 0", LOADING,
    ),
    Fault(
        "a stop text across two tokens", "helix/detokenize.py",
        "min(len(text), len(stop) - 1)", "min(len(text), len(stop) - 2)", TEXT,
    ),
    Fault(
        "the last stop text counts", "helix/detokenize.py", "self._held[: min(places)]", "self._held[: max(places)]",
        TEXT,
    ),
    Fault(
        "results of other token ids are kept", "launch/inputs/prompts.py",
        "[prompt.text, prompt.ids, options, model]", "[prompt.text, options, model]", PROMPTS,
    ),
    Fault(
        "results of another stop text are kept", "launch/inputs/prompts.py",
        "getattr(config.decode, key) for key in DEFAULTED} | dict(prompt.options)",
        "getattr(config.decode, key) for key in DEFAULTED}", PROMPTS,
    ),
    Fault(
        "refusals count as results", "launch/inputs/prompts.py",
        'if reason in ("stop", "length"):', "if reason is not None:", PROMPTS,
    ),
    Fault(
        "ranks that failed are not heard", "launch/job/membership.py",
        '                if store.check(["failed"]):\n', "                if False:\n",
        ("tests/unit/test_membership.py",), 20.0,
    ),
    Fault(
        "silence is not noticed", "launch/job/membership.py",
        "silence[r] * BEAT_S > SILENCE_S", "silence[r] * BEAT_S > 9 * SILENCE_S",
        ("tests/unit/test_membership.py",), 20.0,
    ),
    Fault(
        "a rank cleans up for its launcher", "launch/job/spawn.py",
        "os._exit(code)  # what", "sys.exit(code)  # what", ("tests/unit/test_spawn.py",),
    ),
    Fault(
        "a rank answers for a launcher that is gone", "launch/job/spawn.py",
        "        listener.close()", "        pass", ("tests/unit/test_spawn.py",),
    ),
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
        ("tests/kernels/test_select_blocks.py::test_choices[many-tiles-bounds-kernel]",),
    ),
    Fault(
        "the search for the k-th largest ends a key early", "kernels/sparse/select_blocks.py",
        "(reached > k) & (mark < high)", "(reached > k + 1) & (mark < high)",
        ("tests/kernels/test_select_blocks.py::test_any_scores",),
    ),
    Fault(
        "dense a token too long", "kernels/sparse/block_ranges.py",
        "short = position + 1 < from_tokens", "short = position < from_tokens",
        ("tests/kernels/test_block_ranges.py",),
    ),
    Fault(
        "of equal blocks the later", "kernels/reference/keep_best.py", "(1 << 31) - block", "(1 << 31) + block",
        ("tests/kernels/test_keep_best.py",),
    ),
    Fault(
        "bounds of no generated page", "helix/model_runner.py",
        "self.state.lengths[:rows].clone()", "self.state.lengths[:rows]",
        ("tests/e2e/test_block_sparse.py::test_new_text_can_be_chosen",),
    ),
    # ---- a cache in host memory
    Fault(
        "tier: what comes is read before it is there", "kernels/tier/resolve.py",
        "place = tl.where(comes, -1, place)", "place = tl.where(comes, place, place)",
        ("tests/kernels/test_tier.py::test_kernel_and_reference_leave_the_same",),
    ),
    Fault(
        "tier: a learned sink in both parts", "helix/attention/tiered.py",
        "replace(keys, table=late, sinks=None)", "replace(keys, table=late)",
        ("tests/e2e/test_tiered.py::test_what_is_hot_is_attended_first",),
    ),
    Fault(
        "tier: a layer does not wait for its guess", "helix/attention/tiered.py",
        "            self._join(self._ahead[cache.index % 2])", "            pass",
        ("tests/e2e/test_tiered.py::test_a_guess_may_take_until_its_layer_waits_for_it",),
    ),
    Fault(
        "tier: a guess takes places that are being read", "helix/attention/tiered.py",
        """            self._join(self._ahead[cache.index % 2])
        resolve(
            table, hi, pages, step.positions, step.starts, step.max_q, cache.hot, misses, cache.counted, step.first,
            cache.ring_pages, late, False, **step.placement.grid, page_size=step.placement.page_size,
        )  # fmt: skip
""",
        """            pass
        resolve(
            table, hi, pages, step.positions, step.starts, step.max_q, cache.hot, misses, cache.counted, step.first,
            cache.ring_pages, late, False, **step.placement.grid, page_size=step.placement.page_size,
        )  # fmt: skip
        self._join(self._ahead[cache.index % 2])
""",
        ("tests/e2e/test_tiered.py::test_a_guess_may_take_until_its_layer_waits_for_it",),
    ),
    Fault(
        "tier: parts of the batch share a list", "helix/attention/tiered.py",
        "cache.missing(step.first), cache", "cache.missing(0), cache",
        ("tests/e2e/test_tiered.py::test_a_part_of_the_batch_is_attended_while_the_next_one_s_comes",),
    ),
    Fault(
        "tier: a guess renews the order", "kernels/tier/resolve.py",
        "    if not GUESS:\n        tl.store(turns + head, 1 - turn)", "    tl.store(turns + head, 1 - turn)",
        ("tests/kernels/test_tier.py::test_kernel_and_reference_leave_the_same",),
    ),
    Fault(
        "tier: steps renew a block too few", "kernels/reference/repeat_blocks.py",
        "renewed = round((1 - repeat) * topk * SHARES)", "renewed = round((1 - repeat) * (topk - 1) * SHARES)",
        ("tests/kernels/test_repeat_blocks.py::test_the_share_is_kept",),
    ),
    Fault(
        "tier: hits come over the link", "helix/simulate/layer.py",
        "tokens = share * (1 - tier.hits) * chosen", "tokens = share * chosen",
        ("tests/unit/test_simulate_cost.py::test_what_is_not_hot_comes_over_the_link",),
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
        "a NaN that pushes out a sink", "kernels/reference/select_tokens.py",
        "NO_NUMBER = 0xFFFE", "NO_NUMBER = 0xFFFF",
        ("tests/kernels/test_select_tokens.py::test_no_number_is_the_highest_score_but_pushes_out_no_sink",),
    ),
    Fault(
        "a counter that overflows", "kernels/sparse/select_tokens.py", "MOST_TILES = 7", "MOST_TILES = 14",
        ("tests/kernels/test_select_tokens.py::test_one_counter_holds_all_keys",),
    ),
    Fault(
        "drafts may choose a key that was refused", "helix/speculation/sparse.py",
        "self._choose(state, slice(0, rows), before, state", "self._choose(state, slice(0, rows), before + 1, state",
        ("tests/e2e/test_sparse_drafts.py::test_tables[all]",),
    ),
    Fault(
        "a new sequence drafts with its predecessor's keys", "helix/speculation/sparse.py",
        "for slot, begin, tokens in segments:", "for slot, begin, tokens in segments[1:]:",
        ("tests/e2e/test_sparse_drafts.py::test_tables[all]",),
    ),
    Fault(
        "after steps without drafts, old keys", "helix/speculation/sparse.py",
        "self._choose(state, slice(0, len(state.active)), state.lengths - 1, state.active, 0)", "return",
        ("tests/e2e/test_sparse_drafts.py::test_tables[all]",),
    ),
    Fault(
        "the bonus row is the last of the tile", "kernels/attention/flash_decode.py",
        "(t == 0) | (t == reading - 1)", "(t == 0) | (t == T - 1)",
        ("tests/kernels/test_key_scores.py",),
    ),
    Fault(
        "a draft too many is read", "helix/attention/chosen.py",
        "behind = hi - self.known[rows] + self.counts[rows]", "behind = hi - self.known[rows] + self.counts[rows] + 1",
        ("tests/e2e/test_sparse_drafts.py::test_drafts_that_read_every_key_all_hold",),
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
    # ---- predictions
    Fault(
        "an all-reduce goes once round", "helix/simulate/cost.py",
        '(2 if op == "all_reduce" else 1)', "1", COST,
    ),
    Fault(
        "experts of one token less", "helix/simulate/cost.py",
        "(1 - top_k / experts) ** tokens)", "(1 - top_k / experts) ** (tokens - 1))", COST,
    ),
    Fault(
        "a pipeline without its ends", "helix/simulate/cost.py",
        "np.maximum(chunks * compute + exchange, compute + chunks * exchange)",
        "np.maximum(chunks * compute, chunks * exchange)", COST,
    ),
    Fault(
        "a part of a KV head", "helix/simulate/cost.py",
        "batch * 2 * np.ceil(kv_heads / tpa)", "batch * 2 * (kv_heads / tpa)", COST,
    ),
    Fault(
        "KV is not divided", "helix/simulate/layer.py",
        "min(window or self.length, self.length) / self.points.kvp", "min(window or self.length, self.length)", COST,
    ),
    Fault(
        "a rank's share of chosen blocks, not rounded up", "helix/simulate/points.py",
        "-(-self.topk // kvp) -", "self.topk // kvp -", COST,
    ),
    Fault(
        "drafts read one choice of blocks", "helix/simulate/layer.py",
        "if self._chooses(window) is None else self.rows", "if self._chooses(window) is None else self.sequences", COST,
    ),
    Fault(
        "what attention takes anyway counts as finding", "helix/simulate/constants.py",
        "row[\"bytes\"] / rate - fixed for row", "row[\"bytes\"] / rate for row",
        ("tests/unit/test_calibrate.py::test_constants_of_planted_rows",),
    ),
    Fault(
        "bounds are gone through at the whole bandwidth", "helix/simulate/layer.py",
        "self.zeros, 0, hw.bounds_share)", "self.zeros, 0)", COST,
    ),
    Fault(
        "what is held out is fitted on", "launch/records/sparse_bill.py",
        "bill = fit(*kept)", "bill = fit(dense, chosen)", BILL,
    ),
    Fault(
        "a block-sparse row may read everything", "launch/records/recorded_steps.py",
        "if read > held - 1 and", "if read > held + 1 and", BILL,
    ),
    Fault(
        "the token behind the drafts", "helix/simulate/cost.py",
        "for i in range(gamma + 1))", "for i in range(gamma))", COST,
    ),
    Fault(
        "ranks that are started again begin at the prompt", "launch/serving/core.py",
        "np.concatenate([before.ids, np", "np.concatenate([before.ids[:0], np",
        (FRONT + "test_a_job_that_dies_is_a_pause",),
    ),
    Fault(
        "what streams to nobody goes on",
        "launch/serving/streams.py", "            self._close()\n", "            pass\n",
        (FRONT + "test_a_client_that_leaves_ends_its_request",),
    ),
    Fault(
        "owners of keys share prefixes", "launch/serving/routes.py",
        "json.dumps([request.state.owner, body", "json.dumps([None, body", (FRONT + "test_keys_and_their_owners",),
    ),
    Fault(
        "a stop id is a token like others",
        "launch/serving/choice.py", "if token in self._stop_ids or last:", "if last:",
        (FRONT + "test_stop_texts_and_stop_ids_end_it_and_the_engine_is_told",),
    ),
    Fault(
        "segments are never compared with the whole", "launch/serving/tokens.py",
        "return all(np.array_equal(a", "return True or all(np.array_equal(a",
        ("tests/serving/test_chat.py::test_a_tokenizer_whose_segments_differ_takes_the_whole",),
    ),
    Fault(
        "an answer waits for its client's acknowledgement", "launch/serving/http.py",
        "socket.TCP_NODELAY, 1)", "socket.TCP_NODELAY, 0)",
        (MALFORMED + "test_an_answer_does_not_wait_for_the_clients_acknowledgement",),
    ),
    Fault(
        "any number of tokens is a number", "launch/serving/schemas.py",
        "    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)", "    max_tokens: int | None = Field(None, ge=1)",
        (MALFORMED + "test_malformed_bodies_are_refused_and_reach_no_rank",),
    ),
    Fault(
        "a call is followed by others where one is wanted", "launch/serving/grammars.py",
        "if many and calls.between is not None", "if calls.between is not None", (CALLS,),
    ),
    Fault(
        "a thought may hold the answer's end", "launch/serving/grammars.py",
        "{close, *eos}", "{close}", (CALLS,),
    ),
    Fault(
        "marks of calls are spelled out", "launch/serving/grammars.py",
        "for found in self._pattern.finditer(text):", "for found in ():",
        ("tests/serving/test_calls.py::test_recorded_calls_are_among_what_may_come",),
    ),
    Fault(
        "a named tool leaves the others callable", "launch/serving/schemas.py",
        "if tool.function.name == choice.function.name]", "if choice.function.name]",
        ("tests/serving/test_chat.py::test_a_call_that_has_to_come",),
    ),
    Fault(
        "what follows the only call is told", "launch/serving/dialects.py",
        "return self.calls > 0 and not self._many", "return False",
        ("tests/serving/test_chat.py::test_calls_that_may_not_be_parallel_end_with_the_first",),
    ),
    Fault(
        "spaces in JSON have no bound", "launch/serving/grammars.py",
        '{"whitespace_pattern": r"( |\\n[ \\t]{0,64})?"}', '{"whitespace_flexible": True}',
        ("tests/serving/test_grammar.py::test_any_walk_follows_the_schema",),
    ),
    Fault(
        "a new job's preemptions are lost", "launch/serving/core.py",
        "now - before if now >= before else now)", "max(0, now - before))",
        (FRONT + "test_every_documented_metric_moves",),
    ),
    Fault(
        "preemptions are told at the end", "helix/serving.py",
        "self._timings.preemptions = self._scheduler.preemptions", "pass",
        ("tests/serving/test_families.py::test_tokens_are_those_of_decoding[qwen3]",),
    ),
    Fault(
        "a resumed answer begins its grammar anew", "launch/job/grammar.py",
        "        for token in drawn:\n", "        for token in ():\n",
        ("tests/serving/test_grammar.py::test_any_walk_follows_the_schema",),
    ),
    Fault(
        "a hang is nobody's business", "launch/serving/supervisor.py",
        "self._core.flights and silent > self._serve.hang_s", "self._core.flights and silent > 1e9",
        (FRONT + "test_a_job_without_progress_is_started_again",),
    ),
]  # fmt: skip
