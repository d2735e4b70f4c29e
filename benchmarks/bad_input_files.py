"""The broken files that the campaign of bad input names."""

from __future__ import annotations

import json
import os
from pathlib import Path

RECIPES = {
    "broken.yaml": "tp: [1\n", "list.yaml": "- tp\n", "scalar.yaml": "3\n", "empty.yaml": "", "null.yaml": "null\n",
    "tabs.yaml": "model:\n\tlayers: 3\n", "twice.yaml": "tp: 2\ntp: 4\n",
    "cycle_a.yaml": "defaults:\n  - cycle_b.yaml\n",
    "cycle_b.yaml": "defaults:\n  - cycle_a.yaml\n", "self.yaml": "defaults:\n  - self\n",
    "section.yaml": "model: 3\n", "nulls.yaml": "model: null\n", "deep.yaml": "model:\n  layers:\n    more: 3\n",
    "typo.yaml": "modle:\n  layers: 3\n", "types.yaml": "tp: eight\nsteps: 1.5\nseed: -1\n",
    "nan.yaml": "optimizer:\n  lr: .nan\n",
    "anchor.yaml": "a: *b\n", "keys.yaml": "1: 2\ntrue: 3\nnull: 4\n",
    "dates.yaml": "name: 2026-11-23\nseed: 12:30:00\n",
    "bom.yaml": "\ufefftp: 2\n", "crlf.yaml": "tp: 2\r\nsteps: x\r\n", "defaults.yaml": "defaults: 3\n",
    "defaults2.yaml": "defaults:\n  - override /model: [gpt, mlp]\n  - 3\n",
    "defaults3.yaml": "defaults:\n  - {a: {b: c}}\n  - _self_\n",
    "defaults4.yaml": "defaults:\n  - override /modle: gpt\n  - override /model: gtp\n",
    "complex.yaml": "? [a, b]\n: 3\n",
    "about.yaml": "about: 3\ntp: 2\n", "binary_tag.yaml": "name: !!binary aGVsbG8=\n",
    "set.yaml": "model: !!set {a, b}\n",
    "dotted.yaml": "model.layers: 3\n", "group.yaml": "strategy: fsdp\n", "list_value.yaml": "tp: [1, 2]\n",
    "float.yaml": "tp: 2.0\n",
    "big.yaml": "steps: 99999999999999999999999\n", "listless.yaml": "optimizer:\n  betas: 0.9\n",
    "missing.yaml": "tp: ???\n",
    "interp.yaml": "tp: ${pp}\npp: ${tp}\n", "interp2.yaml": "tp: ${nosuch.key}\n", "interp3.yaml": "tp: ${\n",
    "verb.yaml": "verb: bench\n", "hydra.yaml": "hydra:\n  run:\n    dir: /tmp/x\n",
    "preset.yaml": "strategy:\n  own_axis: zz\n",
    "demo.yaml": "strategy:\n  demo: {zz: 2}\n", "fill.yaml": "strategy:\n  fill_order: [zz]\n",
    "router.yaml": "strategy:\n  router: {zz: 2}\n",
    "roles.yaml": "model:\n  roles: {a: {b: c}}\n", "args.yaml": "model:\n  arguments: [1]\n",
    "mixture.yaml": "dataset:\n  name: mixture\n  mixture: [3]\n",
}  # fmt: skip


def write_files(root: Path) -> None:
    """Write the files that the cases name."""
    for name, text in RECIPES.items():
        (root / name).write_text(text)
    (root / "folder").mkdir()
    (root / "empty").write_text("")
    (root / "binary").write_bytes(bytes(range(256)) * 40)
    (root / "text.txt").write_text("some text\n" * 50)
    (root / "broken.json").write_text('{"a": ')
    (root / "list.json").write_text("[1, 2]")
    (root / "ds.json").write_text('{"train_batch_size": "x", "zero_optimization": {"stage": 9}, "fp16": 3}')
    (root / "acc.yaml").write_text("distributed_type: ZZ\nnum_processes: x\n")
    (root / "bad.sh").write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size x --num-layers --bogus 3\n")
    (root / "bad.toml").write_text("[model\nname=3")
    (root / "bad.safetensors").write_bytes(b"\xff" * 100)
    (root / "hosts_bad").write_text("h1 slots=x\nh1:4\n slots=4\nh2 slots=-1\nü\n")
    (root / "locked").write_text("x")
    (root / "locked").chmod(0)
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    (root / "recipes_bad").mkdir()
    (root / "recipes_bad" / "b.yaml").write_text("tp: [")
    for name in ("badrun", "badruns/a", "badruns/b"):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("tp: [1\n" if name != "badruns/b" else "")
        (folder / "status.json.x").write_text("{")
        (folder / "summary.json").write_text("[]" if name == "badruns/a" else '{"loss": ')
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"st\nnull\n')
    hf = root / "badhf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "x", "num_hidden_layers": -1}))
    (hf / "model.safetensors").write_bytes(b'\x08\0\0\0\0\0\0\0{"a":3}x')
    step = root / "badckpt" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    (step / "index.json").write_text('{"step": "x"}')
