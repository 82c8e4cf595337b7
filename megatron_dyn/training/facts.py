# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run compare before anything is built: versions, settings, tokenizer, documents."""

import hashlib
import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from megatron_dyn.pipeline.handshake import code_version
from megatron_dyn.pipeline.plan_agreement import plan_settings
from megatron_dyn.pipeline.schedule import schedule_settings
from megatron_dyn.training.field_flags import flag_name
from megatron_dyn.training.inputs import Inputs
from megatron_dyn.training.plan_from_settings import name_of_plan_setting
from megatron_dyn.training.run_config import RunConfig

# Of files it counts what they say, not where they lie: nodes may keep them in different places.
_COMPARED_BY_CONTENT = ("data_path", "tokenizer_model", "cost_file", "tp_comm_overlap_cfg")

_SCHEDULE_FLAGS = {
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "overlap_p2p_comm": "--overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
}

TRAINING_DOCUMENTS = "corpus fingerprint of the training documents"
VALIDATION_DOCUMENTS = "corpus fingerprint of the validation documents"


def run_facts(run: RunConfig, inputs: Inputs) -> dict[str, object]:
    """Name -> value, the likeliest cause of all other differences first."""
    settings = {name: value for values in run.as_dict().values() for name, value in values.items()}
    return {
        **versions(layers=inputs.layers),
        "process group backend": inputs.process_group_backend,
        "device type": inputs.device.type,
        **({"ranks on a node": os.environ.get("LOCAL_WORLD_SIZE", "unknown")} if run.overlap.tp_comm_overlap else {}),
        **{flag_name(name): value for name, value in settings.items() if name not in _COMPARED_BY_CONTENT},
        **_overlap_table(run),
        "content of --tokenizer-model": _file_digest(run.data.tokenizer_model),
        "vocabulary size": inputs.vocab_size,
        "padding token": inputs.pad_token_id,
        **document_facts(inputs),
        **{name_of_plan_setting(name): value for name, value in plan_settings(inputs.plan_config).items()},
    }


def _overlap_table(run: RunConfig) -> dict[str, object]:
    """Each option of each communicator on its own, and that there are others: a rank that lacks a name would have no say in it."""
    table = run.overlap.table
    options = {f"--tp-comm-overlap-cfg, {layer}": table[layer] for layer in sorted(table)}
    return {"--tp-comm-overlap-cfg, layers": sorted(table), **options}


def document_facts(inputs: Inputs) -> dict[str, object]:
    """Fingerprints of the documents. A rank that reads no tokens can speak of their lengths only."""
    found: dict[str, object] = {}
    for name, corpus in ((TRAINING_DOCUMENTS, inputs.splits.train), (VALIDATION_DOCUMENTS, inputs.splits.valid)):
        if inputs.broadcasts_tokens:
            found[f"{name} (order and lengths)"] = corpus.lengths_fingerprint if corpus else "none"
        if inputs.reads_tokens:
            found[name] = corpus.fingerprint if corpus else "none"
    return found


def schedule_facts(run: RunConfig) -> dict[str, object]:
    """What decides the order of the pipeline's work, compared with each step's plan."""
    parallel = run.parallel
    schedule = schedule_settings(
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        overlap=parallel.overlap_p2p_communication,
        warmup_flush=parallel.overlap_p2p_communication_warmup_flush,
    )
    return {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        **{_SCHEDULE_FLAGS.get(name, f"schedule, {name}"): value for name, value in schedule.items()},
    }


def versions(*, layers: str) -> dict[str, str]:
    """Versions of everything that computes. Transformer Engine counts where its layers are used."""
    names = ("megatron-core", "numpy", "sentencepiece") + (("transformer_engine",) if layers == "te" else ())
    return {
        "code version of megatron_dyn": code_version(),
        "version of torch": torch.__version__,
        **{f"version of {name}": _version(name) for name in names},
        "version of python": platform.python_version(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version" if importlib.util.find_spec(name.replace("-", ".")) else "not installed"


def _file_digest(path: str | None) -> str:
    return "none" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
