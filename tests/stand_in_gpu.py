"""A stand-in for GPUs on hosts without one: tensors that say `cuda` and are computed on the CPU.

An operation that mixes tensors of the host and of a GPU fails as it does on a GPU; streams and events exist, and
nothing runs beside anything else. So all code for GPUs runs, with real numbers. CUDA's kernels and NCCL do not.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests import stand_in_attention

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
# What a GPU does with a tensor of its own and one of the host.
BETWEEN_DEVICES = {
    f"aten::{name}" for name in ("_to_copy", "copy", "copy_", "_foreach_copy_", "index", "index_put", "index_put_")
}
_OF_DISPATCH = ("stand_in_gpu.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")  # below what asks for something
_AUTOGRAD = "torch/autograd/graph.py"


class OnGpu(Tensor):
    """A tensor of the stand-in. inner: its numbers, on the CPU.

    torch's C++ takes it for a tensor of the CPU: every build of torch has what that needs. Python sees a GPU's.
    """

    inner: Tensor
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=HOST, requires_grad=inner.requires_grad,
        )  # fmt: skip
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"OnGpu({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def data(self) -> Tensor:
        found: Tensor = Tensor.data.__get__(self)
        return found

    @data.setter
    def data(self, value: OnGpu) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            stays = dtype in (None, self.dtype) and not copy
            return self if stays else torch.ops.aten._to_copy(self, dtype=dtype)
        return _to_host(self, dtype)

    def cpu(self) -> Tensor:
        return _to_host(self, None)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"device": GPU, "dtype": self.dtype, **kwargs})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Any) -> None: ...


class _Mode(TorchDispatchMode):
    """Sees operations that make tensors of a GPU from none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter, OnGpu) for kind in types):
            return NotImplemented  # a DTensor calls the operation again, for its local tensor
        return _run(function, args, kwargs or {})


_leaving = threading.local()  # .now: `_to_host` is running


def _to_host(tensor: OnGpu, dtype: torch.dtype | None) -> Tensor:
    _leaving.now = True
    try:
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=HOST)
    finally:
        _leaving.now = False


def _asked_by_autograd() -> bool:
    """Whether one of autograd's own formulas asks: it names the device that C++ sees."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_OF_DISPATCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_AUTOGRAD)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; its results are a GPU's if its device or, without one, its tensors are."""
    name = function._schema.name
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    of_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cpu":
        is_cast = name == "aten::_to_copy" and of_gpu and not getattr(_leaving, "now", False)
        if is_cast or _asked_by_autograd():  # C++ names the device that it sees
            device, of_gpu = None, True
    if of_gpu and name not in BETWEEN_DEVICES:
        _check_devices(function, tensors)
    on_gpu = of_gpu if device is None else torch.device(device).type == "cuda"
    inner_kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}  # which only a GPU has
    if not of_gpu and not on_gpu:
        return function(*args, **inner_kwargs)
    if kwargs.get("device") is not None:
        inner_kwargs["device"] = HOST
    inner_args, inner_kwargs = tree_map(_inner_of, (args, inner_kwargs))
    found = stand_in_attention.ON_CPU.get(name, function)(*inner_args, **inner_kwargs)
    if on_gpu and name != "aten::_local_scalar_dense":
        found = tree_map(_on_gpu, found)
    # A collective returns tensors that it was given; they alias nothing that torch would know of.
    return found if name.startswith("c10d") else return_and_correct_aliasing(function, args, kwargs, found)


def _check_devices(function: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if a tensor of the host with dims is among those of a GPU."""
    for tensor in tensors:
        if not isinstance(tensor, OnGpu) and tensor.dim() and tensor.device.type == "cpu":
            what = f"{function}: Expected all tensors to be on the same device, but found {GPU} and cpu"
            raise RuntimeError(f"{what}, of shape {tuple(tensor.shape)}")


def _inner_of(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _on_gpu(value: Any) -> Any:
    return OnGpu(value) if isinstance(value, Tensor) and not isinstance(value, OnGpu) else value


class _Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return 1000 * (later._at - self._at)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        recorded = event or _Event()
        recorded.record()
        return recorded


def _cuda(stream: _Stream) -> dict[str, Any]:
    """What `torch.cuda` is replaced by."""
    properties = SimpleNamespace(
        name="stand-in", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0, uuid="stand-in"
    )
    return {
        "Event": _Event,
        "Stream": _Stream,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda device=None: 1,
        "memory_allocated": lambda device=None: 1,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device=None: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
    }


def _made_on_host(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and its like: they write numbers to a device without an operation that a mode would see."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, OnGpu) or device is None or torch.device(device).type != "cuda":
            return function(data, device=device, **kwargs)
        return OnGpu(function(data, **kwargs))

    return made


def _to_like(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to`, which asks C++ for the device of `other`."""

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(tensor, GPU, args[0].dtype) if args and isinstance(args[0], OnGpu) else to(tensor, *args, **kwargs)

    return moved


def _seen(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """`Thread.run` within the mode, which is of one thread."""

    def running(thread: Any) -> None:
        with _Mode():
            run(thread)

    return running


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[torch.device]:
    """Within, this process has one GPU. Yields its device."""
    replaced = [(torch.cuda, name, value) for name, value in _cuda(_Stream()).items()] + [
        (torch, "tensor", _made_on_host(torch.tensor)),
        (torch, "as_tensor", _made_on_host(torch.as_tensor)),
        (Tensor, "to", _to_like(Tensor.to)),
        (Tensor, "pin_memory", lambda tensor, device=None: tensor.clone()),
        (threading.Thread, "run", _seen(threading.Thread.run)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Mode())
        yield GPU
