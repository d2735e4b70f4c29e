"""Checksums notice every flipped bit, and the rank that is wrong follows from what the ranks have seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallelrun.distributed.sequences import Lane
from parallelrun.training.corruption.blame import Difference, Evidence, origins, verdict
from parallelrun.training.corruption.digests import ROW, AtRest, RowSums, digests
from parallelrun.training.corruption.probe import PassRecorder
from tests.matrix import every


def flip(tensor, index, bit):
    words = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    size = 8 * tensor.element_size()
    words[index] ^= 1 << bit if bit < size - 1 else -(1 << bit)


def digest(tensor):
    return digests([tensor])[0]


def sums_of(tensor):
    """The checksum by which tensors on GPUs are compared."""
    return RowSums([tensor]).read()[0]


CHECKSUMS = pytest.mark.parametrize("digest", [digest, sums_of])


@CHECKSUMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("length", every(2, [1, 5, 2 * ROW, 2 * ROW + 2, 5 * ROW + 3]))
def test_any_flipped_bit_changes_the_checksum(dtype, length, digest):
    tensor = torch.randn(length).to(dtype)
    before, rest = digest(tensor), AtRest({"w": tensor})
    rest.begin()
    for index in {0, length // 2, length - 1}:
        for bit in range(8 * tensor.element_size()):
            flip(tensor, index, bit)
            assert digest(tensor) != before and rest.changed() == ["w"]
            flip(tensor, index, bit)
            assert digest(tensor) == before and not rest.changed()


@CHECKSUMS
def test_two_flips_of_the_same_bit_in_opposite_directions_do_not_cancel(digest):
    tensor = torch.zeros(8 * ROW)
    before = digest(tensor)
    for bit in (0, 30, 31):
        for other in (4 * ROW, 7 * ROW - 1):
            flip(tensor, 0, bit)
            flip(tensor, other, bit)
            assert digest(tensor) != before
            flip(tensor, 0, bit)
            flip(tensor, other, bit)


@CHECKSUMS
@pytest.mark.parametrize("bit", [29, 31], ids=["exponent", "sign"])
@pytest.mark.parametrize("count", [2, 8, 16])
def test_a_high_bit_that_is_stuck_in_words_of_one_row_changes_the_checksum(bit, count, digest):
    """Sums of words modulo 2^64 count the highest bit modulo 2, and the exponent's modulo 8."""
    tensor = torch.full((2 * ROW,), 0.02)
    before, rest = digest(tensor), AtRest({"w": tensor})
    rest.begin()
    for index in range(1, 16 * count, 16):
        flip(tensor, index, bit)
    assert digest(tensor) != before and rest.changed() == ["w"]


@pytest.mark.parametrize("weights", [torch.randn(6, 8).t(), torch.randn(6, 8)[:, ::2]], ids=["transposed", "with gaps"])
def test_weights_that_are_not_contiguous_are_read_where_they_are(weights):
    """What is read is not a copy made before."""
    rest = AtRest({"w": weights, "v": torch.randn(3)})
    rest.begin()
    weights[3, 2] += 1
    assert rest.changed() == ["w"]


@CHECKSUMS
def test_a_view_that_begins_at_an_odd_element_has_the_checksum_of_its_values(digest):
    values = torch.randn(9)
    assert digest(values[1:]) == digest(values[1:].clone().narrow(0, 0, 8)) or values.storage_offset() == 0
    shifted = values[1:]
    before = digest(shifted)
    flip(shifted, 3, 7)
    assert digest(shifted) != before


def test_tensors_have_together_the_checksums_that_each_has_alone(monkeypatch):
    monkeypatch.setattr("parallelrun.training.corruption.digests.PIECE", 4 * ROW)
    sizes = (1, 0, ROW + 3, 5, 8 * ROW + 1, 2 * ROW, 7, 16 * ROW, 3)
    tensors = [torch.randn(size).to(dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    assert digests(tensors).tolist() == [int(digest(tensor)) for tensor in tensors]
    assert RowSums(tensors).read().tolist() == [int(RowSums([one]).read()) if one.numel() else 0 for one in tensors]
    rest = AtRest(dict(zip(map(str, range(len(tensors))), tensors)))
    rest.begin()
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            flip(tensor, tensor.numel() - 1, 3)
            assert rest.changed() == [str(number)]
            flip(tensor, tensor.numel() - 1, 3)


def test_nothing_is_compared_before_the_first_update():
    assert AtRest({"w": torch.zeros(3)}).changed() == []


TP, DP = Lane("tp", (0, 1)), Lane("dp", (0, 2))
FORWARD, BACK = Lane("pp", (0, 1), "activations"), Lane("pp", (1, 0), "gradients")


ORIGINS = {
    # Rank 1 gives wrong bits to tp; rank 0 passes them on to rank 2 over dp.
    "a victim of a collective": (
        [
            Evidence(lanes=(TP, TP, DP), sent=(1, 2), results=("w",)),
            Evidence(lanes=(TP, TP), sent=(0,), results=("w",)),
            Evidence(lanes=(DP,), results=("w",)),
        ],
        (1,),
    ),
    "the receiver of a message": (
        [Evidence(lanes=(FORWARD, BACK), sent=(0,)), Evidence(lanes=(FORWARD, BACK), sent=(1,))],
        (0,),
    ),
    "the first stage, of a message back": (
        [
            Evidence(lanes=(FORWARD, BACK, DP), sent=(2,)),
            Evidence(lanes=(FORWARD, BACK), sent=(1,)),
            Evidence(lanes=(DP,)),
        ],
        (1,),
    ),
    "a wrong sum of its own": ([Evidence(lanes=(TP,)), Evidence(lanes=(TP,), results=("w",))], (1,)),
    "before the other's result": ([Evidence(lanes=(TP,), results=("w",)), Evidence(lanes=(TP,), sent=(0,))], (1,)),
    "two by themselves": ([Evidence(results=("w",)), Evidence(results=("w",))], (0, 1)),
}


@pytest.mark.parametrize("evidence, ranks", ORIGINS.values(), ids=ORIGINS)
def test_the_rank_is_named_that_was_wrong_before_it_received_anything_wrong(evidence, ranks):
    assert origins(evidence) == ranks and verdict(evidence).ranks == ranks


def test_memory_that_changed_comes_before_what_it_led_to():
    found = [Evidence(results=("w",)), Evidence(at_rest=((4, "w"),), results=("w",))]
    assert verdict(found).ranks == (1,) and "step 4" in verdict(found).what


def replicas(*digests):
    return [Evidence(replicas={"w": ("tp=0", digest)}) for digest in digests]


def test_of_three_replicas_the_odd_one_is_wrong():
    assert verdict(replicas(5, 7, 5)).ranks == (1,)


def test_of_two_replicas_neither_is_named():
    judged = verdict(replicas(5, 7))
    assert judged.ranks == () and judged.among == (0, 1)


def test_evidence_survives_json():
    import json

    sent = Evidence([TP, FORWARD], [1], ["g"], "h", [[4, "w"]], {"w": ["tp=0", -5]})
    assert Evidence.from_json(json.loads(json.dumps(vars(sent)))) == sent


def test_a_pass_whose_loss_alone_has_other_bits_differs():
    """A fault behind the backward pass leaves the gradients right; what the run reports is wrong all the same."""
    weight = torch.zeros(3)
    weight.grad = torch.randn(3)

    def of_loss(loss):
        training = SimpleNamespace(
            parameters=[SimpleNamespace(name="w", tensor=weight)],
            runner=SimpleNamespace(loss_sum=torch.tensor(loss)),
            mesh=SimpleNamespace(device=torch.device("cpu")),
        )
        return PassRecorder(SimpleNamespace(axis_of_group={}, rank=0)).bits(training)

    assert not of_loss(2.0).compared(of_loss(2.0))
    assert of_loss(2.0).compared(of_loss(2.5)) == Difference([], [], ["the loss"])
