# SPDX-License-Identifier: Apache-2.0
"""The table of communicators: Transformer Engine's defaults and rules, and Megatron's YAML file."""

import pytest

from megatron_dyn.userbuffers import OverlapConfigError, communicator_specs, read_overlap_config


def test_the_defaults_are_those_of_transformer_engine():
    specs = communicator_specs(None, 4)
    assert {name for name, spec in specs.items() if spec.is_reduce_scatter} == {"proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad"}
    by_method = {}
    for name, spec in specs.items():
        by_method.setdefault(spec.method, set()).add(name)
    assert by_method == {
        "ring_exchange": {"qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"},
        "pipeline": {"proj_fprop", "fc2_fprop"},
        "bulk": {"qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"},
        "external": {"proj_wgrad", "fc2_wgrad"},
    }
    assert specs["qkv_fprop"].num_splits == 4 and specs["proj_fprop"].num_splits == 4
    assert communicator_specs(None, 2)["qkv_fprop"].num_splits == 2


def test_a_dgrad_that_is_reduce_scattered_beside_its_own_gemm_replaces_the_bulk_wgrad():
    specs = communicator_specs({"qkv_dgrad": {"method": "pipeline", "num_splits": 2}, "fc1_dgrad": {"method": "ring_exchange"}}, 2)
    assert "qkv_wgrad" not in specs and "fc1_wgrad" not in specs
    assert (specs["qkv_dgrad"].method, specs["qkv_dgrad"].is_reduce_scatter, specs["qkv_dgrad"].num_splits) == ("pipeline", True, 2)
    assert (specs["fc1_dgrad"].method, specs["fc1_dgrad"].is_reduce_scatter) == ("ring_exchange", True)


def test_ring_exchange_reduce_scatter_is_one_word():
    spec = communicator_specs({"fc2_fprop": {"method": "ring_exchange", "num_sm": 1}}, 4)["fc2_fprop"]
    assert (spec.method, spec.is_reduce_scatter, spec.num_splits, spec.options["num_sm"]) == ("ring_exchange", True, 4, 1)


@pytest.mark.parametrize(
    "table, says",
    [
        ({"qkv_fprob": {}}, "did you mean 'qkv_fprop'"),
        ({"qkv_fprop": {"methode": "bulk"}}, "no option 'methode'"),
        ({"qkv_fprop": {"method": "ring"}}, "cannot use method 'ring'"),
        ({"qkv_fprop": {"method": "pipeline"}}, "all-gather, which has no 'pipeline'"),
        ({"qkv_fprop": {"method": "bulk"}}, "its exchange belongs to its own GEMM"),
        ({"qkv_fprop": {"is_reduce_scatter": True}}, "is an all-gather, but the table says"),
        ({"qkv_wgrad": {"method": "ring_exchange"}}, "beside a weight gradient is 'bulk'"),
        ({"proj_wgrad": {"method": "bulk"}}, "only 'external' fits"),
        ({"qkv_fprop": {"method": "external"}}, "never 'external' fits"),
        ({"qkv_dgrad": {"method": "pipeline"}, "qkv_wgrad": {"num_sm": 2}}, "there is no qkv_wgrad to configure"),
        ({"proj_fprop": {"num_splits": 3}}, "divide the hidden size 64"),
        ({"proj_fprop": {"num_splits": 0}}, "at least 1"),
        ({"proj_fprop": {"num_splits": "two"}}, "num_splits: 'two', which is not a whole number"),
        ({"proj_fprop": {"num_splits": None}}, "num_splits: None, which is not a whole number"),
        ({"proj_fprop": {"num_splits": 2.5}}, "num_splits: 2.5, which is not a whole number"),
        ({"proj_fprop": {"num_sm": True}}, "num_sm: True, which is not a whole number"),
        ({"proj_fprop": {"use_ce": "yes"}}, "use_ce: 'yes', which is neither true nor false"),
        ({"proj_fprop": {"is_reduce_scatter": "no"}}, "neither true nor false"),
        ({1: {}}, "no communicator is called 1"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(table, says):
    with pytest.raises(OverlapConfigError, match=says):
        communicator_specs(table, 2, hidden=64)


def test_megatrons_yaml_file(tmp_path):
    path = tmp_path / "overlap.yaml"
    path.write_text("proj_fprop:\n  method: pipeline\n  num_splits: 2\nqkv_fprop:\n  aggregate: 0\n")
    assert read_overlap_config(path) == {"proj_fprop": {"method": "pipeline", "num_splits": 2}, "qkv_fprop": {"aggregate": 0}}
    path.write_text("")
    assert read_overlap_config(path) == {}
    for broken, says in (("- a\n", "table of tables"), ("a: 1\n", "table of tables"), ("a: [", "not YAML"), ("\udcff", "not YAML")):
        path.write_text(broken, errors="surrogateescape")
        with pytest.raises(OverlapConfigError, match=says):
            read_overlap_config(path)
