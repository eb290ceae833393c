"""Flags as data: the keys that they stand for, and the answers to flags of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

API_KEY = "HELIX_API_KEY"
CPU_TOKENS = 65536  # of KV where there is no GPU and kv.tokens is unset: memory is not all the cache's


@dataclass(frozen=True)
class Flag:
    """A flag that stands for a key.

    Attributes:
        names: as in `--port`; the first is the one that help shows.
        value: what follows it, in help; empty: nothing does.
        key: that it sets, with others before it; empty: it is the command's own.
        what: a few words on it; empty: those of the key are enough.
        words: the key's words for those of other programs.
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
    Flag(("--tensor-parallel-size", "-tp"), "N", "layout=tp layout.tpa", "plain TP; better: layout=auto"),
    Flag(("--max-model-len",), "TOKENS", "decode.max_length"),
    Flag(("--max-num-seqs",), "N", "decode.max_batch"),
    Flag(("--gpu-memory-utilization",), "SHARE", "kv.memory_fraction", "of the memory that weights leave free"),
    Flag(("--quantization", "-q"), "fp8", "model.weights", "rounds an unquantised checkpoint to FP8"),
    Flag(("--kv-cache-dtype",), "TYPE", "kv.dtype", "auto, fp8, fp8_all, or k16v8: values alone in FP8",
         {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto"}),
    Flag(("--seed",), "N", "decode.seed"),
)  # fmt: skip
RUN_FLAGS = (
    Flag(("--output", "-o"), "FILE", "decode.output"),
    Flag(("--max-tokens",), "N", "decode.max_tokens"),
    Flag(("--temperature",), "T", "decode.temperature"),
)
KEY_FLAG = Flag(("--api-key",), "KEY", API_KEY, "a variable of the environment; serve.api_keys=FILE for several")
SERVE_FLAGS = (
    Flag(("--host",), "ADDRESS", "serve.host"),
    Flag(("--port",), "N", "serve.port"),
    KEY_FLAG,
    Flag(("--served-model-name",), "NAME", "serve.name"),
    Flag(("--chat-template",), "FILE", "serve.chat_template"),
)
CHAT_FLAGS = (
    Flag(("--url",), "URL", "", "of a server, in place of MODEL"),
    Flag(("--system",), "TEXT", "", "told before the first question"),
    Flag(("--max-tokens",), "N", "", "of an answer"),
    Flag(("--temperature",), "T", "", "0 is greedy; unset: the model's own"),
    KEY_FLAG,
)
HYDRA = (
    Flag(("--help", "-h"), "", "", "this text"),
    Flag(("--info", "-i"), "", "", "all groups with their options, and all keys with what they mean and may be"),
    Flag(("--cfg", "-c"), "job", "", "the config in effect; with -m that of each point"),
    Flag(("--package", "-p"), "PART", "", "with --cfg: a part of it, such as layout"),
    Flag(("--resolve",), "", "", "with --cfg: with interpolations resolved"),
    Flag(("--config-dir", "-cd"), "DIR", "", "groups of your own beside conf/: DIR/model/mine.yaml is model=mine"),
    Flag(("--config-name", "-cn"), "NAME", "", "DIR/NAME.yaml in place of conf/config.yaml"),
    Flag(("--multirun", "-m"), "", "", "points: KEY=A,B, range(1,5), choice(A,B), glob(*); hydra.sweep.dir=DIR"),
)
# Flags of vLLM, SGLang and Hydra that mean nothing here, or that a key says better.
FOREIGN_FLAGS = {
    "--trust-remote-code": "no code of a checkpoint is ever run: models are those that the runtime knows",
    "--pipeline-parallel-size": "layers are not split over ranks: layout=auto, or layout.kvp=N layout.tpa=M",
    "--decode-context-parallel-size": "layout.kvp=N splits the tokens of the cache over N ranks",
    "--prefill-context-parallel-size": "layout.kvp=N splits prompts, too, over N ranks",
    "--data-parallel-size": "layout=dp layout.dp=N",
    "--enable-expert-parallel": "layout.ep=N splits the experts into N groups",
    "--max-num-batched-tokens": "decode.prefill_chunk=N is the most prompt tokens in one step",
    "--enable-chunked-prefill": "prompts are always computed in chunks: decode.prefill_chunk=N",
    "--enable-prefix-caching": "it is on: kv.prefix_cache=true",
    "--no-enable-prefix-caching": "kv.prefix_cache=false",
    "--block-size": "kv.page_size=N",
    "--num-gpu-blocks-override": "kv.tokens=N, of all ranks",
    "--swap-space": "nothing is swapped: sequences that are preempted are computed again",
    "--cpu-offload-gb": "weights stay on the GPU; keys and values: attention=block_sparse kv.offload=host",
    "--kv-offloading-size": "attention=block_sparse kv.offload=host kv.offload_host_bytes=BYTES, of each rank",
    "--enforce-eager": "decode steps are always captured in graphs on a GPU",
    "--load-format": "model.load=random takes random weights; checkpoints are safetensors",
    "--revision": "ORG/NAME@REVISION",
    "--download-dir": "the variable HF_HOME of the environment",
    "--tokenizer": "the tokenizer is the checkpoint's",
    "--hf-overrides": "model.config.KEY=VALUE",
    "--rope-scaling": "model.config.rope_scaling.KEY=VALUE",
    "--speculative-config": "speculation=ngram, suffix, sparse, mtp, eagle3 or model; speculation.gamma=N drafts",
    "--num-speculative-tokens": "speculation.gamma=N",
    "--tool-call-parser": "the checkpoint's chat template says which syntax its calls have",
    "--reasoning-parser": "the checkpoint's chat template says how its thoughts are marked",
    "--enable-auto-tool-choice": "tools are always taken",
    "--allowed-origins": "serve.cors=[https://chat.example]",
    "--disable-log-requests": "requests are not logged",
    "--uvicorn-log-level": "requests are not logged",
    "--tp": "--tensor-parallel-size N, or -tp N",
    "--dp": "layout=dp layout.dp=N",
    "--mem-fraction-static": "--gpu-memory-utilization SHARE",
    "--context-length": "--max-model-len TOKENS",
    "--max-running-requests": "--max-num-seqs N",
    "--chunked-prefill-size": "decode.prefill_chunk=N",
    "--config-path": "another folder of groups is --config-dir DIR",
    "--experimental-rerun": "a run's record holds its config: give its settings again",
    "--hydra-help": "--help lists Hydra's options",
    "--run": "one config is the default",
}
