"""Command-line flags: which keys they set, and hints for flags of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

API_KEY = "HELIX_API_KEY"
CPU_TOKENS = 65536  # KV cache tokens without a GPU if kv.tokens is unset: the cache must not fill host memory


@dataclass(frozen=True)
class Flag:
    """A flag that sets a key.

    Attributes:
        names: e.g. `--port`; the first one is shown by `--help`.
        value: placeholder of the value in `--help`; empty if the flag takes none.
        key: the key it sets; `KEY=VALUE` words before it are set too. Empty: the command reads the flag itself.
        what: remark for `--help`; may be empty if there is a key.
        aliases: values of other programs, and ours for them.
    """

    names: tuple[str, ...]
    value: str
    key: str
    what: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)

    def overrides(self, value: str) -> list[str]:
        *more, key = self.key.split()
        return [*more, f"{key}={self.aliases.get(value, value)}"]


MODEL_FLAGS = (
    Flag(("--dtype",), "TYPE", "model.dtype", aliases={"half": "float16", "float": "float32"}),
    Flag(("--tensor-parallel-size", "-tp"), "N", "layout=tp layout.tpa", "plain TP; layout=auto is usually faster"),
    Flag(("--max-model-len",), "TOKENS", "decode.max_length"),
    Flag(("--max-num-seqs",), "N", "decode.max_batch"),
    Flag(("--gpu-memory-utilization",), "SHARE", "kv.memory_fraction", "of the memory left after the weights"),
    Flag(("--quantization", "-q"), "fp8", "model.weights", "quantizes an unquantized checkpoint to FP8 on load"),
    Flag(("--kv-cache-dtype",), "TYPE", "kv.dtype", "auto, fp8, fp8_all, or k16v8: only values in FP8",
         {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto"}),
)  # fmt: skip
RUN_FLAGS = (
    Flag(("--output", "-o"), "FILE", "decode.output"),
    Flag(("--max-tokens",), "N", "decode.max_tokens"),
    Flag(("--temperature",), "T", "decode.temperature"),
    Flag(("--seed",), "N", "decode.seed"),
)
KEY_FLAG = Flag(("--api-key",), "KEY", API_KEY, "environment variable; serve.api_keys=FILE for several")
SERVE_FLAGS = (
    Flag(("--host",), "ADDRESS", "serve.host"),
    Flag(("--port",), "N", "serve.port"),
    Flag(("--api-server-count",), "N", "serve.processes"),
    KEY_FLAG,
    Flag(("--served-model-name",), "NAME", "serve.name"),
    Flag(("--chat-template",), "FILE", "serve.chat_template"),
)
CHAT_FLAGS = (
    Flag(("--url",), "URL", "", "chat with this server, without MODEL"),
    Flag(("--system",), "TEXT", "", "system prompt"),
    Flag(("--max-tokens",), "N", "", "maximum tokens per answer"),
    Flag(("--temperature",), "T", "", "0 is greedy; default: the model's"),
    KEY_FLAG,
)
HYDRA = (
    Flag(("--help", "-h"), "", "", "show this help"),
    Flag(("--info", "-i"), "", "", "list all groups with their options, and all keys with meaning and values"),
    Flag(("--cfg", "-c"), "job", "", "print the effective config; with -m, one per point"),
    Flag(("--package", "-p"), "PART", "", "with --cfg: print only this part, such as layout"),
    Flag(("--resolve",), "", "", "with --cfg: resolve interpolations"),
    Flag(("--config-dir", "-cd"), "DIR", "", "more config groups: DIR/model/mine.yaml is model=mine"),
    Flag(("--config-name", "-cn"), "NAME", "", "use DIR/NAME.yaml instead of conf/config.yaml"),
    Flag(("--multirun", "-m"), "", "", "sweep: KEY=A,B, range(1,5), choice(A,B), glob(*); hydra.sweep.dir=DIR"),
)
# Flags of vLLM, SGLang and Hydra that do not apply, or for which there is a key.
FOREIGN_FLAGS = {
    "--trust-remote-code": "Helix never runs code from a checkpoint; it implements its models itself",
    "--pipeline-parallel-size": "there is no pipeline parallelism: use layout=auto, or layout.kvp=N layout.tpa=M",
    "--decode-context-parallel-size": "layout.kvp=N splits the KV cache by token over N ranks",
    "--prefill-context-parallel-size": "layout.kvp=N also splits prompts over N ranks",
    "--data-parallel-size": "use layout=dp layout.dp=N",
    "--enable-expert-parallel": "layout.ep=N shards the experts over N groups of ranks",
    "--max-num-batched-tokens": "decode.prefill_chunk=N limits the prompt tokens of a step",
    "--enable-chunked-prefill": "prefill is always chunked: decode.prefill_chunk=N",
    "--enable-prefix-caching": "prefix caching is on by default: kv.prefix_cache=true",
    "--no-enable-prefix-caching": "use kv.prefix_cache=false",
    "--no-disable-cascade-attn": "attention.shared_prefix=auto reads shared prefixes once where it pays",
    "--block-size": "use kv.page_size=N",
    "--num-gpu-blocks-override": "use kv.tokens=N, the total of all ranks",
    "--swap-space": "nothing is swapped: preempted sequences are recomputed",
    "--cpu-offload-gb": "weights stay on the GPU; to offload KV: attention=block_sparse kv.offload=host",
    "--kv-offloading-size": "use kv.prefix_host_bytes=BYTES (per rank)",
    "--enforce-eager": "decode steps always run as CUDA graphs on a GPU",
    "--load-format": "checkpoints are safetensors; for random weights use model.load=random",
    "--revision": "write ORG/NAME@REVISION",
    "--download-dir": "set the environment variable HF_HOME",
    "--tokenizer": "the tokenizer always comes from the checkpoint",
    "--hf-overrides": "use model.config.KEY=VALUE",
    "--rope-scaling": "use model.config.rope_scaling.KEY=VALUE",
    "--speculative-config": "use speculation=ngram, suffix, sparse, mtp, eagle3 or model, and speculation.gamma=N",
    "--num-speculative-tokens": "use speculation.gamma=N",
    "--tool-call-parser": "the parser follows from the checkpoint's chat template",
    "--reasoning-parser": "the parser follows from the checkpoint's chat template",
    "--enable-auto-tool-choice": "tool calls are always enabled",
    "--allowed-origins": "use serve.cors=[https://chat.example]",
    "--disable-log-requests": "prompts are never logged; HELIX_LOG_LEVEL, at WARNING, leaves out the lines of requests",
    "--uvicorn-log-level": "set the environment variable HELIX_LOG_LEVEL",
    "--tp": "use --tensor-parallel-size N, or -tp N",
    "--dp": "use layout=dp layout.dp=N",
    "--mem-fraction-static": "use --gpu-memory-utilization SHARE",
    "--context-length": "use --max-model-len TOKENS",
    "--max-running-requests": "use --max-num-seqs N",
    "--chunked-prefill-size": "use decode.prefill_chunk=N",
    "--config-path": "use --config-dir DIR for more config groups",
    "--experimental-rerun": "a run's record contains its config: pass its settings again",
    "--hydra-help": "--help lists Hydra's options",
    "--run": "running one config is the default",
}
