"""`model=hf` against what people run today: the same Llama of transformers, weights, tokens and optimizer, paired.

    python -m benchmarks.hugging_face --pairs 10 --case tp --name ""

Peers, over gloo, in the steps of `benchmarks.native`: torch DDP, FSDP2, and transformers' `tp_plan="auto"`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import native
from benchmarks.pairs import compare, on_ranks, read_arguments
from benchmarks.plain_gpt import Sizes
from parallelrun.models.module import outputs, source
from parallelrun.training.loop.build import Training

BARS = {"ddp": 1.03, "fsdp": 1.03, "tp": 0.8}


def _overrides(sizes: Sizes) -> dict[str, Any]:
    model = {"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
             "num_key_value_heads": sizes.heads, "intermediate_size": 4 * sizes.hidden,
             "vocab_size": sizes.vocab}  # fmt: skip
    data = {key: value for key, value in sizes.overrides.items() if not key.startswith("model.")}
    own = {"model.name": "hf", "model.preset": "hf", "model.path": "LlamaForCausalLM", "model.hf": model}
    return {**data, **own, "model.seq": sizes.seq, "model.vocab": None}


class HuggingFacePeer(native.Peer):
    overrides = staticmethod(_overrides)

    def make(self, training: Training) -> Any:
        return source.build(training.config, training.plan.spec.vocab)

    def _fsdp(self, model: Any) -> tuple[nn.Module, Callable, Callable]:
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=self.mesh)
        return model, self._whole(model), self._clip(model)

    def _tp(self, model: Any) -> tuple[nn.Module, Callable, Callable]:
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        rank, folder = dist.get_rank(), [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        if rank == 0:
            model.save_pretrained(folder[0])
        dist.barrier()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        how = DistributedConfig(tp_plan="auto", tp_size=2)
        make = init_device_mesh

        def on_gloo(*shape: Any, mesh_dim_names: Any) -> Any:  # its own would take the world's group
            return make(*shape, mesh_dim_names=mesh_dim_names, backend_override=dict.fromkeys(mesh_dim_names, "gloo"))

        with mock.patch.object(dist, "init_device_mesh", on_gloo):
            split = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=how, dtype=torch.float32).train()
        group = next(p.device_mesh for p in split.parameters() if hasattr(p, "device_mesh")).get_group()
        assert dist.get_backend(group) == "gloo", "the peer does not communicate over gloo"
        outputs.return_logits(split)
        return split, self._whole(split), self._clip_mixed(split)


def main() -> None:
    wanted = read_arguments(__doc__, "hugging_face", BARS, ("mixed",))
    cells = [(case, size) for case in wanted.case.split(",") for size in wanted.size.split(",")]
    sides = (on_ranks(2, native.run, *cell, wanted.pairs, wanted.warmup, HuggingFacePeer) for cell in cells)
    compare(wanted.name, zip(sides, (BARS[case] for case, _ in cells)))


if __name__ == "__main__":
    main()
