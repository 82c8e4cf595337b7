# SPDX-License-Identifier: Apache-2.0
"""Dynamic microbatches for Megatron-Core: packed THD training with a variable number of tokens T in every microbatch."""

__version__ = "0.1.0"
