# SPDX-License-Identifier: Apache-2.0
"""Bins -> ranks and microbatch numbers."""

import numpy as np


def deal_to_ranks(bin_cost: np.ndarray, num_ranks: int) -> np.ndarray:
    """Bins of each rank, int64 [ranks, K], cheapest first; column i holds bins of similar cost.

    Bins sorted by cost are cut into K groups of one bin a rank. Groups are dealt in order of falling spread, the costliest
    bin of a group to the rank which has least so far.
    """
    order = np.argsort(bin_cost, kind="stable")
    groups = order.reshape(-1, num_ranks)
    dealt = np.empty_like(groups.T)
    load = np.zeros(num_ranks, dtype=np.int64)
    cost = bin_cost[groups]
    for g in np.argsort(cost[:, 0] - cost[:, -1], kind="stable"):
        ranks = np.argsort(-load, kind="stable")  # most loaded rank first: it gets the cheapest bin
        dealt[ranks, g] = groups[g]
        load[ranks] += cost[g]
    return dealt


def cheap_ends(dealt: np.ndarray) -> np.ndarray:
    """Reorder columns (cheapest first) so that the cheap ones are at both ends, the costliest in the middle.

    A pipeline is partly idle while it fills and drains: the cheapest microbatches make that shortest (verl does the same).
    """
    return np.concatenate([dealt[:, 0::2], dealt[:, 1::2][:, ::-1]], axis=1)
