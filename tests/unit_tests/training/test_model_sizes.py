# SPDX-License-Identifier: Apache-2.0
"""The padded vocabulary is part of the model, so it must not follow the tensor-parallel size."""

import pytest

from megatron_dyn.training.model import padded_vocab_size


@pytest.mark.parametrize("vocab", [1, 61, 4000, 32000, 50257])
def test_tensor_parallel_sizes_train_the_same_vocabulary(vocab):
    sizes = {padded_vocab_size(vocab, 128, tp) for tp in (1, 2, 4, 8)}
    assert len(sizes) == 1
    (size,) = sizes
    assert size >= vocab and size % 128 == 0 and size - vocab < 128


def test_each_rank_gets_a_whole_share_even_where_the_numbers_do_not_divide():
    assert padded_vocab_size(61, 2, 3) == 66
    assert padded_vocab_size(61, 1, 2) == 62
