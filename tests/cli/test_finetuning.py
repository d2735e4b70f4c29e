"""The recipe `finetune_chat`, as a user runs it: its loss falls, it goes on, and its adapters leave for peft."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.launcher import run_to_end
from tests.extras import needs


def run(folder: Path, *words: str) -> str:
    done = run_to_end(*words, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stderr + done.stdout


@needs("peft")
def test_the_recipe_trains_goes_on_and_leaves_adapters(tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    common = ("recipe=finetune_chat", f"dataset.cache={tmp_path}/cache", "name=tuned")
    run(tmp_path, *common, "steps=25", "eval.every=25", "tp=2", "dp=1")
    (metrics,) = tmp_path.glob("runs/**/metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses[0] > 5.4 and losses[-1] < 0.75 * losses[0]
    screen = run(tmp_path, *common[:2], "resume=latest", "steps=30", "tp=1", "dp=2", "strategy=fsdp", "eval.every=30")
    assert "step 30/30" in " ".join(screen.split()) and "as predicted, to the byte" in screen
    for form in ("peft", "hf"):
        run(tmp_path, "export", "latest", form, "--format", form)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    talk = [{"role": "user", "content": "What is the capital of Peru?"}]
    tokens = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = merged(tokens).logits
        state = dict(merged.named_parameters())
        adapted = peft.PeftModel.from_pretrained(merged, tmp_path / "peft").eval()
        for name, module in adapted.named_modules():  # back to the weights before the adapters were merged
            if isinstance(module, peft.tuners.lora.Linear):
                module.base_layer.weight -= module.get_delta_weight("default")
                assert name.removeprefix("base_model.model.") + ".weight" in state
        assert torch.allclose(adapted(tokens).logits, expected, atol=1e-4)
