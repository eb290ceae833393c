"""What `make run` runs: the demo model over four CPU ranks, or over all GPUs of this machine."""

from __future__ import annotations

import sys

import torch

from launch import local


def main() -> None:
    gpus = torch.cuda.device_count()
    kvp, tpa = (2, 2) if gpus == 0 else (gpus // 2, 2) if gpus % 2 == 0 else (gpus, 1)
    overrides = ["experiment=demo", f"layout.kvp={kvp}", f"layout.tpa={tpa}", *sys.argv[1:]]
    sys.exit(local.launch(kvp * tpa, overrides))


if __name__ == "__main__":
    main()
