#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT on packed THD microbatches of variable T.

    torchrun --nproc-per-node 2 pretrain_gpt_thd.py --data-path PREFIX --tokenizer-model M.model \\
        --tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-microbatch 8192 --global-batch-size 256 ...

`--help` lists every flag; `examples/` has complete launch scripts.
"""

import sys

from megatron_dyn.training.launch import main

if __name__ == "__main__":
    sys.exit(main())
