#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT on packed THD microbatches of variable T.

    torchrun --nproc-per-node 2 pretrain_gpt_thd.py --data-path PREFIX --tokenizer-model M.model \\
        --tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-microbatch 8192 --global-batch-size 256 ...

`--help` lists every flag; `examples/` has complete launch scripts.
"""

import faulthandler
import os
import sys

from megatron_dyn.training.stop_request import StopRequest

if __name__ == "__main__":
    faulthandler.enable()  # a bus error (the corpus was cut short under its memory map) shows where it came from
    stop = StopRequest()  # before the imports that take seconds
    from megatron_dyn.training.launch import main

    status = main(stop=stop)
    if status:  # at once: the destructors of a broken process group could wait for ranks that are gone
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
