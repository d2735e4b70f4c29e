"""`parallelrun import-flags`: other runners' settings become a recipe that can be planned, and nothing is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import parallelrun as pr
from parallelrun.cli.flag_formats import settings, sources, table
from parallelrun.cli.flag_formats.shell import commands
from parallelrun.cli.main import main
from parallelrun.config.keys import GROUPS, known_keys
from tests.other_runners import ACCELERATE, DEEPSPEED, SCRIPT, TOML, dropped, of_words, translated

FORMATS = (sources.SCRIPT, *dict.fromkeys(sources._FORMATS.values()))
VALUES = {
    "model.layers": 8, "model.hidden": 64, "model.heads": 4, "model.kv_heads": 2, "model.seq": 32,
    "model.activation": "swiglu", "model.ffn": 128, "model.norm": "rmsnorm", "model.bias": False, "dropout": 0.0,
    "model.attention_dropout": 0.1, "model.vocab": 512, "micro_batch": 2, "global_batch": 32, "steps": 100,
    "optimizer.lr": 1e-3, "optimizer.min_lr_ratio": 0.1, "optimizer.schedule": "cosine", "optimizer.warmup": 10,
    "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01, "tp": 2, "pp": 2, "dp": 2,
    "strategy.pipeline.kind": "interleaved", "strategy.pipeline.virtual_stages": 2, "strategy.data.kind": "zero1",
    "strategy.tensor.sequence_parallel": True, "seed": 1234, "eval.every": 1000, "eval.batches": 100,
    "tracker.use": ["tensorboard"],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_names_our_keys_and_functions_that_exist(name):
    content = table.table_of(name)
    rows = [(*row[:3], row[3] if len(row) > 3 else {}) for row in content["rows"]]
    keys = {*known_keys(), *GROUPS}
    assert {key for _, key, _, _ in rows if key} <= keys
    assert all(name.startswith("--") == (content["runner"] == "Megatron-LM") for name, *_ in rows)
    options = {"when", "needs", "why", "value", "call", "times", "drop", "open", "fault", "absent"}
    assert all(row[3].keys() <= options for row in rows)
    names = {name for name, *_ in rows}
    conditions = [row[3].get(kind, "") for row in rows for kind in ("when", "needs")]
    conditions += [*content["defaults"], *content.get("stand_ins", {}), *content.get("sections", {}).values()]
    terms = {term.strip("!").split("=")[0].split(">")[0].strip("!") for text in conditions for term in text.split()}
    assert terms <= names | keys and {key for entries in content["defaults"].values() for key in entries} <= names
    dropped_names = [name for names in content["no_counterpart"].values() for name in names.split()]
    assert len(set(dropped_names)) == len(dropped_names) and not names & set(dropped_names)


def test_the_tables_name_functions_that_exist():
    rows = [row for name in FORMATS for row in table.table_of(name)["rows"]]
    assert {row[2] for row in rows if isinstance(row[2], str)} <= vars(settings).keys()
    assert {row[3]["call"] for row in rows if len(row) > 3 and "call" in row[3]} <= vars(settings).keys()


def test_a_script_of_megatron(tmp_path):
    found = translated(tmp_path / "train.sh", SCRIPT)
    assert found.values == VALUES and found.problems == []
    assert found.groups == {
        "model": "gpt", "dataset": "synthetic", "precision": "bf16", "strategy": "ptdp", "stack": "megatron_core",
    }  # fmt: skip
    assert dropped(found) == {"--data-path", "--save", "--frobnicate"}


def test_what_a_shell_does():
    script = "A='$x y'\nB=(one \"two words\" $A)  # it's not (this\nB+=(three)\nif true; then C=1; A+=no; fi\n"
    script += 'D="--p 1 \\\n--q $NONE"; E=2 run ${B[@]} "$A" $C $((2*(3+4))) $D ${F:-$A} z # not this'
    (words,) = [words for words in commands(script) if words[0] == "run"]
    assert words == [
        "run", "one", "two", "words", "$x", "y", "three", "$x", "y", "$C", "$COMPUTED", "--p", "1", "--q", "$NONE",
        "$x", "y", "z",
    ]  # fmt: skip


def test_arithmetic_of_the_shell_is_not_done(tmp_path):
    script = "N=2\nrun pretrain_gpt.py --num-layers 2 \\\n  --hidden-size $((N*8))"
    (problem,) = translated(tmp_path / "a.sh", script).problems
    assert problem.what.startswith("--hidden-size $COMPUTED: the file does not say")


def test_experts_of_megatron():
    words = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64 --hidden-size 16"
    words += " --moe-layer-freq ([0]*3+[1]*5) --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    words += " --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5 --expert-model-parallel-size 4"
    words += " --moe-router-load-balancing-type sinkhorn --context-parallel-size 2 --bf16 ${EXTRA_ARGS[@]}"
    found = of_words(words)
    wanted = {
        "model.experts": 8, "model.expert_ffn": 32, "model.expert_period": 1, "model.router.top_k": 2, "ep": 4,
        "model.router.score": "sigmoid",
        "model.router.bias_rate": 1e-3, "model.router.renormalise": "none", "model.router.scaling": 2.5,
        "model.router.aux_coefficient": 0.0, "cp": 2,
    }  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert dropped(found) == {"--moe-router-load-balancing-type", "${EXTRA_ARGS[@]}"}
    assert found.groups["precision"] == "bf16" and not found.problems
    assert "strategy.expert.tp" not in found.values
    whole = of_words("--num-experts 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
                     "--expert-tensor-parallel-size 1")  # fmt: skip
    assert whole.values["strategy.expert.tp"] == 1 and not dropped(whole)
    without = of_words("--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")
    assert "--expert-tensor-parallel-size" in dropped(without) and "strategy.expert.tp" not in without.values
    other = of_words("--num-experts 8 --moe-layer-freq 2")
    assert other.values["model.expert_period"] == 1
    assert "model.dense_layers" in [key for key, _, _ in other.left_open]


def test_latent_attention_of_megatron():
    """The arguments of Megatron-LM's own example for DeepSeek-V3."""
    words = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --v-head-dim 96"
    words += " --qk-layernorm --kv-channels 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0"
    words += " --num-experts 256 --moe-router-num-groups 8 --moe-router-group-topk 4 --hidden-size 7168"
    words += " --num-attention-heads 128"
    found = of_words(words)
    wanted = {
        "model.q_lora_rank": 1536, "model.kv_lora_rank": 512, "model.qk_nope_head_dim": 128, "model.v_head_dim": 96,
        "model.qk_rope_head_dim": 64, "model.rope_scaling": "yarn", "model.rope_factor": 40, "model.rope_mscale": 1,
        "model.rope_mscale_all_dim": 1, "model.router.n_group": 8, "model.router.topk_group": 4,
    }  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert not found.problems and not dropped(found) and "model.head_dim" not in found.values
    plain = of_words("--multi-latent-attention --kv-lora-rank 64")
    assert "--multi-latent-attention" in dropped(plain) and "model.q_lora_rank" not in plain.values


def test_heads_of_megatron():
    found = of_words("--hidden-size 64 --num-attention-heads 8 --qk-layernorm --kv-channels 16")
    assert (found.values["model.qk_norm"], found.values["model.head_dim"]) == ("head", 16) and not dropped(found)


def test_torchtitan(tmp_path):
    found = translated(tmp_path / "job.toml", TOML)
    wanted = {"dp": 8, "cp": 2, "tp": 2, "strategy.data.shard": 8, "local_batch": 2, "micro_batch": 2,
              "model.seq": 4096, "steps": 1000, "checkpoint.every": 500, "recompute": "selective", "optimizer.lr": 8e-4,
              "optimizer.warmup": 200, "strategy.tensor.sequence_parallel": True,
              "tracker.use": ["tensorboard", "wandb"]}  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert found.groups == {
        "model": "llama3_8b", "precision": "bf16", "strategy": "hsdp", "dataset": "synthetic", "stack": "torchtitan",
    }  # fmt: skip
    assert dropped(found) == {"lr_scheduler.decay_ratio"}


def test_deepspeed(tmp_path):
    found = translated(tmp_path / "ds.json", json.dumps(DEEPSPEED))
    assert found.values == {
        "precision.loss_scale": 4096.0, "optimizer.betas": [0.9, 0.95], "optimizer.schedule": "linear", "tp": 2,
        "optimizer.min_lr_ratio": 0, "optimizer.lr": 1e-3, "optimizer.warmup": 10, "steps": 100, "micro_batch": 4,
        "global_batch": 64, "optimizer.clip": 0, "optimizer.offload": True,
    }  # fmt: skip
    assert found.groups == {"precision": "fp16", "strategy": "fsdp", "optimizer": "adamw"}
    # WarmupDecayLR sets a rate of its own, 0.001 by default, and warms up with the logarithm
    assert dropped(found) == {"optimizer.params.lr", "scheduler.params.warmup_type"}
    assert [setting.name for _, setting, _ in found.left_open] == ["optimizer.params.weight_decay"]
    found = translated(tmp_path / "ds.json", json.dumps({**DEEPSPEED, "gradient_clipping": "auto"}))
    assert "optimizer.clip" not in found.values


def test_accelerate(tmp_path):
    found = translated(tmp_path / "config.yaml", ACCELERATE)
    assert found.values == {"dp": 4, "tp": 2, "strategy.data.shard": 2, "recompute": "full",
                            "strategy.data.reshard_after_forward": True}  # fmt: skip
    assert found.groups == {"precision": "bf16", "strategy": "hsdp"}
    later = ACCELERATE.partition("parallelism_config")[0].replace("forward: true", "forward: SHARD_GRAD_OP")
    found = translated(tmp_path / "config.yaml", later)
    assert found.groups["strategy"] == "zero2" and found.values == {"world": 8, "recompute": "full"}


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("train.sh", SCRIPT, []),
        ("job.toml", TOML, []),
        ("ds.json", json.dumps(DEEPSPEED), ["model=gpt2_124m", "dp=4"]),
        ("config.yaml", ACCELERATE, ["global_batch=16"]),
    ],
)
def test_the_recipe_is_written_and_can_be_planned(tmp_path, monkeypatch, capsys, name, text, more):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["import-flags", name, *more]) == 0
    printed = capsys.readouterr().out
    assert "# no counterpart:" in printed or name == "config.yaml"
    Path("mine.yaml").write_text(printed)
    assert main(["plan", "recipe=mine.yaml", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    about = yaml.safe_load(printed)["about"]
    assert about["devices"] == planned["world"] and f"'s {name}, by parallelrun import-flags" in about["source"]
    degrees = {"train.sh": (2, 2, 2), "job.toml": (1, 8, 2), "ds.json": (1, 4, 2), "config.yaml": (1, 4, 2)}[name]
    assert tuple(planned["degrees"][axis] for axis in ("pp", "dp", "tp")) == degrees


def test_arguments_of_llama_give_the_model_of_the_preset(capsys):
    words = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    words += " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base"
    words += " 500000 --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 8192 --vocab-size 128256"
    words += " --hidden-dropout 0 --attention-dropout 0 --bf16"
    found = of_words(words)
    pairs = [f"{key}={value}" for key, value in found.values.items() if key.startswith("model.")]
    ours, preset = (
        pr.plan(*one, "dataset=synthetic").plan.spec for one in (["model=gpt", *pairs], ["model=llama3_8b"])
    )
    assert ours.num_parameters == preset.num_parameters
    assert ours.forward_flops == preset.forward_flops


@pytest.mark.parametrize(
    ("name", "text", "where", "what"),
    [
        (
            "a.sh",
            SCRIPT.replace("-size 64", "-size 66"),
            "a.sh: --hidden-size 66",
            "model.hidden=66 does not divide into",
        ),
        ("a.sh", SCRIPT.replace("heads 4", "heads four"), "a.sh", "--num-attention-heads four: not a number"),
        ("a.sh", SCRIPT.replace("--lr 1e-3", "--lr $LR"), "a.sh", "--lr $LR: the file does not say"),
        ("a.sh", SCRIPT.replace("GPUS=4", "GPUS=3"), "a.sh", "6 ranks are not a multiple of tp x pp = 4"),
        ("a.sh", SCRIPT.replace("stage 2", "stage 3"), "a.sh", "8 layers are not 2 ranks times"),
        ("a.toml", TOML.replace("8B", "9B"), "a.toml", "there is no preset of this model: give model="),
        ("a.toml", TOML.replace("degree = 4", "degree = -1"), "a.toml", "how many ranks share a copy"),
        ("a.toml", TOML + "x =\n", "a.toml", "cannot be read as TOML: "),
        ("a.json", '{"train_batch_size": [4,\n}', "a.json", "cannot be read as JSON: "),
        ("a.json", '{"batch": 4}', "a.json", "there is no setting of DeepSpeed"),
        ("a.yaml", "distributed_type: FSDP\n- 3\n", "a.yaml", "cannot be read as YAML: "),
        ("a.yaml", "nothing", "a.yaml", "there is no setting of accelerate"),
        ("a.sh", "run '--num-layers 3", "a.sh", "cannot be read as a shell script: No closing quotation"),
    ],
)
def test_faults_are_named_with_their_place_and_nothing_is_printed(
    tmp_path, monkeypatch, capsys, name, text, where, what
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["import-flags", name]) == 2
    out, said = capsys.readouterr()
    assert out == "" and f"where: {where}" in said and what in said, said


def test_all_faults_are_named_at_once(capsys):
    assert main(["import-flags", "--", "--num-layers", "x", "--hidden-size", "y", "--lr", "z"]) == 2
    assert capsys.readouterr().err.count("error:") == 3


@pytest.mark.parametrize("words", [[], ["nosuch.sh"], ["--"], ["a.sh", "--", "--lr", "1"], ["a.sh", "dp"]])
def test_wrong_use(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.sh").write_text(SCRIPT)
    assert main(["import-flags", *words]) == 2
    assert capsys.readouterr().err.startswith("error:")
