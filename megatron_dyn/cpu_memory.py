# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tensors that live, on a machine without a device whose allocator would count them.

Every operation shows its results to `TensorBytes`, the backward pass's too (on a CPU it runs in the thread that called it). A storage
counts from the operation that made it until it is freed; views and operations in place add nothing.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Inside `with`, counts what this thread's operations allocate.

    Attributes:
        now: bytes of the storages made inside that are still there.
        peak: most of it since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def restart(self) -> None:
        """Begin a new peak."""
        self.peak = self.now

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: weakref.ref) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
