"""Commands that compose a config."""

from __future__ import annotations

from launch.inputs.command_parser import Command
from launch.inputs.flags import CHAT_FLAGS, MODEL_FLAGS, RUN_FLAGS, SERVE_FLAGS

LAYOUT_KEYS = (
    ("layout=auto", "the layout that the planner predicts to be the fastest"),
    ("layout.kvp=N layout.tpa=M", "attention: N ranks split the tokens, M the heads; N x M ranks in all"),
    ("layout=dp layout.dp=N", "a baseline: each of N ranks attends whole sequences of its own"),
)
RUNTIME_KEYS = (
    *LAYOUT_KEYS,
    ("speculation=ngram | sparse", "several tokens a step, none of them changed: by prompt lookup, by few keys"),
    ("attention=parts", "steps read few keys (lossy); block_sparse is faster, loses lines; kv.offload=host"),
    ("hopb=on | off | auto", "overlap of the exchange with attention of other sequences"),
)
SWEEP_KEYS = (
    ("KEY=A,B", "both values; range(1,5), choice(A,B) and, for a group's options, glob(*) as well"),
    ("hydra.sweep.dir=DIR", "where records, sweep.csv and sweep.png go (default: sweeps/DATE_TIME)"),
)
RUN = Command(
    "helix run",
    "Decodes the prompts of a file with a Hugging Face checkpoint, over all ranks of a layout.",
    (
        "helix run ./llama-3.1-8b prompts.jsonl -o results.jsonl layout=auto",
        "helix run Qwen/Qwen3-8B prompts.jsonl layout.kvp=4 layout.tpa=2 decode.max_tokens=1K",
        "helix run ./llama-3.1-8b prompts.jsonl -m layout.kvp=2,4 hopb=off,on",
    ),
    (*RUN_FLAGS, *MODEL_FLAGS),
    (
        *RUNTIME_KEYS,
        ("decode.resume=true", "keep the results that decode.output holds and run the rest"),
        ("record=FILE", "layout, versions, times and throughput of the run, JSON"),
    ),
    ("model", "decode.prompts"),
)
SERVE = Command(
    "helix serve",
    "Serves a model over HTTP, with OpenAI's interface and a page to chat at.",
    (
        "helix serve ./llama-3.1-8b --port 8000",
        "helix serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key secret --max-model-len 1M",
        "helix serve ./llama-3.1-8b layout.kvp=4 layout.tpa=2 speculation=sparse",
    ),
    (*SERVE_FLAGS, *MODEL_FLAGS),
    (
        *RUNTIME_KEYS,
        ("decode.max_batch=N", "sequences at a time; further ones wait"),
        ("schedule.goal=latency | throughput", "shorter pauses for new prompts, or more requests a second"),
        ("serve.api_keys=FILE", "lines of OWNER KEY"),
    ),
)
CHAT = Command(
    "helix chat",
    "Talks to a model in the terminal: one that it starts, or a server's.",
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
    "Runs a job for each combination of several values (as `helix run -m`), and tabulates and draws what they took.",
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
