"""Mistakes in who owns which token, head, column and expert, and in pages, lengths and steps."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

LAYOUT = ("tests/unit/test_layout.py",)
KV_CACHE = ("tests/unit/test_kv_cache.py",)
PAGES = ("tests/unit/test_pages.py",)
PREFIX = ("tests/unit/test_prefix.py",)
BLOCK_TABLES = ("tests/unit/test_block_tables.py",)
PLACEMENT = ("tests/kernels/test_step_kernels.py",)
COMMIT = ("tests/kernels/test_commit.py",)
WINDOWS = ("tests/e2e/test_serve.py::test_tokens_are_those_of_each_request_alone[gpt-oss-None]",)
STATES = ("tests/e2e/test_mixers.py",)

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
        "append block taken for the page size", "helix/placement.py",
        "page * self.page_size + slot % self.page_size, -1)", "page * self.page_size + slot % self.append_block, -1)",
        KV_CACHE,
    ),
    Fault(
        "a part of a page is none", "helix/placement.py",
        "return -(-self.layout.local_length(length, 0, self.append_block) // self.page_size)",
        "return self.layout.local_length(length, 0, self.append_block) // self.page_size", PAGES,
    ),
    Fault(
        "no page for rounding", "helix/placement.py",
        "(sequences - 1) * (-(-self.append_block // self.page_size) + 1)",
        "(sequences - 1) * (-(-self.append_block // self.page_size))", KV_CACHE,
    ),
    Fault(
        "a page is not given back", "helix/engine/pages.py",
        "self._push(idle[~kept])", "self._push(idle[~kept][1:])", PAGES,
    ),
    Fault(
        "bounds of copied pages are lost", "helix/worker/kv_cache.py",
        "if kept.is_paged:", "if kept.is_paged and kept.per == 'token':", KV_CACHE,
    ),
    Fault(
        "a page is freed while it is used", "helix/engine/pages.py",
        "idle = pages[self._users[pages] == 0]", "idle = pages", PAGES,
    ),
    Fault(
        "a stripe shared across starts", "helix/engine/block_tables.py",
        "self.tree.root(held.salt, held.start)", "self.tree.root(held.salt, 0)", PREFIX,
    ),
    Fault(
        "a reference to a shared page is lost", "helix/engine/block_tables.py",
        "self.pool.share(shared)", "self.pool.share(shared[1:])", PREFIX,
    ),
    Fault(
        "a copied tail is one token too long", "helix/engine/prefix.py",
        "return int(differ[0]) if len(differ)", "return int(differ[0]) + 1 if len(differ)", PREFIX,
    ),
    Fault(
        "the last token of a prompt is not computed", "helix/engine/prefix.py",
        "best, prompt = Hit(), tokens[:-1]", "best, prompt = Hit(), tokens", BLOCK_TABLES,
    ),
    Fault(
        "a run grows under others that end in it", "helix/engine/prefix.py",
        " and self.pool.users(parent.pages[-1]) == 1:", ":", BLOCK_TABLES,
    ),
    Fault(
        "the source of a copy is anybody's", "helix/engine/block_tables.py",
        "        self.pool.share(source)\n        own = self._take(fresh)\n        self.pool.release(source)\n",
        "        own = self._take(fresh)\n", BLOCK_TABLES,
    ),
    Fault(
        "salts meet", "helix/engine/prefix.py",
        "self._roots[parent.root] = parent", "self._roots[None, parent.root[1]] = parent", BLOCK_TABLES,
    ),
    Fault(
        "padding reads keys", "helix/placement.py",
        "torch.where(live, hi, lo).int()", "hi.int()", KV_CACHE,
    ),
    Fault(
        "missing drafts are appended", "helix/worker/step.py",
        "active[owner] & (tokens >= 0)", "active[owner]", KV_CACHE,
    ),
    Fault(
        "drafts past the end", "helix/worker/step.py",
        "self.limits[:rows] - self.lengths[:rows] - 1)", "self.limits[:rows] - self.lengths[:rows])", KV_CACHE,
    ),
    Fault(
        "a verify group at one position", "helix/worker/step.py",
        "positions = (lengths[:, None] + offsets).flatten()", "positions = (lengths[:, None] + 0 * offsets).flatten()",
        KV_CACHE,
    ),
    Fault(
        "prompt chunks begin at zero", "helix/worker/step.py",
        "torch.arange(chunk.begin, chunk.end)", "torch.arange(len(chunk.tokens))", KV_CACHE,
    ),
    Fault(
        "a draft behind a rejected one is kept", "kernels/tokens/reference.py",
        ".long().cumprod(1).sum(1)", ".long().sum(1)", KV_CACHE,
    ),
    Fault(
        "a step takes more than the limit", "kernels/tokens/commit.py",
        "left = tl.load(limits + b) - length", "left = tl.load(limits + b) * 0 + G + 1",
        COMMIT,
    ),
    Fault(
        "lengths of idle rows grow", "kernels/tokens/commit.py",
        "tl.store(lengths + b, length + count)", "tl.store(lengths + b, length + tl.maximum(count, 1))", COMMIT,
    ),
    Fault(
        "a broken token is no error", "kernels/tokens/best_token.py",
        "    top = tl.where(broken > 0, float(\"nan\"), top)\n", "", COMMIT,
    ),
    Fault(
        "shared pages count once where each sequence has its own", "helix/engine/block_tables.py",
        "        self._left -= count\n        node = ", "        self._left -= fresh\n        node = ", BLOCK_TABLES,
    ),
    # ---- windows and states
    Fault(
        "a ring is shorter than its window", "helix/worker/kv_cache.py",
        "return placement.touched(reach + rows - 1)", "return placement.touched(reach + rows - 1) // 2", WINDOWS,
    ),
    Fault(
        "the end of a chunk does not reach the ring", "helix/worker/kv_cache.py",
        "for column in part.columns[1:][-pages:]", "for column in part.columns[:0]", WINDOWS,
    ),
    Fault(
        "a hit has no windows", "helix/engine/scheduler.py",
        "return int(max(known - self._runner.lacking, 0))", "return known", WINDOWS,
    ),
    Fault(
        "what is computed again is written over what others read", "helix/worker/step.py",
        "state == NEW, table", "state > 0, table", WINDOWS,
    ),
    Fault(
        "a ring has what its memory had", "helix/worker/kv_cache.py",
        "tensor[:, slot * pages : (slot + 1) * pages].fill_(0)", "pass",
        ("tests/e2e/test_serve.py::test_a_prompt_that_skips_what_another_one_computes_lacks_its_windows[gpt-oss]",),
    ),
    Fault(
        "a state goes on where another sequence ended", "helix/worker/kv_cache.py",
        "tensor[:, slot].fill_(0)", "pass", STATES,
    ),
    Fault(
        "rows that choose after others have the others' places", "helix/layers/indexer.py",
        "step.cu_q.clamp(begin, begin + most) - begin", "step.cu_q.clamp(begin, begin + most)",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[padded choices-threads]",),
    ),
    Fault(
        "padding of a chunk goes on in a sequence's state", "helix/worker/step.py", "slots[n:] = -1", "slots[n:] = 0",
        ("tests/e2e/test_parity.py::test_tokens_and_logits[padded states-threads]",),
    ),
    Fault(
        "refused rows are part of a state", "helix/worker/kv_cache.py",
        "self.accepted[: step.kind.rows] = step.span.after - step.span.before",
        "self.accepted[: step.kind.rows] = 1 + step.kind.drafts", STATES,
    ),
]  # fmt: skip
