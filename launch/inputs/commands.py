"""The commands that compose a config: flags, examples and keys for `--help`."""

from __future__ import annotations

from launch.inputs.command_parser import Command
from launch.inputs.flags import CHAT_FLAGS, MODEL_FLAGS, RUN_FLAGS, SERVE_FLAGS

LAYOUT_KEYS = (
    ("layout=auto", "the layout that the planner predicts to be fastest"),
    ("layout.kvp=N layout.tpa=M", "attention on N x M ranks: KV split by token N ways, by head M ways"),
    ("layout=dp layout.dp=N", "baseline: data-parallel attention over N ranks"),
)
RUNTIME_KEYS = (
    *LAYOUT_KEYS,
    ("speculation=ngram | sparse", "lossless speculative decoding: by prompt lookup, or self-drafting over few keys"),
    ("attention=parts", "block-sparse (lossy; block_sparse: faster, less exact); allows kv.offload=host"),
    ("hopb=on | off | auto", "overlap the exchange of a part of the batch with the attention of the next"),
)
SWEEP_KEYS = (
    ("KEY=A,B", "both values; also range(1,5), choice(A,B) and, for a group's options, glob(*)"),
    ("hydra.sweep.dir=DIR", "where records, sweep.csv and sweep.png go (default: sweeps/DATE_TIME)"),
)
RUN = Command(
    "helix run",
    "Generates completions for a file of prompts with a Hugging Face checkpoint, over all ranks of a layout.",
    (
        "helix run ./llama-3.1-8b prompts.jsonl -o results.jsonl layout=auto",
        "helix run Qwen/Qwen3-8B prompts.jsonl layout.kvp=4 layout.tpa=2 decode.max_tokens=1K",
        "helix run ./llama-3.1-8b prompts.jsonl -m layout.kvp=2,4 hopb=off,on",
    ),
    (*RUN_FLAGS, *MODEL_FLAGS),
    (
        *RUNTIME_KEYS,
        ("decode.resume=true", "keep the results in decode.output and run the remaining prompts"),
        ("record=FILE", "write layout, versions, times and throughput of the run as JSON"),
    ),
    ("model", "decode.prompts"),
)
SERVE = Command(
    "helix serve",
    "Serves a model over an OpenAI-compatible HTTP API, with a chat page.",
    (
        "helix serve ./llama-3.1-8b --port 8000",
        "helix serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key secret --max-model-len 32K",
        "helix serve ./llama-3.1-8b layout.kvp=4 layout.tpa=2 speculation=sparse",
    ),
    (*SERVE_FLAGS, *MODEL_FLAGS),
    (
        *RUNTIME_KEYS,
        ("decode.max_batch=N", "sequences per batch; more requests queue"),
        ("schedule.goal=latency | throughput", "shorter stalls when prompts arrive, or more requests per second"),
        ("serve.api_keys=FILE", "one OWNER KEY per line"),
    ),
)
CHAT = Command(
    "helix chat",
    "Chats with a model in the terminal: one that it starts, or one on a server.",
    (
        "helix chat ./smollm2-135m-instruct",
        "helix chat Qwen/Qwen3-8B layout=auto --system 'Answer in one sentence.'",
        "helix chat --url http://127.0.0.1:8000 --api-key secret",
    ),
    (*CHAT_FLAGS, *MODEL_FLAGS),
    LAYOUT_KEYS,
)
SWEEP = Command(
    "helix sweep",
    "Runs a job for each combination of values (like `helix run -m`), then writes a table, a CSV and a plot.",
    (
        "helix sweep ./llama-3.1-8b prompts.jsonl layout.kvp=1,2,4 layout.tpa=1,2",
        "helix sweep ./llama-3.1-8b prompts.jsonl 'layout=glob(*)' 'hopb=choice(off,on)'",
        "helix sweep ./llama-3.1-8b prompts.jsonl layout.kvp=1,2 hydra.sweep.dir=sweeps/mine",
    ),
    RUN.flags,
    SWEEP_KEYS,
    RUN.words,
)
COMMANDS = {command.name.split()[-1]: command for command in (RUN, SERVE, CHAT, SWEEP)}
