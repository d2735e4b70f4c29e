"""What the predicted time of a step hides, and how its parts answer to the rates of a cluster and to the program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelrun.models import recompute
from parallelrun.models.gpt import network
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.step_time import blocks, host, overlap, spread, step, streaming
from parallelrun.planner.predict.step_time.kernels import attention_s
from parallelrun.planner.predict.step_time.links import bytes_s, intra_bytes_s, latency_s
from parallelrun.planner.predict.step_time.rates import rates_of
from parallelrun.planner.predict.step_time.step import step_time
from tests.matrix import FULL, every
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, LARGE, PLANS, RATES, predicted, with_stack

SEQUENCE = (*LARGE[:-1], "tp=8", "strategy.tensor.sequence_parallel=true")


@pytest.mark.parametrize("communication", [0.0, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("computation", [0.0, 0.5, 1.0, 10.0])
def test_what_is_exposed_is_never_negative_nor_more_than_is_sent(communication, computation):
    exposed = overlap.exposed_s(communication, computation)
    assert 0 <= exposed <= communication
    assert exposed >= overlap.SLOWED * communication * (1 - 1e-9)
    assert exposed >= communication - computation
    assert (
        overlap.exposed_s(communication, 2 * computation)
        <= exposed
        <= overlap.exposed_s(1 + communication, computation)
    )


FASTER = {"intra_gb_s": 2, "inter_gb_s": 2, "memory_gb_s": 2, "collective_us": 0.5, "hop_us": 0.5,
          "latency_us": 0.5, "kernel_us": 0.5, "operation_us": 0.5, "product_ramp": 0.5}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [(name, *part) for n, name in enumerate(PLANS) for part in [*every(3, [*FASTER.items()][0 if FULL else n % 3 :])]],
)
def test_no_part_of_a_machine_makes_a_step_slower_by_being_faster(name, key, factor):
    plan, cluster = planned(*PLANS[name]), composed(*PLANS[name]).config.cluster
    before = step_time(plan, cluster).step_s
    assert step_time(plan, replace(cluster, **{key: factor * getattr(cluster, key)})).step_s <= before * (1 + 1e-12)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("in_node", [1, 2, 8])
def test_steps_within_and_between_nodes_are_no_slower_than_one_ring(operation, in_node):
    row = Collective("dp", operation, "gradients", 1, 10**9)
    for nodes in (2, 8, 64):
        size = nodes * in_node
        found = bytes_s(row, size, in_node, RATES)
        wire = prediction.wire_bytes(row, size)
        ports = 1 if operation == "all_to_all" else in_node  # no other rank of the node has the data of an all-to-all
        assert 0 < found <= wire / min(intra_bytes_s(row, RATES), ports * RATES.inter_bytes_s)
        crossing = row.payload_bytes * (nodes - 1) / nodes / ports  # at least, of each rank
        assert found >= crossing / RATES.inter_bytes_s * (1 - 1e-9)


@pytest.mark.parametrize(("nodes", "in_node"), [(1, 8), (2, 8), (4, 2), (5, 1)])
def test_a_gather_waits_for_the_piece_of_data_with_the_longest_way_around_the_ring(nodes, in_node):
    size, rates = nodes * in_node, replace(RATES, message_s=9 * RATES.hop_s)
    links = [rates.hop_s if (rank + 1) % in_node or nodes == 1 else rates.message_s for rank in range(size)]
    longest = max(sum(links) - skipped for skipped in links)
    assert latency_s("all_gather", size, in_node, rates) == pytest.approx(rates.collective_s + longest)


def test_sums_of_small_tensors_go_through_a_tree_of_nodes():
    ring, tree = (latency_s(operation, 512, 8, RATES) for operation in ("reduce_scatter", "all_reduce"))
    assert ring == pytest.approx(RATES.collective_s + 64 * RATES.message_s + 447 * RATES.hop_s)
    assert tree == pytest.approx(RATES.collective_s + 2 * (6 * RATES.message_s + 7 * RATES.hop_s))


@pytest.mark.parametrize(("issuing", "computing"), [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_a_device_waits_for_its_host_at_least_for_what_is_not_issued(issuing, computing):
    waited = host.waited_s(issuing, computing)
    assert max(0.0, issuing - computing) <= waited <= issuing


def test_sequence_parallel_communication_runs_under_products():
    apart, ours, hidden = (
        predicted(*SEQUENCE, **settings).parts[blocks.TENSOR]
        for settings in ({"gradient_overlap": False}, {}, {"tensor_overlap": 1.0})
    )
    assert hidden < ours < apart
    assert hidden == pytest.approx(overlap.SLOWED * apart, rel=0.3)
    small = (*SEQUENCE, "cluster.gpus_per_node=4")  # nothing writes into the memory of another host's devices
    parts = [predicted(*small, gradient_overlap=False, tensor_overlap=part).parts for part in (0.0, 1.0)]
    assert parts[0] == parts[1] and parts[0][blocks.TENSOR] > apart


@pytest.mark.parametrize(
    ("words", "is_backward", "seconds"),
    [((), True, 0.55), ((), False, 1.0), (("strategy.tensor.overlap=false",), True, 1.0),
     (("pp=2", "schedule=zero_bubble"), True, 1.0)],
)  # fmt: skip
def test_an_input_s_gradient_travels_under_the_product_of_its_weights_alone(words, is_backward, seconds):
    """Of the two products of a backward pass of 1 s, the second one; a tenth of what is hidden slows it down."""
    assert overlap.tensor_s(1.0, 1.0, planned(*LARGE, "tp=8", *words), is_backward, True) == pytest.approx(seconds)


def test_recomputation_ends_before_the_last_product():
    early, whole = (predicted(*LARGE, "tp=8", stops_early=value).parts for value in (True, False))
    rates, plan = RATES, planned(*LARGE, "tp=8")
    block = blocks.block_time(plan.spec.blocks[1], plan, CLUSTER, rates)
    share = 1 - block.again[blocks.PRODUCTS] / block.forward[blocks.PRODUCTS]
    assert share == pytest.approx(1 / 3, rel=0.05), "4h of 12h of a layer's weights"
    assert early[spread.RECOMPUTE] < whole[spread.RECOMPUTE]
    assert {**early, spread.RECOMPUTE: 0} == {**whole, spread.RECOMPUTE: 0}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_rounded_weights_and_gradients_send_half(schedule):
    """Ours keeps rounded weights, but not the embedding, nor where backward is split."""
    shape = ("model=gpt3_13b", "strategy=zero1", "dp=64", "precision=bf16", "cluster=a100_dgx")
    shape += ("pp=2", f"schedule={schedule}")
    plan, cluster = planned(*shape), composed(*shape).config.cluster
    rates = replace(RATES, collective_s=0.0, message_s=0.0, hop_s=0.0)
    ours = step._data(plan, cluster, rates)
    halved = step._data(planned(*shape, "stack.rounded_weights=true", "stack.rounded_gradients=true"), cluster, rates)
    assert halved.sums == pytest.approx(ours.sums / 2, rel=1e-6)
    assert halved.gathers == pytest.approx(halved.sums, rel=0.01)  # the tied weight's gradients are summed once more
    assert ours.gathers / halved.gathers == pytest.approx(2.0 if schedule == "zero_bubble" else 1.05, rel=0.03)
    found = step._data(planned(*shape, "stack.rounded_weights=true"), cluster, rates)
    assert found[:3] == pytest.approx((halved.gathers, ours.sums, 0.0), rel=1e-6)


def test_the_bounds_are_as_wide_as_the_parts_are_uncertain():
    """A step of one part has that part's deviation, beside that of all steps; independent parts add as squares."""
    low, high = spread.bounds({blocks.PRODUCTS: 2.0})
    assert high / 2 == pytest.approx(2 / low) == pytest.approx(1 + 1.28 * (0.12**2 + 0.135**2) ** 0.5)
    _, mixed = spread.bounds({blocks.PRODUCTS: 1.0, spread.DATA: 1.0})
    assert mixed / 2 == pytest.approx(1 + 1.28 * (0.06**2 + 0.135**2 + 0.375**2) ** 0.5)


def test_a_message_in_parts_uses_the_ports_of_all_tp_ranks_and_is_gathered_again():
    """Each of 8 ranks sends an eighth to its next stage's rank, on another node; then these gather the whole there."""
    plan, cluster = planned(*PLANS["pipeline"]), composed(*PLANS["pipeline"]).config.cluster
    size = 2 * 2048 * 12288  # of one microbatch of one sample, in bf16; one goes forward and one backward
    sent, gathered = size / 8 / RATES.inter_bytes_s, 7 / 8 * size / (0.9 * RATES.intra_bytes_s)
    latency = 2 * RATES.collective_s + RATES.message_s + 7 * RATES.hop_s
    parts = step.StepModel(cluster).messages(with_stack(plan, scattered_messages=True))
    assert parts == pytest.approx(2 * (sent + gathered + latency))
    whole = step.StepModel(cluster).messages(plan)
    assert whole == pytest.approx(2 * (size / RATES.inter_bytes_s + RATES.collective_s + RATES.message_s))


def test_sharded_weights_travel_under_the_blocks_before_theirs():
    plan = planned(*PLANS["fsdp"])
    assert overlap.data_s(1.0, 1.0, 0.3, 10.0, 20.0, plan) == pytest.approx(0.3), "all hidden, and slows it down"
    assert overlap.data_s(1.0, 1.0, 0.3, 0.0, 0.0, plan) == pytest.approx(2.0), "nothing to hide under"
    assert overlap.data_s(1.0, 1.0, 3.0, 10.0, 20.0, plan) == pytest.approx(2.0), "at most all hidden time"
    forward, blocks_before = 0.1, 1 - 1 / len(plan.spec.blocks)
    found = overlap.data_s(1.0, 0.0, 0.3, forward, 1e9, plan)
    exposed = 0.5 - forward * blocks_before
    assert found == pytest.approx(exposed + 0.3 * (1 - exposed)), "of what is hidden alone"


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        # 4 microbatches of 1 s forward and 2 s backward; a hundred seconds of each kind, so that all windows are full
        (
            ("strategy=ddp",),
            200 - (1 + 2),
        ),  # its sums in the last backward; gathers, if any, in the first forward
        (("strategy=zero1",), 200 - (1 + 2)),
        (("strategy=zero2",), 200 - (1 + 4 * 2)),  # reduces in every backward pass
        (("strategy=fsdp",), 200 - (4 * 1 + 4 * 2)),  # gathers in both passes of every microbatch
        (("strategy=fsdp", "strategy.data.reshard_after_forward=false"), 200 - (1 + 4 * 2)),
        (("strategy=fsdp", "strategy.data.reduce_each_microbatch=false"), 200 - (4 * 1 + 4 * 2)),
    ],
)
def test_communication_hides_under_those_passes_in_which_it_takes_place(words, seconds):
    plan = planned("model=gpt2_124m", "dp=8", "micro_batch=1", "global_batch=32", *words)
    first = 1 - 1 / len(plan.spec.blocks)  # nothing computes while the first block's weights travel
    found = overlap.data_s(100.0, 100.0, 0.0, 1.0, 2.0, plan)
    assert found == pytest.approx(200 - (200 - seconds) * first)


class _MovedBytes(TorchDispatchMode):
    """Counts the bytes that operations other than products and attention read and write."""

    OTHERS = ("mm", "addmm", "bmm", "view", "transpose", "split", "expand", "detach", "alias", "select", "slice")
    VIEWS = ("t", "_unsafe_view", "unsqueeze", "squeeze", "permute", "split_with_sizes", "as_strided", "unbind")

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        name = function.overloadpacket.__name__
        if name not in self.OTHERS + self.VIEWS and "attention" not in name:
            outputs = found if isinstance(found, (tuple, list)) else [found]
            tensors = [one for one in (*arguments, *outputs) if isinstance(one, torch.Tensor)]
            self.total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return found


LATENT = (
    "model.position=rope", "model.q_lora_rank=192", "model.kv_lora_rank=64", "model.qk_nope_head_dim=64",
    "model.qk_rope_head_dim=32", "model.v_head_dim=64", "model.bias=false",
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [(), ("model.ffn=1024",), ("model.bias=false",), ("model.position=rope",), ("model.activation=swiglu",), LATENT],
)
def test_bytes_of_simple_kernels_are_those_that_a_block_moves(changes):
    """Counted in a block of this program, without the rounding of weights, which is counted apart."""
    shape = (
        "model=gpt3_175b", "strategy=single", "precision=bf16", "cluster=a100_dgx", "model.layers=1",
        "model.hidden=256", "model.heads=4", "model.seq=512", "model.vocab=512", "model.ffn=512", "micro_batch=4",
        "global_batch=4",
    )  # fmt: skip
    if "model.ffn=1024" in changes:
        shape = tuple(word for word in shape if not word.startswith("model.ffn"))
    plan, config = planned(*shape, *changes), composed(*shape, *changes).config
    whole = network.build(config, plan.spec, plan.precision)
    block = whole.block(whole.block_names[1])
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0, 0.02)
    x = torch.randn(4, 512, 256, dtype=torch.bfloat16, requires_grad=True)
    with _MovedBytes() as forward:
        y = recompute.run(block, x, None, "none")
    with _MovedBytes() as backward:
        y.backward(torch.ones_like(y))
    weights = sum(parameter.numel() for parameter in block.parameters())
    rates = replace(RATES, kernel_s=0.0)
    predicted_bytes = streaming.of_block(plan.spec.blocks[1], plan, rates)
    rounding = streaming.of_weights(weights, plan, rates)
    for counted, seconds, beside in zip((forward, backward), predicted_bytes, rounding):
        assert (seconds + beside) * rates.memory_bytes_s == pytest.approx(counted.total, rel=0.05)


@pytest.mark.parametrize(
    ("microbatches", "expected"), [(1, {"ddp": (6, 6), "zero1": (0, 6)}), (4, {"ddp": (6, 18), "zero1": (0, 10)})]
)
def test_weights_that_are_kept_rounded_are_not_rounded_again(microbatches, expected):
    """Bytes per weight, forward and backward. Gradients are widened where they are collected, and added up in fp32."""
    for kind, moved in expected.items():
        words = f"global_batch={2 * microbatches}", "micro_batch=1", "precision=bf16", "device=cuda"
        plan = planned("model=gpt2_124m", f"strategy={kind}", "dp=2", *words)
        found = streaming.of_weights(1.0, plan, RATES)
        assert [seconds * RATES.memory_bytes_s for seconds in found] == pytest.approx(moved), kind


def test_measured_rates_of_attention_on_a_cpu():
    """torch 2.13, one core with AVX-512, causal, forward and backward, by tokens and head size: GFLOP/s."""
    measured = {(64, 16): 31.7, (96, 16): 40.6, (512, 8): 15.7, (512, 16): 50.7, (512, 48): 65.9, (512, 128): 71.3}
    one_core = replace(RATES, kernel_s=0.0, synchronous=True)
    predicted = {case: 1e12 / attention_s(1e12, case[0], case[1], True, one_core) for case in measured}
    largest = predicted[512, 128]
    for case, rate in measured.items():
        assert predicted[case] / largest == pytest.approx(rate / measured[512, 128], rel=0.15), case


def test_published_rates_of_attention():
    """FlashAttention-2, A100, head size 128, causal, forward and backward; FlashAttention-3's table of it on H100."""
    for seq, rate in ((512, 99e12), (2048, 155e12), (16384, 189e12)):
        seconds = attention_s(1e12, seq, 128, True, replace(RATES, kernel_s=0.0))
        assert 3.5e12 / (seconds * (1 + blocks.BACKWARD_OF_ATTENTION)) == pytest.approx(rate, rel=0.1)
    h100 = rates_of(composed("cluster=h100_dgx").config.cluster, "bf16")
    for seq, rate in ((512, 309e12), (16384, 370e12)):
        assert 1e12 / attention_s(1e12, seq, 128, False, replace(h100, kernel_s=0.0)) == pytest.approx(rate, rel=0.05)


def test_what_waits_for_the_end_of_backward_hides_nothing():
    model = ("model=llama3_8b", "dp=8", "cluster=a100_80gb", "global_batch=8", "precision=bf16")
    ddp, naive = (predicted(*model, f"strategy={kind}").parts["data communication"] for kind in ("ddp", "naive_ddp"))
    assert naive > 5 * ddp
