"""Decoding from Python, with the demo model on CPUs: `torchrun --nproc-per-node=2 -m launch.example`."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.torch_dist import TorchDistCommunicator
from helix.attention.dense import DenseAttention
from helix.build import build_engine
from helix.config import Config, ModelConfig
from helix.layout import HelixLayout
from helix.loading import Checkpoint, read_config
from helix.models import Decoder, spec_from_config
from helix.request import Request
from launch.inputs.compose import ROOT
from launch.inputs.parts import load_tokenizer

PATH = ROOT / "assets" / "demo-model"
PROMPTS = ['def read_json(path):\n    """Read a JSON file', "import os\n\n\nclass Path:"]


def main() -> None:
    if not dist.is_torchelastic_launched():
        sys.exit("error: start it as `torchrun --nproc-per-node=2 -m launch.example`")
    dist.init_process_group("gloo")  # on GPUs: "nccl", and each rank its torch.device("cuda", local rank)
    layout = HelixLayout.create(kvp=dist.get_world_size())
    comm = TorchDistCommunicator(layout.kvp_groups(), "cpu", timedelta(minutes=5))
    checkpoint = Checkpoint(PATH)
    spec = checkpoint.with_head(spec_from_config(read_config(PATH)))
    model = Decoder(spec, layout, comm, DenseAttention(), torch.float32, comm.device)
    checkpoint.load(model.weights)
    config = Config(model=ModelConfig(path=str(PATH)))
    tokenizer = load_tokenizer(config)
    assert tokenizer is not None  # the directory has one
    engine = build_engine(layout, comm, model, config, max_batch=4, wanted_tokens=4096, tokenizer=tokenizer)

    requests = [Request(i, tokenizer(text)["input_ids"], max_new_tokens=24) for i, text in enumerate(PROMPTS)]
    for output in engine.generate(requests):  # on every rank; rank 0's requests are served, and rank 0 gets the tokens
        if output.finish_reason is not None:
            print(f"{output.id} {output.finish_reason}: {PROMPTS[int(output.id)] + output.text!r}", flush=True)

    engine.close()
    comm.barrier()
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
