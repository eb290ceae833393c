"""Mistakes in what rank 0 decides, in how ranks follow it, and in the text that comes of it."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

SCHEDULER = ("tests/unit/test_scheduler.py",)
TEXT = ("tests/unit/test_text.py",)
ENGINE = "tests/e2e/test_engine.py::"
WISHES = "tests/e2e/test_wishes.py::"
SERVE = "tests/e2e/test_serve.py::"

FAULTS = [
    # ---- the control plane
    Fault(
        "a step's time is a grammar's too", "helix/engine/core.py",
        "run.seconds.append(step.busy_seconds)", "run.seconds.append(step.seconds)",
        (WISHES + "test_what_a_grammar_takes_does_not_delay_the_next_decision",),
    ),
    Fault(
        "a step that is held is waited for as long as predicted", "helix/engine/core.py",
        "self.runner.is_computed if run.holds_draw", "False if run.holds_draw",
        (WISHES + "test_what_a_grammar_takes_does_not_delay_the_next_decision",),
    ),
    Fault(
        "a slot is lost", "helix/engine/scheduler.py",
        "heapq.heappush(self._free_slots[s.slot % len(self._homes)], s.slot)", "pass", SCHEDULER,
    ),
    Fault(
        "all sequences start on rank 0", "helix/engine/scheduler.py",
        "start = crc32(s.tokens[: self._stripes.tokens].tobytes()) % self._stripes.layout.kvp", "start = 0",
        SCHEDULER,
    ),
    Fault(
        "tokens under way are not counted", "helix/engine/scheduler.py",
        "min(s.known + s.most + more, ", "min(s.known + more, ", SCHEDULER,
    ),
    Fault(
        "ranks are not told what others have computed", "helix/engine/scheduler.py",
        "writes, self._changed = self._changed, []", "writes, self._changed = list[_Change](), []", SCHEDULER,
    ),
    Fault(
        "it comes back before its last tokens are read", "helix/engine/scheduler.py",
        "if s.most or (room", "if (room", SCHEDULER,
    ),
    Fault("no lease", "helix/engine/scheduler.py", " and not o.leased and", " and", SCHEDULER),
    Fault(
        "the dearest is preempted", "helix/engine/scheduler.py",
        "min([*others, s], key=loss)", "max([*others, s], key=loss)", SCHEDULER,
    ),
    Fault(
        "no patience", "helix/engine/scheduler.py",
        "if now - s.refused >= self._schedule.patience_s:", "if False:", SCHEDULER,
    ),
    Fault(
        "chunks as long as they may be", "helix/engine/scheduler.py",
        "work = min(work, self._times.within(stall - self._paused))", "pass", SCHEDULER,
    ),
    Fault(
        "chunks as long as they may be while nothing decodes", "helix/engine/scheduler.py",
        "self._times.longest(self._longest_s) or UNTIMED_WORK", "math.inf", SCHEDULER,
    ),
    Fault(
        "many steps that nobody has timed", "helix/engine/scheduler.py",
        "min(most, plan.steps or UNTIMED_STEPS)", "most",
        ("tests/unit/test_scheduler.py::test_steps_that_nobody_has_timed_come_in_short_runs",),
    ),
    Fault(
        "a smaller chunk may take longer", "helix/engine/prefill_time.py",
        "np.minimum.accumulate(times[::-1])[::-1].tolist()", "list(times)", ("tests/unit/test_prefill_time.py",),
    ),
    Fault(
        "a chunk that was held up is remembered", "helix/engine/prefill_time.py",
        "if seconds * before[0] <= before[1] * work:", "if not work:", ("tests/unit/test_prefill_time.py",),
    ),
    Fault(
        "who waits for a prediction does not look", "helix/engine/core.py",
        "time.sleep(min(LOOK_S, max(until - perf_counter(), 0.0)))", "time.sleep(max(until - perf_counter(), 0.0))",
        ("tests/e2e/test_serve.py::test_what_ends_sooner_than_predicted_is_read_then",),
    ),
    Fault(
        "chunks are judged in proportion", "helix/engine/prefill_time.py",
        "return float(np.interp(seconds, times[after - 1 : after + 1], sizes[after - 1 : after + 1]))",
        "return sizes[after - 1] * seconds / times[after - 1]", ("tests/unit/test_prefill_time.py",),
    ),
    Fault(
        "chunk after chunk", "helix/engine/scheduler.py",
        "if not prompts or self._owed > 0:", "if not prompts:", SCHEDULER,
    ),
    Fault(
        "a pause is its last chunk", "helix/engine/scheduler.py",
        "owed_s(seconds, stall), self._paused + seconds", "owed_s(seconds, stall), seconds", SCHEDULER,
    ),
    Fault(
        "the oldest prompt has what is left", "helix/engine/scheduler.py",
        "half = max(self._cut(oldest, -(-tokens // 2), work / 2), least)", "half = 0", SCHEDULER,
    ),
    Fault(
        "all compute the same", "helix/engine/scheduler.py",
        "if stripe is not None and stripe in computed:", "if False:", SCHEDULER,
    ),
    Fault(
        "a run goes on to the last end", "helix/engine/scheduler.py",
        "self._steps(plan, min(left),", "self._steps(plan, max(left),",
        SCHEDULER,
    ),
    Fault(
        "no room for drafts", "helix/engine/scheduler.py",
        "s.request.max_tokens) + self._runner.sizes.drafts", "s.request.max_tokens)", SCHEDULER,
    ),
    Fault(
        "as many rows as sequences", "helix/engine/scheduler.py",
        "min(1 << slot.bit_length(), self._runner.sizes.slots)",
        "min(len(self.running), self._runner.sizes.slots)",
        SCHEDULER,
    ),
    Fault(
        "a grammar is not waited for", "helix/engine/scheduler.py",
        "if any(s.most > self._held_tokens and not s.ended for s in guided):", "if False:", SCHEDULER,
    ),
    Fault(
        "a step with grammars is drawn at once", "helix/engine/scheduler.py",
        "holds_draw=self._held_tokens > 0", "holds_draw=False", SCHEDULER,
    ),
    Fault(
        "a held step is never drawn", "helix/engine/scheduler.py",
        "or prefill or steps or held):", "or prefill or steps):", SCHEDULER,
    ),
    Fault(
        "a first token without a mask", "helix/engine/scheduler.py",
        "None if request.matcher is None else request.matcher.allowed(),", "None,", SCHEDULER,
    ),
    Fault(
        "runs of steps beside a grammar", "helix/engine/scheduler.py",
        "1 if masked else self._runner.sizes.run_steps", "self._runner.sizes.run_steps",
        SCHEDULER,
    ),
    Fault(
        "a held step is drawn without masks", "helix/worker/model_runner.py",
        "                self._shaper().allow(decision.masks)\n", "                pass\n",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "what is drawn is not counted", "helix/worker/model_runner.py",
        "logits, slots, state.uncounted(rows), following)", "logits, slots, 0 * state.uncounted(rows) - 1, following)",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "what was drawn before is forgotten", "helix/worker/shaping.py",
        "[len(tokens) - admission.drawn]", "[len(tokens)]",
        (WISHES + "test_tokens_are_those_of_the_walk[come back]",),
    ),
    Fault(
        "nothing is reported of a step", "helix/worker/model_runner.py",
        "self._shaper().report(logits[:: step.max_q], taken[:, 0].contiguous(), slots, self.own)", "pass",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "tokens of a held step count as those of the next", "helix/engine/core.py",
        "            self._runs[-1].steps.append(steps.popleft())\n", "            steps.append(steps.popleft())\n",
        (WISHES + "test_tokens_are_those_of_the_walk[all at once]",),
    ),
    Fault(
        "no look at the end of a run", "helix/engine/core.py",
        "                self.runner.check(wait=False)\n            self.runner.check()\n", "",
        (ENGINE + "test_a_rank_that_gave_up_in_the_last_step_says_so",),
    ),
    Fault(
        "tokens are taken without a look", "helix/worker/step_tokens.py", "        self._check(False)\n", "",
        (ENGINE + "test_no_token_comes_out_of_a_step_in_which_a_rank_gave_up",),
    ),
    Fault(
        "tokens behind the end", "helix/engine/core.py",
        "                continue  # computed after its end, discarded\n",
        "                pass\n", (ENGINE + "test_eos_ends_a_request_and_gives_its_slot_on",),
    ),
    Fault(
        "a chunk carries the tokens before its own", "helix/engine/scheduler.py", "new = s.tokens[s.prefilled : end]",
        "new = s.tokens[: end - s.prefilled]", SCHEDULER,
    ),
    Fault(
        "who looks back sees no prompt", "helix/engine/scheduler.py",
        "if self._runner.sizes.drafts or request.sampling.changes_logits",
        "if request.sampling.changes_logits", SCHEDULER,
    ),
    Fault(
        "a rehearsal launches", "kernels/ahead.py", 'options | {"warmup": True}', "options",
        ("tests/kernels/test_compile.py::test_what_is_launched_ahead_is_compiled_at_the_end_and_writes_nothing",),
    ),
    Fault(
        "a draw depends on where its parameters begin", "kernels/tokens/draw.py",
        ', do_not_specialize_on_alignment=["temperature", "min_p", "seed"]', "",
        ("tests/e2e/test_rehearsal.py::test_what_is_served_later_needs_no_other_kernel",),
    ),
    Fault(
        "a merge is rehearsed in one form", "kernels/attention/lse_combine.py",
        "for rows in (1, ROWS) if rehearses() else (1 if N * H < MANY else ROWS,):",
        "for rows in (1 if N * H < MANY else ROWS,):",
        ("tests/e2e/test_rehearsal.py::test_what_is_served_later_needs_no_other_kernel",),
    ),
    Fault(
        "a heartbeat is left out", "helix/engine/core.py",
        "self._send(Decision.nothing(captures=captures))", "pass",
        (SERVE + "test_an_idle_engine_lives_and_its_ranks_hear_from_it",),
    ),
    Fault(
        "what the draft model has not read is shared", "helix/engine/scheduler.py",
        "s.tokens if self._runner.drafter.lags else s.text()", "s.text()", SCHEDULER,
    ),
    Fault(
        "the next run waits for the one before", "helix/engine/core.py",
        "while len(self._runs) > 1 or self._is_early(inbox):", "while self._runs:",
        (SERVE + "test_the_next_run_is_launched_before_the_one_before_is_read",),
    ),
    Fault(
        "the next decision waits for a chunk", "helix/engine/core.py",
        "run.holds_draw or not run.in_chunk or steps_s > ahead_s", "True",
        ("tests/unit/test_decide_ahead.py::test_before_a_chunk_ends",),
    ),
    Fault(
        "what a launch kept from being read counts as late", "helix/engine/core.py",
        "min(step.came, max(run.begin, self._came) + step.seconds)", "step.came",
        ("tests/unit/test_decide_ahead.py::test_time_counts_from_the_devices_end_not_from_the_hosts_reading",),
    ),
    Fault(
        "a copy is left out", "helix/worker/model_runner.py", "if len(admission.copy_from):", "if False:",
        (SERVE + "test_an_output_says_how_far_a_prompt_is",),
    ),
    Fault(
        "a table does not grow", "helix/worker/model_runner.py", "if decision.tables:", "if False:",
        (SERVE + "test_tokens_are_those_of_each_request_alone[qwen3-None]",),
    ),
    Fault(
        "of several sequences at once, the first alone is admitted", "helix/worker/step.py",
        "for a in admissions], dtype=torch.int64)", "for a in admissions[:1] * len(admissions)], dtype=torch.int64)",
        ("tests/unit/test_kv_cache.py::test_several_sequences_come_grow_and_leave_at_once",),
    ),
    Fault(
        "EOS is a token like others", "helix/engine/core.py",
        '"stop" if token in s.ends else ', "",
        (ENGINE + "test_eos_ends_a_request_and_gives_its_slot_on",),
    ),
    Fault(
        "preemptions are told at the end", "helix/engine/core.py",
        "self.timings.preemptions = self._scheduler.preemptions", "pass",
        ("tests/serving/test_families.py::test_tokens_are_those_of_decoding[qwen3]",),
    ),
    # ---- texts
    Fault(
        "a stop text across two tokens", "launch/client/detokenize.py",
        "min(len(text), len(stop) - 1)", "min(len(text), len(stop) - 2)", TEXT,
    ),
    Fault(
        "the last stop text counts", "launch/client/detokenize.py",
        "self._held[: min(places)]", "self._held[: max(places)]",
        TEXT,
    ),
]  # fmt: skip
