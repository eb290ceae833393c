"""Mistakes in what ranks send each other."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

MESSAGES = ("tests/dist/test_exchange.py::test_messages_hold_each_share_then_padding",)
VAIN = ("tests/kernels/test_collectives.py::test_a_wait_in_vain_ends_and_the_next_is_short",)
AHEAD = "tests/kernels/test_interleavings.py::"
LONG = AHEAD + "test_all_reduce_norm_of_long_chunks"
COLLECTIVES = "tests/kernels/test_collectives.py::"

FAULTS = [
    Fault(
        "padding lanes count", "kernels/attention/reference.py",
        "to_lse[k : k + n, :, h:] = -torch.inf", "to_lse[k : k + n, :, h:] = 0", MESSAGES,
    ),
    Fault(
        "shares begin too early", "kernels/attention/reference.py",
        "k, head = k + n, run.stop", "k, head = k + n, head + h", MESSAGES,
    ),
    Fault(
        "every destination gets the first one's heads", "kernels/attention/merge_messages.py",
        "head = tl.load(starts + to) + lane", "head = tl.load(starts) + lane",
        ("tests/kernels/test_merge_messages.py::test_as_the_merge_and_then_copies",),
    ),
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
        "a program of a row does not wait for its predecessor", "kernels/peers/all_reduce_norm_rows.py",
        "    wait_for_predecessor(PDL)\n    start_successor(PDL)\n", "    start_successor(PDL)\n",
        (AHEAD + "test_all_reduce_norm_of_rows",),
    ),
    Fault(
        "an owner's rows share a box", "kernels/peers/all_reduce_norm_rows.py",
        "n % RANKS, n // RANKS", "n % RANKS, n // RANKS // 2", (AHEAD + "test_all_reduce_norm_of_rows",),
    ),
    Fault(
        "a box is filled before it has been read", "kernels/peers/all_reduce_norm_long.py",
        "        arrived = _await_flag(seen + slot, tag - 1, -1, status, looks)\n", "        pass\n", (LONG,),
    ),
    Fault(
        "a flag is raised before the sum is there", "kernels/peers/all_reduce_norm_long.py",
        """            tl.store(box + cell, summed, mask=inside)
        to = tl.arange""",
        """            tl.atomic_xchg(_flags_of(peers, SUM_FLAGS, to, RANKS) + slot, tag)
            tl.store(box + cell, summed, mask=inside)
        to = tl.arange""", (LONG,),
    ),
    Fault(
        "a flag of the last launch will do", "kernels/peers/all_reduce_norm_long.py",
        "    tag = turn(count) * ROUNDS + group // ROOM\n", "    tag = ROUNDS + group // ROOM\n", (LONG,),
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
        "LSE sent in base 2", "kernels/attention/split_kv.py",
        "log = log2 * 0.6931471805599453", "log = log2",
        ("tests/kernels/test_merge_exchange.py::test_as_one_after_the_other[plain-40-torch.float32]",),
    ),
]  # fmt: skip
