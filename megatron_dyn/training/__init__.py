# SPDX-License-Identifier: Apache-2.0
"""A training run: configuration, model, optimizer, loop, loss, evaluation, checkpoints, metrics.

`launch.main` is the whole job (`pretrain_gpt_thd.py` calls it); the other modules are its parts.
"""
