"""Mistakes in prompts, jobs and the HTTP server."""

from __future__ import annotations

from tests.faults.planted.fault import Fault

CONVERT = "tests/unit/test_convert.py::"
PROMPTS = ("tests/unit/test_prompts.py",)
CALLS = "tests/serving/test_calls.py::test_any_walk_is_calls_that_the_parser_reads"
FRONT = "tests/serving/test_front.py::"
FAILING = "tests/serving/test_failing_jobs.py::"
MALFORMED = "tests/serving/test_malformed.py::"

FAULTS = [
    # ---- prompts, results
    Fault(
        "results of other token ids are kept", "launch/inputs/prompts.py",
        "[prompt.text, prompt.ids, self._defaults", "[prompt.text, self._defaults", PROMPTS,
    ),
    Fault(
        "results of another stop text are kept", "launch/inputs/prompts.py",
        "self._defaults | dict(prompt.options)", "self._defaults", PROMPTS,
    ),
    Fault(
        "refusals count as results", "launch/inputs/prompts.py",
        'line["finish_reason"] in ("stop", "length")', 'line["finish_reason"] is not None', PROMPTS,
    ),
    Fault(
        "refusals count as results of a batch", "launch/inputs/prompts.py",
        'line["response"]["status_code"] == SERVED', 'line["response"]["status_code"] > 0', PROMPTS,
    ),
    # ---- GGUF files
    Fault(
        "rotated pairs stay side by side", "launch/inputs/gguf.py",
        '== "llama" and re.search', '== "none" and re.search',
        (CONVERT + "test_the_model_is_the_one_that_was_written[llama]",),
    ),
    Fault(
        "tensors are left out", "launch/inputs/gguf.py",
        "sorted(name for name in wanted.keys() | shapes.keys()", "sorted(name for name in wanted.keys()",
        (CONVERT + "test_tensors_that_would_be_left_out_are_refused",),
    ),
    Fault(
        "numbers are words", "launch/inputs/gguf_tokenizer.py",
        '"smollm": Splitting(digits=True)', '"smollm": Splitting()',
        (CONVERT + "test_texts_become_the_tokens_of_the_reference[smollm]",),
    ),
    Fault(
        "special tokens are text", "launch/inputs/gguf_tokenizer.py",
        "special=type_ != USER_DEFINED", "special=False",
        (CONVERT + "test_special_tokens_are_tokens_and_others_are_text",),
    ),
    # ---- jobs
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
    Fault(
        "a resumed answer begins its grammar anew", "launch/answers/matcher.py",
        "        for token in drawn:\n", "        for token in ():\n",
        ("tests/serving/test_grammar.py::test_any_walk_follows_the_schema",),
    ),
    Fault(
        "hopb=on is the baseline that comes first", "launch/job/sweep_report.py",
        "row for row in of_off or group if", "row for row in group if",
        ("tests/unit/test_sweep.py::test_the_csv_has_a_column_for_each_swept_key",),
    ),
    Fault(
        "who is bound to no form any more ends well", "launch/job/serve.py",
        'update.finish_reason in ("stop", "length"):', "False:",
        ("tests/serving/test_forms.py::test_an_answer_that_leaves_its_form_is_an_error",),
    ),
    # ---- serving
    Fault(
        "what is certain is looked for ahead", "launch/answers/grammars.py",
        '"no_forcing": true', '"no_forcing": false',
        ("tests/serving/test_grammar.py::test_what_is_certain_is_not_looked_for_ahead",),
    ),
    Fault(
        "a compilation that takes long goes on", "launch/client/workers.py",
        "            await self._end(process)\n            self._start_more()",
        "            self.processes.discard(process)\n            self._start_more()",
        ("tests/serving/test_compiler.py::test_nobody_waits_for_a_form_that_takes_long",),
    ),
    Fault(
        "the first request starts a process of its own", "launch/client/workers.py",
        "if waiting > len(self._starts) and", "if",
        ("tests/serving/test_large_requests.py::test_the_first_request_waits_for_the_process_that_has_begun",),
    ),
    Fault(
        "who leaves ends what others wait for", "launch/client/compiler.py",
        "if not running.waiting:", "if running.waiting:",
        ("tests/serving/test_compiler.py::test_who_sends_the_same_waits_for_the_same_compilation",),
    ),
    Fault(
        "an answer that goes on begins a message", "launch/client/tokens.py",
        "conversation, chat.continue_final_message, more", "conversation, False, more",
        ("tests/serving/test_templates.py::test_prompts_are_those_of_transformers",),
    ),
    Fault(
        "spaces where a message goes on are lost", "launch/answers/dialects.py",
        "self._parts(self._reader.begun)", "pass",
        ("tests/serving/test_chat.py::test_what_reaches_a_client",),
    ),
    Fault(
        "a form begins within a thought", "launch/answers/grammars.py",
        "start = _behind_thought(rules, dialect, turn, eos, f", "start = (lambda *a: a[-1])(f",
        ("tests/serving/test_calls.py::test_a_form_begins_behind_a_thought",),
    ),
    Fault(
        "unknown variables of templates are dropped", "launch/client/tokens.py",
        "if unread := sorted(found.keys() - free):", "if unread := []:",
        ("tests/serving/test_templates.py::test_what_no_template_reads_is_refused",),
    ),
    Fault(
        "ranks that are started again begin at the prompt", "launch/client/core.py",
        "np.concatenate([before.prompt, np", "np.concatenate([before.prompt[:0], np",
        (FAILING + "test_a_job_that_dies_is_a_pause",),
    ),
    Fault(
        "what streams to nobody goes on",
        "launch/serving/streams.py", "            self._close()\n", "            pass\n",
        (FRONT + "test_a_client_that_leaves_ends_its_request",),
    ),
    Fault(
        "owners of keys share prefixes", "launch/serving/routes.py",
        "json.dumps([owner, body", "json.dumps([None, body",
        ("tests/serving/test_access.py::test_keys_and_their_owners",),
    ),
    Fault(
        "a stop id is a token like others",
        "launch/client/choice.py", "if flight.finish_reason == \"stop\" and at + 1 == len(fresh):", "if False:",
        (FRONT + "test_an_end_token_is_no_text_even_if_it_has_one",),
    ),
    Fault(
        "segments are never compared with the whole", "launch/client/tokens.py",
        "return all(np.array_equal(a", "return True or all(np.array_equal(a",
        ("tests/serving/test_templates.py::test_a_tokenizer_whose_segments_differ_takes_the_whole",),
    ),
    Fault(
        "an answer waits for its client's acknowledgement", "launch/serving/http.py",
        "socket.TCP_NODELAY, 1)", "socket.TCP_NODELAY, 0)",
        (MALFORMED + "test_an_answer_does_not_wait_for_the_clients_acknowledgement",),
    ),
    Fault(
        "any number of tokens is a number", "launch/client/schemas.py",
        "    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)", "    max_tokens: int | None = Field(None, ge=1)",
        (MALFORMED + "test_malformed_bodies_are_refused_and_reach_no_rank",),
    ),
    Fault(
        "a call is followed by others where one is wanted", "launch/answers/grammars.py",
        "if many and calls.between is not None", "if calls.between is not None", (CALLS,),
    ),
    Fault(
        "a thought may hold the answer's end", "launch/answers/grammars.py",
        "{close, *eos}", "{close}", (CALLS,),
    ),
    Fault(
        "marks of calls are spelled out", "launch/answers/grammars.py",
        "for found in self._pattern.finditer(text):", "for found in ():",
        ("tests/serving/test_calls.py::test_recorded_calls_are_among_what_may_come",),
    ),
    Fault(
        "a named tool leaves the others callable", "launch/client/schemas.py",
        "if self.named in (None, tool.function.name))", "if tool.function.name)",
        ("tests/serving/test_chat.py::test_a_call_that_has_to_come",),
    ),
    Fault(
        "what follows the only call is told", "launch/answers/dialects.py",
        "return self.calls > 0 and not self._many", "return False",
        ("tests/serving/test_chat.py::test_what_reaches_a_client",),
    ),
    Fault(
        "spaces in JSON have no bound", "launch/answers/grammars.py",
        '{"whitespace_pattern": r"( |\\n[ \\t]{0,64})?"}', '{"whitespace_flexible": True}',
        ("tests/serving/test_grammar.py::test_any_walk_follows_the_schema",),
    ),
    Fault(
        "a new job's preemptions are lost", "launch/serving/metrics.py",
        "now - known if now >= known else now", "max(0, now - known)",
        ("tests/serving/test_metrics.py::test_every_documented_metric_moves",),
    ),
    Fault(
        "a hang is nobody's business", "launch/client/supervisor.py",
        "else hang_s):", "else 1e9):",
        (FAILING + "test_a_job_without_progress_is_started_again[1-0-False]",),
    ),
    # ---- where packages lie
    Fault(
        "a package of the working directory is taken for ours", "helix/packages.py",
        '"PYTHONSAFEPATH": "1"', '"PYTHONSAFEPATH": ""',
        ("tests/e2e/test_installed.py::test_it_serves_its_page",),
    ),
    Fault(
        "a package that another has imported is taken for ours", "helix/packages.py",
        "elif folder not in", "elif not folder and folder not in",
        ("tests/unit/test_imports.py::test_another_s_launch_is_named",),
    ),
]  # fmt: skip
