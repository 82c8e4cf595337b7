# SPDX-License-Identifier: Apache-2.0
"""A training run: configuration, model, optimizer, loop, loss, evaluation, checkpoints, metrics.

`launch.main` is the whole job (`pretrain_gpt_thd.py` calls it); the other modules are its parts.
"""

import warnings

# Megatron-Core warns once per module and rank that Transformer Engine and Apex are absent; the header says it once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# Megatron-Core 0.16 calls torch's collectives by names that torch 2.13 renames; nothing a user could do about it.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
