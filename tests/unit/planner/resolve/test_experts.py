"""Expert parallelism before anything runs: degrees, axes, layouts, routers, what is refused and with which fix."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parallelrun.base.errors import ConfigError
from parallelrun.config import presets
from parallelrun.planner.contract.parameters import held_parameters, module_layout
from parallelrun.planner.facts.document import document
from parallelrun.planner.pieces.expert_axes import replica_axis, split
from parallelrun.planner.resolve.freeze import freeze, load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.plan import show
from parallelrun.training.verify.checked import single_device as single_device
from tests.plans import tiny_config, tiny_plan

ROOT = Path(__file__).parents[4]
MOE = {"model.experts": 8, "model.expert_period": 2}
LIMITED = {**MOE, "model.router.kind": "gshard", "model.router.capacity_factor": 1.25}
PRESETS = ("gshard", "switch", "expert_choice", "dropless", "aux_free")


def preset(name: str, **more) -> dict:
    """Overrides that a preset of `conf/strategy` makes."""
    values = presets.values("strategy", name)
    dotted = {f"strategy.{axis}.{key}": v for axis in ("data", "expert") for key, v in values[axis].items()}
    own = {"strategy.name": name, "strategy.demo": values["demo"], "strategy.router": values["router"]}
    return {**MOE, **dotted, **own, "dp": None, "tp": None, "pp": None, **more}


def problems(overrides: dict, **arguments) -> tuple:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides), **arguments)
    return caught.value.problems


def only(overrides: dict, **arguments):
    (problem,) = problems(overrides, **arguments)
    return problem


MLP = {"model.name": "mlp", "dataset.name": "digits"}
OPEN = {"dp": None, "tp": None}
ON_CP = {"model.experts": 4, "cp": 2, "ep": 4, "global_batch": 12, "device": "cuda"}
DEGREES = [  # overrides, the world or the GPUs, and (pp, dp, cp, tp, ep)
    ({**OPEN, "pp": None, "ep": 2, "strategy.demo": {"tp": 2, "pp": 2}}, {}, (1, 2, 1, 1, 2)),  # no demonstration
    ({"dp": None, "tp": 2, "ep": 2}, {"world": 8}, (1, 4, 1, 2, 2)),
    ({"dp": None, "tp": 2, "ep": 2}, {"gpus": 8}, (1, 4, 1, 2, 2)),
    ({**OPEN, "ep": 2, "strategy.own_axis": "tp"}, {"world": 8}, (1, 2, 1, 4, 2)),
    ({"dp": None, **ON_CP}, {"gpus": 7}, (1, 2, 2, 1, 4)),  # on two ranks of a sequence in each of two replicas
    ({"dp": None, "tp": 2, "ep": 8, "strategy.expert.tp": 1}, {}, (1, 4, 1, 2, 8)),
    ({"dp": None, "tp": 2, "ep": 4, "strategy.expert.tp": 1}, {"world": 8}, (1, 4, 1, 2, 4)),
    ({"dp": 4, "tp": 2, "strategy.expert.tp": 1, "strategy.expert.fills": True}, {}, (1, 4, 1, 2, 8)),
]


class TestDegrees:
    @pytest.mark.parametrize(("overrides", "devices", "degrees"), DEGREES)
    def test_ep_fills_what_is_open(self, overrides, devices, degrees):
        plan = resolve(tiny_config({**MOE, **overrides}), **devices)
        assert plan.degrees == dict(zip(("pp", "dp", "cp", "tp", "ep"), degrees))

    @pytest.mark.parametrize("own_axis", ["dp", "tp", "pp"])
    def test_ep_alone_means_as_large_a_dp(self, own_axis):
        plan = tiny_plan({**MOE, "dp": None, "ep": 4, "strategy.own_axis": own_axis})
        assert plan.mesh.size("dp") == plan.mesh.size("ep") == 4
        assert "dp=4 (filled: ep, which divides it)" in plan.filled

    def test_gpus_that_ep_cannot_use_stay_idle(self):
        plan = resolve(tiny_config({**MOE, "model.experts": 6, "dp": None, "ep": 3, "global_batch": 12}), gpus=8)
        assert plan.mesh.size("dp") == 6
        assert "2 of 8 GPUs stay idle: 3 does not divide 8" in plan.warnings

    @pytest.mark.parametrize(("dp", "experts", "ep"), [(4, 8, 4), (6, 8, 2), (16, 8, 8), (3, 8, 1), (8, 6, 2)])
    def test_a_preset_fills_the_largest_that_divides_both(self, dp, experts, ep):
        plan = tiny_plan(preset("gshard", **{"dp": dp, "model.experts": experts, "global_batch": 2 * dp}))
        assert plan.mesh.size("ep") == ep
        assert f"ep={ep} (filled: the largest that divides dp {dp} and {experts} experts)" in plan.filled

    def test_an_explicit_ep_beats_the_preset(self):
        assert tiny_plan(preset("gshard", dp=4, ep=2)).mesh.size("ep") == 2
        assert tiny_plan(preset("gshard", dp=4, ep=1)).expert is None

    def test_a_model_without_experts_has_nothing_to_spread(self):
        for overrides in (preset("gshard", **{"model.experts": 0}), {"dp": 2, "ep": 2}):
            problem = problems(overrides)[0]
            assert problem.kind == "undefined" and problem.suggestion == "model.experts=8 or model=moe_gpt"

    @pytest.mark.parametrize("group_size", [None, 4])
    def test_a_group_over_tp_has_consecutive_ranks_and_copies_beyond_them(self, group_size):
        overrides = {**MOE, "dp": 8, "tp": 2, "ep": 8, "strategy.expert.group_size": group_size}
        plan = tiny_plan({**overrides, "strategy.expert.tp": 1})
        assert plan.mesh.group_of(9, "ep") == tuple(range(8, 16)) and plan.mesh.group_of(9, "expert_dp") == (1, 9)
        (up, *_) = [held for held in held_parameters(plan, 0) if held.spec.layer_role == "expert"]
        assert up.layout.dims == (("ep",), (), ()) and replica_axis(up.layout, plan) == "expert_dp"
        assert up.layout.local_shape(up.spec.shape, plan.mesh.sizes, plan.mesh.coordinate(9)) == (1, *up.spec.shape[1:])
        if group_size:
            assert plan.mesh.group_of(9, "ep_inner") == (8, 9, 10, 11) and plan.mesh.group_of(9, "ep_outer") == (9, 13)


GROUP, CUT = "model.router.group_samples", {"micro_batch": 6, "global_batch": 48}
OVER_TP = {"strategy.expert.tp": 1, "tp": 4, "dp": 2, "ep": 8}
REFUSED = [  # overrides, and what the problem says: `kind: what -> suggestion;`
    (
        {**OVER_TP, "ep": 2},
        (
            "not_built: ",
            "parts of them are not built -> ep=4 or ep=8",
        ),
    ),
    (
        {**OVER_TP, "ep": 16, "model.experts": 16},
        ("arithmetic: ", "ep=16 does not divide dp x tp=8", "-> ep=4 or ep=8 or dp=4;"),
    ),
    ({**OVER_TP, "ep": 2, "strategy.expert.tp": 2}, ("not_built: ", "split over all of tp=4 or over none")),
    ({**OVER_TP, "model.seq": 10}, ("arithmetic: model.seq=10 is not divisible by tp=4", "-> model.seq=12 or leave")),
    ({**OVER_TP, "dp": 4, "strategy.expert.group_size": 2}, ("arithmetic: ", "divides a group of tp=4", "size=4 or")),
    (
        {**OVER_TP, "layout": "2d", "model.seq": 9},
        (
            "arithmetic: model.seq=9 is not divisible by tp=2 (the ranks of tp=4 with the same tokens)",
            "seq=10 or leave",
        ),
    ),
    ({**OVER_TP, "layout": "2d", "ep": 2, "strategy.expert.tp": 4}, ("not_built: ", "over all of tp=2 (the ranks of")),
    ({"tp": 4, "layout": "2d", "model.expert_ffn": 9}, ("arithmetic: model.expert_ffn=9 is not divisible by 2", "=8")),
    ({**MLP, "dp": 2, "ep": 2}, ("undefined: ", "-> model=moe_gpt;")),
    ({"strategy.own_axis": "none", "ep": 2}, ("contradiction: ", "-> ep=1;")),
    (
        {"dp": 3, "ep": 3, "global_batch": 9},
        (": 8 experts of a layer are not divisible by ep=3; divisors: 1, 2, 4, 8 -> ", "ep=1", "model.experts=6 or"),
    ),
    (
        {"dp": 2, "ep": 2, "strategy.expert.kind": "capacity"},
        ("undefined: ", "-> strategy.expert.kind=dropless or model.router.capacity_factor=1.25;"),
    ),
    ({"model.router.eval_capacity_factor": 2.0}, ("contradiction: ", "model.router.capacity_factor=1.25")),
    ({"dp": 2, "ep": 2, "strategy.expert.kind": "fast"}, ("capacity, dropless",)),
    (
        {"dp": 2, GROUP: 4, **CUT},
        (f": micro_batch=6 does not hold whole routing groups of {GROUP}=4 samples -> ", "micro_batch=4"),
    ),
    ({"dp": 4, GROUP: 3, "global_batch": 16}, ("arithmetic: ", "global_batch=24")),
]


class TestRefused:
    @pytest.mark.parametrize(("overrides", "parts"), REFUSED, ids=str)
    def test_what_cannot_be_is_refused_with_its_reason_and_a_fix(self, overrides, parts):
        problem = only({**MOE, **overrides})
        text = f"{problem.kind}: {problem.what} -> {problem.suggestion};"
        assert [part for part in parts if part not in text] == [], text

    @pytest.mark.parametrize(
        ("router", "suggestion"),
        [
            ({"n_group": 3, "topk_group": 2}, "model.router.n_group=2 or model.router.n_group=4"),
            ({"n_group": 4, "topk_group": 5}, "model.router.topk_group=4"),
            ({"n_group": 4, "topk_group": 1, "top_k": 3}, "model.router.topk_group=2"),
            (
                {"n_group": 4, "topk_group": 2, "kind": "expert_choice"},
                "model.router.n_group=1 model.router.topk_group=1",
            ),
        ],
    )
    def test_groups_of_experts_that_do_not_fit(self, router, suggestion):
        problem = only({**MOE, **{f"model.router.{key}": value for key, value in router.items()}})
        assert problem.suggestion == suggestion

    @pytest.mark.parametrize(("kind", "top_k"), [("gshard", 2), ("switch", 1)])
    def test_a_kind_says_how_many_experts_a_token_has(self, kind, top_k):
        overrides = {**MOE, "model.router.kind": kind, "model.router.top_k": 3}
        problem = problems(overrides, given=frozenset({"model.router.kind", "model.router.top_k"}))[0]
        assert problem.suggestion == f"model.router.top_k={top_k} or model.router.kind=top_k"
        found = resolve(tiny_config(overrides), given=frozenset({"model.router.kind"}))
        assert found.spec.router.top_k == top_k, "unless it is said, the kind fills it in"


class TestRoutingGroups:
    def test_a_microbatch_holds_whole_groups(self):
        plan = tiny_plan({**MOE, "dp": 2, "pp": 2, "model.router.group_samples": 2, "global_batch": 24})
        assert plan.batch.micro_batch % 2 == 0

    def test_the_default_batch_does_too(self):
        plan = tiny_plan({**MOE, "dp": 2, "model.router.group_samples": 5, "global_batch": None})
        assert plan.batch.micro_batch % 5 == 0 and plan.batch.global_batch >= 48


class TestRouter:
    @pytest.mark.parametrize("name", PRESETS)
    def test_a_preset_fills_the_model_s_router(self, name):
        plan, said = tiny_plan(preset(name)), presets.values("strategy", name)["router"]
        assert {key: getattr(plan.spec.router, key) for key in said} == said

    def test_an_explicit_key_beats_the_preset(self):
        config = tiny_config(preset("gshard", **{"model.router.capacity_factor": 3.0}))
        assert resolve(config, given=frozenset({"model.router.capacity_factor"})).spec.router.capacity_factor == 3.0
        assert resolve(config).spec.router.capacity_factor == 1.25

    def test_what_the_preset_leaves_is_the_model_s(self):
        assert tiny_plan(preset("dropless", **{"model.router.top_k": 5})).spec.router.top_k == 5

    @pytest.mark.parametrize(("key", "value"), [("capacity", 2), ("top_k", None), ("top_k", "many")])
    def test_a_preset_s_mistakes_are_told(self, key, value):
        overrides = preset("gshard")
        overrides["strategy.router"] = {**overrides["strategy.router"], key: value}
        found = problems(overrides)
        assert any(problem.where in (f"strategy.router.{key}", f"model.router.{key}") for problem in found)

    def test_expert_choice_looks_ahead_and_says_so(self):
        assert any("later" in text for text in tiny_plan(preset("expert_choice")).warnings)
        assert not tiny_plan(preset("gshard")).warnings


class TestUnread:
    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            ({}, "model.router.second_expert"),
            ({}, "model.router.drop_policy"),
            ({}, "model.router.min_capacity"),
            ({"model.router.kind": "switch", "model.router.top_k": 1}, "model.router.renormalise"),
            ({"model.router.kind": "expert_choice"}, "model.router.drop_policy"),
            ({"model.router.kind": "expert_choice"}, "model.router.aux_coefficient"),
            ({"model.router.kind": "expert_choice"}, "model.router.bias_rate"),
            ({}, "strategy.expert.kind"),
            ({}, "strategy.expert.chunks"),
            ({"model.experts": 0}, "model.router.top_k"),
            ({"model.experts": 0}, "model.expert_ffn"),
            ({"model.experts": 0}, "strategy.expert.overlap"),
            ({"model.name": "mlp", "dataset.name": "digits"}, "model.experts"),
        ],
    )
    def test_a_key_that_nobody_reads_is_refused_and_noted_in_a_sweep(self, overrides, key):
        config = tiny_config({**MOE, **overrides})
        with pytest.raises(ConfigError) as caught:
            resolve(config, given=frozenset({key}))
        (problem,) = caught.value.problems
        assert problem.kind == "unread" and problem.where == key and problem.suggestion
        noted = resolve(config, given=frozenset({key}), sweep=True)
        assert any(text.startswith(key) for text in noted.warnings)
        resolve(load_frozen(freeze(config, noted)))

    @pytest.mark.parametrize("key", ["min_capacity", "drop_policy", "second_expert", "renormalise", "jitter"])
    def test_gshard_reads_what_its_algorithm_has(self, key):
        resolve(tiny_config({**LIMITED, "dp": 2, "ep": 2}), given=frozenset({f"model.router.{key}"}))


class TestAxes:
    def test_dp_is_expert_dp_times_ep(self):
        shape = tiny_plan({**MOE, "dp": 4, "ep": 2, "tp": 2}).mesh
        assert shape.mesh_dims == (("pp", 1), ("expert_dp", 2), ("ep", 2), ("tp", 2))
        assert shape.mesh_dims_of("dp") == ("expert_dp", "ep")
        assert shape.group_of(0, "dp") == (0, 2, 4, 6) and shape.group_of(3, "dp") == (1, 3, 5, 7)
        assert shape.group_of(0, "ep") == (0, 2) and shape.group_of(0, "expert_dp") == (0, 4)

    def test_hsdp_keeps_its_shards_with_ep_inside(self):
        overrides = {**MOE, "dp": 8, "ep": 2, "strategy.data.kind": "fsdp", "strategy.data.shard": 4}
        shape = tiny_plan(overrides).mesh
        assert shape.mesh_dims == (("pp", 1), ("dp_replicate", 2), ("expert_dp_shard", 2), ("ep", 2), ("tp", 1))
        assert shape.mesh_dims_of("dp_shard") == ("expert_dp_shard", "ep")
        assert shape.mesh_dims_of("dp") == ("dp_replicate", "expert_dp_shard", "ep")
        assert shape.mesh_dims_of("expert_dp") == ("dp_replicate", "expert_dp_shard")
        assert shape.group_of(0, "dp_shard") == (0, 1, 2, 3) and shape.group_of(0, "expert_dp") == (0, 2, 4, 6)

    def test_two_levels_of_ep_stay_together(self):
        levels = (("ep_outer", 2), ("ep_inner", 2)), (("ep", ("ep_outer", "ep_inner")),)
        mesh_dims, flattened = split((("dp", 8),), (), *levels)
        assert mesh_dims == (("expert_dp", 2), ("ep_outer", 2), ("ep_inner", 2))
        assert dict(flattened) == {"ep": ("ep_outer", "ep_inner"), "dp": ("expert_dp", "ep_outer", "ep_inner")}
        hsdp = (("dp_replicate", 2), ("dp_shard", 4)), (("dp", ("dp_replicate", "dp_shard")),)
        mesh_dims, flattened = split(*hsdp, *levels)
        assert dict(flattened)["dp_shard"] == ("expert_dp_shard", "ep_outer", "ep_inner")
        assert dict(flattened)["expert_dp"] == ("dp_replicate", "expert_dp_shard")

    def test_nothing_changes_without_ep(self):
        assert split((("dp", 4),), (), (), ()) == ((("dp", 4),), ())


class TestLayouts:
    @pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp"])
    @pytest.mark.parametrize(("dp", "ep", "tp"), [(4, 2, 1), (4, 4, 1), (4, 2, 2), (2, 2, 1)])
    def test_experts_are_cut_over_ep(self, data, dp, ep, tp):
        plan = tiny_plan({**MOE, "dp": dp, "ep": ep, "tp": tp, "strategy.data.kind": data})
        shape = plan.mesh
        for held in held_parameters(plan, 0):
            of_experts = held.spec.layer_role == "expert"
            assert ("ep" in held.layout.axes) == of_experts
            assert replica_axis(held.layout, plan) == ("expert_dp" if of_experts else "dp")
            if of_experts:
                assert held.layout.local_shape(held.spec.shape, shape.sizes, {})[0] == 8 // ep

    def test_experts_follow_the_tensor_way_at_ep_1(self):
        plan = tiny_plan({**MOE, "dp": 2, "tp": 2})
        for spec in plan.spec.parameters.values():
            assert module_layout(spec, plan) == plan.tensor.layout(spec, plan)
            assert replica_axis(module_layout(spec, plan), plan) == "dp"


class TestFrozen:
    @pytest.mark.parametrize("name", PRESETS)
    @pytest.mark.parametrize(
        "degrees", [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2}, {"world": 4}, {"dp": 3, "global_batch": 6}]
    )
    def test_a_frozen_config_is_the_same_plan(self, name, degrees):
        config = tiny_config(preset(name, **degrees, **{"model.router.jitter": 0.5}))
        plan = resolve(config, given=frozenset({"model.router.jitter"}))
        frozen = load_frozen(freeze(config, plan))
        assert frozen.strategy.router == {} and frozen.ep == plan.mesh.size("ep")
        assert frozen.model.router.jitter == plan.spec.router.jitter == 0.5
        assert replace(resolve(frozen), filled=(), warnings=()) == replace(plan, filled=(), warnings=())

    def test_the_reference_keeps_the_router_and_has_all_experts(self):
        config = tiny_config(preset("gshard", **{"dp": 4, "ep": 2, "strategy.expert.chunks": 2}))
        plan = resolve(config)
        alone, reference = single_device(config, plan)
        assert reference.world == 1 and reference.spec == plan.spec and reference.expert is None
        assert resolve(load_frozen(freeze(alone, reference))).spec.router == plan.spec.router


class TestSeen:
    def test_the_document_says_who_holds_what(self):
        config = tiny_config({**LIMITED, "dp": 4, "ep": 2, "tp": 2})
        data = document(resolve(config), config)
        assert data["degrees"]["ep"] == 2
        assert [row["axis"] for row in data["axes"]] == ["pp", "dp", "expert_dp", "ep", "tp"]
        assert [row["ep"] for row in data["ranks"]] == [0, 0, 1, 1, 0, 0, 1, 1]
        experts = data["experts"]
        assert experts["layers"] == ["layers.1", "layers.3"] and experts["held"] == 4
        assert experts["group_tokens"] == 8 and experts["capacity"] == 4 and experts["way"]["kind"] == "capacity"

    def test_the_screen_says_it_too(self):
        config, file = (
            tiny_config({**LIMITED, "dp": 4, "ep": 2, "tp": 2, "verb": "plan", "detail": "ranks"}),
            io.StringIO(),
        )
        show(resolve(config), config, Console(file=file, width=80))
        text = file.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert "8 experts in layers.1, layers.3 (2 of 4 layers); top-2 (gshard)" in text
        assert "ep 2: each rank holds 4 experts of every layer; dispatch: capacity" in text
        assert "copies of the same experts" in text and "8 experts, 4 each" in text

    def test_an_ep_across_hosts_is_a_hint(self):
        cluster = {"cluster.gpus_per_node": 2, "cluster.nodes": 2, "device": "cuda"}
        config = tiny_config({**LIMITED, "dp": 4, "ep": 4, **cluster})
        texts = document(resolve(config), config)["warnings"]
        said = "ep groups of 4 reach across hosts of 2 devices"
        assert f"{said}; strategy.expert.group_size=2 sends inside a host first" in texts

    def test_waiting_for_all_to_alls_that_nothing_hides_is_a_hint(self):
        rates = {"peak_tflops": 100, "memory_gb_s": 1000, "intra_gb_s": 1, "inter_gb_s": 1, "operation_us": 0.1}
        rates["gpus_per_node"] = 2
        for stack, often in (({}, 1), ({"stack.expert_overlap": 1.0}, 0)):
            keys = {f"cluster.{key}": value for key, value in rates.items()} | stack
            config = tiny_config({**LIMITED, "dp": 4, "ep": 4, "device": "cuda", "verb": "plan", **keys})
            texts = document(resolve(config), config)["warnings"]
            assert sum("of a step waits for all-to-alls" in text for text in texts) == often, texts
